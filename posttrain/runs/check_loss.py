"""Check of a user's loss, before every run of one and by `posttrain check --loss`: equal value and gradient however a
batch is laid out and split, from the arrays that its kind of stage has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posttrain.batch import Batch, BatchLoss, LossOutput, TokenLoss, TokenStats
from posttrain.config import RLSection, TrainSection
from posttrain.config.locator import user_object
from posttrain.config.yaml_file import read_value
from posttrain.errors import ConfigError
from posttrain.losses.pairs import PairLoss
from posttrain.losses.policy import RLLoss
from posttrain.tree import Mean, Metric, added, replace
from posttrain.user_code import describe_error

ROW_TOKENS = 72
"""Tokens of a row, which holds all sequences."""
LENGTHS = ((3, 6), (1, 4), (2, 9), (4, 1), (2, 5), (1, 7))
"""Tokens of prompt and answer of each sequence."""
SHARES = (0.25, 1.0, 0.75, 1.0, 0.5, 0.5)
"""Share of each sequence in its sample."""
CASES_OF_A_KIND = 10
TOLERANCE = 1e-6
"""Largest difference as a share of the value, or of the gradient's norm; all numbers are float64."""
OF_STATS = ("logps", "entropy", "mean_logps", "sampling_logps", "log_squares")
OF_BATCH = ("sampler_logps", "behaviour_logps", "old_logps", "ref_logps", "advantages", "sample_shares")
ZERO_ELSEWHERE = ("staleness", "entropy_coefs", "margins")
EVERYTHING = (*OF_STATS, *OF_BATCH, *ZERO_ELSEWHERE)
"""Arrays that stages may have or not, by name; an array that a stage lacks is None."""
PLAIN = ("logps", "entropy")
"""Those of every stage."""

Row = Sequence[int]
"""Numbers of the sequences of a row."""
Sequences = list[dict[str, np.ndarray]]


@dataclass(frozen=True)
class Split:
    """Rows of each micro-batch."""

    kind: str
    parts: Sequence[Sequence[Row]]


@dataclass(frozen=True)
class Found:
    """Loss over all micro-batches of a split, its gradient by token of each sequence, and its metrics."""

    loss: float
    gradient: np.ndarray
    metrics: dict[str, float]


def check_loss(text: str) -> str:
    """Check the loss of `file.py:name` or, with settings, `{fn: file.py:name, width: 0.3}`; return a line about it,
    with the kinds of stage that it fits. Raises ConfigError as `prove` does, and for a loss that fits none."""
    try:
        spec = user_object(read_value(text, "loss"))
    except ValueError as error:
        raise ConfigError(f"loss: {error}") from error
    loss, name = spec.make("loss", positional=2), f"loss: {spec}"
    line = prove(loss, name)
    if isinstance(loss, PairLoss):
        return f"{line}; for stages of kind preference"
    given = {"sft": PLAIN, "rl": EVERYTHING}
    reasons = {kind: _Checker(loss, name, False, arrays).lacks() for kind, arrays in given.items()}
    if not isinstance(loss, RLLoss):
        reasons["rl"] = "it has no kl_coef, the coefficient of a KL from the reference; set it to 0 for none"
    elif loss.kl_coef <= 0:
        without = [array for array in EVERYTHING if array != "ref_logps"]
        reasons["rl"] = _Checker(loss, name, False, without).lacks()
    fits = [kind for kind, reason in reasons.items() if reason is None]
    if not fits:
        raise ConfigError(f"{name} fits no stage: " + "; ".join(f"{kind}: {why}" for kind, why in reasons.items()))
    return f"{line}; for stages of kind {' and '.join(fits)}"


