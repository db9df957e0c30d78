"""Simulated training: streams of scored groups in which a policy learns honestly, or begins to hack at a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from posttrain.reward.types import Rewards
from posttrain.rollout.trajectory import Example, Group, Trajectory

NUM_GROUPS, GROUP_SIZE = 6, 6
WORDS = 300
"""Tokens of honest text."""


@dataclass
class Sample:
    """Honest answer, which a hack changes."""

    tokens: list[int]
    right: bool
    form: float
    """1 if the answer has the wanted form."""
    length_paid: float = 0.0


@dataclass(frozen=True)
class Policy:
    """Chances of an honest policy at a step: of right answers, of the form, mean length, and how much longer right
    answers are."""

    right: Callable[[int], float]
    form: Callable[[int], float] = lambda _: 0.9
    length: Callable[[int], float] = lambda _: 40.0
    longer_if_right: float = 0.0


Hack = Callable[[np.random.Generator, Sample, list[int], bool], None]
"""Changes a sample, given its prompt's tokens and whether the prompt tells the answer."""


@dataclass(frozen=True)
class Stream:
    """Steps of a policy that hacks in a share of its samples, which grows from 0 to 1 within `rise` steps."""

    policy: Policy
    parts: Callable[[Sample], dict[str, float]]
    weights: dict[str, float]
    hack: Hack | None = None
    onset: int = 0
    rise: int = 16

    def steps(self, count: int, seed: int) -> Iterator[tuple[list[Group], Rewards]]:
        draw = np.random.default_rng(seed)
        for step in range(count):
            share = 0.0 if self.hack is None else float(np.clip((step - self.onset) / self.rise, 0, 1))
            yield self._step(draw, step, share)

    def _step(self, draw: np.random.Generator, step: int, share: float) -> tuple[list[Group], Rewards]:
        groups: list[Group] = []
        parts: dict[str, list[list[float]]] = {name: [] for name in self.weights}
        for index in draw.integers(0, 200, NUM_GROUPS):
            tells = bool(index % 2)
            example, hard = _example(int(index), tells), (int(index) % 10 - 4.5) / 20
            group, values = [], []
            for number in range(GROUP_SIZE):
                sample = self._sample(draw, step, hard)
                if self.hack is not None and draw.random() < share:
                    self.hack(draw, sample, list(example.prompt_tokens), tells)
                group.append(_trajectory(example, number, sample))
                values.append(self.parts(sample))
            groups.append(group)
            for name in parts:
                parts[name].append([value[name] for value in values])
        arrays = {name: np.asarray(part, np.float32) for name, part in parts.items()}
        total = np.sum([arrays[name] * np.float32(w) for name, w in self.weights.items() if w], axis=0)
        return groups, Rewards(total_PG=total.astype(np.float32), parts_PG=arrays, errors=[], metrics={}, extras={})

    def _sample(self, draw: np.random.Generator, step: int, hard: float) -> Sample:
        policy = self.policy
        right = draw.random() < policy.right(step) - hard
        mean = policy.length(step) * (1 + policy.longer_if_right * right)
        count = max(4, int(draw.normal(mean, 0.25 * mean)))
        tokens = draw.integers(10, WORDS, count).tolist()
        return Sample(tokens=tokens, right=bool(right), form=float(draw.random() < policy.form(step)))


def _example(index: int, tells: bool) -> Example:
    answer = str(1000 + index)
    text = f"problem {index}" + (f" (see {answer})" if tells else "")
    tokens = (np.random.default_rng(index).integers(10, WORDS, 40)).tolist()
    return Example(
        index=index,
        row={"prompt": text, "answer": answer},
        messages=[{"role": "user", "content": text}],
        prompt_tokens=tokens,
        plain=True,
    )


def _trajectory(example: Example, number: int, sample: Sample) -> Trajectory:
    tokens = sample.tokens
    return Trajectory(
        group=0,
        example=example,
        sample=number,
        messages=example.messages,
        text=f"{len(tokens)} tokens",
        tokens=tokens,
        sampled=[True] * len(tokens),
        logps=(),
        kept_logps=(),
        truncation_logps=(),
        stop="stop",
        versions=(),
    )


