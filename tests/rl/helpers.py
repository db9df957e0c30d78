"""Trajectories and rewards for tests of reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.config import RLSection
from posttrain.data.tokenizer_files import FIRST_CONTROL_ID
from posttrain.reward.rubric import Rubric
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.collector import RolloutCollector
from posttrain.rl.sampler import Sampler, Source
from posttrain.rl.step import StepSettings
from posttrain.rollout.trajectory import Example, Group, Trajectory


class InOrder:
    """Every place once."""

    def __init__(self) -> None:
        self.position = -1

    def __next__(self) -> int:
        self.position += 1
        return self.position

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def restore(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def collector(
    sampler: Sampler, rubric: Rubric, examples: Sequence[Example], group_size: int, *, issued: int = 0
) -> RolloutCollector:
    """A group of each example, numbered from `issued`."""
    source = Source(InOrder(), examples)
    source.issued = issued
    return RolloutCollector(
        sampler=sampler,
        rubric=rubric,
        source=source,
        group_size=group_size,
        groups_per_step=len(examples),
        steps_per_version=1,
    )


def make_algorithm(kind: str, *, max_tokens: int, **fields: Any) -> Algorithm:
    """Algorithm of a stage that samples `max_tokens` tokens of each answer; `fields`: of its section."""
    stage: dict[str, Any] = {
        "dataset": {"path": "rows"},
        "rewards": [{"fn": len}],
        "sampling": {"max_tokens": max_tokens},
    }
    if kind == "distill":
        stage["teachers"] = [{"path": "teacher"}]
    return Algorithm.of(RLSection(**stage, algorithm={"kind": kind, **fields}), {})


def step_settings(**changes: Any) -> StepSettings:
    """One update on policy, but for the changes."""
    plain: dict[str, Any] = {"updates": 1, "epochs": 1, "seed": 7, "old_logps": "self", "zero_advantage": "skip"}
    return StepSettings(**plain | {"stale": False} | changes)


def example(index: int, text: str) -> Example:
    """A plain prompt in tokens of bytes, as `Renderer` makes them."""
    return Example(
        index=index,
        row={"prompt": text},
        messages=[{"role": "user", "content": text}],
        prompt_tokens=[FIRST_CONTROL_ID + 1, *text.encode()],
        plain=True,
    )


def trajectory(
    text: str = "b",
    *,
    prompt: str = "a",
    row: Mapping[str, Any] | None = None,
    sample: int = 0,
    tokens: Sequence[int] = (1, 2, 3),
    num_prompt: int = 1,
    stop: Any = "stop",
    plain: bool = True,
) -> Trajectory:
    """A sample whose first `num_prompt` tokens are the prompt."""
    count = len(tokens)
    sampled = [index >= num_prompt for index in range(count)]
    asked = replace(example(0, prompt), row=dict(row or {"prompt": prompt}), plain=plain)
    return Trajectory(
        group=0,
        example=asked,
        sample=sample,
        messages=[*asked.messages, {"role": "assistant", "content": text}],
        text=text,
        tokens=list(tokens),
        sampled=sampled,
        logps=[-0.5 * s for s in sampled],
        kept_logps=[0.0] * count,
        truncation_logps=[0.0] * count,
        stop=stop,
        versions=[0 if s else -1 for s in sampled],
    )


def groups(texts_PG: Sequence[Sequence[str]], rows: Sequence[Mapping[str, Any]] | None = None) -> list[Group]:
    """One group per list of texts."""
    return [
        [trajectory(text, row=None if rows is None else rows[p], sample=g) for g, text in enumerate(texts)]
        for p, texts in enumerate(texts_PG)
    ]
