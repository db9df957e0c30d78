"""Configurations as text, and what differs between two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from posttrain.config import RLSection
from posttrain.config.yaml_file import diff_config, dump_config
from tests.config.files import LONG, SHORT, Write, fresh_folder, read, rl

pytestmark = pytest.mark.fast


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    return fresh_folder(tmp_path, monkeypatch)


@dataclass
class Judge:
    strictness: float

    def __call__(self, completions: list[str]) -> list[float]:
        return [self.strictness] * len(completions)


def short_answers(completions: list[str]) -> list[float]:
    return [1.0 / (1 + len(text)) for text in completions]


def test_dump_reads_back_equal(write: Write) -> None:
    awkward = {"text": "a\nb\n", "number": "1e-4", "no": "no", "none": "null", "small": 1e-8, "unicode": "é: #", "": []}
    config = read(write(LONG), "model.lora.rank=8", "stages.rl.sampling.stop=['\n\n', 'yes', '1_0']")
    config = config.model_copy(update={"model": config.model.model_copy(update={"init": awkward})})
    again = read(write(dump_config(config)))
    assert again == config
    assert dump_config(again) == dump_config(config)
    assert again.model.init is not None
    assert {word: type(value) for word, value in again.model.init.items()} == {w: type(v) for w, v in awkward.items()}


def test_dump_is_readable(write: Write) -> None:
    head = dump_config(read(write(SHORT))).splitlines()[:19]
    assert head == [
        "output: runs/x", "seed: 0", "model:", "  path: some/model", "  init: null", "  family: null",
        "  tokenizer: null", "  chat_template: null", "  stop_tokens: []", "  dtype: float32", "  compute_dtype: null",
        "  lora: null", "  adapter: null", "  quantize: none", "  remat: none", "  attention: auto",
        "  decode_attention: auto",
        "  grouped_matmul: auto", "  long_context: false",
    ]  # fmt: skip


def test_functions_dump_by_name(write: Write) -> None:
    config = read(write(LONG))
    rewards = [{"fn": short_answers}, {"fn": Judge(0.5)}, {"fn": Path("rewards/length.py")}]
    stage = RLSection.model_validate({**dict(rl(config)), "rewards": rewards})
    text = dump_config(config.model_copy(update={"stages": (stage,)}))
    assert f"fn: {__name__}:short_answers\n" in text
    assert f"fn: {__name__}:Judge\n" in text
    assert "fn: rewards/length.py\n" in text


def test_diff_names_what_changed(write: Write) -> None:
    config = read(write(LONG))
    assert diff_config(config, read(write(LONG))) == []
    changed = read(
        write(LONG), "seed=1", "model.lora.rank=8", "stages.rl.rewards=[{fn: a}]", "stages.0.optimizer.eps=1",
        "model.init.extra=1",
    )  # fmt: skip
    expected = [
        "seed", "model.init.extra", "model.lora", "stages.0.optimizer.eps", "stages.1.rewards.0.fn",
        "stages.1.rewards.1",
    ]  # fmt: skip
    assert diff_config(config, changed) == expected
    assert sorted(diff_config(changed, config)) == sorted(expected)
