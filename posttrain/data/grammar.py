"""Structured output: grammars of the texts that a model may write, and the tokens that go on with a text.

The grammars are llguidance's, the extra `grammar`. https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

import numpy as np
from jaxtyping import UInt32

from posttrain.config import GrammarSection
from posttrain.data.thoughts import Place, Thought
from posttrain.data.tokenizer import Tokenizer
from posttrain.data.tokenizer_files import byte_characters
from posttrain.errors import ConfigError

T = TypeVar("T")
STACK_SIZE = threading.Lock()
"""Held while the stack of new threads is another, which is a setting of the process."""
WORD = 32
HEADER = '%llguidance {"no_forcing": true}\n'
"""Without it the only text that fits would be allowed in one tokenization alone."""
SPACES = r"( |\r?\n[ \t]{0,32})?"
"""Space between the parts of JSON: with any, a model that knows little JSON writes nothing else."""
MAX_COMPILED = 256
"""Grammars that stay compiled; each takes up to some megabytes with what it has met."""
MAX_CHARACTERS = 1 << 20
"""Longest grammar."""
STACK_BYTES = 256 << 20
"""Stack of the thread that compiles a grammar, of which only what is used takes memory: llguidance goes down along all
references of a schema, and a process whose stack is full is ended by the system."""


class GrammarError(ValueError):
    """Error of a grammar that cannot be read, or that the tokens of a vocabulary cannot go on in."""


@dataclass(frozen=True)
class Grammar:
    """Language of the texts that a sample may be, in llguidance's form of Lark; see the functions that make one.

    Only text after the prompt counts, up to the stop token, which is drawn where the text may end and nowhere else.
    """

    kind: str
    """Name in messages."""
    start: str = field(repr=False)
    """Right side of the rule `start`."""
    rules: str = field(default="", repr=False)
    lead: str = field(default="", repr=False)
    """Spaces that may stand before the text: a template writes them, and replies do without them."""
    thought: Thought | None = field(default=None, repr=False)
    """Thought that may stand before the text; None: the text is all."""

    def lark(self, place: Place) -> str:
        """Whole grammar, for a prompt that leaves its turn there."""
        lead = f"({json.dumps(self.lead)})? " if self.lead else ""
        before = "" if self.thought is None else self.thought.before(place)
        rules = "" if self.thought is None else self.thought.rules
        start = f"{lead}{before} ({self.start})" if lead or before else self.start
        return f"{HEADER}start: {start}\n{self.rules}{rules}"

    def after(self, spaces: str, thought: Thought) -> Grammar:
        """Copy with what may stand before the text: spaces, and a thought unless it has one of its own."""
        return replace(self, lead=spaces, thought=thought if self.thought is None else self.thought)

    @classmethod
    def of(cls, section: GrammarSection) -> Grammar:
        """Make the grammar of a section."""
        if section.json_object:
            return cls.json_object()
        if section.json_schema is not None:
            return cls.json_schema(section.json_schema)
        return cls.choice(section.choice) if section.regex is None else cls.regex(section.regex)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object", json_rule({"type": "object"}))

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """JSON that fits a schema, its properties in the schema's order. GrammarError for a schema that nothing fits,
        and for a keyword that is not supported."""
        return cls("json_schema", json_rule(schema)).checked()

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole. GrammarError for look-around, back-references and \\b."""
        import_llguidance()
        from llguidance import regex_to_lark

        return cls("regex", f"/{regex_to_lark(pattern, '')}/").checked()

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts."""
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise GrammarError(f"sampling.grammar: choice={str(texts)[:60]}: give texts that are not empty")
        return cls("choice", "CHOICE", f"CHOICE: {' | '.join(map(json.dumps, texts))}\n").checked()

    def checked(self) -> Grammar:
        """Return the grammar. GrammarError for one that llguidance cannot read."""
        lark = self.lark(Place.BEGINNING)
        if len(lark) > MAX_CHARACTERS:
            raise GrammarError(f"sampling.grammar: {self.kind}: longer than {MAX_CHARACTERS} characters")
        if fault := _fault(lark):
            raise GrammarError(f"sampling.grammar: {self.kind}: {fault}")
        return self


def json_rule(schema: Any) -> str:
    """Right side of a rule: JSON that fits a schema."""
    given = {} if schema is True else schema
    if isinstance(given, Mapping):
        given = {**given, "x-guidance": {"whitespace_pattern": SPACES, **given.get("x-guidance", {})}}
    try:
        return f"%json {json.dumps(given, allow_nan=False)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"sampling.grammar: json_schema: it is no JSON ({error})") from error


def import_llguidance() -> Any:
    """ConfigError without the extra `grammar`."""
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            f"sampling.grammar: needs the extra grammar ({error}); pip install 'posttrain[grammar]'"
        ) from error
    return llguidance


@lru_cache(maxsize=MAX_COMPILED)
def _fault(lark: str) -> str:
    """Fault of a grammar in one line; empty without any."""
    validate = import_llguidance().LLMatcher.validate_grammar_with_warnings
    failed, messages = _on_deep_stack(lambda: validate(lark))
    return _one_line(messages[0]) if failed else ""


def _on_deep_stack(work: Callable[[], T]) -> T:
    """Result of some work in a thread with a stack of `STACK_BYTES`."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with STACK_SIZE:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return done.result()


