"""Agreement of sampler and trainer: its limits, the veto inside the step, and the diagnosis of a disagreement: the
worst tokens are scored again, one change at a time, and the change under which the difference disappears names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jaxtyping import Float, Int

from posttrain.batch import Batch, model_inputs, rows_per_pass
from posttrain.cluster.cluster import Cluster
from posttrain.errors import RunError
from posttrain.mesh import BATCH_SPEC, row_shards
from posttrain.models.attention import Attention, LatentAttention
from posttrain.models.config import ModelConfig, MoEConfig, Rope
from posttrain.models.decoder import Decoder
from posttrain.models.rope import default_frequencies
from posttrain.rl.assemble import sample_rows
from posttrain.rl.sampler import Sampler
from posttrain.rollout.trajectory import Group, Trajectory
from posttrain.rollout.types import sampled
from posttrain.train.trainer import Trainer
from posttrain.tree import Max, Mean
from posttrain.weights.state import ModelWeights

GAP = "sampling/logp_difference"
LIMITS = {f"{GAP}/mean": 0.1, f"{GAP}/outliers": 0.01, f"{GAP}/max": 10.0, f"{GAP}/stale_mean": 1.0}
"""Maximum difference of sampler and trainer log-probabilities: mean in nats over tokens sampled with the current
weights, share of those beyond `OUTLIER_NATS` (bounds the 99th percentile), their maximum, and the mean over tokens of
earlier weights, which are expected to differ. Typical means: 1e-6 in float32, 5e-3 to 1.3e-2 in bfloat16; with 260,000
parameters 0.02 in int8 and 0.06 in fp8."""
LIMIT = f"{GAP}/limit"
"""Maximum of the mean in this run, see `SamplerGate`."""
MAX_GROWTH = 20.0
"""Maximum mean as a multiple of that of the first step, whose weights are known to be equal."""
ONE_SIDED, ONE_SIDED_NATS = 0.8, 5e-3
"""Share of the mean that its sign may not explain, where it is above these nats: rounding has no sign."""
LEAST_TOKENS, LEAST_SIGMAS = 10, 8.0
"""Tokens, and standard errors of the signed mean, below which its sign may be chance."""
LEAST_STALE = 16
"""Tokens of earlier weights that are judged as a mean; fewer are judged as if there were so many."""


@dataclass(frozen=True)
class SamplerGate:
    """Veto on updates where `sampler_disagrees`, for `TrainSettings.skip_update`.

    The mean over fresh tokens may be at most `MAX_GROWTH` times that of the first step, which is remembered: later
    weights that do not reach the sampler whole stay below any limit that rounding in 16 or 8 bits leaves room for.
    """

    rounding: float
    """Mean in nats that is never refused for its growth: rounding, such as `EXACT` or `ROUNDED`."""

    def start(self) -> np.ndarray:
        return np.asarray(np.nan, np.float32)

    def __call__(self, metrics: Mapping[str, object], memory: Array) -> tuple[Array, Array, Mapping[str, Array]]:
        mean = metrics.get(f"{GAP}/mean")
        if not isinstance(mean, Mean):
            return jnp.zeros((), bool), memory, {}
        first = jnp.where(jnp.isnan(memory) & (jnp.asarray(mean.weight) > 0), _value(mean), memory)
        allowed = jnp.maximum(MAX_GROWTH * first, self.rounding)
        highest = LIMITS[f"{GAP}/mean"]
        told = {LIMIT: jnp.where(jnp.isnan(first), highest, jnp.minimum(allowed, highest)).astype(jnp.float32)}
        return sampler_disagrees({**metrics, **told}), first.astype(jnp.float32), told


EXACT, ROUNDED = 1e-3, 0.05
"""`SamplerGate.rounding` where sampler and trainer compute in float32 with equal weights, and elsewhere: in lower
precision the first step may have samples of which the model is certain, without any rounding."""


def sampler_disagrees(metrics: Mapping[str, object]) -> Array:
    """Compare a loss's metrics with `LIMITS`, and the mean with that of `SamplerGate`. True also where differences have
    one sign: only one of the two knows a truncation or a bias. NaN exceeds every limit; missing metrics pass.
    """
    within = jnp.ones((), bool)
    for name, limit in _limits(metrics).items():
        within &= _value(metrics[name], LEAST_STALE if name.endswith("/stale_mean") else 1) <= limit
    return ~within | _one_sided(metrics)


def _limits(metrics: Mapping[str, object]) -> dict[str, Any]:
    """Limits of the metrics that are there."""
    own = {f"{GAP}/mean": metrics[LIMIT]} if LIMIT in metrics else {}
    return {name: limit for name, limit in {**LIMITS, **own}.items() if name in metrics}


def _one_sided(metrics: Mapping[str, object]) -> Array:
    names = [f"{GAP}/{name}" for name in ("mean", "signed", "square")]
    if not all(name in metrics for name in names):
        return jnp.zeros((), bool)
    mean, signed, square = (_value(metrics[name]) for name in names)
    weight = jnp.asarray(cast(Mean, metrics[names[0]]).weight)
    beyond_chance = weight * signed**2 >= LEAST_SIGMAS**2 * (square - signed**2)
    large = (mean >= ONE_SIDED_NATS) & (weight >= LEAST_TOKENS)
    return large & (jnp.abs(signed) >= ONE_SIDED * mean) & beyond_chance


def check_agreement(metrics: Mapping[str, object], step: int, diagnosis: Callable[[], str] | None = None) -> None:
    """Raise RunError with the measured differences if `sampler_disagrees`. Reads from the device.

    `diagnosis`: names the likely cause.
    """
    if not bool(sampler_disagrees(metrics)):
        return
    found = {name: (float(_value(metrics[name])), float(limit)) for name, limit in _limits(metrics).items()}
    told = [f"{name.removeprefix(f'{GAP}/')} {value:.3g} of {limit:.3g}" for name, (value, limit) in found.items()]
    if bool(_one_sided(metrics)):
        signed = float(_value(metrics[f"{GAP}/signed"]))
        told.append(f"nearly all {'below' if signed > 0 else 'above'} the trainer's: signed {signed:+.3g}")
    average, _ = max((found[name] for name in found if name.endswith("mean")), key=lambda pair: pair[0] / pair[1])
    if _only_stale_tokens_disagree(metrics):
        fresh, _ = found[f"{GAP}/mean"]
        cause = (
            "Likely cause: the updates since the tokens were sampled have moved the weights so far, for tokens of "
            f"equal weights agree (mean {fresh:.1e}): lower optimizer.learning_rate, update_epochs or updates, with "
            "asynchronous also max_staleness"
        )
        weights = "the weights are those of the last update that agreed"
    else:
        cause = "Look for stale weights or another temperature in the engine" if diagnosis is None else _told(diagnosis)
        weights = "the weights are those before the step"
    raise RunError(
        f"step {step}: sampler and trainer disagree by {average:.3g} nats per token on average (differences and their "
        f"limits: {', '.join(told)}); {weights}. {cause}"
    )


def _only_stale_tokens_disagree(metrics: Mapping[str, object]) -> bool:
    """Tell whether tokens of the weights that sampled them were measured and agree: the engine has the right weights,
    and the others differ by the run's own updates since."""
    fresh = metrics.get(f"{GAP}/mean")
    measured = isinstance(fresh, Mean) and bool(jnp.asarray(fresh.weight) > 0)
    others = {name: metric for name, metric in metrics.items() if name != f"{GAP}/stale_mean"}
    return measured and not bool(sampler_disagrees(others))