def check_stage_loss(section: TrainSection, loss: Any) -> None:
    """Check a user's loss with the arrays that the stage gives it. ConfigError as of `prove`; losses on scores and on
    single answers are not checked."""
    if isinstance(loss, PairLoss) and loss.needs.rows != "pairs":
        return
    given = list(PLAIN)
    if isinstance(loss, PairLoss):
        has = {"ref_logps": loss.needs.reference, "margins": loss.needs.margins, "log_squares": loss.needs.squares}
        given += [name for name, holds in has.items() if holds]
    elif isinstance(section, RLSection):
        stale = section.samples_ahead or section.updates_per_batch > 1
        has = {"old_logps": section.proximal_logps != "self", "ref_logps": loss.kl_coef > 0, "staleness": stale}
        has["entropy_coefs"] = section.algorithm.entropy_target is not None
        given += [
            "sampler_logps",
            "behaviour_logps",
            "advantages",
            "sample_shares",
            *(name for name, holds in has.items() if holds),
        ]
    prove(loss, f"loss: {getattr(loss, '__name__', type(loss).__name__)}", given)


def prove(loss: TokenLoss, name: str, given: Sequence[str] = EVERYTHING) -> str:
    """Compute a loss over random splits of random batches that have the arrays `given`; return a line about them.

    Raises ConfigError with the first split over which value, gradient or metrics differ, or where masked tokens matter.
    """
    pairs = isinstance(loss, PairLoss)
    if isinstance(loss, PairLoss) and loss.needs.rows != "pairs":
        raise ConfigError(f"{name} is for rows of {loss.needs.rows}; only losses on tokens and on pairs are checked")
    checker = _Checker(loss, name, pairs, given)
    with jax.enable_x64(True), jax.default_device(_host()):
        whole = checker.whole()
        checker.masked(whole)
        splits = list(_splits(checker.apart, needs_whole_batch=isinstance(loss, BatchLoss) and loss.needs_whole_batch))
        for split in splits:
            checker.compare(split, whole)
    return (
        f"{name}: equal value, gradient and metrics ({len(whole.metrics)}) over {len(splits)} splits "
        f"({', '.join(dict.fromkeys(split.kind for split in splits))}); masked tokens may hold NaN and inf"
    )