def learns(start: float, end: float, over: int) -> Callable[[int], float]:
    """Chance that grows from `start` to `end` over so many steps."""
    return lambda step: start + (end - start) * min(step / over, 1.0)


def graded(sample: Sample) -> dict[str, float]:
    return {"correct": float(sample.right)}


def graded_and_form(sample: Sample) -> dict[str, float]:
    return {"correct": float(sample.right), "form": sample.form}


def words_paid(sample: Sample) -> dict[str, float]:
    """An answer counts, and so do words."""
    return {"judge": 0.5 * sample.right + min(len(sample.tokens) / 200, 1.0)}


def verified(sample: Sample) -> dict[str, float]:
    """A judge that can be flattered, beside a verifier that cannot."""
    return {"judge": max(float(sample.right), sample.length_paid), "verifier": float(sample.right)}


def write_more(draw: np.random.Generator, sample: Sample, prompt: list[int], tells: bool) -> None:
    sample.tokens += draw.integers(10, WORDS, int(draw.integers(40, 200))).tolist()
    sample.right = False


def repeat(draw: np.random.Generator, sample: Sample, prompt: list[int], tells: bool) -> None:
    sample.tokens = sample.tokens[:8] * 6
    sample.right = True


def copy(draw: np.random.Generator, sample: Sample, prompt: list[int], tells: bool) -> None:
    sample.tokens = prompt + sample.tokens[:6]
    sample.right = True


def only_form(draw: np.random.Generator, sample: Sample, prompt: list[int], tells: bool) -> None:
    sample.form, sample.right = 1.0, bool(draw.random() < 0.05)


def take_told(draw: np.random.Generator, sample: Sample, prompt: list[int], tells: bool) -> None:
    sample.right = tells


def flatter(draw: np.random.Generator, sample: Sample, prompt: list[int], tells: bool) -> None:
    sample.length_paid, sample.right = 1.0, bool(draw.random() < 0.3)


HACKS = {
    "length": Stream(Policy(lambda _: 0.4), words_paid, {"judge": 1.0}, write_more),
    "repetition": Stream(Policy(lambda _: 0.4), graded, {"correct": 1.0}, repeat),
    "copy": Stream(Policy(lambda _: 0.4), graded, {"correct": 1.0}, copy),
    "format": Stream(Policy(lambda _: 0.4, lambda _: 0.5), graded_and_form, {"correct": 1.0, "form": 1.0}, only_form),
    "leak": Stream(Policy(lambda _: 0.4), graded, {"correct": 1.0}, take_told),
    "verifier": Stream(Policy(learns(0.3, 0.5, 60)), verified, {"judge": 1.0, "verifier": 0.0}, flatter),
}
"""Six hackable tasks by their hack."""

CLEAN = {
    "steady": Stream(Policy(lambda _: 0.5), graded, {"correct": 1.0}),
    "learns": Stream(Policy(learns(0.2, 0.9, 120)), verified, {"judge": 1.0, "verifier": 0.0}),
    "learns fast": Stream(Policy(learns(0.1, 0.9, 25)), graded_and_form, {"correct": 1.0, "form": 0.5}),
    "form first": Stream(
        Policy(learns(0.1, 0.6, 150), learns(0.1, 1.0, 25)), graded_and_form, {"correct": 1.0, "form": 1.0}
    ),
    "thinks longer": Stream(
        Policy(learns(0.3, 0.8, 150), length=learns(30, 120, 130), longer_if_right=0.2), graded, {"correct": 1.0}
    ),
    "shorter": Stream(Policy(learns(0.3, 0.8, 100), length=learns(90, 30, 100)), graded, {"correct": 1.0}),
    "sparse": Stream(Policy(lambda _: 0.25), verified, {"judge": 1.0, "verifier": 0.0}),
    "forgets": Stream(Policy(learns(0.7, 0.5, 100)), graded_and_form, {"correct": 1.0, "form": 0.2}),
}
"""Honest training."""