def _told(diagnosis: Callable[[], str]) -> str:
    """Diagnosis in words; its own failure must not hide the error that it explains."""
    try:
        return f"Likely cause: {diagnosis()}"
    except Exception as error:
        return f"The diagnosis of the cause failed: {type(error).__name__}: {error}"


def _value(metric: object, least_weight: int = 1) -> Array:
    """Value of a metric; 0 without any counted token, and as of `least_weight` where it counts fewer."""
    if isinstance(metric, Mean):
        return jnp.asarray(metric.total) / jnp.maximum(jnp.asarray(metric.weight), least_weight)
    assert isinstance(metric, Max)
    return jnp.asarray(metric.largest)


EXPLAINED = 0.2
"""Maximum share of the difference that may remain under a change that explains it."""
MAX_SAMPLES, MAX_TOKENS = 8, 64
"""Samples and tokens that are scored again."""
Forward = Callable[[Batch, np.ndarray, np.ndarray], np.ndarray]
"""Logits [N, V] at rows and places of a batch."""
TEMPERATURES = np.geomspace(0.02, 10.0, 32)
THETAS = (1e4, 1e5, 5e5, 1e6)
"""Common base frequencies of RoPE."""


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Tokens with the largest differences, N of them in a few samples."""

    cluster: Cluster
    sampler: Sampler
    samples: Sequence[Trajectory]
    scores: Sequence[Float[np.ndarray, " T"]]
    """Trainer's log-probability of each token of each sample."""
    row_tokens: int
    sample_N: Int[np.ndarray, " N"]
    at_N: Int[np.ndarray, " N"]
    """Index of each token in its sample."""

    @property
    def tokens_N(self) -> Int[np.ndarray, " N"]:
        return self.of([np.asarray(sample.tokens) for sample in self.samples], 0)

    @property
    def recorded_N(self) -> Float[np.ndarray, " N"]:
        """Sampler's log-probabilities."""
        return self.of([np.asarray(sample.logps, np.float64) for sample in self.samples], 0)

    def trainer_N(self, offset: int = 0) -> Float[np.ndarray, " N"]:
        """Trainer's log-probabilities of the tokens, or of those so many places later; NaN where none was sampled."""
        return self.of(
            [
                np.where(sample.sampled, scores, np.nan)
                for sample, scores in zip(self.samples, self.scores, strict=True)
            ],
            offset,
        )

    def difference(self, logps_N: Float[np.ndarray, " N"]) -> float:
        """Mean absolute difference from the sampler's; infinite unless most of the numbers are known."""
        known = ~np.isnan(logps_N)
        return float(np.abs(logps_N - self.recorded_N)[known].mean()) if 2 * known.sum() > known.size else np.inf

    def explains(self, logps_N: Float[np.ndarray, " N"]) -> bool:
        return self.difference(logps_N) <= EXPLAINED * self.difference(self.trainer_N())

    def left(self, logps_N: Float[np.ndarray, " N"]) -> str:
        now, before = self.difference(logps_N), self.difference(self.trainer_N())
        return f"mean difference {now:.1e} in place of {before:.1e}"

    def of(self, values: Sequence[np.ndarray], offset: int) -> np.ndarray:
        """Value of each of the N tokens, or of that so many places later; NaN beyond the sample."""
        places = zip(self.sample_N, self.at_N + offset, strict=True)
        return np.asarray([values[s][at] if 0 <= at < len(values[s]) else np.nan for s, at in places])


