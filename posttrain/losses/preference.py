"""Losses against a reference model: the DPO family over pairs of a chosen and a rejected answer, and KTO over single
answers labelled desirable or undesirable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from posttrain.batch import Batch, LossOutput, TokenStats
from posttrain.errors import did_you_mean
from posttrain.losses.pairs import (
    Needs,
    PairedSequences,
    Sequences,
    log_ratios,
    nll_of_chosen,
    output,
    pair_metrics,
    pairs_of,
    sequences_of,
    with_nll,
)
from posttrain.losses.ratios import MAX_LOG_RATIO
from posttrain.tree import Mean, replace

FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
Values = Float[Array, "B S"]


@dataclass(frozen=True, kw_only=True)
class LogRatios:
    """Inputs of pairwise losses; 0 where there is no pair."""

    pairs: PairedSequences
    ratios: tuple[Values, Values]
    """Log-ratios of policy and reference, of chosen and rejected answers."""
    divergence: Callable[[Values], Values]

    @property
    def chosen(self) -> Values:
        return self.ratios[0]

    @property
    def rejected(self) -> Values:
        return self.ratios[1]

    @property
    def delta(self) -> Values:
        """Difference of the log-ratios after the f-divergence transform."""
        return self.divergence(self.chosen) - self.divergence(self.rejected)

    def mean_delta(self) -> Values:
        """Difference with each side divided by its length."""
        lengths = [jnp.maximum(side.lengths, 1.0) for side in (self.pairs.chosen, self.pairs.rejected)]
        return self.divergence(self.chosen) / lengths[0] - self.divergence(self.rejected) / lengths[1]


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """DPO family, arXiv:2305.18290: a function of both answers' log-ratios of policy and reference.

    `kinds`: one or several names of `KINDS`, whose losses are added with `weights`. The implicit reward of an answer is
    beta * log-ratio.
    """

    kinds: tuple[str, ...] = ("sigmoid",)
    weights: tuple[float, ...] = ()
    """One per kind; by default 1."""
    beta: float = 0.1
    """Strength of the regularization towards the reference."""
    label_smoothing: float = 0.0
    """Probability that a pair's labels are swapped; `sigmoid` is then cDPO. Must be positive for `exo_pair`."""
    divergence: FDivergence = "reverse_kl"
    """f-divergence to the reference, arXiv:2309.16240, for the kinds that compare both answers (`DIVERGED`); in the
    others its constant would not cancel."""
    alpha: float | None = None
    """Parameter of `alpha_divergence`."""
    tail_weight: float = 1.0
    """Weight of tokens beyond the length of a pair's shorter answer, arXiv:2409.06411."""
    temperature: float | None = None
    """Temperature of the switch in `discopop`; by default 0.05."""
    use_weighting: bool = False
    """Pair weights of WPO, arXiv:2406.11827 eq. 2: the policy's own probability of both answers, without a gradient.
    Requires `stats.log_squares`."""

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                known = f"{did_you_mean(kind, KINDS)}; known: {', '.join(KINDS)}"
                raise ValueError(f"PreferenceLoss.kinds: {kind!r} is unknown{known}")
        if (
            not self.kinds
            or (self.weights and len(self.weights) != len(self.kinds))
            or min(self.weights, default=0) < 0
        ):
            raise ValueError(
                f"PreferenceLoss.weights={self.weights} must be one number for each of kinds={self.kinds}, at least "
                "one and none negative"
            )
        if self.divergence not in get_args(FDivergence):
            raise ValueError(
                f"PreferenceLoss.divergence={self.divergence!r} must be one of {', '.join(get_args(FDivergence))}"
            )
        if self.beta <= 0 or not 0 <= self.label_smoothing < 0.5 or not 0 <= self.tail_weight <= 1:
            raise ValueError(
                f"PreferenceLoss.beta={self.beta} must be positive, label_smoothing={self.label_smoothing} in "
                f"[0, 0.5), tail_weight={self.tail_weight} in [0, 1]"
            )
        self._refuse_unused()

    def _refuse_unused(self) -> None:
        """Raises ValueError for settings without effect."""
        if self.label_smoothing and not SMOOTHED & set(self.kinds):
            raise ValueError(
                f"PreferenceLoss.label_smoothing={self.label_smoothing} has no effect on {', '.join(self.kinds)}; "
                f"only on {', '.join(sorted(SMOOTHED))}"
            )
        if "exo_pair" in self.kinds and not self.label_smoothing:
            raise ValueError("PreferenceLoss: exo_pair needs label_smoothing > 0, such as 0.001")
        if (self.alpha is None) == (self.divergence == "alpha_divergence"):
            raise ValueError(
                f"PreferenceLoss.alpha={self.alpha} belongs to divergence=alpha_divergence, got {self.divergence}"
            )
        if self.divergence != "reverse_kl" and not DIVERGED & set(self.kinds):
            raise ValueError(
                f"PreferenceLoss.divergence={self.divergence} has no effect on {', '.join(self.kinds)}; "
                f"only on {', '.join(sorted(DIVERGED))}"
            )
        if self.use_weighting and self.kinds == ("sft",):
            raise ValueError("PreferenceLoss.use_weighting has no effect on sft, a mean over tokens")
        if self.tail_weight != 1.0 and self.kinds == ("sft",):
            raise ValueError(f"PreferenceLoss.tail_weight={self.tail_weight} has no effect on sft, a mean over tokens")
        if self.temperature is not None and "discopop" not in self.kinds:
            raise ValueError(f"PreferenceLoss.temperature={self.temperature} has no effect without the kind discopop")

    @property
    def needs(self) -> Needs:
        return Needs(rows="pairs", reference=True, squares=self.use_weighting)

    @property
    def needs_whole_batch(self) -> bool:
        """True if a pair's loss depends on other pairs of its batch, or on their number of tokens."""
        return bool(WHOLE_BATCH & set(self.kinds))

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        """Raises ValueError if `batch.roles`, `batch.ref_logps` or, if required, `stats.log_squares` is None."""
        pairs = pairs_of(sequences_of(stats, batch, self.tail_weight))
        ratios = [log_ratios(side, type(self).__name__) for side in (pairs.chosen, pairs.rejected)]
        scores = LogRatios(pairs=pairs, ratios=(ratios[0], ratios[1]), divergence=self._score)
        share = self._share(stats, batch) if self.use_weighting else 1.0
        loss = Mean(total=jnp.zeros_like(pairs.count), weight=pairs.count)
        metrics = pair_metrics(pairs, self.beta * ratios[0], self.beta * ratios[1])
        for kind, weight in zip(self.kinds, self.weights or (1.0,) * len(self.kinds), strict=True):
            if kind == "sft":
                metrics["nll"] = nll_of_chosen(stats, batch)
                loss = with_nll(loss, metrics["nll"], weight)
            else:
                loss = Mean(
                    total=loss.total + weight * pairs.total(share * KINDS[kind](scores, self)).total, weight=loss.weight
                )
        return output(loss, metrics, stats, batch)

    def _share(self, stats: TokenStats, batch: Batch) -> Values:
        """WPO weight of each pair: p / sum of p^2, geometric means over the tokens of each answer, multiplied."""
        if stats.log_squares is None:
            raise ValueError(
                "PreferenceLoss: use_weighting needs stats.log_squares; give the trainer terms=Terms(squares=True)"
            )
        aligned = pairs_of(sequences_of(replace(stats, logps=stats.logps - stats.log_squares), batch))
        return jax.lax.stop_gradient(jnp.exp(aligned.chosen.mean_logps() + aligned.rejected.mean_logps()))

    def _score(self, log_ratio: Values) -> Values:
        """f'(ratio), shifted to 0 where policy and reference agree."""
        if self.divergence == "reverse_kl":
            return log_ratio
        bounded = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        if self.divergence == "forward_kl":
            return -jnp.expm1(-bounded)
        if self.divergence == "js_divergence":
            return jnp.log(2.0) + jax.nn.log_sigmoid(log_ratio)
        assert self.alpha is not None
        power = self.alpha - 1.0
        return log_ratio if abs(power) < 1e-6 else jnp.expm1(power * bounded) / power