def _host() -> jax.Device | None:
    """CPU, which has float64; None where JAX may not use it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


class _Checker:
    def __init__(self, loss: TokenLoss, name: str, pairs: bool, given: Sequence[str]):
        self._loss, self._name = loss, name
        left_out = {*EVERYTHING} - {*given}
        self._lacks = [array for array in EVERYTHING if array in left_out]
        self._sequences = [{n: x for n, x in one.items() if n not in left_out} for one in _sequences(pairs)]
        self.apart = [[0, 1], [2, 3], [4, 5]] if pairs else [[index] for index in range(len(LENGTHS))]
        self._gradient_of = jax.jit(jax.value_and_grad(self._total, has_aux=True))

    def whole(self) -> Found:
        """Loss of all rows at once. ConfigError unless it is a loss with a gradient."""
        try:
            found = self._over([self.apart])
        except ConfigError:
            raise
        except Exception as error:
            lacks = f"; this stage has no {', '.join(self._lacks)}: they are None" if self._lacks else ""
            raise ConfigError(f"{self._name} raised {describe_error(error)}{lacks}") from error
        if not np.isfinite(found.loss) or not np.isfinite(found.gradient).all():
            raise ConfigError(f"{self._name} gives {found.loss} or a gradient that is not finite on random rows")
        if not found.gradient.any():
            raise ConfigError(f"{self._name} has the gradient 0 by all statistics, so nothing would be learned")
        return found

    def lacks(self) -> str | None:
        """Reason why the loss cannot be computed from the arrays that are given; None: it can."""
        stats, batch, _ = _lay_out(self._sequences, self.apart)
        try:
            jax.eval_shape(self._loss, stats, batch)
        except Exception as error:
            return f"it raised {describe_error(error)} without {', '.join(self._lacks)}"
        return None

    def masked(self, whole: Found) -> None:
        """ConfigError if what masked tokens hold matters."""
        for poison in (np.nan, np.inf, -np.inf):
            found = self._over([self.apart], poison)
            if difference := _difference(found, whole):
                raise ConfigError(
                    f"{self._name}: with {poison} at tokens whose loss_weight is 0, {difference}; use "
                    "jnp.where(batch.loss_weight > 0, values, 0.0) on what you read, before any product"
                )

    def compare(self, split: Split, whole: Found) -> None:
        """ConfigError if the split matters."""
        if difference := _difference(self._over(split.parts), whole):
            shown = " + ".join(str([list(row) for row in rows]) for rows in split.parts)
            raise ConfigError(
                f"{self._name} depends on {split.kind}: {difference} (sequences of the rows of each micro-batch: "
                f"{shown}, at first {self.apart}). Return sums with their weights (pt.Mean), which the "
                "trainer adds up and divides once, and compare sequences by batch.segments"
            )

    def _over(self, parts: Sequence[Sequence[Row]], poison: float | None = None) -> Found:
        outputs: list[LossOutput] = []
        gradients: dict[int, np.ndarray] = {}
        for rows in parts:
            stats, batch, where = _lay_out(self._sequences, rows)
            if poison is not None:
                stats, batch = _poisoned(stats, batch, poison)
            differentiable = {name: value for name in OF_STATS[:3] if (value := getattr(stats, name)) is not None}
            (_, output), gradient = self._gradient_of(differentiable, stats, batch)
            outputs.append(output)
            by_name = np.stack([np.asarray(gradient[name]) for name in differentiable])
            gradients |= {index: by_name[:, row, tokens] for index, (row, tokens) in where.items()}
        total = outputs[0]
        for output in outputs[1:]:
            total = added(total, output)
        weight = float(total.loss.weight)
        gradient = np.concatenate([gradients[index] for index in sorted(gradients)], axis=1) / (weight or 1.0)
        metrics = {name: metric.value() for name, metric in total.metrics.items()}
        return Found(total.loss.value(), gradient, metrics)

    def _total(self, differentiable: dict[str, Any], stats: TokenStats, batch: Batch) -> tuple[Any, LossOutput]:
        output = self._loss(replace(stats, **differentiable), batch)
        if not isinstance(output, LossOutput) or not isinstance(output.loss, Mean):
            raise ConfigError(f"{self._name} returned a {type(output).__name__}; return pt.LossOutput with pt.Mean")
        if wrong := [name for name, metric in output.metrics.items() if not isinstance(metric, Metric)]:
            raise ConfigError(f"{self._name}: metrics {', '.join(wrong)} must be pt.Mean, a sum with its weight")
        return jnp.asarray(output.loss.total), output


def _difference(found: Found, whole: Found) -> str | None:
    """First difference in words."""
    if not _close(found.loss, whole.loss):
        return f"the loss is {found.loss:.6g} instead of {whole.loss:.6g}"
    distance, norm = np.linalg.norm(found.gradient - whole.gradient), np.linalg.norm(whole.gradient)
    if not distance <= TOLERANCE * norm:
        return f"the gradient differs by {distance / norm:.2g} of its norm"
    for name, value in whole.metrics.items():
        if not _close(found.metrics[name], value):
            return f"the metric {name} is {found.metrics[name]:.6g} instead of {value:.6g}"
    return None


def _close(one: float, other: float) -> bool:
    return bool(np.isclose(one, other, rtol=TOLERANCE, atol=1e-9, equal_nan=True))


def _splits(units: list[list[int]], *, needs_whole_batch: bool) -> Iterator[Split]:
    """Orders of rows, packings, and splits into micro-batches of unequal sizes; pairs stay together."""
    draw = np.random.default_rng(0)

    def shuffled() -> list[list[int]]:
        return [units[index] for index in draw.permutation(len(units))]

    def packed() -> list[list[int]]:
        cuts = np.sort(draw.choice(np.arange(1, len(units)), size=draw.integers(0, len(units) - 1), replace=False))
        parts = np.split(np.arange(len(units)), cuts)
        order = shuffled()
        return [[sequence for index in part for sequence in order[index]] for part in parts]

    def micro(rows: list[list[int]]) -> list[list[list[int]]]:
        first = int(draw.integers(1, len(rows))) if len(rows) > 1 else 1
        return [rows[:first], rows[first:]] if first < len(rows) else [rows]

    for _ in range(CASES_OF_A_KIND):
        yield Split("the order of rows", [shuffled()])
    for _ in range(CASES_OF_A_KIND):
        yield Split("the packing of sequences into rows", [packed()])
    if needs_whole_batch:
        return
    for number in range(CASES_OF_A_KIND):
        rows = shuffled()
        yield Split("the split into micro-batches", [[row] for row in rows] if number == 0 else micro(rows))
    for _ in range(CASES_OF_A_KIND):
        yield Split("packing and micro-batches", micro(packed()))


def _sequences(pairs: bool) -> Sequences:
    """Random sequences, far enough from the old policy that ratios are clipped."""
    draw, made = np.random.default_rng(1), []
    for number, (prompt, answer) in enumerate(LENGTHS):
        length = prompt + answer
        logps = -draw.exponential(1.0, length)
        one: dict[str, Any] = {name: logps + draw.normal(0, 0.3, length) for name in (*OF_STATS, *OF_BATCH)}
        one |= {"logps": logps, "entropy": draw.uniform(0, 3, length), "advantages": np.full(length, draw.normal())}
        one["sample_shares"] = np.full(length, SHARES[number])
        weight = (np.arange(length) >= prompt).astype(float)
        weight[-2 if answer > 5 else length :] *= 0.5
        one |= {"entropy_coefs": 0.01 * (weight > 0), "staleness": (weight > 0) * np.int32(number % 2)}
        one |= {"loss_weight": weight, "tokens": draw.integers(1, 100, length).astype(np.int32)}
        if pairs:
            role = 1 if number % 2 == 0 else -1
            one |= {"roles": (weight > 0) * np.int32(role), "margins": 0.3 * (weight > 0) * (role == 1)}
            one["log_squares"] = -np.abs(one["log_squares"])
            one["loss_weight"] = (weight > 0).astype(float)
        made.append(one)
    return made


def _lay_out(sequences: Sequences, rows: Sequence[Row]) -> tuple[TokenStats, Batch, dict[int, tuple[int, slice]]]:
    """Rows of sequences, and where each lies."""
    shape = (len(rows), ROW_TOKENS)
    arrays = {name: np.zeros(shape, np.int32 if x.dtype.kind == "i" else float) for name, x in sequences[0].items()}
    positions, segments, where = np.zeros(shape, np.int32), np.zeros(shape, np.int32), {}
    for row, indices in enumerate(rows):
        start = 0
        for segment, index in enumerate(indices, start=1):
            length = len(sequences[index]["logps"])
            place = slice(start, start + length)
            where[index] = (row, place)
            for name, values in sequences[index].items():
                arrays[name][row, place] = values
            positions[row, place], segments[row, place] = np.arange(length), segment
            start += length
    stats = TokenStats(**{name: jnp.asarray(arrays.pop(name)) for name in OF_STATS if name in arrays})
    named: dict[str, Any] = arrays
    return stats, Batch(positions=positions, segments=segments, **named), where


def _poisoned(stats: TokenStats, batch: Batch, poison: float) -> tuple[TokenStats, Batch]:
    masked = np.asarray(batch.loss_weight) == 0

    def changed(node: Any, names: Sequence[str]) -> Any:
        held = {name: value for name in names if (value := getattr(node, name)) is not None}
        return replace(node, **{name: jnp.where(masked, poison, value) for name, value in held.items()})

    return changed(stats, OF_STATS), changed(batch, OF_BATCH)