async def diagnose(cluster: Cluster, sampler: Sampler, groups_P: Sequence[Group], row_tokens: int) -> str:
    """Name the likely cause in one line. Scores samples of the present weights again, in the trainer and at the engine,
    which must have been given the weights again since."""
    groups_P = [[row for sample in group for row in sample.rows] for group in groups_P]
    newest = max(version for group in groups_P for sample in group for version in sample.versions)
    fresh = [[np.asarray(sample.versions) == newest for sample in group] for group in groups_P]
    pairs = [
        (sample, mask)
        for group, masks in zip(groups_P, fresh, strict=True)
        for sample, mask in zip(group, masks, strict=True)
        if mask.any()
    ]
    odd = sum(int((~np.isfinite(np.asarray(sample.logps)[mask])).sum()) for sample, mask in pairs)
    if odd:
        return f"{odd} log-probabilities of the sampler are not finite"
    case = _worst(cluster, sampler, pairs, row_tokens)
    if not np.isfinite(case.trainer_N()).all():
        return "log-probabilities of the trainer are not finite"
    for change, logps_N in _changes(case):
        if case.explains(logps_N):
            return f"{change} ({case.left(logps_N)})"
    again_N = await _scored_again(case)
    apart_N = np.abs(again_N - case.trainer_N())
    if np.isfinite(apart_N).any() and np.nanmean(apart_N) <= EXPLAINED * case.difference(case.trainer_N()):
        # The step of these samples has handed its weights over.
        ahead = newest < cluster.version - 1
        moved = "; or the updates since have moved the weights so far: lower learning_rate or max_staleness"
        again = "given the weights again, the engine scores the same tokens as the trainer does"
        return f"stale weights: {again}{moved if ahead else ''}"
    for theta in _thetas(case.cluster.actor.model.config):
        logits = _logits(case, _forward(cluster.actor, theta), case.samples, case.at_N)
        logps_N = _logps(case, logits / sampler.sampling.temperature)
        if case.explains(logps_N):
            return f"RoPE: the sampler's numbers are those of plain RoPE of theta {theta:g} ({case.left(logps_N)})"
    if case.explains(again_N):
        return (
            "the engine's own computation: given the weights again, it scores the same tokens as it did; look for "
            "weights that do not reach it, a layer, precision, or positions (then sampling/logp_difference/at_last is "
            "above at_first)"
        )
    config = case.cluster.actor.model.config
    mixture = any(isinstance(block.mlp, MoEConfig) for stage in config.stages for block in stage.blocks)
    unrecorded = mixture and all(sample.experts is None for sample in case.samples)
    return "no probe explains the difference" + ("; try rollout.record_routing" if unrecorded else "")