def smoothed(logits: Float[Array, "*N"], label_smoothing: float) -> Float[Array, "*N"]:
    """Binary cross-entropy with label smoothing: -(1 - s) log sigmoid(x) - s log sigmoid(-x)."""
    loss = -jax.nn.log_sigmoid(logits)
    return (1 - label_smoothing) * loss - label_smoothing * jax.nn.log_sigmoid(-logits) if label_smoothing else loss


def _sigmoid(s: LogRatios, c: PreferenceLoss) -> Values:
    """DPO, arXiv:2305.18290 eq. 7; with label smoothing cDPO, https://ericmitchell.ai/cdpo.pdf."""
    return smoothed(c.beta * s.delta, c.label_smoothing)


def _sigmoid_norm(s: LogRatios, c: PreferenceLoss) -> Values:
    """Length-normalized DPO, arXiv:2411.15124."""
    return smoothed(c.beta * s.mean_delta(), c.label_smoothing)


def _hinge(s: LogRatios, c: PreferenceLoss) -> Values:
    """Hinge loss (SLiC), arXiv:2305.10425."""
    return jax.nn.relu(1 - c.beta * s.delta)


def _ipo(s: LogRatios, c: PreferenceLoss) -> Values:
    """IPO, arXiv:2310.12036, with log-ratios per token: a squared loss of sums would grow with the length."""
    return jnp.square(s.mean_delta() - 1 / (2 * c.beta))


