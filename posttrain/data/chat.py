"""Rendering of messages, plain prompts and plain text to tokens with loss masks. Control tokens written in message
contents are tokenized as ordinary characters, so they cannot end a turn; assistant messages may contain those used
inside a turn (thinking marks), except begin and stop tokens. Plain text and plain prompts are tokenized as written."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain.data.messages import (
    THINKING,
    Message,
    Remarks,
    TemplateForm,
    any_of,
    check_tools_written,
    check_turn_written,
    only_text,
    parts_of,
    pictures_in,
    plain_text,
    replaced,
    squeezed,
    strings_in,
    text_of,
)
from posttrain.data.templates import (
    STAND_IN_TEXT,
    THINK,
    THINK_END,
    after_turn,
    end_at_stop,
    marks_generation,
    opened_thought,
    render,
    split_thought,
    stand_in_turn,
)
from posttrain.data.tokenizer import PromptForm, Tokenizer
from posttrain.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.data.images import Grid
    from posttrain.data.prompt_images import PromptImage, PromptImages

Span = tuple[int, int]
STAND_INS = range(0x100000, 0x10FFFE)
"""Private-use characters for control tokens in contents, and for images, while the template runs."""
EMPTY_THOUGHT = re.compile(rf"\s*({THINK})?\s*{THINK_END}")
LITERAL = (
    "control tokens in messages are ordinary characters to the model; if rows are ready-formatted texts, set "
    "dataset.chat to false"
)


class TurnsRewritten(ConfigError):
    """Error of assistant turns that are not parts of one sequence: the template changes them when others follow."""


class Masked(NamedTuple):
    """Token sequence with a loss mask. The first token never has loss."""

    tokens: list[int]
    mask: list[bool]
    images: list[int] | None = None
    """Number of the image whose feature stands at each token, from 1; 0: text. None: without pictures."""
    grids: tuple[Grid, ...] = ()
    """Tokens of the images."""


class Prompt(NamedTuple):
    """Tokens to sample from, or between two sampled turns."""

    tokens: list[int]
    images: PromptImages | None


@dataclass(frozen=True)
class TemplateInput:
    """Messages and tool descriptions with stand-ins for the control tokens in their texts."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    literals: dict[str, str | list[int]]
    """Text of a control token, or tokens of an image, by stand-in character."""
    silent: frozenset[int]
    """Numbers of the assistant messages without loss (`weight: 0`)."""
    images: dict[str, PromptImage] = field(default_factory=dict)
    """Images by stand-in character, in order."""


ToolConversion = Callable[
    [Sequence[Message], Sequence[dict[str, Any]]], tuple[Sequence[Message], Sequence[dict[str, Any]] | None]
]
"""Conversion of messages and tools into messages, and the tools that the chat template still writes."""