def _worst(
    cluster: Cluster, sampler: Sampler, pairs: Sequence[tuple[Trajectory, np.ndarray]], row_tokens: int
) -> Disagreement:
    """Worst tokens of samples, each with the mask of those of the present weights."""
    samples, fresh = [sample for sample, _ in pairs], [mask for _, mask in pairs]
    rows = rows_per_pass(len(samples), None, row_shards(cluster.actor.mesh))
    batch, where = sample_rows(samples, row_tokens=row_tokens, num_rows=rows)
    logps = cluster.actor.logps(batch)
    scores = [np.asarray(logps[span.row, span.tokens], np.float64) for span in where]
    gaps = [
        np.where(mask, np.nan_to_num(np.abs(score - np.asarray(sample.logps)), nan=np.inf), 0.0)
        for sample, score, mask in zip(samples, scores, fresh, strict=True)
    ]
    chosen = sorted(range(len(samples)), key=lambda index: -float(gaps[index].sum() / fresh[index].sum()))[:MAX_SAMPLES]
    places = [(s, at, gaps[index][at]) for s, index in enumerate(chosen) for at in np.flatnonzero(fresh[index])]
    places = sorted(places, key=lambda place: -place[2])[:MAX_TOKENS]
    return Disagreement(
        cluster=cluster,
        sampler=sampler,
        samples=[samples[index] for index in chosen],
        scores=[scores[index] for index in chosen],
        row_tokens=row_tokens,
        sample_N=np.asarray([place[0] for place in places]),
        at_N=np.asarray([place[1] for place in places]),
    )


def _changes(case: Disagreement) -> Iterator[tuple[str, Float[np.ndarray, " N"]]]:
    """Changes with the log-probabilities under them, cheap ones first."""
    for offset, neighbour in ((1, "next"), (-1, "previous")):
        yield f"shift by one: the sampler's numbers are those of the {neighbour} token", case.trainer_N(offset)
    sampling, trained_at = case.sampler.sampling, case.sampler.sampling.temperature
    forward = _forward(case.cluster.actor, None)
    logits = _logits(case, forward, case.samples, case.at_N)
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        cut = f"top_k={sampling.top_k}, top_p={sampling.top_p:g}, min_p={sampling.min_p:g}"
        logps_N = _truncated(case, logits / trained_at)
        yield f"truncation: the sampler's numbers are normalised after {cut}; they must be those before", logps_N
    temperature = _fitted_temperature(case, logits)
    name = (
        f"temperature: the sampler's numbers are those of temperature {temperature:.3g}, the trainer's {trained_at:g}"
    )
    yield name, _logps(case, logits / temperature)
    if any(sample.experts is not None for sample in case.samples):
        own = _logits(case, forward, [replace(sample, experts=None) for sample in case.samples], case.at_N)
        name = "routing: the difference disappears with the trainer's own routing in place of the recorded one"
        yield name, _logps(case, own / trained_at)
    for name, samples in _prompts(case):
        moved = np.asarray([len(b.tokens) - len(a.tokens) for a, b in zip(case.samples, samples, strict=True)])
        made = _logits(case, forward, samples, case.at_N + moved[case.sample_N])
        yield f"template: the difference disappears with the prompt {name}", _logps(case, made / trained_at)


