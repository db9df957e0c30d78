"""Names of Unsloth, verl and Tunix: each leads to a field that there is, or to the reason why there is none."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

import posttrain as pt
from posttrain.config.messages import config_fields
from posttrain.config.other_names import ABSENT, OTHER_CLASSES, OTHER_NAMES, TRL_NAMES, meant_kind
from posttrain.config.yaml_file import build_config, read_value
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
    words = [(e.name, e.kinds) for e in OTHER_NAMES]
    assert len(words) == len(set(words))
    last = {str(key[-1]) for key, _ in config_fields()}
    assert sorted(ABSENT.keys() & (last | {e.trl for e in TRL_NAMES})) == []


ADVICE = re.compile(r"(?:write |: |, )(?:[a-z]+: )*?([a-z_]+): (\{.*\}|\[.*?\]|'[^']*'|[a-z][\w.:/]*)")


def test_advice_can_be_followed() -> None:
    """Red if a hint says to write what the same stage then refuses."""
    names = [(e.name, e.note) for e in OTHER_NAMES] + [(e.trl, e.note) for e in TRL_NAMES] + [*ABSENT.items()]
    names = [(name, text) for name, text in names if re.search(r"[a-z_]+: ", text)]
    followed = []
    for kind in STAGES:
        refused = refusal(kind, **{name: None for name, _ in names})
        for hint in dict.fromkeys(line.partition("unknown field")[2] for line in refused.splitlines()):
            found, near = ADVICE.search(hint), re.search(r"mean '([\w.]+)'", hint)
            if found is None:
                continue
            words = near[1].split(".") if near is not None and near[1].endswith(f".{found[1]}") else [found[1]]
            value = functools.reduce(lambda inner, word: {word: inner}, reversed(words[1:]), read_value(found[2], hint))
            run = {"output": "o", "seed": 1, "model": {"path": "m"}, "kind": kind, **STAGES[kind]}
            run[words[0]] = {**run[words[0]], **value} if words[0] == "model" else value
            build_config(run)
            followed.append(found[1])
    assert {"loss", "agent", "env", "rewards", "teachers", "mesh", "optimizer", "dataset"} <= set(followed)


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("GRPOTrainer", "; here it is pt.RL"),
        ("LoraConfig", "; here it is pt.LoRA"),
        ("Rubrik", "; did you mean 'Rubric'?"),
        ("zzzz", "no attribute 'zzzz'"),
    ],
)
def test_classes_of_others_lead_to_ours(word: str, words: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(pt, word)
    assert str(error.value).endswith(words)
    for here in OTHER_CLASSES:
        assert all(hasattr(pt, name) for name in re.findall(r"pt\.(\w+)", here))
    assert [name for names in OTHER_CLASSES.values() for name in names if name in pt.__all__] == []


def test_words_of_others_for_kinds() -> None:
    assert meant_kind("cross_entropy", ["nll", "dft"]) == "; it is nll, the default"
    assert "DPO is a stage of kind preference" in refusal("rl", algorithm="dpo")
    assert "algorithm: 'GRPO' is unknown; did you mean 'grpo'?" in refusal("rl", algorithm="GRPO")


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
        ("rl", "ref_model", "did you mean 'reference.path'?"),
        ("preference", "ref_model", "there is none: the reference is the model at the start"),
        ("rl", "load_best_model_at_end", "did you mean 'evaluate.keep_best'?"),
        ("sft", "load_best_model_at_end", "there is none: the newest two checkpoints"),
        ("rl", "num_epochs", "did you mean 'num_steps'? (steps, not passes over the data)"),
        ("rl", "rollout_n", "did you mean 'group_size'?"),
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
