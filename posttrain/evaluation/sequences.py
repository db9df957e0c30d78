"""Evaluation of held-out sequences: loss, perplexity, KL, with 95 % intervals over prompts, not sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from posttrain.batch import Batch, TokenStats
from posttrain.config import SequenceSection
from posttrain.data.chat import Renderer
from posttrain.data.pipeline import RowTargets, eval_batches
from posttrain.data.sources import Rows
from posttrain.losses.distill import teacher_weight
from posttrain.metrics import Metrics, to_host
from posttrain.runtime.files import digest
from posttrain.statistics import paired_ratio_difference, prompt_numbers, ratio_interval
from posttrain.tracking.console import progress_bar
from posttrain.train.trainer import Trainer
from posttrain.tree import Mean, Perplexity

Record = dict[str, Any]
SEQUENCES = "sequences"
PROMPTS = "prompts"
"""Digest of each sequence's prompt, beside its sums."""
WEIGHTS = {
    "nll": "weight",
    "distill/kl": "covered",
    "distill/divergence": "covered",
    "distill/student_nll": "covered",
    "distill/teacher_nll": "covered",
}
"""Metrics with an interval, and by which sum of weights each is divided."""
PERPLEXITIES = {
    "nll": "perplexity",
    "distill/student_nll": "distill/student_perplexity",
    "distill/teacher_nll": "distill/teacher_perplexity",
}
"""Names of the exponentials (perplexities) of metrics."""


def evaluate_sequences(
    trainer: Trainer, section: SequenceSection, rows: Rows, renderer: Renderer, targets: RowTargets | None
) -> Record:
    """One pass over held-out rows: metrics, and under `SEQUENCES` the sums of each sequence, in a fixed order."""
    assert section.eval_dataset is not None
    parts: list[Mapping[str, np.ndarray]] = []
    prompts: list[str] = []

    def measure(batch: Batch, stats: TokenStats) -> None:
        parts.append(_sums(batch, stats))
        prompts.extend(_prompts(batch))

    with progress_bar(f"evaluating {len(rows):,} held-out rows", len(rows)) as advance:
        held_out = counted(eval_batches(section, section.eval_dataset, rows, renderer, targets), advance)
        means = trainer.evaluate(held_out, measure)
    sums = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    metrics = {f"eval/{name}": value for name, value in to_host(with_perplexities(means)).items()}
    record = {PROMPTS: prompts, **{name: values.tolist() for name, values in sums.items()}}
    return {**metrics, **_intervals(sums, prompt_numbers(prompts)), SEQUENCES: record}


def sequence_metrics(record: Record) -> Mapping[str, float]:
    return {name: value for name, value in record.items() if name != SEQUENCES}


def sequence_differences(before: Record, after: Record) -> dict[str, Any]:
    """Paired differences over the same prompts; the difficulty of sequences, which widens each interval, cancels."""
    if SEQUENCES not in before:  # evaluated on samples alone
        return {}
    first, second = before[SEQUENCES], after[SEQUENCES]
    prompts = prompt_numbers(second[PROMPTS])
    return {
        f"eval/{name}": asdict(paired_ratio_difference(first[name], second[name], first[weight], prompts))
        for name, weight in WEIGHTS.items()
        if name in first and name in second
    }


def with_perplexities(metrics: Metrics) -> Metrics:
    """Add perplexities of student and teachers at temperature 1 over the same tokens, if there are teachers."""
    means = {name: metrics[n] for n, name in PERPLEXITIES.items() if n in metrics and n.startswith("distill/")}
    perplexities = {
        name: Perplexity(total=m.total, weight=m.weight) for name, m in means.items() if isinstance(m, Mean)
    }
    return {**metrics, **perplexities}


def counted(batches: Iterator[Batch], advance: Callable[[int], None]) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        advance(int(np.max(batch.segments, axis=1).sum()))


def _intervals(sums: Mapping[str, Float[np.ndarray, " n"]], prompts: Int[np.ndarray, " n"]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, weight in WEIGHTS.items():
        if name in sums and sums[weight].any():
            interval = ratio_interval(sums[name], sums[weight], prompts)
            ends = {"": interval.mean, "_low": interval.low, "_high": interval.high}
            metrics |= {f"eval/{name}{end}": value for end, value in ends.items() if end}
            if name in PERPLEXITIES:
                metrics |= {f"eval/{PERPLEXITIES[name]}{end}": _exp(value) for end, value in ends.items()}
    return metrics


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _sums(batch: Batch, stats: TokenStats) -> dict[str, Float[np.ndarray, " n"]]:
    """Return totals and weights of each metric for each sequence with loss."""
    segments, weight = np.asarray(batch.segments), np.asarray(batch.loss_weight, np.float64)
    values = {"weight": weight, "nll": -weight * np.where(weight > 0, stats.logps, 0.0)}
    if stats.teacher_kl is not None:
        shares = np.asarray(teacher_weight(batch))
        of_teachers = {"kl": stats.teacher_kl, "divergence": stats.divergence, "student_nll": -shares * stats.logps}
        of_teachers["teacher_nll"] = None if stats.teacher_logps is None else -stats.teacher_logps
        values["covered"] = weight * shares
        values |= {
            f"distill/{n}": weight * np.where(weight > 0, x, 0.0) for n, x in of_teachers.items() if x is not None
        }
    width = segments.shape[1] + 1
    places = (np.arange(len(segments))[:, None] * width + segments).ravel()
    summed = {name: np.bincount(places, array.ravel(), len(segments) * width) for name, array in values.items()}
    there = np.flatnonzero(summed["weight"])
    return {name: array[there] for name, array in summed.items()}


def _prompts(batch: Batch) -> list[str]:
    """Digest of each sequence's prompt, in the order of `_sums`: its tokens before the first with loss, and the patches
    of pictures there; of a text that has loss from its beginning all of it."""
    tokens, segments = np.asarray(batch.tokens), np.asarray(batch.segments)
    weight = np.asarray(batch.loss_weight) > 0
    found = []
    for row in range(len(segments)):
        for segment in range(1, int(segments[row].max(initial=0)) + 1):
            places = np.flatnonzero(segments[row] == segment)
            if not weight[row, places].any():
                continue
            first = int(np.argmax(weight[row, places]))
            # The first token of a sequence never has loss: without a prompt the second one has.
            own = places[:first] if first > 1 else places
            content = tokens[row, own].astype(np.int64).tobytes()
            if batch.images is not None and batch.patches is not None and batch.patch_images is not None:
                pictures = np.unique(np.asarray(batch.images)[row, own])
                seen = np.isin(np.asarray(batch.patch_images)[row], pictures[pictures > 0])
                content += np.asarray(batch.patches)[row][seen].tobytes()
            found.append(digest(content))
    return found