async def _scored_again(case: Disagreement) -> Float[np.ndarray, " N"]:
    """Engine's log-probabilities of the tokens under the weights of now; NaN for an engine that does not score
    prompts."""
    scores = []
    for sample in case.samples:
        params = replace(case.sampler.params(sample.group, sample.sample), max_tokens=1, prompt_logps=True)
        found = (await sampled(case.sampler.engine, sample.tokens[:-1], params, sample.images)).prompt_logps
        known = [np.nan] * (len(sample.tokens) - 1) if found is None else found
        scores.append(np.asarray([*known, np.nan]))
    return case.of(scores, 0)


def _forward(actor: Trainer, theta: float | None) -> Forward:
    """Program of the trainer's logits [N, V] at places of rows; `theta`: with plain RoPE."""
    structure = ModelWeights(actor.model)

    @jax.jit
    def forward(weights: Any, batch: Batch, rows_N: Array, places_N: Array) -> Array:
        model = structure.bind(weights)
        if theta is not None:
            _set_theta(model, theta)
        experts = None if batch.experts is None else jnp.moveaxis(jnp.asarray(batch.experts, jnp.int32), 2, 0)
        tokens, positions, segments = map(jnp.asarray, (batch.tokens, batch.positions, batch.segments))
        images = model.images_of(batch)
        hidden, _, _ = model.forward(tokens, positions, segments, experts=experts, images=images)
        return model.logits(hidden[rows_N, places_N][None])[0]

    def run(batch: Batch, rows_N: np.ndarray, places_N: np.ndarray) -> np.ndarray:
        placed = jax.device_put(batch, NamedSharding(actor.mesh, BATCH_SPEC))
        return np.asarray(forward(structure.read(), placed, rows_N, places_N))

    return run


def _logits(
    case: Disagreement, forward: Forward, samples: Sequence[Trajectory], at_N: Int[np.ndarray, " N"]
) -> Float[np.ndarray, "N V"]:
    """Trainer's logits for the tokens at these places of the samples."""
    rows = rows_per_pass(len(samples), None, row_shards(case.cluster.actor.mesh))
    made, where = sample_rows(samples, row_tokens=case.row_tokens, num_rows=rows)
    batch = jax.tree.map(lambda x: np.pad(x, ((0, rows - len(x)), *((0, 0) for _ in x.shape[1:]))), model_inputs(made))
    rows_N = np.asarray([where[s].row for s in case.sample_N])
    places_N = np.asarray([where[s].tokens.start for s in case.sample_N]) + at_N - 1
    return forward(batch, rows_N, places_N)


def _logps(case: Disagreement, logits: Float[np.ndarray, "N V"]) -> Float[np.ndarray, " N"]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    taken = np.take_along_axis(shifted, case.tokens_N[:, None], axis=1)[:, 0]
    return taken - np.log(np.exp(shifted).sum(axis=1))