def _exo_pair(s: LogRatios, c: PreferenceLoss) -> Values:
    """EXO, arXiv:2402.00856 eq. 16."""
    x, e = c.beta * s.delta, c.label_smoothing
    won = jax.nn.sigmoid(x) * (jax.nn.log_sigmoid(x) - jnp.log1p(-e))
    return won + jax.nn.sigmoid(-x) * (jax.nn.log_sigmoid(-x) - jnp.log(e))


def _nca_pair(s: LogRatios, c: PreferenceLoss) -> Values:
    """NCA, arXiv:2402.05369."""
    chosen, rejected = c.beta * s.chosen, c.beta * s.rejected
    return -jax.nn.log_sigmoid(chosen) - 0.5 * jax.nn.log_sigmoid(-chosen) - 0.5 * jax.nn.log_sigmoid(-rejected)


def _robust(s: LogRatios, c: PreferenceLoss) -> Values:
    """Robust DPO: unbiased under swapped labels, arXiv:2403.00409."""
    x, e = c.beta * s.delta, c.label_smoothing
    return (-(1 - e) * jax.nn.log_sigmoid(x) + e * jax.nn.log_sigmoid(-x)) / (1 - 2 * e)


def _bco_pair(s: LogRatios, c: PreferenceLoss) -> Values:
    """BCO, arXiv:2404.04656, without its reward shift: binary classification of each answer by its reward."""
    return -jax.nn.log_sigmoid(c.beta * s.chosen) - jax.nn.log_sigmoid(-c.beta * s.rejected)


def _sppo_hard(s: LogRatios, c: PreferenceLoss) -> Values:
    """SPPO, arXiv:2405.00675, with a winning probability of 1 for the chosen answer."""
    return jnp.square(s.chosen - 0.5 / c.beta) + jnp.square(s.rejected + 0.5 / c.beta)


def _aot(s: LogRatios, c: PreferenceLoss) -> Values:
    """Alignment by optimal transport (AOT), arXiv:2406.05882: sorted margins of the policy against those of the
    reference."""
    chosen, rejected = s.pairs.chosen, s.pairs.rejected
    assert chosen.ref_logps is not None and rejected.ref_logps is not None
    policy = _sorted(chosen.logps - rejected.logps, s.pairs)
    reference = _sorted(chosen.ref_logps - rejected.ref_logps, s.pairs)
    return _spread(smoothed(c.beta * (policy - reference), c.label_smoothing), s)


def _aot_unpaired(s: LogRatios, c: PreferenceLoss) -> Values:
    """AOT unpaired: sorted log-ratios of chosen and of rejected answers."""
    delta = _sorted(s.chosen, s.pairs) - _sorted(s.rejected, s.pairs)
    return _spread(smoothed(c.beta * delta, c.label_smoothing), s)


def _apo_zero(s: LogRatios, c: PreferenceLoss) -> Values:
    """APO-zero: raises chosen answers, lowers rejected ones, arXiv:2408.06266."""
    return 1 - jax.nn.sigmoid(c.beta * s.chosen) + jax.nn.sigmoid(c.beta * s.rejected)


def _apo_down(s: LogRatios, c: PreferenceLoss) -> Values:
    """APO-down: lowers both, rejected answers more, arXiv:2408.06266."""
    return jax.nn.sigmoid(c.beta * s.chosen) + 1 - jax.nn.sigmoid(c.beta * (s.chosen - s.rejected))


def _discopop(s: LogRatios, c: PreferenceLoss) -> Values:
    """DiscoPOP (log-ratio modulated loss), arXiv:2406.08414 eq. 5."""
    x = c.beta * s.delta
    share = jax.nn.sigmoid(x / (0.05 if c.temperature is None else c.temperature))
    return -jax.nn.log_sigmoid(x) * (1 - share) + jnp.exp(-jnp.clip(x, -MAX_LOG_RATIO)) * share


