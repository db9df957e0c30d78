"""Faults that show in sampled groups before training: most samples cut, no group with different rewards, a constant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from posttrain.reward.lab.findings import Finding
from posttrain.reward.types import Rewards
from posttrain.rollout.trajectory import Group

MAX_CUT = 0.5
"""Largest share of samples that may be cut at the maximum of tokens."""
TEXT_CHARS = 160
NUM_SHOWN = 4


def sample_findings(groups_P: Sequence[Group], rewards: Rewards) -> list[Finding]:
    """Reasons not to train on such samples."""
    found = []
    cut = cut_ratio(groups_P)
    if cut > MAX_CUT:
        longest = max(sample.num_sampled for group in groups_P for sample in group)
        found.append(
            Finding(
                code="cut",
                text=f"{cut:.0%} of the samples are cut at {longest} tokens, before their end",
                remedy="raise sampling.max_tokens (and row_tokens), or see that the model ends its turn with a stop "
                "token",
            )
        )
    total_PG = rewards.total_PG
    valid = total_PG[~np.isnan(total_PG)]
    if not valid.size:
        found.append(
            Finding(
                code="never",
                text="no sample has a reward" + (f": {rewards.errors[0].error}" if rewards.errors else ""),
                remedy="try the functions with posttrain reward",
            )
        )
    elif valid.min() == valid.max():
        found.append(
            Finding(
                code="constant",
                text=f"every one of {valid.size} samples has the reward {valid[0]:g}",
                remedy="read the samples; try the functions with posttrain reward",
            )
        )
    elif not num_mixed(total_PG):
        found.append(
            Finding(
                code="unmixed",
                text=f"in none of {len(total_PG)} groups do rewards differ, so there is nothing to compare",
                remedy="use easier or harder prompts, a larger group_size, or sampling.temperature=1",
            )
        )
    return found


def cut_ratio(groups_P: Sequence[Group]) -> float:
    """Share of samples cut at the maximum of tokens."""
    return float(np.mean([sample.stop == "length" for group in groups_P for sample in group]))


def num_mixed(total_PG: np.ndarray) -> int:
    """Number of groups with different rewards."""
    return sum(bool(np.ptp(row[~np.isnan(row)]) > 0) for row in total_PG if not np.isnan(row).all())


def describe_samples(groups_P: Sequence[Group], rewards: Rewards) -> Iterator[str]:
    """Lines about the samples: counts, rewards, then the best and the worst of a few groups."""
    total_PG = rewards.total_PG
    lengths = [sample.num_sampled for group in groups_P for sample in group]
    yield (
        f"{len(groups_P)} prompts x {total_PG.shape[1]} samples: {np.mean(lengths):.0f} tokens on average, "
        f"{cut_ratio(groups_P):.0%} cut; {num_mixed(total_PG)} groups with different rewards"
    )
    for name, part in [("reward", total_PG), *rewards.parts_PG.items()]:
        valid = part[~np.isnan(part)]
        if valid.size:
            within = np.mean([row[~np.isnan(row)].std() for row in part if not np.isnan(row).all()])
            yield (
                f"  {name}: mean {valid.mean():.3g}, {valid.min():.3g} to {valid.max():.3g}, "
                f"deviation within groups {within:.3g}"
            )
    for error in list({error.function: error for error in rewards.errors}.values()):
        yield f"  {error.function}: failed on a sample: {error.error}"
    for index in np.argsort([-_range(row) for row in total_PG], kind="stable")[:NUM_SHOWN].tolist():
        row, group = total_PG[index], groups_P[index]
        yield f"prompt: {_short(str(group[0].answer.example.messages[-1]['content']))}"
        order = np.argsort(np.where(np.isnan(row), np.inf, -row), kind="stable")
        for sample in dict.fromkeys((int(order[0]), int(order[-1]))):
            yield f"  {row[sample]:8.3g}  {_short(group[sample].answer.text)}"


def _range(row: np.ndarray) -> float:
    valid = row[~np.isnan(row)]
    return float(np.ptp(valid)) if valid.size else 0.0


def _short(text: str) -> str:
    plain = "".join(character if character.isprintable() else "·" for character in " ".join(text.split()))
    return plain if len(plain) <= TEXT_CHARS else f"{plain[: TEXT_CHARS - 40]} ... {plain[-34:]}"