def _truncated(case: Disagreement, logits: Float[np.ndarray, "N V"]) -> Float[np.ndarray, " N"]:
    """Log-probabilities after top-k, top-p and min-p."""
    sampling, tokens = case.sampler.sampling, case.tokens_N
    made = []
    for row, token in zip(logits, tokens, strict=True):
        order = np.argsort(-row, kind="stable")
        probs = np.exp(row[order] - row[order[0]])
        probs /= probs.sum()
        if sampling.top_k:
            probs[sampling.top_k :] = 0.0
        probs[np.cumsum(probs) - probs >= sampling.top_p * probs.sum()] = 0.0
        probs[probs < sampling.min_p * probs[0]] = 0.0
        with np.errstate(divide="ignore"):
            made.append(np.log(probs[order == token][0] / probs.sum()))
    return np.asarray(made)


def _fitted_temperature(case: Disagreement, logits: Float[np.ndarray, "N V"]) -> float:
    """Temperature under which the trainer's log-probabilities are closest to the sampler's."""

    def difference(temperature: float) -> float:
        return case.difference(_logps(case, logits / np.float32(temperature)))

    best = int(np.argmin([difference(t) for t in TEMPERATURES]))
    low, high = TEMPERATURES[max(best - 1, 0)], TEMPERATURES[min(best + 1, len(TEMPERATURES) - 1)]
    for _ in range(20):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, second) if difference(first) < difference(second) else (first, high)
    return float((low + high) / 2)


def _prompts(case: Disagreement) -> Iterator[tuple[str, list[Trajectory]]]:
    """Samples behind other prompts that an engine may have read, where they fit the rows."""
    if any(sample.images is not None for sample in case.samples):
        return  # images would be at other tokens
    render = case.sampler.renderer.prompt
    variants = {
        "rendered again from its messages": lambda sample: render(sample.example.messages),
        "without its first token": lambda sample: _prompt(sample)[1:],
        "with its first token twice": lambda sample: [*_prompt(sample)[:1], *_prompt(sample)],
    }
    for name, variant in variants.items():
        samples = [_behind(sample, variant(sample)) for sample in case.samples]
        longest = max(len(sample.tokens) for sample in samples)
        changed = any(a.tokens != b.tokens for a, b in zip(case.samples, samples, strict=True))
        if changed and longest <= case.row_tokens and all(not sample.sampled[0] for sample in samples):
            yield name, samples


def _prompt(sample: Trajectory) -> list[int]:
    return list(sample.tokens[: list(sample.sampled).index(True)])


def _behind(sample: Trajectory, prompt: Sequence[int]) -> Trajectory:
    """Sample with another prompt, without recorded experts."""
    cut = len(_prompt(sample))
    return replace(
        sample,
        tokens=[*prompt, *sample.tokens[cut:]],
        sampled=[*(False for _ in prompt), *sample.sampled[cut:]],
        logps=[*(0.0 for _ in prompt), *sample.logps[cut:]],
        experts=None,
    )


def _thetas(config: ModelConfig) -> list[float]:
    """Plain base frequencies that the model does not have: the common ones, and its own where it scales them."""
    ropes = {rope for stage in config.stages for block in stage.blocks if (rope := block.attention.rope) is not None}
    own = [float(round(rope.frequencies[1] ** -len(rope.frequencies))) for rope in ropes if len(rope.frequencies) > 1]
    return [
        theta
        for theta in dict.fromkeys([*own, *THETAS])
        if any(not np.allclose(_plain(rope, theta).frequencies, rope.frequencies, rtol=1e-3) for rope in ropes)
    ]


def _plain(rope: Rope, theta: float) -> Rope:
    frequencies = default_frequencies(theta, 2 * len(rope.frequencies))
    return replace(rope, frequencies=tuple(map(float, frequencies)), magnitude=1.0)


def _set_theta(model: Decoder, theta: float) -> None:
    """Change the RoPE of every layer of a bound model."""

    def changed(attention: Any) -> Any:
        return attention if attention.rope is None else replace(attention, rope=_plain(attention.rope, theta))

    for _, node in list(nnx.iter_graph(model)):
        if isinstance(node, Attention | LatentAttention):
            node.config = changed(node.config)
    stages = [
        replace(stage, blocks=tuple(replace(block, attention=changed(block.attention)) for block in stage.blocks))
        for stage in model.config.stages
    ]
    model.config = replace(model.config, stages=tuple(stages))