def _one_line(message: str) -> str:
    """Line that says what is wrong, without its place in the text that stands around it."""
    lines = [line.strip() for line in message.splitlines()]
    lines = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines[:1]
    text = lines[0].partition("failed to compile JSON schema: ")[2] or lines[0]
    if "oneOf" in text:
        return "oneOf is not supported; use anyOf"
    return text.replace("Unimplemented keys:", "keywords that are not supported:")


class GrammarCompiler:
    """Maker of the constraints of samples, for a tokenizer and a model of `vocab_size` tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._compiled: OrderedDict[tuple[Grammar, Place], Any] = OrderedDict()
        self._lock = threading.Lock()

    def start(
        self,
        grammar: Grammar,
        prompt: Sequence[int],
        ends: Sequence[int],
        within: UInt32[np.ndarray, " W"] | None = None,
    ) -> Constraint:
        """Constraint of a sample after its prompt. `ends`: tokens that end it; `within`: tokens that it may have
        otherwise, in bits. GrammarError for a grammar that no token of the vocabulary begins."""
        place = Place.CONTENT if grammar.thought is None else grammar.thought.place(self.tokenizer, prompt)
        known = grammar, place
        with self._lock:
            matcher = self._compiled.get(known)
            if matcher is None:
                make = partial(import_llguidance().LLMatcher, self._vocabulary, grammar.lark(place), log_level=0)
                matcher = _on_deep_stack(make)
                if matcher.is_error():
                    raise GrammarError(f"sampling.grammar: {grammar.kind}: {_one_line(matcher.get_error())}")
                self._compiled[known] = matcher
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(known)
            matcher = matcher.deep_copy()
        bare = None if self._has_text(prompt) else self._otherwise_at_start
        return Constraint(self, grammar, matcher, ends, within, bare)

    def text(self, tokens: Sequence[int]) -> str:
        return repr(b"".join(self._bytes[token] for token in tokens)[-60:].decode(errors="replace"))

    def _has_text(self, prompt: Sequence[int]) -> bool:
        controls = set(self.tokenizer.control_ids.values())
        return any(token not in controls for token in prompt)

    @cached_property
    def _bytes(self) -> list[bytes]:
        known = bytes_of_tokens(self.tokenizer)
        return [known[token] if token < len(known) else b"" for token in range(self.vocab_size)]

    @cached_property
    def _vocabulary(self) -> Any:
        library = import_llguidance()
        return library.LLTokenizer(
            library.TokenizerWrapper(_Vocabulary(self._bytes, self.tokenizer)), n_vocab=self.vocab_size + 1
        )

    @cached_property
    def _otherwise_at_start(self) -> UInt32[np.ndarray, " W"]:
        """Tokens that are another text where no text stands before them, such as one whose space is left out."""
        alone = self.tokenizer.hf.backend_tokenizer.decode_batch(
            [[token] for token in range(self.tokenizer.num_ids)], skip_special_tokens=False
        )
        return packed(
            [t for t, text in enumerate(alone[: self.vocab_size]) if _is_other(text, self._bytes[t])], self.vocab_size
        )


def _is_other(text: str, content: bytes) -> bool:
    """Compare the text of a token with its bytes, which may be a part of a character."""
    return "\ufffd" not in text and text.encode() != content


class _Vocabulary:
    """Tokens as llguidance's wrapper wants them; the end is a token that the model does not have."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], tokenizer: Tokenizer):
        self.eos_token_id = len(tokens)
        self.tokens = [*tokens, b"<end of grammar>"]
        controls = (token for token in tokenizer.control_ids.values() if token < len(tokens))
        self.special_token_ids = [*sorted(controls), self.eos_token_id]

    def __call__(self, _: bytes) -> list[int]:
        return []  # of texts that a grammar forces, which none does


