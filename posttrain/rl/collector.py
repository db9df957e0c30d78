"""Acting half of an online step: groups are begun, sampled and scored, in waves where useful ones are missing
(dynamic sampling; DAPO, arXiv:2503.14476 section 3.2); and groups as plain data, exchanged between processes and kept
in checkpoints of what is ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from posttrain.config import RLSection
from posttrain.data.messages import parts_of
from posttrain.data.pictures import Picture, picture_of, written
from posttrain.data.prompt_images import PromptImage, PromptImages
from posttrain.data.tokenizer import Tokenizer
from posttrain.metrics import Timer
from posttrain.reward.rubric import Rubric
from posttrain.reward.types import RewardError, Rewards
from posttrain.rl.algorithms import GroupFilter, filter_of
from posttrain.rl.metrics import group_metrics, refill_metrics
from posttrain.rl.sampler import IssuedGroup, Sampler, Source, collect
from posttrain.rl.store import TOKENS
from posttrain.rollout.trajectory import Example, Group, Trajectory, Turn
from posttrain.runtime import processes
from posttrain.tracking.console import progress_bar
from posttrain.tree import Mean


@dataclass(frozen=True, kw_only=True)
class Refill:
    """Settings of dynamic sampling."""

    limit: int
    """Maximum number of waves per step."""
    keep: GroupFilter
    """Mask of the useful groups of a wave."""

    @classmethod
    def of(cls, section: RLSection) -> Refill | None:
        """Build dynamic sampling of a stage; None without. ConfigError for a filter that cannot be used."""
        given = section.refill
        if given is None:
            return None
        return cls(limit=given.limit, keep=filter_of(given.keep, "refill.keep", section.group_size))


@dataclass(frozen=True, kw_only=True)
class Wave:
    """Groups of a step that were begun together, with their rewards."""

    groups_P: Sequence[Group]
    rewards: Rewards
    useful_P: Bool[np.ndarray, " P"] | None
    """Groups to learn from; None: as the algorithm's filter decides."""


@dataclass(frozen=True, kw_only=True)
class ScoredRollouts:
    """Scored groups of a step."""

    version: int
    """Version of the weights when the step began."""
    groups_P: Sequence[Group]
    rewards: Rewards
    weights: Mapping[str, float]
    """Weight of each reward by name."""
    useful_P: Bool[np.ndarray, " P"] | None = None
    """Groups to learn from; None: as the algorithm's filter decides."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the groups, of refill and of the curriculum."""


