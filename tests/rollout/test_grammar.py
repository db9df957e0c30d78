"""Structured output: tokens by the model's distribution over those that a grammar allows, for odd tokenizers too."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from posttrain.config import GrammarSection, RLSection, SamplingSection
from posttrain.data.grammar import Grammar, GrammarCompiler
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError
from posttrain.models.decoder import Decoder
from posttrain.rl.sampler import sampling_params
from posttrain.rollout.dispatch import HOST_S, Dispatch, DispatchOutcome, fair_length
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.types import Completion, SamplingParams
from tests.rollout.engines import VOCABULARY, NaiveEngine, _Draws, assert_same, make_engine, params

END, OTHER_END = 2, 6
TEXTS = ("yes", "no", "nope", "not yet", "y", "no no")


def wrapped(backend: Any, controls: Sequence[str], decoder: Any) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    backend.decoder = decoder
    backend.add_special_tokens([*controls])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False)
    return Tokenizer(hf, "odd", {}, {})


@cache
def sentence_pieces(lacking: str = "") -> Tokenizer:
    """Space prefixes, byte fallback, a byte and a letter that are the same text, an added token, two ends."""
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend

    pieces = ["<unk>", "<s>", "</s>", "▁", "n", "no", "</x>", "▁no", "▁not", "t", "y", "▁y", "es", "pe", "yes", "▁yet"]
    pieces += [piece for piece in ["e", "p", "s", "o"] if piece != lacking]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    if not lacking:
        vocabulary |= {f"<0x{byte:02X}>": len(pieces) + byte for byte in range(256)}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=not lacking, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.add_tokens([AddedToken("nope", special=False)])
    return wrapped(backend, ["<unk>", "<s>", "</s>", "</x>"], decoders.Sequence(steps))


@cache
def word_pieces() -> Tokenizer:
    """Words of which the decoder itself puts spaces before each but the first."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    texts = ["[UNK]", "[CLS]", "</s>", "yes", "no", "##pe", "not", "yet", "##es", "y", "##y", "##n", "##o", "##et"]
    backend = Backend(models.WordPiece({text: number for number, text in enumerate(texts)}, unk_token="[UNK]"))
    return wrapped(backend, ["[UNK]", "[CLS]", "</s>"], decoders.WordPiece("##", True))


def spelled(tokenizer: Tokenizer, prompt: Sequence[int], sample: Sequence[int], texts: Sequence[str]) -> set[int]:
    """By the decoded text of every token: those that go on in one of the texts, and the ends behind a whole one.

    Without a text before it a token is left out whose text is another then.
    """
    ends = {END, *({OTHER_END} if tokenizer is sentence_pieces() else ())}
    written = tokenizer.decode(sample, after=prompt)
    plain = [t for t in tokenizer.hf.get_vocab().values() if t not in tokenizer.control_ids.values()]
    decoded = tokenizer.decode_each([(prompt, [*sample, token]) for token in plain])
    if not sample and set(prompt) <= set(tokenizer.control_ids.values()):
        texts_after = tokenizer.decode_each([([*prompt, 10], [token]) for token in plain])
        plain, decoded = zip(
            *((t, x) for t, x, y in zip(plain, decoded, texts_after, strict=True) if x == y), strict=True
        )
    going = {token for token, text in zip(plain, decoded, strict=True) if text != written}
    found = {t for t, x in zip(plain, decoded, strict=True) if t in going and any(one.startswith(x) for one in texts)}
    return found | (ends if written in texts else set())