class Constraint:
    """Progress of one sample in its grammar."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        grammar: Grammar,
        matcher: Any,
        ends: Sequence[int],
        within: UInt32[np.ndarray, " W"] | None,
        not_first: UInt32[np.ndarray, " W"] | None,
    ):
        self._compiler, self._grammar, self._matcher = compiler, grammar, matcher
        self._ends, self._within = packed(ends, compiler.vocab_size), within
        self._tokens: list[int] = []
        self._not_first = not_first
        self._buffer = np.zeros(compiler.vocab_size // WORD + 1, np.uint32)
        self.allowed = self._next()
        """Tokens that may be drawn next, in bits: bit t % 32 of word t // 32 is token t."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on by sampled tokens, an end only as the last. GrammarError where no token may follow."""
        for token in tokens:
            if self._ends[token // WORD] >> token % WORD & 1:
                return
            self._tokens.append(token)
            if self._matcher.try_consume_tokens([token]) != 1:
                fault = _one_line(self._matcher.get_error()) if self._matcher.is_error() else ""
                raise GrammarError(f"{self._where()}: {fault or f'token {token} is not allowed there'}")
        self.allowed = self._next()

    def _next(self) -> UInt32[np.ndarray, " W"]:
        self._matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
        if self._matcher.is_error():
            fault = _one_line(self._matcher.get_error())
            raise GrammarError(
                f"{self._where()}: "
                + (f"no token of {self._compiler.tokenizer.name} goes on" if fault == "NoExtensionBias" else fault)
            )
        end = self._compiler.vocab_size
        may_end = self._buffer[end // WORD] >> end % WORD & 1
        self._buffer[end // WORD] &= ~(np.uint32(1) << np.uint32(end % WORD))
        allowed = self._buffer[: len(self._ends)] & ~self._ends
        if self._not_first is not None and not self._tokens:
            allowed &= ~self._not_first
        if may_end:
            allowed |= self._ends
        if self._within is not None:
            allowed &= self._within
        if not allowed.any():
            why = "allowed_token_ids and logit_bias leave" if self._within is not None else "there is"
            # A stop token ends a completion, whatever its text.
            if self._within is None and (self._buffer[: len(self._ends)] & self._ends).any():
                why = "stop_token_ids leave"
            raise GrammarError(f"{self._where()}: {why} no token of {self._compiler.tokenizer.name} that goes on")
        return allowed

    def _where(self) -> str:
        after = f" after {self._compiler.text(self._tokens)}" if self._tokens else ""
        return f"sampling.grammar: {self._grammar.kind}{after}"


def packed(tokens: Sequence[int], vocab_size: int) -> UInt32[np.ndarray, " W"]:
    """Set of tokens in bits."""
    bits = np.zeros(-(-vocab_size // WORD) * WORD, bool)
    bits[np.asarray([token for token in tokens if token < vocab_size], np.int64)] = True
    return np.packbits(bits, bitorder="little").view("<u4")


def bytes_of_tokens(tokenizer: Tokenizer) -> list[bytes]:
    """Bytes that each token id adds to a text that stands before it; none for ids without a token.

    Tokens of a byte-level vocabulary and of the byte fallback are bytes; the others are what the decoder adds with them
    to a letter.
    """
    backend, vocabulary = tokenizer.hf.backend_tokenizer, tokenizer.hf.get_vocab()
    if '"ByteLevel"' in str(backend.decoder.__getstate__() if backend.decoder is not None else ""):
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        found = {
            number: bytes(byte_of[c] for c in text) if byte_of.keys() >= {*text} else text.encode()
            for text, number in vocabulary.items()
        }
        return [found.get(number, b"") for number in range(tokenizer.num_ids)]
    numbers = sorted(vocabulary.values())
    letter = next(
        n for n, text in zip(numbers, backend.decode_batch([[n] for n in numbers]), strict=True) if _is_letter(text)
    )
    before = backend.decode([letter])
    texts = backend.decode_batch([[letter, number] for number in numbers], skip_special_tokens=False)
    added = {
        n: text.removeprefix(before).encode() for n, text in zip(numbers, texts, strict=True) if text.startswith(before)
    }
    added |= {token: bytes([byte]) for token, byte in tokenizer.byte_of.items()}
    return [added.get(number, b"") for number in range(tokenizer.num_ids)]


def _is_letter(text: str) -> bool:
    return text.isascii() and text.isalpha()
