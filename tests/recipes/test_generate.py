"""Text from a model: what each setting of `generate` does to it."""

from __future__ import annotations

from typing import Any

import pytest

import posttrain as pt
from posttrain.config import ConfigError
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import Tokenizer
from posttrain.models.decoder import Decoder
from posttrain.rollout.types import SamplingParams
from tests.rollout.engines import NaiveEngine
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def parts() -> tuple[Decoder, Tokenizer]:
    return tiny_model(vocab_size=262, num_layers=1), pt.load_tokenizer("bytes")


def texts(parts: tuple[Decoder, Tokenizer], prompts: tuple[str, ...] = ("12+",), **settings: Any) -> list[str]:
    model, tokenizer = parts
    return pt.generate(
        model, tokenizer, prompts, **{"max_new_tokens": 16, "temperature": 0.0, "chat": False} | settings
    )


def test_several_samples_of_each_prompt(parts: tuple[Decoder, Tokenizer]) -> None:
    warm = {"temperature": 1.0, "seed": 7}
    several = texts(parts, ("12+", "ab"), n=3, **warm)
    assert len(set(several)) == 6
    assert several[::3] == texts(parts, ("12+", "ab"), **warm)
    with pytest.raises(ConfigError, match="n=0"):
        texts(parts, n=0)


def test_penalties(parts: tuple[Decoder, Tokenizer]) -> None:
    model, tokenizer = parts
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": -2.0}
    params = SamplingParams(max_tokens=16, temperature=0.0, stop_token_ids=tokenizer.stop_ids, key=(0, 0), **penalties)
    prompt = Renderer(tokenizer, chat=False).prompt([{"role": "user", "content": "12+"}])
    expected = NaiveEngine(model, length=32).generate(prompt, params)
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
