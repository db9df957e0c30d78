"""Text from a model: what each setting of `generate` does to it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import posttrain as pt
from posttrain import generation
from posttrain.config.rollout import drafts_of
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.generation import _named, _render
from posttrain.models.decoder import Decoder
from posttrain.rollout.decoding import DecodedTokens
from posttrain.rollout.drafting import Drafter
from posttrain.rollout.types import SamplingParams
from tests.rollout.engines import NaiveEngine, assert_same
from tests.stages.runs import posttrain, sft_stage, write_run
from tests.tiny import tiny_model

LENGTH = 48
"""The model's context: calls of as many samples that name no `max_new_tokens` share their programs."""
PROMPT = 4
"""Tokens of "12+", behind that of the beginning."""


@pytest.fixture(scope="module")
def parts() -> tuple[Decoder, Tokenizer]:
    """The last row of the embedding stands for no token."""
    return tiny_model(vocab_size=262, num_layers=1, max_positions=LENGTH), pt.load_tokenizer("bytes")


@pytest.fixture(scope="module")
def naive(parts: tuple[Decoder, Tokenizer]) -> NaiveEngine:
    """Over a model that knows how many tokens there are."""
    model = tiny_model(vocab_size=262, num_layers=1, max_positions=LENGTH)
    model.config = replace(model.config, num_tokens=parts[1].num_ids)
    return NaiveEngine(model, length=LENGTH)


def texts(parts: tuple[Decoder, Tokenizer], prompts: tuple[str, ...] = ("12+",), **settings: Any) -> list[str]:
    return pt.generate(*parts, prompts, **{"temperature": 0.0, "chat": False} | settings)