def allowed_in(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


CASES: dict[str, tuple[Callable[[], Tokenizer], list[int], Grammar, tuple[str, ...]]] = {
    "choice": (sentence_pieces, [1, 5], Grammar.choice(TEXTS), TEXTS),
    "regex": (
        sentence_pieces,
        [1, 5],
        Grammar.regex("(no ?){1,2}|ye?s?"),
        ("no", "no ", "no no", "nono", "no no ", "nono ", "y", "ye", "ys", "yes"),
    ),
    "after no text": (sentence_pieces, [1], Grammar.regex(" ?no"), ("no",)),
    "spaces of the template": (sentence_pieces, [1, 5], replace(Grammar.choice(["no"]), lead=" "), ("no", " no")),
    "words": (word_pieces, [3], Grammar.regex("( not yet| no|yes|nope)"), (" not yet", " no", "yes", "nope")),
    "bytes": (lambda: load_tokenizer("bytes"), [65], Grammar.choice(["é", "ab"]), ()),
}


@pytest.mark.parametrize("case", [name for name in CASES if name != "bytes"])
def test_tokens_that_go_on_are_allowed_and_no_others(case: str) -> None:
    make, prompt, grammar, texts = CASES[case]
    tokenizer, ends = make(), (END, OTHER_END) if make is sentence_pieces else (END,)
    compiler, seen = GrammarCompiler(tokenizer, VOCABULARY), set()

    def walk(sample: list[int]) -> None:
        constraint = compiler.start(grammar, prompt, ends)
        constraint.advance(sample)
        expected = spelled(tokenizer, prompt, sample, texts)
        assert allowed_in(constraint.allowed) == expected, (sample, tokenizer.decode(sample, after=prompt))
        seen.add(tuple(sample))
        for token in sorted(expected - set(ends)):
            if len(seen) < 20:
                walk([*sample, token])

    walk([])
    assert len(seen) > 1


def test_parts_of_characters() -> None:
    compiler = GrammarCompiler(load_tokenizer("bytes"), 300)
    constraint = compiler.start(Grammar.choice(["é", "ab"]), [65], (258, 260))
    assert allowed_in(constraint.allowed) == {0xC3, 97}
    constraint.advance([0xC3])
    assert allowed_in(constraint.allowed) == {0xA9}
    constraint.advance([0xA9])
    assert allowed_in(constraint.allowed) == {258, 260}
    fallback = GrammarCompiler(sentence_pieces(), VOCABULARY).start(Grammar.choice(["é"]), [1, 5], (END,))
    for byte in "é".encode():
        (token,) = allowed_in(fallback.allowed)
        assert sentence_pieces().byte_of[token] == byte
        fallback.advance([token])
    assert allowed_in(fallback.allowed) == {END}


def test_an_end_that_is_text_ends_only_where_the_grammar_may() -> None:
    compiler = GrammarCompiler(load_tokenizer("bytes"), 300)
    constraint = compiler.start(Grammar.regex("a\n*b"), [65], (10,))
    constraint.advance([97])
    assert allowed_in(constraint.allowed) == {98}
    constraint.advance([98])
    assert allowed_in(constraint.allowed) == {10}


@pytest.fixture(scope="module")
def shared_engine(model: Decoder) -> NativeEngine:
    return make_engine(model, tokenizer=sentence_pieces(), tokenizer_decode=sentence_pieces().decode)


def asked(sample: int = 0, **changes: Any) -> SamplingParams:
    return params(sample, **{"stop_token_ids": (END, OTHER_END), "grammar": Grammar.choice(TEXTS)} | changes)


def naively(naive: NaiveEngine, prompt: Sequence[int], p: SamplingParams) -> Completion:
    """Naive sampling of the tokens that `spelled` names."""
    draws = _Draws(prompt, replace(p, grammar=None), naive._uniforms_of(p))
    while not draws.sample or (draws.sample[-1] not in p.ends and len(draws.sample) < p.max_tokens):
        names = sorted(spelled(sentence_pieces(), prompt, draws.sample, TEXTS) & set(p.allowed_token_ids or range(512)))
        draws.p = replace(p, grammar=None, allowed_token_ids=tuple(names))
        draws.draw(naive._logits([*prompt, *draws.sample])[draws.length - 1])
    return naive._completion(draws, "stop" if draws.sample[-1] in p.ends else "length")


def test_draws_by_the_models_distribution_over_what_is_allowed(engine: NativeEngine, model: Decoder) -> None:
    """Beside plain requests, with other settings, in fewer slots than requests; log-probabilities are the model's."""
    changes = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_k": 3},
        {"repetition_penalty": 1.7},
        {"max_tokens": 1},
    ]
    changes += [{"allowed_token_ids": (*range(20), 131, 141), "top_logps": 2}, {"logit_bias": {10: 3.0}}]
    prompts = [[1, 5, 10 + i % 3] for i in range(10)]
    asking = [asked(i, **change) for i, change in enumerate(changes)] + [params(20 + i) for i in range(3)]
    done = engine.generate_all(prompts, asking)
    naive = NaiveEngine(model, tokenizer_decode=sentence_pieces().decode)
    for prompt, p, completion in zip(prompts, asking, done, strict=True):
        assert_same(completion, naively(naive, prompt, p) if p.grammar else naive.generate(prompt, p))
        if p.grammar and completion.stop == "stop":
            assert sentence_pieces().decode(completion.tokens[:-1], after=prompt) in TEXTS
    assert {c.stop for c in done[:7]} == {"stop", "length"}