@dataclass(frozen=True, kw_only=True)
class RolloutCollector:
    """Sampling and scoring of the groups of a step.

    With `refill`, a step begins as many further groups as useful ones are missing, and so on in waves: what is sampled
    depends on rewards and not on time.
    """

    sampler: Sampler
    rubric: Rubric
    source: Source
    group_size: int
    groups_per_step: int
    steps_per_version: int
    """Steps of the trainer between two versions of the weights: rewards are told the number of steps before them."""
    refill: Refill | None = None
    pass_above: float | None = None
    """Reward above which a sample passes; None: no metrics of passing groups."""

    async def __call__(self, version: int, title: str, timer: Timer) -> ScoredRollouts:
        waves = [await self._wave(self.groups_per_step, version, title, timer)]
        while missing := self.missing(waves):
            waves.append(await self._wave(missing, version, f"{title}, wave {len(waves)}", timer))
        rollouts = self.rollouts(version, waves)
        return replace(rollouts, metrics={**rollouts.metrics, **self.source.metrics()})

    def observe(self, groups_P: Sequence[Group], rewards: Rewards) -> None:
        """Let the source take note of scored groups, before others are begun."""
        for group, rewards_G in zip(groups_P, rewards.total_PG, strict=True):
            self.source.seen(group, rewards_G)

    def wave(self, groups_P: Sequence[Group], rewards: Rewards) -> Wave:
        """Tell which of the groups of a wave are useful."""
        useful_P = None if self.refill is None else self.refill.keep(rewards.total_PG)
        return Wave(groups_P=groups_P, rewards=rewards, useful_P=useful_P)

    def missing(self, waves: Sequence[Wave]) -> int:
        """Number of groups of a step's next wave: as many as useful ones are missing; 0 after the last wave."""
        if self.refill is None or len(waves) > self.refill.limit:
            return 0
        return self.groups_per_step - sum(int(wave.useful_P.sum()) for wave in waves if wave.useful_P is not None)

    def rollouts(self, version: int, waves: Sequence[Wave]) -> ScoredRollouts:
        """Outcome of a step, with metrics of its groups and waves."""
        rewards, metrics = Rewards.concatenated([wave.rewards for wave in waves]), dict[str, float]()
        useful = [wave.useful_P for wave in waves if wave.useful_P is not None]
        if useful:
            metrics |= refill_metrics(useful, self.groups_per_step)
        if self.pass_above is not None and rewards.parts_PG:
            metrics |= group_metrics(rewards.total_PG, self.pass_above)
        return ScoredRollouts(
            version=version,
            groups_P=[group for wave in waves for group in wave.groups_P],
            rewards=rewards,
            weights=self.rubric.weights,
            useful_P=np.concatenate(useful) if useful else None,
            metrics=metrics,
        )

    async def _wave(self, count: int, version: int, title: str, timer: Timer) -> Wave:
        """Sample and score `count` groups, each process its share; groups are scored as they end."""
        begun = self.source.take(count, version)
        async with self.rubric.scoring(version * self.steps_per_version) as scoring:
            with timer("rollout"):
                own_P = await self._sample(own_share(begun), title, scoring.add)
            with (
                timer("rewards"),
                progress_bar(f"{title}: rewards", len(self.rubric.rewards), closing=False) as advance,
            ):
                own = await scoring.result(own_P, advance) if own_P else None
                groups, rewards = exchanged(own_P, own, begun)
        self.observe(groups, rewards)
        return self.wave(groups, rewards)

    async def _sample(self, groups: Sequence[IssuedGroup], title: str, ended: Callable[[Group], None]) -> list[Group]:
        with progress_bar(f"{title}: sampling", len(groups) * self.group_size, closing=False) as advance:
            return await collect(self.sampler, groups, self.group_size, advance, ended)


@dataclass(frozen=True, kw_only=True)
class QueuedGroup:
    """Group between its beginning and its step."""

    issued: IssuedGroup
    group: Group | None
    """None: not all of its samples are there."""


@dataclass(frozen=True, kw_only=True)
class QueuedWave:
    """Groups of a step that were begun together."""

    groups: Sequence[QueuedGroup]
    rewards: Rewards | None = None
    """None: not all groups are scored."""
    observed: bool = False
    """True if the source has taken note of the rewards."""


Queue = Mapping[int, Sequence[QueuedWave]]
"""Waves of groups that are ahead, by step."""


def new_wave(issued: Sequence[IssuedGroup]) -> QueuedWave:
    """Wave of groups of which nothing is sampled."""
    return QueuedWave(groups=[QueuedGroup(issued=one, group=None) for one in issued])


