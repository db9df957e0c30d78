"""Configurations as text, and what differs between two."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from enum import Enum
from itertools import cycle
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
import yaml
from pydantic import ConfigDict, create_model

from posttrain.config import Locator, RLSection, Section, yaml_file
from posttrain.config.messages import config_fields
from posttrain.config.yaml_file import build_config, diff_config, dump_config
from posttrain.errors import ConfigError
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


class Color(Enum):
    RED = 1


@dataclass
class Strict:
    level: int


def short_answers(completions: list[str]) -> list[float]:
    return [1.0 / (1 + len(text)) for text in completions]


TEXTS = [
    "a", "1", "1_0", "0o17", "017", "1e-4", "1:30", "2020-01-01", "yes", "null", "~", "true", ".nan", "<<", "=", "- a",
    "a: b", "#", "'", '"', "{x}", "%", "é\u200d👧", "\u2028", "\ud800", "\x07", "\t", " a ", "\n", "\n\n", "a\nb\n",
    "\n  a\n b", "a \nb\r\n", "w" * 200, "word " * 40, "?", "-", "!x", "&a", "*a", "|", ">", "@", "`",
]  # fmt: skip
KEYS = [13, -1, 1.5, float("-inf"), True, None, "13", "", "true", "null", "a: b", "a\nb", "k" * 200, "é"]
FREE = [
    *TEXTS, 0, -1, 10**20, True, False, None, 1e-7, 1e22, 0.1 + 0.2, -0.0, 3.0, float("inf"), float("nan"), [], {},
    [1, [None, {"a": []}]], {key: {key: [key]} for key in KEYS}, (1, (2,)), np.float32(0.5), np.array(True),
]  # fmt: skip


def examples(annotation: Any) -> list[Any]:
    """Values of a type, some of which a field's bounds may refuse."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return list(args)
    if origin is Annotated:
        return examples(args[0])
    if origin is tuple:
        items = examples(args[0])
        return [items, *([item] for item in items), *([item, item] for item in items)]
    if origin is dict:
        keys, values = map(examples, args)
        return [{key: value} for key, value in zip(cycle(keys), [*values, *values[: len(keys)]], strict=False)]
    if origin in (Union, UnionType):
        return [value for arg in args for value in examples(arg)]
    known: dict[Any, list[Any]] = {bool: [True, False], int: [0, 1, 2, 7, 10**20], float: [0.5, 1e-7, 1.5, 1e22]}
    known |= {str: TEXTS, Locator: TEXTS, Any: FREE}
    return known.get(annotation, [])


class Undocumented(Section):
    """Without the search of the source for docstrings, which takes most of the time to make a section."""

    model_config = ConfigDict(use_attribute_docstrings=False)


def test_every_field_comes_back_from_its_dump() -> None:
    """Values other than the default of each field, of its type as the schema has it."""
    fields = {f"{info.annotation} {info.metadata} {info.default}": (key, info) for key, info in config_fields()}
    for key, info in fields.values():
        if key[-1] == "fn":
            continue  # a function or its name, which is text
        one = create_model("One", __base__=Undocumented, x=(info.annotation, info))
        changed, given = False, examples(info.annotation)
        for value in given:
            try:
                section = one(x=value)
            except ValueError:
                continue
            again = one(**yaml.load(dump_config(section), yaml_file._Loader))
            # A NaN equals itself only as text.
            assert repr(again) == repr(section), key
            changed |= section.x != info.default  # type: ignore[attr-defined]
        assert changed or given in ([], [[]]) or key[-1] == "kind", key


def test_a_run_comes_back_from_its_dump(write: Write) -> None:
    config = read(
        write(LONG), "model.lora.rank=8", "stages.rl.sampling={logit_bias: {13: -100, 7: -.inf}, max_tokens: 32}",
        "stages.rl.eval_sampling={logit_bias: {13: 1}}", "stages.rl.rewards.0.args={levels: {1: 0.5, '1': 2, 2: .nan}}",
        "stages.sft.dataset.args={x: {1: 2, true_: {true: null}}}", "stages.rl.sampling.logit_bias.8=2",
        "stages.rl.rewards.0.args.levels.1=0.75",
    )  # fmt: skip
    again = read(write(dump_config(config)))
    assert dump_config(again) == dump_config(config) and diff_config(config, again) == []
    assert rl(again).sampling.logit_bias == {13: -100, 7: float("-inf"), 8: 2}
    levels = rl(again).rewards[0].args["levels"]
    assert [*levels] == [1, "1", 2] and levels[1] == 0.5 and levels["1"] == 0.75, "an existing text key is taken first"
    other = read(write(dump_config(config)), "stages.sft.dataset.args={x: {1: 2, true_: {1: null}}}")
    assert diff_config(config, other) == ["stages.0.dataset.args.x.true_.True", "stages.0.dataset.args.x.true_.1"]


@pytest.mark.parametrize("value", [{1, 2}, b"a", date(2020, 1, 1), {(1, 2): 3}, Color.RED, np.zeros(2), [Strict(1)]])
def test_values_that_a_dump_would_lose_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"args: (must be|a key must be) text, a number, true, false"):
        build_config(
            {"output": "x", "seed": 0, "model": {}, "kind": "sft", "dataset": {"path": "a", "args": {"x": value}}}
        )


def test_dump_is_readable(write: Write) -> None:
    head = dump_config(read(write(SHORT))).splitlines()[:20]
    assert head == [
        "output: runs/x", "seed: 0", "model:", "  path: some/model", "  init: null", "  family: null",
        "  tokenizer: null", "  chat_template: null", "  chat_template_args: {}", "  stop_tokens: []",
        "  dtype: float32", "  compute_dtype: null",
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
    assert f"fn: <{__name__}:Judge(" in text, "an object has no name that could be imported"
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