def test_rows_beside_a_grammar_draw_several_tokens_per_dispatch(
    engine: NativeEngine, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine._runner.run
    counts: list[list[int]] = []

    def counted(dispatch: Dispatch) -> DispatchOutcome:
        outcome = run(dispatch)
        if dispatch.decode is not None and outcome.chunk is not None:
            counts.append([int(outcome.chunk.counts[row]) for row in dispatch.decode.places])
        return outcome

    monkeypatch.setattr(engine._runner, "run", counted)
    prompts = [[1, 5, 10 + i] for i in range(3)]
    asking = [asked(3), params(40, max_tokens=9), params(41, max_tokens=9)]
    done = engine.generate_all(prompts, asking)
    naive = NaiveEngine(model, tokenizer_decode=sentence_pieces().decode)
    assert_same(done[0], naively(naive, prompts[0], asking[0]))
    for prompt, p, completion in zip(prompts[1:], asking[1:], done[1:], strict=True):
        assert_same(completion, naive.generate(prompt, p))
    steps = engine.decode_steps
    assert steps > 1 and counts[0] == [1, steps, steps] and all(first == 1 for first, *others in counts if others[1:])


@pytest.mark.parametrize(
    ("fixed", "each", "plain", "constrained", "length"),
    [
        (9.0, 1.0, 31, 1, 8),  # a small model, whose dispatches are mostly the host's
        (1.0, 10.0, 31, 1, 3),  # a large one: 31 * 1 / (1 * 10)
        (1.0, 10.0, 16, 16, 1),
        (4.0, 2.0, 10, 5, 4),
    ],
)
def test_length_beside_grammars(fixed: float, each: float, plain: int, constrained: int, length: int) -> None:
    """The length of the greatest sum of log speeds, by fixed costs."""
    token_s = HOST_S * each / fixed
    assert fair_length(plain=plain, constrained=constrained, longest=8, token_s=token_s) == length
    lengths = np.arange(1, 9)
    # In fixed + each n seconds, P rows draw n tokens and C one.
    speeds = plain * np.log(lengths) - (plain + constrained) * np.log(fixed + each * lengths)
    assert abs(lengths[speeds.argmax()] - length) <= 1


def test_a_sample_goes_on_in_its_grammar(engine: NativeEngine) -> None:
    """Aborted after each token, and continued."""
    (whole,) = engine.generate_all([[1, 5]], [p := asked(3)])
    assert len(whole.tokens) > 2
    for cut in range(1, len(whole.tokens)):
        names = ("tokens", "logps", "kept_logps", "truncation_logps", "weights_versions")
        sampled = {name: getattr(whole, name)[:cut] for name in names}

        async def resumed(partial: Completion) -> Completion:
            return await engine.generate([1, 5], p, partial=partial)

        assert_same(asyncio.run(resumed(replace(whole, stop="abort", **sampled))), whole)


def test_plain_requests_need_no_other_program(model: Decoder) -> None:
    engine = make_engine(model, tokenizer=sentence_pieces())
    assert engine._grammars is not None and not vars(engine._grammars)["_compiled"]
    assert "_vocabulary" not in vars(engine._grammars), "made for the first grammar"


def test_a_dead_end_fails_its_request_alone(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_grammars", GrammarCompiler(sentence_pieces(lacking="o"), VOCABULARY))
    with pytest.raises(ValueError, match=r"^sampling.grammar: regex: no token of odd goes on"):
        engine.generate_all([[1, 5]], [asked(grammar=Grammar.regex("[0-9]"))])

    async def both() -> list[Completion | BaseException]:
        stuck = engine.generate([1, 5], asked(grammar=Grammar.regex("n(s|x)z")))
        return await asyncio.gather(
            stuck, engine.generate([1, 5], asked(1, grammar=Grammar.choice(["yes"]))), return_exceptions=True
        )

    stuck, fine = asyncio.run(both())
    assert str(stuck) == "sampling.grammar: regex after 'ns': no token of odd goes on"
    assert isinstance(fine, Completion) and fine.stop == "stop"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"allowed_token_ids": (3,)}, "choice: allowed_token_ids and logit_bias leave no token of odd that goes on"),
        ({"stop_token_ids": tuple(range(VOCABULARY))}, "choice: stop_token_ids leave no token of odd that goes on"),
        ({"stop_token_ids": ()}, "must be None, or come with stop tokens"),
        ({"ignore_eos": True}, "must be None, or come with stop tokens, without ignore_eos"),
    ],
)
def test_refused_requests(engine: NativeEngine, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate_all([[1, 5]], [asked(**change)])


def test_an_engine_without_a_tokenizer_refuses(model: Decoder) -> None:
    with pytest.raises(ValueError, match="grammar=choice needs an engine with tokenizer"):
        make_engine(model).generate_all([[1, 5]], [asked()])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json_schema({"not": {}, "type": "object"}), 'keywords that are not supported: ["not"]'),
        (lambda: Grammar.json_schema({"uniqueItems": True}), '["uniqueItems"]'),
        (lambda: Grammar.json_schema({"type": "strin"}), "Invalid type: strin"),
        (lambda: Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 2}), "minimum (5) is greater"),
        (lambda: Grammar.json_schema({"oneOf": [{"type": "string"}, {"minLength": 2}]}), "oneOf is not supported; use"),
        (lambda: Grammar.json_schema({"type": "string", "pattern": "(?=a)b"}), "look-ahead and look-behind, is not"),
        (lambda: Grammar.json_schema({"type": "string", "format": "regex"}), "Unknown format: regex"),
        (lambda: Grammar.json_schema(False), "schema is false"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "it is no JSON"),
        (lambda: Grammar.regex("(a"), "unclosed group"),
        (lambda: Grammar.regex(r"\bword"), "lookarounds not supported"),
        (lambda: Grammar.regex(r"(a)\1"), "backreferences are not supported"),
        (lambda: Grammar.choice(["a", ""]), "give texts that are not empty"),
    ],
)
def test_refused_grammars(make: Callable[[], Grammar], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        make()
    assert str(raised.value).startswith("sampling.grammar: ") and "\n" not in str(raised.value)


def test_a_schema_without_an_end_is_refused_before_sampling() -> None:
    endless = Grammar.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})
    with pytest.raises(ValueError, match="json_schema: no token of bytes goes on"):
        GrammarCompiler(load_tokenizer("bytes"), 300).start(endless, [65], (258,))


SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 7},
        "kind": {"enum": ["x", "ö"]},
        "ok": {"type": ["boolean", "null"]},
    },
    "required": ["age", "kind"],
    "additionalProperties": False,
}
FITS = ['{"age": 12, "kind": "ö"}', '{"age":7,"kind":"x","ok":null}', '{\n  "age": 70,\n  "kind": "x"\n}']
FITS_NOT = [
    '{"age": 6, "kind": "x"}',
    '{"age": 12}',
    '{"age": 12, "kind": "y"}',
    '{"age": 12, "kind": "x", "z": 1}',
    "[]",
]


@pytest.mark.parametrize(
    ("grammar", "fits", "fits_not"),
    [
        (Grammar.json_schema(SCHEMA), FITS, FITS_NOT),
        (Grammar.json_schema({"type": "object", "minProperties": 1}), ['{"a": 1}'], ["{}"]),
        (
            Grammar.json_object(),
            ["{}", '{"a": [1, {"b": "\\n"}]}', '{\r\n\t"a":1}'],
            ["[]", "1", " {}", '{"a":  1}', '{"a":\n\n1}'],
        ),
        (Grammar.regex(r"^\d{2}/[a-z]+$"), ["12/ab"], ["1/a", "12/", "^12/ab$"]),
        (Grammar.regex("a\nb|"), ["a\nb", ""], ["a"]),
    ],
)
def test_whole_texts(grammar: Grammar, fits: list[str], fits_not: list[str]) -> None:
    """Walked over the tokens of a text: every one is allowed, and the end behind the last."""
    assert [fits_in(grammar, text) for text in fits] == [True] * len(fits)
    assert [fits_in(grammar, text) for text in fits_not] == [False] * len(fits_not)


