"""Features of stages, whole tiny runs of any two of them, and the table of docs/reference/pairs.md."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from PIL import Image

from posttrain.config.yaml_file import load_config
from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import ConfigError
from posttrain.models.drafter import DrafterConfig
from posttrain.runs.prepare import prepare
from posttrain.weights.drafter import attach_drafter, save_drafter
from posttrain.weights.load import init_model
from posttrain.weights.save import save_model
from posttrain.weights.scalar_head import add_scalar_head
from tests.stages.runs import INIT, ROOT, write_run

PAGE = ROOT / "docs" / "reference" / "pairs.md"
LENGTH = 128
SIZES = {"max_position_embeddings": LENGTH, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads that two devices can split."""
MESH = {"data": 1, "fsdp": -1}
ENDS = [*range(0, 260, 3)]
"""Stop tokens of a random model, so that most turns end before `max_tokens`."""

TEMPLATE = """\
{%- for tool in tools or [] %}{{- tool.function.name }} {% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'][0] }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] }}
            {%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>a' }}{%- endif %}"""
"""Short, since each byte is a token; it writes tools and calls."""

REWRITING = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'][0] }}
    {{- '-' if message['role'] == 'assistant' and not loop.last else message['content'] }}{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>a' }}{%- endif %}"""
"""It drops earlier answers, so that each turn is a sequence of its own."""

CODE = '''
import jax.numpy as jnp
import numpy as np
from PIL import Image
import numpy as np

from posttrain.batch import LossOutput
from posttrain.environments.types import Reply
from posttrain.tree import Mean


def low(completion_tokens, **_):
    return [1.0 + sum(t < 128 for t in c) / max(len(c), 1) for c in completion_tokens]


def short(completion_tokens, **_):
    return [1.0 + 1.0 / (1 + sum(t % 2 for t in c)) for c in completion_tokens]


def twice(rewards_PG):
    """Advantages of one's own."""
    return 2 * (rewards_PG - np.nanmean(rewards_PG, axis=1, keepdims=True))


class Likelihood:
    """Loss of one's own: REINFORCE, as a mean over tokens."""

    kl_coef = 0.0

    def __call__(self, stats, batch):
        weight = jnp.asarray(batch.loss_weight)
        advantages = jnp.where(weight > 0, jnp.asarray(batch.advantages), 0.0)
        total = -(advantages * jnp.where(weight > 0, stats.logps, 0.0)).sum()
        return LossOutput(loss=Mean(total=total, weight=weight.sum()), metrics={})


class Talk:
    """Two turns, each paid for."""

    def __init__(self, answer, tools=()):
        self.said = []

    def reply(self, message):
        self.said.append(str(message["content"]))
        reward = 1.0 + sum(map(ord, self.said[-1])) % 7
        return Reply(messages=[{"role": "user", "content": "go"}], done=len(self.said) == 2, reward=reward)


def play(base_url, api_key, model, messages):
    """Two histories: a plan, then an answer that does not see it."""
    import openai

    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:

        def ask(messages):
            return client.chat.completions.create(model=model, messages=messages).choices[0].message.content or ""

        said = ask([{"role": "user", "content": "plan"}]) + ask(messages)
    return 1.0 + sum(map(ord, said)) % 7


def look(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return word
'''


class Feature(NamedTuple):
    """Something of a stage that can be switched on: fields of the stage and of the model."""

    stage: dict[str, Any]
    model: Mapping[str, Any] = MappingProxyType({})
    devices: int = 1
    mesh: Mapping[str, int] = MappingProxyType({})
    one_of: str | None = None
    """Name of a choice; two features of one choice are no pair, since both set the same field."""
    reads: str | None = None
    """What its other models and prompts are made for, `text` or `pictures`: the two are no pair."""


def _file(name: str) -> dict[str, Any]:
    return {"path": f"{name}.jsonl"}


def merged(base: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Nested fields of all; later ones count."""
    made = dict(base)
    for changes in others:
        for name, value in changes.items():
            both = isinstance(value, dict) and isinstance(made.get(name), dict)
            made[name] = merged(made[name], value) if both else value
    return made


ENV: dict[str, Any] = {"fn": "pairs_code.py:Talk", "max_turns": 2, "timeout_s": 60.0}
TALKS: dict[str, Any] = {"env": ENV, "rewards": []}
LORA: dict[str, Any] = {"lora": {"rank": 2}}
MOE: dict[str, Any] = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
VISION: dict[str, Any] = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 4,
    "text_config": {**{name: value for name, value in (INIT | SIZES).items() if name != "model_type"}},
    "vision_config": {
        "num_hidden_layers": 1,
        "hidden_size": 20,
        "num_attention_heads": 2,
        "intermediate_size": 36,
        "patch_size": 5,
        "image_size": 20,
        "initializer_range": 0.3,
    },
}
VISION["text_config"] |= {"query_pre_attn_scalar": 8, "sliding_window": 64, "initializer_range": 0.3}
MOE |= {"moe_intermediate_size": 16, "norm_topk_prob": True}


def _algorithm(kind: str, **fields: Any) -> Feature:
    return Feature({"algorithm": {"kind": kind, **fields}}, one_of="algorithm")


def _optimizer(**fields: Any) -> Feature:
    return Feature({"optimizer": fields}, one_of="optimizer")


def _mesh(**axes: int) -> Feature:
    return Feature({}, devices=2, mesh={"data": 1, "fsdp": 1, **axes}, one_of="mesh")


CRITIC: dict[str, Any] = {"kind": "ppo", "gamma": 0.9, "gae_lambda": 0.8, "value_clip": 0.01}
CRITIC["critic"] = {"optimizer": {"learning_rate": 1e-2}}
RL = {
    "gdpo": Feature({"algorithm": {"kind": "gdpo"}, "rewards": ["low", "short"]}, one_of="algorithm"),
    "gspo": _algorithm("gspo"),
    "gspo_token": _algorithm("gspo_token"),
    "luspo": _algorithm("luspo"),
    "reinforce_plus_plus": _algorithm("reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": _algorithm("reinforce_plus_plus_baseline"),
    "rloo": _algorithm("rloo"),
    "dr_grpo": _algorithm("dr_grpo"),
    "dapo": _algorithm("dapo"),
    "cispo": _algorithm("cispo", clip_high=0.05),
    "sapo": _algorithm("sapo"),
    "vespo": _algorithm("vespo"),
    "gmpo": _algorithm("gmpo", clip_low=0.05, clip_high=0.05),
    "distill": Feature(
        {"algorithm": {"kind": "distill"}, "teachers": [{"path": "teacher"}]}, one_of="algorithm", reads="text"
    ),
    "ppo": Feature({"algorithm": CRITIC}, one_of="algorithm"),
    "gae_level": Feature({**TALKS, "algorithm": {**CRITIC, "gae_level": "turn"}}, one_of="algorithm"),
    "warmup": Feature({"algorithm": merged(CRITIC, {"critic": {"warmup": 1}})}, one_of="algorithm"),
    "surrogate": Feature({"algorithm": {"surrogate": "cispo"}}),
    "advantage_scale": Feature({"algorithm": {"advantage_scale": "batch"}}),
    "advantage": Feature({"algorithm": {"advantage": "pairs_code.py:twice"}}),
    "loss": Feature({"algorithm": {"loss": "pairs_code.py:Likelihood"}}),
    "dual_clip": Feature({"update_epochs": 2, "algorithm": {"clip_high": 0.01, "dual_clip": 1.02}}),
    "off_policy_mask": Feature({"update_epochs": 2, "algorithm": {"off_policy_mask": 0.01}}),
    "entropy_coef": Feature({"algorithm": {"entropy_coef": 0.1}}, one_of="entropy"),
    "entropy_target": Feature(
        {"algorithm": {"entropy_coef": 0.1, "entropy_target": 5.6, "entropy_step": 0.05}}, one_of="entropy"
    ),
    "env": Feature(TALKS, one_of="env"),
    "split_turns": Feature({**TALKS, "env": {**ENV, "split_turns": True}}, one_of="env"),
    "turn_advantages": Feature({**TALKS, "algorithm": {"turn_advantages": True}}, one_of="env"),
    "agent": Feature({"agent": {"fn": "pairs_code.py:play", "max_rows": 2}, "rewards": []}, one_of="env"),
    "asynchronous": Feature({"asynchronous": {"max_staleness": 1}}, one_of="asynchronous"),
    "in_flight": Feature({"asynchronous": {"max_staleness": 1, "in_flight": True}}, one_of="asynchronous"),
    "refill": Feature({"refill": {"limit": 1}}),
    "curriculum": Feature({"curriculum": {"pools": [0.0, 0.6, 1.0], "draw": [1.0, 0.0]}}),
    "teachers": Feature({"teachers": [{"path": "teacher"}]}, one_of="teachers", reads="text"),
    "teacher_column": Feature(
        {"teachers": [{"path": "teacher"}] * 2, "teacher_column": "who"}, one_of="teachers", reads="text"
    ),
    "kl_in": Feature({"algorithm": {"kl_coef": 0.1, "kl_in": "reward"}}, one_of="kl"),
    "kl_estimator": Feature(
        {"algorithm": {"kl_coef": 0.1, "kl_estimator": "k2", "kl_bias_correction": False}}, one_of="kl"
    ),
    "reference": Feature({"algorithm": {"kl_coef": 0.1}, "reference": {"refresh_every": 1, "mixup": 0.5}}, one_of="kl"),
    "reference.model": Feature(
        {"algorithm": {"kl_coef": 0.1}, "reference": {"model": "base"}}, {"lora": {"rank": 2}}, one_of="kl"
    ),
    "importance_sampling": Feature(
        {"sampling": {"top_p": 0.9}, "algorithm": {"importance_sampling": {"level": "sequence_mean"}}},
        one_of="importance",
    ),
    "mask": Feature(
        {
            "sampling": {"top_p": 0.9},
            "algorithm": {"importance_sampling": {"level": "sequence_sum", "bound": "mask", "low": 0.77}},
        },
        one_of="importance",
    ),
    "reject": Feature(
        {"sampling": {"top_p": 0.9}, "algorithm": {"importance_sampling": {"bound": "reject", "low": 0.901}}},
        one_of="importance",
    ),
    "old_logps": Feature({"algorithm": {"old_logps": "sampler"}}),
    "truncated": Feature({"algorithm": {"truncated": "mask"}, "sampling": {"max_tokens": 4}}),
    "top_entropy": Feature({"algorithm": {"top_entropy": 0.5}}),
    "temperature": Feature({"sampling": {"temperature": 0.7}}),
    "grammar": Feature({"sampling": {"grammar": {"regex": "[a-p]{3,9}"}}}),
    "tools": Feature(
        {
            "tools": [{"fn": "pairs_code.py:look"}],
            "tool_format": "pythonic",
            "env": {"max_turns": 2},
            "rewards": ["short"],
            # Every turn is a call, of which no random model would write one.
            "sampling": {
                "max_tokens": 20,
                "stop_token_ids": [258],
                "grammar": {"regex": '\\[look\\(word="[a-d]"\\)\\]'},
            },
        },
        reads="text",
    ),
    "updates": Feature({"updates": 2}),
    "update_epochs": Feature({"update_epochs": 2}),
    "eval_dataset": Feature({"eval_dataset": _file("chat"), "eval_every": 1}),
    "model": Feature({"rewards": ["model"]}, reads="text"),
    "muon": _optimizer(kind="muon", iteration="newton_schulz"),
    "lion": _optimizer(kind="lion"),
    "adafactor": _optimizer(kind="adafactor"),
    "fn": _optimizer(fn="optax:sgd"),
    "qk_clip": Feature({"optimizer": {"qk_clip": 1e-3}}, {"init": {"model_type": "llama"}}, one_of="init"),
    "record_routing": Feature({"rollout": {"record_routing": True}}, {"init": MOE}, one_of="init"),
    "vision": Feature(
        {"dataset": _file("seen")},
        {"init": VISION, "vision": "tower", "chat_template": None},
        one_of="init",
        reads="pictures",
    ),
    "dtype": Feature({}, {"dtype": "bfloat16"}),
    "lora": Feature({}, LORA),
    "rollout.quantize": Feature({"rollout": {"quantize": "int8"}}),
    "speculative": Feature(
        {"rollout": {"speculative": {"kind": "block", "optimizer": {"learning_rate": 1e-2}}}}, reads="text"
    ),
    "cache_dtype": Feature({"rollout": {"cache_dtype": "int8"}}),
    "placement": Feature({"placement": {"rollout": {"devices": 1}}}, devices=2),
    "data": _mesh(data=2),
    "fsdp": _mesh(fsdp=2),
    "tensor": _mesh(tensor=2),
}
TRAINED = {
    "adamw": Feature(
        {"optimizer": {"weight_decay": 0.1, "schedule": "linear", "clip_value": 0.02, "max_grad_norm": 0.5}},
        one_of="optimizer",
    ),
    "lion": Feature({"optimizer": {"kind": "lion"}}, one_of="optimizer"),
    "adafactor": Feature({"optimizer": {"kind": "adafactor", "min_factored": 8}}, one_of="optimizer"),
    "muon": Feature({"optimizer": {"kind": "muon", "iteration": "newton_schulz"}}, one_of="optimizer"),
    "optax": Feature({"optimizer": {"fn": "optax:sgd", "learning_rate": 1.0}}, one_of="optimizer"),
    "moments": Feature({"optimizer": {"moments": "int8"}}),
    "ema": Feature({"optimizer": {"ema": {"decay": 0.5}}}),
    "bfloat16": Feature({}, {"dtype": "bfloat16"}),
    "lora": Feature({}, LORA),
    "quantize": Feature({}, {**LORA, "quantize": "nf4"}),
    "mixture": Feature({"router": {"balance_coef": 0.1, "z_coef": 0.01}}, {"init": MOE}, one_of="family"),
    "data": _mesh(data=2),
    "fsdp": _mesh(fsdp=2),
    "tensor": _mesh(tensor=2),
    "micro_batch_rows": Feature({"micro_batch_rows": 2}),
}
"""Features of how offline stages train."""
FITTED = {
    "packing": Feature({"packing": False}),
    "truncate": Feature({"overlong": "truncate", "row_tokens": 20}, one_of="overlong"),
    "drop": Feature({"overlong": "drop", "row_tokens": 20}, one_of="overlong"),
}


def _held_out(name: str) -> dict[str, Any]:
    return {"eval_dataset": _file(name), "eval_every": 1}


MIX = {"mix": [{"path": "plain.jsonl", "chat": False}]}
SFT = {
    **FITTED,
    "split": Feature(
        {
            "overlong": "split",
            "row_tokens": 20,
            "train_on_prompt": True,
            "dataset": {**_file("texts"), "chat": False},
        },
        one_of="overlong",
    ),
    "last_turn_only": Feature({"last_turn_only": True}),
    "train_on_prompt": Feature({"train_on_prompt": True}),
    "mix": Feature(MIX),
    "dft": Feature({"loss": "dft"}),
    "label_smoothing": Feature({"label_smoothing": 0.1}),
    "noise_alpha": Feature({"noise_alpha": 5.0}),
    "chat_template": Feature({}, {"chat_template": "rewriting.jinja"}),
    "eval_dataset": Feature(_held_out("held_turns")),
    "samples_every": Feature(
        {**_held_out("held_turns"), "samples_every": 1, "num_samples": 3, "eval_sampling": {"max_tokens": 3}}
    ),
    "qk_clip": Feature({"optimizer": {"qk_clip": 0.5}}, {"init": {"model_type": "llama"}}, one_of="family"),
    **TRAINED,
}
DISTILL = {
    **FITTED,
    "mix": Feature(MIX),
    "temperature": Feature({"temperature": 2.0}),
    "beta": Feature({"beta": 0.3}, one_of="beta"),
    "reverse": Feature({"beta": 1.0}, one_of="beta"),
    "cross_entropy": Feature({"cross_entropy": 0.3}),
    "features": Feature({"features": {"hidden": {"layers": {0: 0}}}}),
    "on_policy": Feature({"on_policy": 1.0, "sampling": {"max_tokens": 6, "stop_token_ids": ENDS}}),
    "two_teachers": Feature({"teachers": [{"path": "teacher"}] * 2, "teacher_column": "who"}, one_of="teachers"),
    "top_k": Feature(
        {"teachers": [{"path": "teacher", "mesh": {"data": 1, "fsdp": -1}, "devices": "shared"}], "top_k": 8},
        one_of="teachers",
    ),
    "cache": Feature({"cache": "cache", "top_k": 8}, one_of="teachers"),
    "eval_dataset": Feature(_held_out("held_answers")),
    **{name: one for name, one in TRAINED.items() if name not in ("adamw", "lion", "adafactor", "muon", "optax")},
}
COMPARED = {
    "share_prompts": Feature({"share_prompts": False}),
    "eval_dataset": Feature(_held_out("held_pairs")),
    **FITTED,
    **{name: one for name, one in TRAINED.items() if name not in ("adamw", "lion", "adafactor", "muon", "optax")},
}
PREFERENCE = {
    "ipo": Feature({"loss": "ipo"}, one_of="loss"),
    "kto": Feature({"loss": "kto", "dataset": _file("judged")}, one_of="loss"),
    "simpo": Feature({"loss": "simpo"}, one_of="loss"),
    "orpo": Feature({"loss": "orpo"}, one_of="loss"),
    "combined": Feature(
        {"loss": {"kind": ["sigmoid", "sft"], "weights": [1.0, 0.3], "beta": 0.5, "label_smoothing": 0.1}},
        one_of="loss",
    ),
    "use_weighting": Feature({"loss": {"kind": "sigmoid", "use_weighting": True, "beta": 0.5}}, one_of="loss"),
    "tail_weight": Feature({"loss": {"kind": "sigmoid", "tail_weight": 0.5, "beta": 0.5}}, one_of="loss"),
    "live": Feature({"reference": "live"}),
    **COMPARED,
}
REWARD_MODEL = {
    "center_coef": Feature(
        {"loss": {"kind": "bradley_terry", "center_coef": 0.1}, "dataset": _file("margins")}, one_of="loss"
    ),
    "process": Feature({"loss": "process", "dataset": _file("steps")}, one_of="loss"),
    **COMPARED,
}
DRAFTER = {
    **FITTED,
    "last_turn_only": Feature({"last_turn_only": True}),
    "train_on_prompt": Feature({"train_on_prompt": True}),
    "mix": Feature(MIX),
    "layers": Feature({"layers": 2}),
    "eval_dataset": Feature(_held_out("held_turns")),
    **{name: TRAINED[name] for name in ("moments", "ema", "bfloat16", "data", "fsdp", "tensor", "micro_batch_rows")},
}
ONLINE_PREFERENCE = {
    "ipo": Feature({"loss": "ipo"}, one_of="loss"),
    "combined": Feature({"loss": {"kind": ["sigmoid", "sft"], "weights": [1.0, 0.3]}}, one_of="loss"),
    "rewards": Feature({"rewards": ["low", "short"]}),
    "share_prompts": Feature({"share_prompts": False}),
    "rollout.quantize": Feature({"rollout": {"quantize": "int8"}}),
    "cache_dtype": Feature({"rollout": {"cache_dtype": "int8"}}),
    **{
        name: TRAINED[name]
        for name in ("moments", "bfloat16", "lora", "quantize", "mixture", "data", "fsdp", "tensor", "micro_batch_rows")
    },
}
OFFLINE: dict[str, Any] = {
    "num_steps": 2,
    "batch_rows": 4,
    "row_tokens": 64,
    "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    "checkpoint_every": 1,
}
BASE: dict[str, dict[str, Any]] = {
    "rl": {
        "algorithm": {"kind": "grpo"},
        "dataset": _file("chat"),
        "prompts_per_step": 2,
        "group_size": 4,
        "micro_batch_rows": 4,
        "row_tokens": 64,
        "sampling": {"max_tokens": 6, "stop_token_ids": ENDS},
        "optimizer": {"learning_rate": 1e-2},
        "checkpoint_every": 1,
    },
    "sft": {**OFFLINE, "dataset": _file("turns")},
    "distill": {**OFFLINE, "dataset": _file("answered"), "teachers": [{"path": "teacher"}]},
    "preference": {**OFFLINE, "dataset": _file("pairs")},
    "reward_model": {**OFFLINE, "dataset": _file("pairs")},
    "drafter": {**OFFLINE, "dataset": _file("turns"), "tokens": 2, "window": 3},
    "online_preference": {
        "dataset": _file("chat"),
        "prompts_per_step": 4,
        "group_size": 4,
        "row_tokens": 64,
        "num_steps": 2,
        "rewards": [],
        "sampling": {"max_tokens": 6, "stop_token_ids": ENDS},
        "optimizer": {"learning_rate": 1e-2},
        "checkpoint_every": 1,
    },
}
STAGES = {
    "rl": RL,
    "sft": SFT,
    "preference": PREFERENCE,
    "distill": DISTILL,
    "reward_model": REWARD_MODEL,
    "online_preference": ONLINE_PREFERENCE,
    "drafter": DRAFTER,
}


ABOUT = """\
# Features together

Made by `tests/pairs.py`. `pytest -m pairs` runs each pair of these features for two steps (`+`), or it is refused by
name (`x`, with the reason below). All take two hours of two cores; a commit runs a ninety-sixth of them. A dot: both
choose for the same field, or one reads pictures and the other's models read text. A run that was killed between the
steps ends with the same bits, but where time decides what the engine computes at once, which rounds log-probabilities
in another way: agents, environments without `asynchronous`, and weights in flight, see
[the same numbers again](../methods/rl.md#the-same-numbers-again). Agents and environments learn from the same tokens
in the step that is done again.

In RL a `+` proves that all that a run does is what `tests/oracles.py` computes, float64 NumPy from the papers that
shares no code with the package:

- samples are drawn by the weights that they name, as old as `asynchronous` allows, with the log-probabilities that a
  forward pass of each row by itself gives; they end at the first stop token or limit, and environments, agents and
  reward models pay what they say;
- groups are kept as filter and `refill` say, and an epoch learns once from each sample, with all of its rows;
- rewards and advantages of the record, the advantage of each token, and a critic's values and returns;
- the log-probabilities of the reference, which routes by itself;
- the loss of each update of actor and critic, and the norm of its gradient, by central differences through full logits;
- the weights after each update, by the optimiser's formula, or the same bits where the update is skipped.

Each feature of RL has a fault in `tests/rl_faults.py` that turns such a pair red.

In the other stages a `+` proves what `tests/offline_oracles.py` computes in the same way, from the files of data and
the papers:

- the tokens of each row as the template writes them, cut or dropped as `overlong` says, with the positions, loss
  weights, roles, margins and shares of teachers of each; every row is seen as often as every other;
- what is trained: all of the model, or both factors of an adapter on each matrix of the layers, beside the weights that
  the seed draws or the nearest codes of them;
- the loss of each update, its metrics and the norm of its gradient, from full logits of each sequence by itself,
  against the model of the stage's beginning and the teachers where there are some; an adapter is added to its matrix,
  and codes are read, by the papers' formulas;
- samples are drawn by the weights before the update, or near them where a sampler has 8 bits;
- what the optimiser makes of the gradient, the average of the weights, and the loss of held-out rows at each step.

Each of these features has a fault in `tests/stages/test_pairs.py` that turns a pair red in one of its stages.
"""
"""Head of the page."""

Pair = tuple[str, str]
Refusals = dict[Pair, str | None]
NAMED = re.compile(r"`([\w.]+)` and `([\w.]+)`(?=[,:])")


def pairs(features: Mapping[str, Feature]) -> list[Pair]:
    """Pairs of features that do not choose for the same field."""

    def together(one: Feature, other: Feature) -> bool:
        chosen = one.one_of is not None and one.one_of == other.one_of
        return not chosen and len({one.reads, other.reads} - {None}) < 2

    return [(a, b) for a, b in combinations(features, 2) if together(features[a], features[b])]


def write(folder: Path, teacher: Path, kind: str, a: str, b: str) -> Path:
    """Write a run of two steps with both features."""
    one, other = STAGES[kind][a], STAGES[kind][b]
    stage = merged({"kind": kind, **BASE[kind]}, one.stage, other.stage)
    if kind == "rl":
        stage["num_steps"] = 2 * stage.get("updates", 1) * stage.get("update_epochs", 1)
        # Conversations are paid by their environment or agent; the environment of tools alone pays nothing.
        paid = "agent" in stage or "fn" in stage.get("env", {})
        named = [feature.stage["rewards"] for feature in (one, other) if feature.stage.get("rewards")]
        functions = {name: function(name) for name in ("low", "short")}
        functions["short"]["weight"] = 0.5
        functions["model"] = {"model": str(teacher / "reward"), "name": "model"}
        stage["rewards"] = [functions[n] for n in (named or [[] if paid else ["low"]])[0]]
    if kind == "online_preference":
        stage["rewards"] = [function(name) for name in stage["rewards"] or ["low"]]
    if "teachers" in stage:
        paths = [teacher, teacher / ("second" if kind == "rl" else "peaked")][: len(stage["teachers"])]
        given = enumerate(zip(stage["teachers"], paths, strict=True))
        stage["teachers"] = [{**one, "path": str(path), "name": f"t{n}"} for n, (one, path) in given]
    if "cache" in stage:
        stage["cache"] = str(folder / "cache")
    if "speculative" in (a, b):
        drafter = write_drafter(teacher, {**one.model, **other.model}.get("init", {}))
        stage = merged(stage, {"rollout": {"speculative": {"path": str(drafter)}}})
    init = INIT | SIZES
    if kind != "rl":
        init |= {"initializer_range": 0.3}  # far from uniform, so that wrong numbers differ from right ones
    # A model with a tower has its sizes in two parts.
    init = {} if "vision" in {**one.model, **other.model} else init
    model = {"init": init, "tokenizer": "bytes", "chat_template": "short.jinja"}
    if kind == "drafter":
        model = {"path": str(teacher / "peaked"), "chat_template": "short.jinja"}
    mesh = {**MESH, **one.mesh, **other.mesh}
    file = write_run(folder, stage, model=merged(model, one.model, other.model), mesh=mesh)
    (folder / "pairs_code.py").write_text(CODE)
    (folder / "short.jinja").write_text(TEMPLATE)
    (folder / "rewriting.jinja").write_text(REWRITING)
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 20, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    for name, rows in rows_of_datasets().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def function(name: str) -> dict[str, Any]:
    """Reward in this process: to import JAX in another takes longer than both steps."""
    return {"fn": f"pairs_code.py:{name}", "isolate": "thread"}


def rows_of_datasets() -> dict[str, list[dict[str, Any]]]:
    """Rows of each dataset. Of most, 20 tokens leave no answer of one, and of another a part."""

    def user(n: int) -> dict[str, str]:
        return {"role": "user", "content": f"{n}?" if n else "how many is that?"}

    def said(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    def shares(n: int) -> dict[str, float]:
        """Weight of each of two teachers."""
        return {"t0": 0.25 * (n % 3), "t1": 1 - 0.25 * (n % 3)}

    return {
        "chat": [{"prompt": [user(n)], "answer": str(n), "who": f"t{n % 2}"} for n in range(1, 7)],
        "seen": [
            {
                "prompt": [{"role": "user", "content": f"{n}?"}],
                "image": f"{n % 2}.png",
                "answer": str(n),
                "who": f"t{n % 2}",
            }
            for n in range(1, 7)
        ],
        "turns": [
            {"messages": [user(n), said("ab"), user(n + 1), said(f"c{n}" if n != 4 else "c4 and more")]}
            for n in range(6)
        ],
        "plain": [{"prompt": f"{n}+1=", "completion": str(n + 1), "who": shares(n)} for n in range(6)],
        "answered": [
            {
                "prompt": [user(n)],
                "completion": [said(f"a{n}" if n > 1 else "an answer that is long")],
                "who": shares(n),
            }
            for n in range(1, 7)
        ],
        "pairs": [
            {
                "prompt": [user(n)],
                "chosen": [said({2: "y", 4: "yes, of course"}.get(n, "yes"))],
                "rejected": [said("n" if n == 2 else f"no{n}")],
            }
            for n in range(6)
        ],
        "judged": [
            {"prompt": [user(n)], "completion": [said(f"a{n}" if n != 4 else "a4 and more")], "label": n % 2 == 0}
            for n in range(6)
        ],
        "margins": [
            {"prompt": [user(n)], "chosen": [said("yes")], "rejected": [said(f"no{n}")], "margin": 0.5 * n}
            for n in range(6)
        ],
        "texts": [{"prompt": f"text {n}" * (n + 1), "completion": "more"} for n in range(6)],
        "steps": [
            {
                "prompt": [user(n)],
                "completions": ["a", "bc", f"{n}"][: 1 + n % 3],
                "labels": [n > 2, True, False][: 1 + n % 3],
            }
            for n in range(6)
        ],
        "held_turns": [{"messages": [user(n), said("ab"), user(n + 1), said(f"d{n}")]} for n in (1, 2, 1)],
        "held_answers": [{"prompt": [user(n)], "completion": [said(f"b{n}")], "who": shares(n)} for n in (1, 2, 1)],
        "held_pairs": [
            {
                "prompt": [user(n)],
                "chosen": [said("ja")],
                "rejected": [said(f"no{n}")],
                "completions": ["a", "b"],
                "labels": [n > 1, False],
            }
            for n in (1, 2, 5)
        ],
    }


def teacher_fields(name: str) -> dict[str, Any]:
    """Arguments of `init_model` for a teacher by the name of its folder: `peaked` is far from uniform."""
    fields = {**INIT, **SIZES, "vocab_size": 261} | ({"initializer_range": 0.3} if name == "peaked" else {})
    return {"hf_config": fields, "dtype": jnp.float32, "seed": {"second": 2, "peaked": 4}.get(name, 1)}


def write_teacher(folder: Path) -> Path:
    """Write models with random weights, the tokenizer of the runs, and a reward model."""
    fields = {**INIT, **SIZES, "vocab_size": 261}
    for path in (folder, folder / "second", folder / "peaked"):
        save_model(init_model(**teacher_fields(path.name)), path, tokenizer=load_tokenizer("bytes"))
    model = init_model(fields, dtype=jnp.float32, seed=3)
    add_scalar_head(model, seed=3)
    template = folder.parent / "short.jinja"
    template.write_text(TEMPLATE)
    save_model(model, folder / "reward", tokenizer=load_tokenizer("bytes").with_chat_template(template))
    return folder


def write_drafter(teacher: Path, changes: Mapping[str, Any]) -> Path:
    """Write a block drafter for the type of model that these fields make, unless it is there."""
    folder = teacher.parent / f"drafter_{changes.get('model_type', INIT['model_type'])}"
    if not folder.exists():
        model = init_model({**INIT, **SIZES, "vocab_size": 261, **changes}, dtype=jnp.float32, seed=1)
        sizes = DrafterConfig(embed_dim=INIT["hidden_size"], vocab_size=261, tokens=2, window=3, layers=1)
        attach_drafter(model, sizes, seed=0)
        save_drafter(model, folder)
    return folder


def refusal(file: Path) -> str | None:
    """Error by which a configuration is refused, without lines of the file; None: it is accepted."""
    try:
        prepare(load_config(file, []), offline_ok=False)
    except ConfigError as error:
        return " ".join(re.sub(rf"{re.escape(str(file))}(:\d+)?:?", "", str(error)).split())
    return None


def refusals(folder: Path, teacher: Path, kind: str, wanted: Iterable[Pair]) -> Refusals:
    """Refusal of each of the wanted pairs of a stage."""
    return {(a, b): refusal(write(folder, teacher, kind, a, b)) for a, b in wanted}


def refused(kind: str) -> list[Pair]:
    """Pairs of a stage that the page says are refused."""
    text = PAGE.read_text().split(f"\n## {kind}\n")[1].split("\n## ")[0]
    found = {pair for line in text.splitlines() if line.startswith("- ") for pair in NAMED.findall(line)}
    return [pair for pair in pairs(STAGES[kind]) if pair in found]


def page(found: Mapping[str, Refusals]) -> str:
    """Documentation page of the pairs."""
    text = [ABOUT]
    for kind, refused in found.items():
        names = list(STAGES[kind])
        text += [f"## {kind}\n", "| | " + " | ".join(str(n + 1) for n in range(len(names) - 1)) + " |"]
        text.append("|---" * len(names) + "|")
        for row, name in enumerate(names[1:], 1):
            marks = [refused.get((other, name), ".") for other in names[:row]]
            cells = ["." if m == "." else "+" if m is None else "x" for m in marks]
            text.append(f"| {row + 1} `{name}` | " + " | ".join(cells + [""] * (len(names) - 1 - row)) + " |")
        text.append(f"\n1 is `{names[0]}`.\n")
        reasons: dict[str, list[str]] = {}
        for (a, b), reason in refused.items():
            if reason is not None:
                reasons.setdefault(reason, []).append(f"`{a}` and `{b}`")
        text += [f"- {', '.join(both)}: {reason}" for reason, both in reasons.items()]
        text.append("")
    return "\n".join(text).rstrip() + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(temporary)
        teacher = write_teacher(where / "teacher")
        PAGE.write_text(page({kind: refusals(where, teacher, kind, pairs(STAGES[kind])) for kind in STAGES}))