class Renderer:
    """Renders messages to tokens with the tokenizer's chat template, or as plain text.

    `chat=False` is for prompts and completions that are plain strings: contents are concatenated. `tool_text` converts
    conversations with tools for templates that do not know them. `remarks` collects what is worth saying of messages.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: bool,
        tool_text: ToolConversion | None = None,
        remarks: Remarks | None = None,
    ) -> None:
        if chat and tokenizer.chat_template is None:
            raise ConfigError(
                f"dataset.chat: tokenizer {tokenizer.name} has no chat template; "
                "set chat to false, or model.chat_template to a file or a name such as chatml"
            )
        self.tokenizer = tokenizer
        self.chat = chat
        self.tool_text = tool_text
        self.remarks = Remarks() if remarks is None else remarks
        # System messages of the prompts so far, at most two different ones; None: a prompt without.
        self._systems: set[str | None] = set()
        self._forms: dict[str, TemplateForm] = {}
        ends = {tokenizer.hf.bos_token, *tokenizer.hf.convert_ids_to_tokens(list(tokenizer.stop_ids))}
        self._ends = [text for text in tokenizer.control_tokens if text in ends]
        self._control = any_of(tokenizer.control_tokens)
        self._next_tokens: dict[bool, int] = {}
        self._control_of_assistant = any_of(self._ends)

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Prompt tokens from which a reply is sampled. ConfigError for messages with pictures."""
        return _of_text(self.prompt_with_images(messages, tools))

    def prompt_with_images(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> Prompt:
        """Prompt tokens from which a reply is sampled, and the pictures of the messages."""
        self._refuse_tools(tools)
        self._note_system(messages)
        if not self.chat:
            plain = self.tokenizer.with_prefix(self.tokenizer.encode(only_text(messages, "user")))
            return Prompt(self.tokenizer.known(plain), None)
        conversation = self._conversation(messages, tools)
        self._form(conversation.tools).check_written(conversation.messages)
        text, _ = self._render(conversation, len(conversation.messages), generation_prompt=True)
        check_tools_written(conversation.tools, text, self.tokenizer.name)
        return self._with_images(conversation, text, *self._tokenize(text, conversation.literals, ()))

    @property
    def form(self) -> PromptForm | None:
        """Form of the prompts rendered so far, with the system message of all of them; None before the first."""
        if not self._systems:
            return None
        return PromptForm(self.chat, next(iter(self._systems)) if len(self._systems) == 1 else None)

    def _note_system(self, messages: Sequence[Message]) -> None:
        first = messages[0] if messages else None
        system = first["content"] if first is not None and first["role"] == "system" else None
        if len(self._systems) < 2:
            self._systems.add(system if isinstance(system, str) else None)

    def rendered(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, *, reply: bool
    ) -> str:
        """Text of messages; `reply`: with the beginning of an assistant turn."""
        conversation = self._conversation(messages, tools)
        return self._render(conversation, len(conversation.messages), generation_prompt=reply)[0]

    def reply(self, text: str) -> str:
        """Content of a sampled reply: its text without the spaces that the template itself writes before contents."""
        return text.removeprefix(self.spaces_before_content) if self.chat and text[:1].isspace() else text

    @cached_property
    def spaces_before_content(self) -> str:
        """Spaces that the template writes between the beginning of a turn and its content."""
        asked: list[Message] = [{"role": "user", "content": "?"}]
        try:
            begin = self.rendered(asked, reply=True)
            whole = self.rendered([*asked, {"role": "assistant", "content": STAND_IN_TEXT}], reply=False)
        except ConfigError:  # a template of other conversations, which may do without any
            return ""
        before = whole[len(begin) : whole.find(STAND_IN_TEXT)] if whole.startswith(begin) else ""
        return before if before.isspace() else ""

    @cached_property
    def opens_thought(self) -> bool:
        """True if the prompt after a user message ends with an open thought, which the turn goes on with."""
        try:
            return self.chat and bool(opened_thought(self.rendered([{"role": "user", "content": "?"}], reply=True)))
        except ConfigError:  # a template of other conversations
            return False

    def between(
        self,
        before: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        last: int | None,
    ) -> list[int]:
        """Tokens of `between_with_images`. ConfigError for messages with pictures."""
        return _of_text(self.between_with_images(before, messages, tools, last=last))

    def between_with_images(
        self,
        before: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        last: int | None,
    ) -> Prompt:
        """Tokens between a sampled turn and the next: the rest of its end, `messages`, and the beginning of a turn;
        and the pictures of `messages`.

        `before`: messages before the turn. `last`: last token of the turn; unless it is the end of turn that the
        template writes, that comes first. Raises `ConfigError` if the template hides the end of the turn.
        """
        self._refuse_tools(tools)
        if not self.chat:
            plain = self.tokenizer.encode_spans(plain_text(messages), continues=True)[0]
            return Prompt(self.tokenizer.known(plain), None)
        turn = stand_in_turn(messages)
        conversation = self._conversation([*before, turn, *messages], tools)
        text, _ = self._render(conversation, len(conversation.messages), generation_prompt=True)
        ends = self.tokenizer.hf.convert_ids_to_tokens(list(self.tokenizer.stop_ids))
        delta = after_turn(text, ends, self.tokenizer.name, calls="tool_calls" in turn)
        tokens, spans = self._tokenize_pieces(delta, conversation.literals, (), continues=True)
        if last in self.tokenizer.stop_ids and tokens[:1] == [last]:
            tokens, spans = tokens[1:], spans[1:]
        return self._with_images(conversation, delta, tokens, spans)

    def _with_images(self, conversation: TemplateInput, text: str, tokens: list[int], spans: list[Span]) -> Prompt:
        """Tokens of a text, and its images among those of the conversation."""
        stand_ins = [character for character in conversation.images if character in text]
        if not stand_ins:
            return Prompt(self.tokenizer.known(tokens), None)
        from posttrain.data.prompt_images import PromptImages

        images = [conversation.images[character] for character in stand_ins]
        numbers = self._numbers(tokens, text, spans, stand_ins)
        return Prompt(self.tokenizer.known(tokens), PromptImages.of(images, numbers))

    def _numbers(self, tokens: list[int], text: str, spans: list[Span], stand_ins: Sequence[str]) -> list[int]:
        """Number of the image whose feature stands at each token of a text, from 1; 0: text."""
        numbers = self.tokenizer.images.numbers(text, spans, stand_ins)
        numbers += [0] * (len(tokens) - len(numbers))
        return [n if t == self.tokenizer.image_id else 0 for n, t in zip(numbers, tokens, strict=True)]

    def conversation(
        self, messages: Sequence[Message], *, first: int = 0, tools: Sequence[dict[str, Any]] | None = None
    ) -> Masked:
        """Tokens of all messages, with loss on assistant turns from message `first` on, each up to its end-of-turn
        token.

        Assistant turns are the spans that the template marks with `{% generation %}`; without marks, and where prompts
        open the thought of a turn, the text that a rendering adds to the prompt before the turn. A stop token behind a
        turn without one ends it: behind the marks, or at the beginning of the next message, whose stop token is added
        to a last turn. Raises `TurnsRewritten` if no rendering is a prefix of another, and `ConfigError` if no token or
        every token has loss.
        """
        if not self.chat:
            why = "dataset.chat is off for" if self.tokenizer.chat_template else "there is none in the tokenizer"
            raise ConfigError(
                f"messages need a chat template, but {why} {self.tokenizer.name}; set model.chat_template"
            )
        self._note_system(messages)
        conversation = self._conversation(messages, tools)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        self._form(conversation.tools).check_written(conversation.messages[: turns[-1]] if turns else [])
        text, marked = self._render(conversation, len(messages), generation_prompt=False)
        check_tools_written(conversation.tools, text, self.tokenizer.name)
        derived = self.opens_thought or not marks_generation(self._template(conversation.tools))
        if derived:
            text, spans = self._derive_spans(conversation, text, first)
        else:
            spans = self._after(conversation, text, marked, first)
        spans = self._spoken(conversation, text, [number for number in turns if number >= first], spans)
        tokens, token_spans = self._tokenize(text, conversation.literals, [start for start, _ in spans])
        mask = [any(s < stop and start < e for start, stop in spans) for s, e in token_spans]
        if derived:
            begins = {start for start, _ in spans}
            mask = end_at_stop(tokens, [s in begins for s, _ in token_spans], mask, self.tokenizer.stop_ids)
        tokens, mask = self._end_turns(tokens, mask, calls="tool_calls" in messages[-1])
        if all(mask) or not any(mask[1:]):
            which = "every token" if all(mask) else "no token"
            roles = [message["role"] for message in messages]
            raise ConfigError(
                f"chat template of {self.tokenizer.name}: {which} of the conversation would have loss (roles {roles}); "
                "it needs at least one prompt message and one assistant message"
            )
        masked = Masked(self.tokenizer.known(tokens), [False, *mask[1:]])
        if not conversation.images:
            return masked
        numbers = self._numbers(tokens, text, token_spans, list(conversation.images))
        return masked._replace(images=numbers, grids=tuple(one.grid for one in conversation.images.values()))

    def conversations(
        self, messages: Sequence[Message], *, first: int = 0, tools: Sequence[dict[str, Any]] | None = None
    ) -> list[Masked]:
        """One sequence of all messages, see `conversation`; or one for each assistant turn with loss, after what it is
        sampled from, if the template rewrites earlier turns."""
        try:
            return [self.conversation(messages, first=first, tools=tools)]
        except TurnsRewritten:
            turns = [n for n, one in enumerate(messages) if one["role"] == "assistant" and n >= first]
            if turns in ([], [len(messages) - 1]):
                raise
            turns = [number for number in turns if messages[number].get("weight", 1) != 0]
            if not turns:
                raise
        return [self.conversation(messages[: turn + 1], first=turn, tools=tools) for turn in turns]

    def answer(
        self,
        prompt: Sequence[Message],
        answer: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Masked:
        """Tokens of a prompt and its answer as one sequence, with loss on the answer: a conversation, or two plain
        texts. ConfigError as in `conversation`, and for what has no place in plain texts."""
        if self.chat:
            return self.conversation([*prompt, *answer], first=len(prompt), tools=tools)
        self._refuse_tools(tools)
        return self.completion(only_text(prompt, "user"), only_text(answer, "assistant"))

    def writes_key(self, key: str, role: str) -> bool:
        """Tell whether the chat template writes a key of messages of a role; never in plain text."""
        return self.chat and self._form(None).writes(key, role)

    def _refuse_tools(self, tools: Sequence[dict[str, Any]] | None) -> None:
        """ConfigError for tools without a chat template, which nothing would describe."""
        if tools and not self.chat:
            raise ConfigError(
                f"tools: there is no place for them without a chat template ({self.tokenizer.name}, or dataset.chat: "
                "false); set model.chat_template, or write them into the prompt (dataset.prompt names their column)"
            )

    def completion(self, prompt: str, completion: str) -> Masked:
        """Tokens of a plain prompt without loss, then of its completion and the end token with loss."""
        self._note_system(())
        before, after = self.tokenizer.encode_after(prompt, completion)
        before, after = self.tokenizer.with_prefix(before), self._end(after)
        mask = [False] * len(before) + [True] * len(after)
        return Masked(self.tokenizer.known(before + after), [False, *mask[1:]])

    def text(self, text: str) -> Masked:
        """Tokens of a plain text with loss on all but the first; missing begin and end tokens are added."""
        tokens = self.tokenizer.known(self._end(self.tokenizer.with_prefix(self.tokenizer.encode(text))))
        return Masked(tokens, [False] + [True] * (len(tokens) - 1))

    def _end(self, tokens: list[int]) -> list[int]:
        end = self.tokenizer.end_id
        return tokens if tokens and tokens[-1] in self.tokenizer.stop_ids else [*tokens, end]

    def _spoken(self, conversation: TemplateInput, text: str, turns: Sequence[int], spans: list[Span]) -> list[Span]:
        """Spans of turns with loss, after the check that they hold what the messages do."""
        where = f"chat template of {self.tokenizer.name}"
        apart = len(spans) == len(turns)
        if conversation.silent and not apart:
            raise ConfigError(f"{where} does not mark each assistant turn apart, so weight: 0 cannot be obeyed")
        whole = "".join(text[start:stop] for start, stop in spans)
        for number, turn in enumerate(turns):
            if (
                turn not in conversation.silent
                and not set(conversation.messages[turn]) - {"role", "content"}
                and (not str(conversation.messages[turn].get("content", "")).strip())
            ):
                self.remarks.add("empty", f"message {turn} is an empty answer, of which only the end is trained")
            if turn not in conversation.silent and check_turn_written(
                conversation.messages[turn], text[slice(*spans[number])] if apart else whole, where
            ):
                self.remarks.add("thinking", f"{where} leaves the thinking of message {turn} out of its loss")
        return (
            [span for turn, span in zip(turns, spans, strict=True) if turn not in conversation.silent]
            if apart
            else spans
        )

    def _form(self, tools: list[dict[str, Any]] | None) -> TemplateForm:
        """Form of messages that the template takes."""

        def render(messages: list[Any]) -> str:
            shown = TemplateInput(messages, tools, {}, frozenset())
            return self._render(shown, len(messages), generation_prompt=False)[0]

        template = self._template(tools)
        if template not in self._forms:
            self._forms[template] = TemplateForm(self.tokenizer.name, template, render)
        return self._forms[template]

    def _template(self, tools: list[dict[str, Any]] | None) -> str:
        return self.tokenizer.hf.get_chat_template(tools=tools)

    def _conversation(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> TemplateInput:
        passed = list(tools) if tools else None
        messages = self._form(passed).fitted(messages)
        if self.tool_text is not None and passed:
            messages, converted = self.tool_text(messages, passed)
            passed = list(converted) if converted else None
        silent = frozenset(number for number, message in enumerate(messages) if message.pop("weight", 1) == 0)
        plain = self._form(passed).with_arguments(messages)
        texts, pictures = list(strings_in([plain, passed or []])), pictures_in(messages)
        others, of_assistant = self._control, self._control_of_assistant
        if pictures:
            plain, marks = self.tokenizer.images.holes(plain), self.tokenizer.images.family.layout.texts
            others, of_assistant = any_of([*marks, *self.tokenizer.control_tokens]), any_of([*marks, *self._ends])
        controls = sorted({match for text in texts for match in others.findall(text)})
        used = set().union(*texts) if controls or pictures else set()
        free = (chr(code) for code in STAND_INS if chr(code) not in used)
        stand_ins = {text: next(free) for text in controls}
        escaped = []
        for message in plain:
            pattern = of_assistant if message["role"] == "assistant" else others
            escaped.append(replaced(message, pattern, stand_ins))
            if controls and (token := next((t for text in strings_in(message) for t in pattern.findall(text)), None)):
                self.remarks.add("control tokens", f"a message of role {message['role']} holds {token!r}; {LITERAL}")
        literals: dict[str, str | list[int]] = {character: text for text, character in stand_ins.items()}
        images = {next(free): self.tokenizer.image_of(picture) for picture in pictures}
        literals |= {character: self.tokenizer.image_tokens(image.grid) for character, image in images.items()}
        escaped_tools = replaced(passed, others, stand_ins) if passed else None
        return TemplateInput(escaped, escaped_tools, literals, silent, images)

    def _render(self, conversation: TemplateInput, length: int, *, generation_prompt: bool) -> tuple[str, list[Span]]:
        """Text of the first `length` messages, and the spans that the template marks as generated."""
        template = self._template(conversation.tools)
        text, marked = render(
            template,
            self.tokenizer.clock,
            self.tokenizer.name,
            messages=self._form(conversation.tools).joined(conversation.messages[:length]),
            tools=conversation.tools,
            add_generation_prompt=generation_prompt,
            **self.tokenizer.hf.special_tokens_map,
        )
        if not conversation.images:
            return text, marked
        count = sum(part["type"] == "image" for one in conversation.messages[:length] for part in parts_of(one))
        stand_ins = list(conversation.images)[:count]
        return self.tokenizer.images.placed(text, marked, stand_ins, self.tokenizer.name)

    def _derive_spans(self, conversation: TemplateInput, text: str, first: int) -> tuple[str, list[Span]]:
        """Text, and the span of each assistant turn: what its rendering adds to the prompt before it."""
        last = len(conversation.messages) - 1
        turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant" and i >= first]
        if turns == [last]:
            prompt, turn = self._last_turn(conversation, text)
            return prompt + turn, [(len(prompt), len(prompt + turn))]
        spans = []
        for index in turns:
            before = self._prefix(conversation, text, index, generation_prompt=True)
            turn = text if index == last else self._prefix(conversation, text, index + 1, generation_prompt=False)
            thought, _ = split_thought(conversation.messages[index])
            if opened_thought(before) and not squeezed(turn[len(before) :]).startswith(squeezed(thought)):
                raise TurnsRewritten(
                    f"chat template of {self.tokenizer.name} opens a thought before message {index}, and leaves that "
                    "of the message out, so that turns are not parts of one sequence; give the last turn as the "
                    "answer and the others as prompt, or set model.chat_template to one that keeps thoughts"
                )
            spans.append((len(before), len(turn)))
        return text, spans

    def _last_turn(self, conversation: TemplateInput, text: str) -> tuple[str, str]:
        """Prompt of the last turn, as it is for sampling, and the turn.

        A template may write earlier text otherwise once the turn is there, such as Mistral's the system message: then
        the turn is what follows the end of the prompt, from its last message on.
        """
        *before, asked, _ = [{"content": ""}, *conversation.messages]
        prompt, _ = self._render(conversation, len(before), generation_prompt=True)
        if opened := opened_thought(prompt):
            return prompt, self._thought_and_answer(conversation, text, prompt, opened)
        if text.startswith(prompt):
            return prompt, text[len(prompt) :]
        content = text_of(asked).strip() if asked.get("content") is not None else ""
        end = prompt[prompt.rfind(content) :] if content and content in prompt else ""
        if not end or end not in text:
            raise TurnsRewritten(
                f"chat template of {self.tokenizer.name} writes a prompt that is no beginning of its text with the "
                f"reply, message {len(before)}: {prompt[-40:]!r} is not in it; change the message, the template's "
                "variables (model.chat_template_args) or the template (model.chat_template)"
            )
        return prompt, text[text.rfind(end) + len(end) :]

    def _thought_and_answer(self, conversation: TemplateInput, text: str, prompt: str, opened: str) -> str:
        """Text of the last turn behind a prompt that ends with an open thought: the rest of the thought as the message
        has it, then what the template writes of a turn without one. `text`: the template's own of all messages.

        ConfigError for a message without a thought, unless the template itself ends the thought of such a turn.
        """
        number = len(conversation.messages) - 1
        message = conversation.messages[number]
        thought, answer = split_thought(message)
        if text.startswith(prompt) and squeezed(text[len(prompt) :]).startswith(squeezed(thought)):
            return text[len(prompt) :]
        if not thought:
            raise ConfigError(
                f"chat template of {self.tokenizer.name} opens a thought in the prompt ({opened!r}), and message "
                f"{number} has none: its answer would be trained as a thought; write {THINK}...{THINK_END} into it, "
                "give the template variables with which it opens none (model.chat_template_args, such as "
                "{enable_thinking: false}, where it has one), or another template (model.chat_template)"
            )
        # The turn as the template writes it without its thought: it must go on where the prompt does before the mark.
        rest = {key: value for key, value in message.items() if key not in THINKING}
        spoken = replace(conversation, messages=[*conversation.messages[:number], {**rest, "content": answer}])
        written, _ = self._render(spoken, number + 1, generation_prompt=False)
        head = prompt.removesuffix(opened)
        if not written.startswith(head):
            raise TurnsRewritten(
                f"chat template of {self.tokenizer.name} changes the text of messages 0..{number - 1} when message "
                f"{number} follows, whose prompt opens a thought; change the message, the template's variables "
                "(model.chat_template_args) or the template (model.chat_template)"
            )
        written = written[len(head) :]
        if empty := EMPTY_THOUGHT.match(written):
            written = written[empty.end() :]
        # White space is the message's own around its marks, and mirrors the prompt's where it has no marks.
        space = opened.removeprefix(THINK)
        if THINK_END not in thought:
            thought = f"{thought.strip()}{space}{THINK_END}"
            return f"{thought}{space * 2}{written.lstrip()}"
        thought = thought.removeprefix(space) if thought.startswith(space) else thought.lstrip()
        return f"{thought}{answer[: len(answer) - len(answer.lstrip())]}{written.lstrip()}"

    def _after(self, conversation: TemplateInput, text: str, spans: list[Span], first: int) -> list[Span]:
        """Marked spans after the prompt of the first `first` messages."""
        if first == 0:
            return spans
        reply = conversation.messages[first]["role"] == "assistant"
        begin = len(self._prefix(conversation, text, first, generation_prompt=reply))
        return [(max(start, begin), stop) for start, stop in spans if stop > begin]

    def _prefix(self, conversation: TemplateInput, text: str, length: int, *, generation_prompt: bool) -> str:
        part, _ = self._render(conversation, length, generation_prompt=generation_prompt)
        if not text.startswith(part):
            raise TurnsRewritten(
                f"chat template of {self.tokenizer.name} changes the text of messages 0..{length - 1} when message "
                f"{length} follows, so that its turns are not parts of one sequence; give the last turn as the answer "
                "and the others as prompt, or set model.chat_template to one that keeps earlier turns"
            )
        return part

    def _end_turns(self, tokens: list[int], mask: list[bool], *, calls: bool) -> tuple[list[int], list[bool]]:
        """Add loss to the stop token behind a turn that has none. `calls`: the last message calls tools."""
        stops, tokens, mask = self.tokenizer.stop_ids, list(tokens), list(mask)
        ended = False
        for index, token in enumerate(tokens):
            if mask[index]:
                ended = (ended and mask[index - 1]) or token in stops
            elif index and mask[index - 1] and not ended and token in stops:
                mask[index] = ended = True
        if mask[-1] and not ended and (end := self.next_token(calls)) in stops:
            tokens.append(end)
            mask.append(True)
        return tokens, mask

    def next_token(self, calls: bool = False) -> int:
        """First token of a message behind an assistant turn, such as the user's role; -1 if the template writes none.

        `calls`: the turn calls tools, and a result follows.
        """
        if calls not in self._next_tokens:
            asked: Message = {"role": "user", "content": STAND_IN_TEXT}
            follower: Message = {**asked, "role": "tool", "tool_call_id": "call00000"} if calls else asked
            turns = [asked, stand_in_turn([follower])]
            try:
                text, longer = self.rendered(turns, reply=False), self.rendered([*turns, follower], reply=False)
            except ConfigError:  # a template for conversations of one turn
                text = longer = ""
            rest = longer[len(text) :] if longer.startswith(text) else ""
            self._next_tokens[calls] = [*self._tokenize_pieces(rest, {}, (), continues=True)[0], -1][0]
        return self._next_tokens[calls]

    def _tokenize(
        self, text: str, literals: Mapping[str, str | list[int]], starts: Sequence[int]
    ) -> tuple[list[int], list[Span]]:
        """Tokens of a rendering with their character spans; no token crosses the start of an assistant turn.

        At inference the prompt is tokenized without its reply, so a token that joins both would never be seen.
        """
        tokens, spans = self._tokenize_pieces(text, literals, ())
        across = [start for start in starts if any(s < start < e for s, e in spans)]
        return self._tokenize_pieces(text, literals, across) if across else (tokens, spans)

    def _tokenize_pieces(
        self, text: str, literals: Mapping[str, str | list[int]], cuts: Sequence[int], *, continues: bool = False
    ) -> tuple[list[int], list[Span]]:
        """Tokens and spans of a rendering that is cut at `cuts`. `continues`: it follows another text."""
        stand_ins = [i for i, character in enumerate(text) if character in literals] if literals else []
        edges = sorted({0, len(text), *cuts, *stand_ins, *(i + 1 for i in stand_ins)})
        tokens: list[int] = []
        spans: list[Span] = []
        for begin, end in itertools.pairwise(edges):
            literal = literals.get(text[begin]) if end == begin + 1 else None
            piece: list[Span] = []
            if isinstance(literal, list):
                ids = literal
            else:
                ids, piece = self.tokenizer.encode_spans(
                    text[begin:end] if literal is None else literal,
                    continues=continues or begin > 0,
                    literal=literal is not None,
                )
            tokens += ids
            spans += [(begin, end)] * len(ids) if literal is not None else [(begin + s, begin + e) for s, e in piece]
        return tokens, spans


def _of_text(prompt: Prompt) -> list[int]:
    """Tokens of a prompt. ConfigError for one with pictures, which its reader would leave out."""
    if prompt.images is not None:
        raise ConfigError("messages have pictures, and are read as text alone here; remove the pictures")
    return prompt.tokens