def test_one_prompt_or_several_and_conversations(parts: tuple[Decoder, Tokenizer]) -> None:
    """Greedy without settings; a conversation goes through the template like a string with the same user turn."""
    user = {"role": "user", "content": "12+"}
    system = [{"role": "system", "content": "Add."}, user]
    (string,), (alone,) = pt.complete(*parts, "12+"), pt.complete(*parts, system)
    mixed = pt.complete(*parts, ["12+", [user], system] * 2)
    assert pt.generate(*parts, [user]) == [string.text] and [mixed[2].text, mixed[5].text] == [alone.text] * 2
    for index in (0, 1, 3, 4):
        tokens = mixed[index].completion.tokens
        assert tokens == string.completion.tokens[: len(tokens)] and len(tokens) > 8
    template = Renderer(parts[1], chat=True).prompt
    assert list(alone.prompt_tokens) == template([{"role": m["role"], "content": m["content"]} for m in system])
    (default,) = pt.complete(*parts, "12+", ignore_eos=True)
    assert len(default.prompt_tokens) + len(default.completion.tokens) == LENGTH
    with patch.object(generation, "NativeEngine", side_effect=RuntimeError) as engine, pytest.raises(RuntimeError):
        pt.generate(tiny_model(vocab_size=262, num_layers=1), parts[1], "12+", chat=False)
    assert engine.call_args.kwargs["max_length"] == PROMPT + 128
    assert pt.generate(*parts, []) == []


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ({"role": "user", "content": "a"}, {}, "the prompt is a single message; pass a conversation"),
        ([3], {}, "prompt 0 must be a string, or a list of messages with role and content; got '3'"),
        ([["a", "b"]], {}, "prompt 0 must be a string, or a list of messages"),
        ([{"role": "usr", "content": "a"}], {}, "the prompt: messages[0].role='usr': use one of"),
        (["a", [{"role": "assistant", "content": "a"}]], {}, "prompt 1 ends with an assistant message"),
        ([{"role": "user", "content": "a"}], {"chat": False}, "needs a chat template, and chat is off"),
    ],
)
def test_prompts_that_cannot_be(
    parts: tuple[Decoder, Tokenizer], prompts: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _render(parts[1], _named(prompts), settings.get("chat"))
    assert words in str(caught.value)


def test_several_samples_of_each_prompt(parts: tuple[Decoder, Tokenizer]) -> None:
    warm = {"temperature": 1.0, "seed": 7}
    several = texts(parts, ("12+", "ab"), n=3, **warm)
    assert len(set(several)) == 6
    assert several[::3] == texts(parts, ("12+", "ab", *"cdef"), **warm)[:2]
    with pytest.raises(ConfigError, match="n=0"):
        texts(parts, n=0)
    with pytest.raises(ConfigError, match=r"n=2 at temperature 0 \(greedy\) gives equal completions"):
        texts(parts, n=2)


def test_penalties(parts: tuple[Decoder, Tokenizer], naive: NaiveEngine) -> None:
    _, tokenizer = parts
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": -2.0}
    params = SamplingParams(
        max_tokens=LENGTH - PROMPT, temperature=0.0, stop_token_ids=tokenizer.stop_ids, key=(0, 0), **penalties
    )
    prompt = Renderer(tokenizer, chat=False).prompt([{"role": "user", "content": "12+"}])
    expected = naive.generate(prompt, params)
    assert texts(parts, **penalties) == [tokenizer.decode(expected.tokens)]


def test_stops(parts: tuple[Decoder, Tokenizer]) -> None:
    model, tokenizer = parts
    (plain,) = texts(parts)
    character = next(c for c in plain[2:] if c.isascii())
    (stopped,) = texts(parts, stop=[character])
    assert stopped == plain.partition(character)[0]
    ending = (model, tokenizer.with_stop_tokens([character]))
    assert texts(ending) == [stopped]
    assert texts(ending, ignore_eos=True) == [plain]
    with pytest.raises(ConfigError, match=r"^generate: stop='a<eos>': contains the special token <eos>"):
        texts(parts, stop=["a<eos>"])


def test_which_tokens_may_come(parts: tuple[Decoder, Tokenizer]) -> None:
    allowed = tuple(ord(c) for c in "abc")
    (text,) = texts(parts, allowed_token_ids=allowed, ignore_eos=True)
    assert len(text) == LENGTH - PROMPT and set(text) <= set("abc")
    (other,) = texts(parts, allowed_token_ids=allowed, ignore_eos=True, logit_bias={ord(text[0]): float("-inf")})
    assert text[0] not in other
    (stopped,) = texts(parts, allowed_token_ids=allowed, stop_token_ids=[ord(text[2])])
    assert stopped == text.partition(text[2])[0]
    with pytest.raises(ConfigError, match=r"generate: logit_bias: token ids from 900 to 900"):
        texts(parts, logit_bias={900: 1.0})


def test_structured_output(parts: tuple[Decoder, Tokenizer]) -> None:
    """Of messages, whose template writes a space before contents, and of plain text."""
    model, tokenizer = parts
    spaced = tokenizer.hf.chat_template.replace("message['content']", "' ' + message['content']")
    grammar = pt.Grammar.regex("[a-c]{2,4}")
    replies = texts(
        (model, tokenizer._with_templates(spaced)), chat=True, grammar=grammar, n=6, temperature=1.0, seed=0
    )
    assert all(re.fullmatch("[a-c]{2,4}", text) for text in replies + texts(parts, grammar=grammar))
    (plain,) = pt.complete(*parts, "12+", max_new_tokens=16, chat=False, grammar=pt.Grammar.choice(["yes"]))
    assert plain.text == "yes" and plain.completion.stop == "stop"
    with pytest.raises(
        ConfigError, match=r"generate: grammar=Grammar\(kind='regex'\): must be None, or come with stop"
    ):
        texts(parts, grammar=grammar, ignore_eos=True)
    with pytest.raises(ConfigError, match="generate: grammar: choice: allowed_token_ids and logit_bias leave no token"):
        texts(parts, grammar=pt.Grammar.choice(["yes"]), allowed_token_ids=[97])


def test_log_probabilities(parts: tuple[Decoder, Tokenizer], naive: NaiveEngine) -> None:
    model, tokenizer = parts
    (done,) = pt.complete(model, tokenizer, ["12+"], top_logps=2, prompt_logps=True, chat=False)
    assert [done.text] == texts(parts)
    asked: dict[str, Any] = {"stop_token_ids": tokenizer.stop_ids, "top_logps": 2, "prompt_logps": True}
    params = SamplingParams(max_tokens=LENGTH - PROMPT, temperature=0.0, key=(0, 0), **asked)
    expected = naive.generate(done.prompt_tokens, params)
    assert_same(done.completion, expected)
    record = done.record(tokenizer.decode)
    assert [token["id"] for token in record["tokens"]] == list(expected.tokens)
    assert all(len(token["top"]) == 2 for token in record["tokens"])
    np.testing.assert_allclose(
        *zip(*((t["logp"], t["top"][0]["logp"]) for t in record["tokens"]), strict=True), atol=1e-6
    )
    assert "".join(token["text"] for token in record["prompt_tokens"]) == "12+"
    assert record["prompt_tokens"][0]["logp"] == 0.0 > record["prompt_tokens"][1]["logp"]


def test_arguments_of_the_template_from_the_command_line(parts: tuple[Decoder, Tokenizer], tmp_path: Path) -> None:
    template = "{% if quiet %}quiet: {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    pt.save_model(parts[0], tmp_path / "model", tokenizer=parts[1]._with_templates(template))

    def read(*args: str) -> str:
        done = posttrain("generate", tmp_path / "model", "1+1=", "--max-tokens", "1", "--prompt-logprobs", *args)
        assert done.code == 0, done.err
        return "".join(token["text"] for token in json.loads(done.out)["prompt_tokens"])

    assert read("--chat-template-args", '{"quiet": true}') == "quiet: 1+1="
    for args, message in [
        ("[1]", "--chat-template-args: '[1]' must be a JSON object"),
        ("quiet", "--chat-template-args: 'quiet' is not JSON"),
        ('{"quite": 1}', "does not mention 'quite'; did you mean 'quiet'"),
    ]:
        assert message in posttrain("generate", tmp_path / "model", "1", "--chat-template-args", args).error


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens of a draft, and of all drafts of a call, by calls."""
    drafted: list[tuple[int, int]] = []
    note = Drafter.note

    def noted(self: Drafter, rows: Any, lanes: Any, chunk: DecodedTokens, size: int) -> None:
        drafted.append((self.tokens, 0 if chunk.drafts is None else int(np.sum(chunk.drafts.drafted))))
        note(self, rows, lanes, chunk, size)

    monkeypatch.setattr(Drafter, "note", noted)
    return drafted


@pytest.mark.thorough
def test_drafts_change_no_text(
    parts: tuple[Decoder, Tokenizer], naive: NaiveEngine, tmp_path: Path, drafted: list[tuple[int, int]]
) -> None:
    ends = parts[1].stop_ids
    prompt = tuple(parts[1].encode("121212121212"))
    whole = naive.generate(prompt, SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=ends, key=(0, 0)))
    (text,) = texts(parts, ("121212121212",), max_new_tokens=8, speculative=pt.LookupDrafts(tokens=2))
    assert text == parts[1].decode([token for token in whole.tokens if token not in ends])
    assert drafted and all(tokens == 2 and count > 0 for tokens, count in drafted)
    assert drafts_of("ngram:8") == pt.LookupDrafts(tokens=8) and drafts_of("draft=a/b").path == "a/b"  # type: ignore
    for option in ("ngrams", "ngram:17", "ngram:0", "draft=", "draft", ":3", "draft=x:99"):
        with pytest.raises(ConfigError, match=f"^{option}: "):
            drafts_of(option)


@pytest.mark.thorough
def test_drafts_of_a_model_by_the_command_line(
    parts: tuple[Decoder, Tokenizer], tmp_path: Path, drafted: list[tuple[int, int]]
) -> None:
    folder = tmp_path / "model"
    pt.save_model(parts[0], folder, tokenizer=parts[1])
    command = ("generate", folder, "1212", "--no-chat", "--max-tokens", "8")
    wanted = posttrain(*command).out
    assert posttrain(*command, "--speculative", f"draft={folder}:3").out == wanted != ""
    # Whether a call drafts is decided by what passes cost: a draft as large as its target saves nothing.
    assert {tokens for tokens, _ in drafted} == {3}
    assert f"generate: speculative.path: {tmp_path}" in posttrain(*command, "--speculative", f"draft={tmp_path}").error


def test_the_column_of_template_arguments_is_refused(tmp_path: Path) -> None:
    file = write_run(tmp_path, {**sft_stage(), "dataset": {"path": "rows.jsonl"}})
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "completion": "2", "chat_template_kwargs": {"quiet": true}}')
    assert (
        "column 'chat_template_kwargs' is not obeyed: arguments of the chat template are the same"
        in posttrain("check", file).error
    )