def own_share(groups: Sequence[IssuedGroup]) -> list[IssuedGroup]:
    """Groups of this process: every process has begun the same ones, and samples a part of them in order."""
    first, end = (len(groups) * number // processes.count() for number in (processes.index(), processes.index() + 1))
    return list(groups[first:end])


def exchanged(
    own_P: Sequence[Group], own: Rewards | None, issued: Sequence[IssuedGroup]
) -> tuple[list[Group], Rewards]:
    """Groups and rewards of all processes, in the order in which the groups were begun. Examples are not sent: each
    process has them. `own`: None in a process without a group."""
    if processes.count() == 1:
        assert own is not None
        return list(own_P), own
    examples = {group.number: group.example for group in issued}
    sent = processes.all_gathered(([[fields_of(sample) for sample in group] for group in own_P], own))
    groups_P: list[Group] = [
        [trajectory_of(sample, examples) for sample in group] for part, _ in sent for group in part
    ]
    return groups_P, Rewards.concatenated([rewards for _, rewards in sent if rewards is not None])


def fields_of(sample: Trajectory) -> dict[str, Any]:
    """Fields of a trajectory without its example, for `trajectory_of`."""
    # What follows the prompt alone, unless the environment made the prompt.
    values = {field.name: getattr(sample, field.name) for field in fields(sample) if field.name != "example"}
    prompt = None
    if sample.turns or sample.error is not None:
        example = sample.example
        prompt = {"messages": example.messages, "prompt_tokens": example.prompt_tokens, "images": example.images}
    more = [fields_of(row) for row in sample.more]
    return values | {"messages": sample.completion_messages, "prompt": prompt, "more": more}


def trajectory_of(values: Mapping[str, Any], examples: Mapping[int, Example]) -> Trajectory:
    """Trajectory of `fields_of`. `examples`: by number of the group."""
    values = dict(values)
    prompt = values.pop("prompt")
    example = examples[values["group"]]
    example = example if prompt is None else replace(example, **prompt)
    more = [trajectory_of(row, examples) for row in values["more"]]
    messages = [*example.messages, *values["messages"]]
    return Trajectory(**{**values, "example": example, "messages": messages, "more": more})


State = dict[str, Any]


def packed(queue: Queue) -> State:
    """State of a queue; numpy arrays stand among JSON. Of groups that are not sampled only their beginning. Pictures
    stand once each, by the digests of their pixels."""
    rows: list[Trajectory] = []
    pictures: dict[str, str] = {}
    steps = [
        {"step": step, "waves": [_wave_state(wave, rows, pictures) for wave in waves]}
        for step, waves in sorted(queue.items())
    ]
    arrays: dict[str, np.ndarray] = {}
    if rows:
        for name, dtype in TOKENS.items():
            arrays[name] = np.concatenate([np.asarray(getattr(row, name), dtype) for row in rows])
        if rows[0].experts is not None:
            arrays["experts"] = np.concatenate([row.experts for row in rows if row.experts is not None])
    return {"steps": steps, "tokens": arrays, **({"pictures": pictures} if pictures else {})}


def unpacked(state: State, example: Callable[[int], Example], tokenizer: Tokenizer) -> Queue:
    """Queue of a state. `example`: that of a row of the dataset. A picture that is another now is a PictureError when
    it is read."""
    known = {
        digest: PromptImage.known(
            picture_of(source, f"picture {digest}", Path()), tokenizer.images, bytes.fromhex(digest)
        )
        for digest, source in state.get("pictures", {}).items()
    }
    rows = TokenRows(state["tokens"], known)
    return {step["step"]: [_wave(wave, rows, example) for wave in step["waves"]] for step in state["steps"]}


class TokenRows:
    """Token sequences, one after the other."""

    def __init__(self, arrays: Mapping[str, np.ndarray], pictures: Mapping[str, PromptImage]):
        self._arrays, self._start, self._pictures = arrays, 0, pictures

    def images(self, state: State | None) -> PromptImages | None:
        """Pictures of a sequence from `_images_state`."""
        if state is None:
            return None
        numbers = np.zeros(max(stop for _, stop, _ in state["runs"]), np.int32)
        for start, stop, number in state["runs"]:
            numbers[start:stop] = number
        return PromptImages.of([self._pictures[digest] for digest in state["digests"]], numbers)

    def take(self, length: int) -> State:
        """Columns of the next sequence."""
        start, self._start = self._start, self._start + length
        columns: State = {name: self._arrays[name][start : self._start].tolist() for name in TOKENS}
        experts = self._arrays.get("experts")
        return {**columns, "experts": None if experts is None else experts[start : self._start]}


def _wave_state(wave: QueuedWave, rows: list[Trajectory], pictures: dict[str, str]) -> State:
    groups = [_group(one, rows, pictures) for one in wave.groups]
    rewards = None if wave.rewards is None else _rewards_state(wave.rewards)
    return {"groups": groups, "rewards": rewards, "observed": wave.observed}


def _wave(state: State, rows: TokenRows, example: Callable[[int], Example]) -> QueuedWave:
    groups = []
    for one in state["groups"]:
        issued = IssuedGroup(number=one["number"], version=one["version"], example=example(one["row"]))
        samples = [_sample(fields, issued, rows) for fields in one["samples"] or ()]
        groups.append(QueuedGroup(issued=issued, group=samples or None))
    rewards = None if state["rewards"] is None else _rewards(state["rewards"])
    return QueuedWave(groups=groups, rewards=rewards, observed=state["observed"])


def _group(one: QueuedGroup, rows: list[Trajectory], pictures: dict[str, str]) -> State:
    """JSON of a group, whose token sequences are added to `rows`, and whose pictures to `pictures`."""
    samples = None
    if one.group is not None:
        samples = [_without_columns(fields_of(sample), pictures) for sample in one.group]
        rows += [row for sample in one.group for row in sample.rows]
    return {
        "number": one.issued.number,
        "row": one.issued.example.index,
        "version": one.issued.version,
        "samples": samples,
    }


def _without_columns(fields: State, pictures: dict[str, str]) -> State:
    plain = {name: value for name, value in fields.items() if name not in (*TOKENS, "experts")}
    plain["images"] = _images_state(fields["images"], pictures)
    prompt = fields["prompt"]
    if prompt is not None:
        images = _images_state(prompt["images"], pictures)
        tokens = list(prompt["prompt_tokens"])
        plain["prompt"] = {
            "messages": _with_parts(prompt["messages"], written),
            "prompt_tokens": tokens,
            "images": images,
        }
    more = [_without_columns(row, pictures) for row in fields["more"]]
    return {
        **plain,
        "more": more,
        "messages": _with_parts(fields["messages"], written),
        "length": len(fields["tokens"]),
    }


def _images_state(images: PromptImages | None, pictures: dict[str, str]) -> State | None:
    """JSON of the pictures of a sequence: their digests, and runs of tokens [start, stop, number]."""
    if images is None:
        return None
    digests = [digest.hex() for digest in images.digests]
    for digest, image in zip(digests, images.images, strict=True):
        if digest not in pictures:
            pictures[digest] = written(image.picture)
    return {"digests": digests, "runs": images.runs}


def _with_columns(fields: State, rows: TokenRows) -> State:
    # The first row of a sample, then its others.
    own = {**fields, **rows.take(fields["length"]), "turns": [Turn(*turn) for turn in fields["turns"]]}
    own |= {"messages": _with_parts(fields["messages"], _picture), "images": rows.images(fields.get("images"))}
    if (prompt := fields["prompt"]) is not None:
        images = rows.images(prompt.get("images"))
        own["prompt"] = {**prompt, "messages": _with_parts(prompt["messages"], _picture), "images": images}
    del own["length"]
    return {**own, "more": [_with_columns(row, rows) for row in fields["more"]]}


def _with_parts(messages: Sequence[Mapping[str, Any]], convert: Callable[[Any], Any]) -> list[Any]:
    """Messages with each picture converted."""

    def part(one: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**one, "image": convert(one["image"])} if one["type"] == "image" else one

    return [{**one, "content": [*map(part, parts)]} if (parts := parts_of(one)) else one for one in messages]


def _picture(value: str) -> Picture:
    return picture_of(value, "image", Path())


def _sample(fields: State, issued: IssuedGroup, rows: TokenRows) -> Trajectory:
    return trajectory_of(_with_columns(fields, rows), {issued.number: issued.example})


def _rewards_state(rewards: Rewards) -> State:
    return {
        "total": rewards.total_PG.tolist(),
        "parts": {name: part.tolist() for name, part in rewards.parts_PG.items()},
        "errors": [asdict(error) for error in rewards.errors],
        "metrics": {name: [float(mean.total), float(mean.weight)] for name, mean in rewards.metrics.items()},
        "extras": {name: list(values) for name, values in rewards.extras.items()},
        "notes": list(rewards.notes),
    }


def _rewards(state: State) -> Rewards:
    return Rewards(
        total_PG=np.asarray(state["total"], np.float32),
        parts_PG={name: np.asarray(part, np.float32) for name, part in state["parts"].items()},
        errors=[RewardError(**error) for error in state["errors"]],
        metrics={name: Mean(total=total, weight=weight) for name, (total, weight) in state["metrics"].items()},
        extras=state["extras"],
        notes=state["notes"],
    )
