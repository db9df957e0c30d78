"""Trajectories and rewards for tests of reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.rl.types import Example, Group, Trajectory


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
    messages = [{"role": "user", "content": prompt}]
    return Trajectory(
        example=Example(
            index=0, row=dict(row or {"prompt": prompt}), messages=messages, length=len(prompt), plain=plain
        ),
        sample=sample,
        messages=[*messages, {"role": "assistant", "content": text}],
        text=text,
        tokens=list(tokens),
        sampled=sampled,
        logps=[-0.5 * s for s in sampled],
        kept_logps=[0.0] * count,
        stop=stop,
        versions=[0 if s else -1 for s in sampled],
    )


def groups(texts_PG: Sequence[Sequence[str]], rows: Sequence[Mapping[str, Any]] | None = None) -> list[Group]:
    """One group per list of texts."""
    return [
        [trajectory(text, row=None if rows is None else rows[p], sample=g) for g, text in enumerate(texts)]
        for p, texts in enumerate(texts_PG)
    ]
