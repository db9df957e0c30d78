"""Names of Unsloth, verl and Tunix: each leads to a field that there is, or to the reason why there is none."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config.messages import config_fields
from posttrain.config.other_names import ABSENT, OTHER_NAMES, TRL_NAMES
from posttrain.config.yaml_file import build_config
from posttrain.errors import ConfigError
from tests.documents import STAGES

pytestmark = pytest.mark.fast


def refusal(kind: str, *, python: bool = False, **fields: Any) -> str:
    run = {"output": "o", "seed": 1, "model": {"path": "m"}, "kind": kind, **STAGES[kind], **fields}
    with pytest.raises(ConfigError) as error:
        build_config(run, name="pt.X" if python else "run.yaml", python=python)
    return str(error.value)


def test_every_entry_has_a_field() -> None:
    known = [".".join(map(str, key)) for key, _ in config_fields()]
    assert [e for e in OTHER_NAMES if not any(k == e.field or k.endswith(f".{e.field}") for k in known)] == []
    assert {kind for entry in OTHER_NAMES for kind in entry.kinds} <= STAGES.keys()
    words = [(e.name, e.kinds) for e in OTHER_NAMES] + [(name, ()) for name in ABSENT]
    assert len(words) == len(set(words))
    last = {str(key[-1]) for key, _ in config_fields()}
    assert sorted(ABSENT.keys() & (last | {e.name for e in OTHER_NAMES} | {e.trl for e in TRL_NAMES})) == []


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("rl", "max_response_length", "did you mean 'sampling.max_tokens'?"),
        ("rl", "train_batch_size", "did you mean 'prompts_per_step'? (prompts of one step)"),
        ("sft", "train_batch_size", "did you mean 'batch_rows'?"),
        ("rl", "loss_algo", "did you mean 'algorithm'?"),
        ("rl", "kl_loss_coef", "did you mean 'algorithm.kl_coef'?"),
        ("sft", "load_in_fp8", "did you mean 'model.quantize'? (write fp8)"),
        ("sft", "max_seq_length", "did you mean 'row_tokens'?"),
        ("rl", "use_vllm", "there is none: the built-in engine"),
        ("sft", "push_to_hub", "there is none: the result is a folder"),
        ("sft", "rewards", "a field of 'rl' and 'online_preference', not of 'sft'"),
        ("rl", "zzzz", "posttrain fields rl lists the fields"),
    ],
)
def test_hints(kind: str, name: str, words: str) -> None:
    message = refusal(kind, **{name: 1})
    assert f"{name}: unknown field; {words}" in message and len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lora_r", "did you mean lora={'rank': ...}?"),
        ("load_in_4bit", "did you mean 'quantize'?"),
        ("learning_rate", "did you mean optimizer={'learning_rate': ...}?"),
        ("train_dataset", "did you mean 'dataset'?"),
        ("model_name_or_path", "did you mean 'model'?"),
        ("stage", "pt.X.fields() lists the fields"),
    ],
)
def test_python_gets_keywords(name: str, words: str) -> None:
    """Red if a Python class told of `stages`, which it does not have."""
    message = refusal("rl", python=True, **{name: 1})
    assert f"pt.X: {name}: unknown field; {words}" in message and "stages" not in message