def fits_in(grammar: Grammar, text: str) -> bool:
    tokenizer = load_tokenizer("bytes")
    constraint = compiler_of_bytes().start(grammar, [65], (258,))
    for token in [*tokenizer.encode(text), 258]:
        if token not in allowed_in(constraint.allowed):
            return False
        constraint.advance([token])
    return True


@cache
def compiler_of_bytes() -> GrammarCompiler:
    return GrammarCompiler(load_tokenizer("bytes"), 300)


@pytest.mark.parametrize("name", ["qwen3", "mistral-7b-instruct", "gpt2"])
@pytest.mark.thorough
def test_real_tokenizers(shared: Any, name: str) -> None:
    tokenizer = load_tokenizer(shared / "tokenizers" / name)
    compiler = GrammarCompiler(tokenizer, tokenizer.num_ids + 300)
    text = json.dumps({"age": 31, "kind": "ö", "ok": True}, ensure_ascii=False)
    prompt, end = tokenizer.encode("An object:"), tokenizer.num_ids - 1
    constraint = compiler.start(Grammar.json_schema(SCHEMA), prompt, (end,))
    for token in [*tokenizer.encode_spans(text, continues=True)[0], end]:
        assert token in allowed_in(constraint.allowed)
        constraint.advance([token])


def test_grammars_of_a_configuration() -> None:
    section = SamplingSection(grammar={"json_schema": {"enum": [1, 2]}})  # type: ignore[arg-type]
    made = sampling_params(section, load_tokenizer("bytes"), key=(0, 0))
    assert made.grammar == Grammar.json_schema({"enum": [1, 2]}) and section.changes_distribution
    kinds: list[tuple[dict[str, Any], Grammar]] = [({"json_object": True}, Grammar.json_object())]
    kinds += [({"regex": "a"}, Grammar.regex("a")), ({"choice": ("a", "b")}, Grammar.choice(["a", "b"]))]
    assert [Grammar.of(GrammarSection(**kind)) for kind, _ in kinds] == [grammar for _, grammar in kinds]
    for given, message in (({"regex": "a", "choice": ("b",)}, "got regex and choice"), ({}, "got none of them")):
        with pytest.raises(ConfigError, match=f"set one of json_object, json_schema, regex, choice; {message}"):
            GrammarSection(**given)
    ask: dict[str, Any] = {"dataset": {"path": "x"}, "num_steps": 1, "rewards": [{"fn": "a.py:f"}]}
    held_out = {"grammar": {"json_object": True}}
    with pytest.raises(ConfigError, match="sampling.grammar: supported by the built-in engine, not by my.py:Engine"):
        RLSection(**ask, rollout={"engine": "my.py:Engine"}, eval_sampling=held_out)