def _sft(s: LogRatios, c: PreferenceLoss) -> Values:
    raise AssertionError("sft is added by PreferenceLoss.__call__")


def _sorted(values: Values, pairs: PairedSequences) -> Float[Array, " N"]:
    """Values of all pairs of the batch in ascending order; entries without a pair come last."""
    valid, flat = pairs.valid.reshape(-1), values.reshape(-1)
    return flat[jnp.argsort(jnp.where(valid, jax.lax.stop_gradient(flat), jnp.inf))]


def _spread(values: Float[Array, " N"], s: LogRatios) -> Values:
    """Scatter sorted values back to pairs; their order is irrelevant to the sum."""
    valid = s.pairs.valid.reshape(-1)
    return values[jnp.where(valid, jnp.cumsum(valid) - 1, 0)].reshape(s.pairs.valid.shape)


KINDS: Mapping[str, Callable[[LogRatios, PreferenceLoss], Values]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sft": _sft,
}
"""Loss of every pair by kind; `sft` is the mean of -log p over the tokens of chosen answers."""

SMOOTHED = {"sigmoid", "sigmoid_norm", "exo_pair", "robust", "aot", "aot_unpaired"}
"""Kinds with label smoothing."""

DIVERGED = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"}
"""Kinds whose log-ratios pass through the f-divergence."""

WHOLE_BATCH = {"aot", "aot_unpaired", "sft"}


KTOKind = Literal["kto", "apo_zero_unpaired"]


@dataclass(frozen=True, kw_only=True)
class KTOLoss:
    """Kahneman-Tversky optimization, arXiv:2402.01306: 1 - sigmoid(+-(beta * log-ratio - beta * KL)).

    Answers have the role 1 (desirable), -1 (undesirable) or 2 (answer to another prompt; their mean log-ratio estimates
    the KL of policy and reference, clipped at 0, without a gradient). `apo_zero_unpaired`, arXiv:2408.06266, has no KL.
    """

    kind: KTOKind = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(KTOKind):
            raise ValueError(f"KTOLoss.kind={self.kind!r} must be one of {', '.join(get_args(KTOKind))}")
        if self.beta <= 0 or self.desirable_weight < 0 or self.undesirable_weight < 0:
            raise ValueError(
                f"KTOLoss.beta={self.beta} must be positive, desirable_weight={self.desirable_weight} and "
                f"undesirable_weight={self.undesirable_weight} not negative"
            )

    @property
    def needs(self) -> Needs:
        return Needs(rows="answers_and_others" if self.kind == "kto" else "answers", reference=True)

    @property
    def needs_whole_batch(self) -> bool:
        """True for `kto`: the KL is a mean over the batch."""
        return self.kind == "kto"

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        """Raises ValueError if `batch.roles` or `batch.ref_logps` is None."""
        sequences = sequences_of(stats, batch)
        ratios = log_ratios(sequences, "KTOLoss")
        counted = sequences.lengths > 0
        good, bad = (sequences.roles == 1) & counted, (sequences.roles == -1) & counted
        kl = self._kl(sequences, ratios)
        signed = self.beta * (ratios - kl.total / jnp.maximum(kl.weight, 1.0))
        losses = jnp.where(
            good,
            self.desirable_weight * (1 - jax.nn.sigmoid(signed)),
            jnp.where(bad, self.undesirable_weight * jax.nn.sigmoid(signed), 0.0),
        )
        loss = Mean(total=losses.sum(), weight=(good | bad).sum().astype(losses.dtype))
        metrics = {"kl": kl} if self.kind == "kto" else {}
        for name, mask in (("chosen", good), ("rejected", bad)):
            weight = mask.sum().astype(losses.dtype)
            for what, values in (("rewards", self.beta * ratios), ("logps", sequences.logps)):
                metrics[f"{what}/{name}"] = Mean(total=jnp.where(mask, values, 0.0).sum(), weight=weight)
        return output(loss, metrics, stats, batch)

    def _kl(self, sequences: Sequences, ratios: Float[Array, "B S"]) -> Mean:
        mismatched = (sequences.roles == 2) & (sequences.lengths > 0)
        weight = mismatched.sum().astype(ratios.dtype)
        if self.kind != "kto":
            return Mean(total=jnp.zeros_like(weight), weight=weight)
        total = jax.lax.stop_gradient(jnp.where(mismatched, ratios, 0.0).sum())
        return Mean(total=jnp.maximum(total, 0.0), weight=weight)
