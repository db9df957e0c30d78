"""Seeded faults of RL: for each feature a wrong function in place of the package's, which must turn a pair red."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import posttrain.config.rollout
from posttrain.cluster import reference
from posttrain.cluster.cluster import Cluster, Critic, DrafterLearner
from posttrain.cluster.reference import Reference, Teachers
from posttrain.cluster.sync import ReshardedReplica
from posttrain.config.rl import RLSection
from posttrain.kernels.logits.layout import VocabSharding
from posttrain.losses import policy, reduce
from posttrain.losses.ratios import ImportanceSampling
from posttrain.losses.surrogates import CLIP, CISPOObjective, Clip, GMPOObjective, SAPOObjective, VESPOObjective
from posttrain.losses.value import ValueLoss
from posttrain.models.cache import KVCache
from posttrain.reward.model import ModelReward
from posttrain.rl import algorithms, collector, returns, sampler
from posttrain.rl import step as rl_step
from posttrain.rl.returns import RewardKL
from posttrain.rl.step import EntropyControl
from posttrain.rollout import speculative
from posttrain.rollout.types import Transcript
from posttrain.train import muon, objective, programs, transformations
from posttrain.train.optimizers import Optimizer
from posttrain.train.trainer import Trainer
from posttrain.tree import replace
from posttrain.weights import quantize
from posttrain.weights.state import ModelWeights


class Fault(NamedTuple):
    """A pair, and what is wrong in its run."""

    pair: tuple[str, str]
    place: Any
    attribute: str
    wrong: Callable[[Any], Any]
    """Substitute for what is right."""


def constant(value: Any) -> Callable[[Any], Any]:
    """The same substitute for whatever is right."""
    return lambda _: value


def with_surrogate(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Any], Any]:
    """Surrogate, called with another objective and other terms."""
    return lambda right: lambda self, terms: right(*change(self, terms))


def symmetric(self: Any, terms: Any) -> tuple[Any, Any]:
    return self, dataclasses.replace(terms, high=2 - terms.low)


def without_dual_clip(self: Any, terms: Any) -> tuple[Any, Any]:
    return self, dataclasses.replace(terms, dual_clip=None)


def never_clipped(self: Any, terms: Any) -> tuple[Any, Any]:
    return self, dataclasses.replace(terms, low=-1e9, high=1e9)


def swapped_gate(self: Any, terms: Any) -> tuple[Any, Any]:
    return dataclasses.replace(self, positive=self.negative, negative=self.positive), terms


def swapped_weights(self: Any, terms: Any) -> tuple[Any, Any]:
    return dataclasses.replace(self, k_positive=self.k_negative, k_negative=self.k_positive), terms


def differentiated_weight(right: Any) -> Any:
    def wrong(self: Any, terms: Any) -> Any:
        loss = -jnp.minimum(terms.ratio, terms.high) * terms.advantages * terms.logps
        return replace_loss(right(self, terms), loss)

    return wrong


def replace_loss(tokens: Any, loss: Any) -> Any:
    return dataclasses.replace(tokens, loss=loss)


def with_bound(bound: str) -> Callable[[Any], Any]:
    return lambda right: lambda self, *x: right(dataclasses.replace(self, bound=bound), *x)


def unweighted(right: Any) -> Any:
    def wrong(*inputs: Any) -> Any:
        weights, metrics = right(*inputs)
        return jnp.ones_like(weights), metrics

    return wrong


def first_reward(right: Any) -> Any:
    def wrong(parts_PG: Any, weights: Any, penalties_PG: Any) -> Any:
        first = next(iter(parts_PG))
        return right({first: parts_PG[first]}, weights, penalties_PG)

    return wrong


def first_teacher(right: Any) -> Any:
    def wrong(self: Any, batch: Any) -> Any:
        weights = np.zeros_like(batch.teacher_weights)
        weights[..., 0] = 1.0
        return right(self, replace(batch, teacher_weights=weights))

    return wrong


def one_temperature(right: Any) -> Any:
    return lambda *x, **options: right(*x, **{**options, "temperature": 1.0})


def after_the_last_turn(right: Any) -> Any:
    """Turns whose end is one token late: an answer of the environment is learned from."""

    def wrong(self: Any, completion: Any, time: int = 0) -> None:
        right(self, completion, time)
        if len(self.turns) > 1:
            self.sampled[self.turns[-1].start - 1] = True

    return wrong


def replies_are_sampled(right: Any) -> Any:
    def wrong(self: Any, tokens: Any, images: Any = None) -> None:
        right(self, tokens, images)
        if self.turns:
            self.sampled[-len(tokens) :] = [True] * len(tokens)

    return wrong


def experts_unread(right: Any) -> Any:
    def wrong(*x: Any) -> Any:
        made = right(*x)
        return {**made, "experts": np.full_like(made["experts"], -1)}

    return wrong


def with_drafts_unread(right: Any) -> Any:
    def wrong(*x: Any) -> Any:
        made = right(*x)
        return replace(made, logps=made.logps - 0.5)

    return wrong


def without_pictures(right: Any) -> Any:
    def wrong(self: Any, batch: Any, **options: Any) -> Any:
        return right(self, replace(batch, patches=np.zeros_like(batch.patches)), **options)

    return wrong


def without_rates(right: Any) -> Any:
    return lambda self, prompt, rewards: right(self, prompt, np.full_like(rewards, np.nan))


def without_parameter_scale(right: Any) -> Any:
    return lambda section, *x: right(section.model_copy(update={"parameter_scale": False}), *x)


def standardized(rewards_PG: Any, *_: Any) -> Any:
    """Advantages of GRPO, whatever the other inputs."""
    return algorithms.standardized(rewards_PG)


def with_larger_scales(right: Any) -> Any:
    def wrong(*x: Any) -> Any:
        codes, scales = right(*x)
        return codes, 2 * scales

    return wrong


def without_values(right: Any) -> Any:
    def wrong(self: Any, keys: Any, values: Any) -> Any:
        kept, rounded = right(self, keys, values)
        return kept, rounded if self.kind == "compute" else 0 * rounded

    return wrong


def without_new_masters(right: Any) -> Any:
    return lambda self, group, *x: right(self, group, *x)._replace(masters=group.masters)


def first_rows_alone(right: Any) -> Any:
    """Rows of the first device, as those of all that split a vocabulary."""

    def wrong(self: Any, x: Any) -> Any:
        devices = 1 if self.mesh is None else self.mesh.shape["fsdp"]
        return right(self, jnp.concatenate([x[: x.shape[0] // devices]] * devices))

    return wrong


def counted_on_each(right: Any) -> Any:
    """Logits of tokens as a sum over devices that all have them."""
    return lambda self, *x: right(self, *x) * (1 if self.mesh is None else self.mesh.size)


def half_of_adapter(right: Any) -> Any:
    return lambda self: frozenset(path for path in right(self) if not path.endswith("lora_a"))


FAULTS: dict[str, Fault] = {
    # Algorithms.
    "first reward alone": Fault(("gdpo", "curriculum"), algorithms, "decoupled", first_reward),
    "token ratios": Fault(
        ("gspo", "update_epochs"), policy, "level_log_ratio", lambda right: lambda _, *x: right("token", *x)
    ),
    "one gradient for a sequence": Fault(
        ("gspo_token", "top_entropy"),
        policy,
        "level_log_ratio",
        lambda right: lambda _, *x: right("sequence_mean", *x),
    ),
    "short samples as heavy as long ones": Fault(
        ("luspo", "lora"),
        algorithms,
        "REDUCTIONS",
        lambda right: {**right, "sequence_total": reduce.sequence_mean},
    ),
    "groups in reinforce_plus_plus": Fault(
        ("reinforce_plus_plus", "updates"), algorithms, "batch_standardized", constant(algorithms.standardized)
    ),
    "deviation of each group": Fault(
        ("reinforce_plus_plus_baseline", "updates"), algorithms, "group_baseline", constant(algorithms.standardized)
    ),
    "a sample in its own baseline": Fault(("rloo", "lora"), algorithms, "leave_one_out", constant(algorithms.centered)),
    "length in dr_grpo": Fault(
        ("dr_grpo", "env"), algorithms, "ConstantLength", constant(lambda _: reduce.sequence_mean)
    ),
    "one clip range": Fault(("dapo", "update_epochs"), Clip, "__call__", with_surrogate(symmetric)),
    "gradient of the weight": Fault(("cispo", "update_epochs"), CISPOObjective, "__call__", differentiated_weight),
    "gate of the other sign": Fault(("sapo", "update_epochs"), SAPOObjective, "__call__", with_surrogate(swapped_gate)),
    "exponent of the other sign": Fault(
        ("vespo", "update_epochs"), VESPOObjective, "__call__", with_surrogate(swapped_weights)
    ),
    "no clip of log-ratios": Fault(("gmpo", "update_epochs"), GMPOObjective, "__call__", with_surrogate(never_clipped)),
    "half a teacher": Fault(
        ("distill", "lora"),
        rl_step,
        "add_teachers",
        lambda right: lambda batch, teacher, coef: right(batch, teacher, coef / 2),
    ),
    "rewards without a discount": Fault(
        ("ppo", "env"),
        returns,
        "gae",
        lambda right: lambda *x, gamma, lam: right(*x, gamma=1.0, lam=lam),
    ),
    "values that are not clipped": Fault(
        ("ppo", "update_epochs"),
        ValueLoss,
        "__call__",
        lambda right: lambda self, *x: right(dataclasses.replace(self, clip=None), *x),
    ),
    "values after the token": Fault(
        ("ppo", "lora"), Critic, "values", lambda right: lambda self, batch: np.roll(right(self, batch), -1, axis=1)
    ),
    "tokens in place of turns": Fault(("gae_level", "updates"), returns, "turn_gae", lambda _: returns.gae),
    "no time for the critic": Fault(("warmup", "lora"), Cluster, "warming_up", constant(property(lambda _: False))),
    # Options of algorithms.
    "clip for a surrogate": Fault(("surrogate", "updates"), algorithms, "_surrogate_of", constant(lambda _: CLIP)),
    "deviation of the group": Fault(
        ("advantage_scale", "lora"), algorithms, "batch_scaled", constant(algorithms.standardized)
    ),
    "no advantage of one's own": Fault(
        ("advantage", "lora"), algorithms, "given_advantage", constant(lambda *_: standardized)
    ),
    "no loss of one's own": Fault(
        ("loss", "updates"), algorithms, "loss_of", constant(lambda section: algorithms._policy_loss(section))
    ),
    "no dual clip": Fault(("dual_clip", "updates"), Clip, "__call__", with_surrogate(without_dual_clip)),
    "far samples are learned from": Fault(
        ("off_policy_mask", "lora"), policy, "off_policy_mask", constant(lambda _, advantages, *__: advantages > -9)
    ),
    "no entropy bonus": Fault(
        ("entropy_coef", "updates"),
        algorithms,
        "OF_LOSS",
        lambda right: tuple(name for name in right if name != "entropy_coef"),
    ),
    "a bonus that stays": Fault(("entropy_target", "updates"), EntropyControl, "observe", constant(lambda *_: None)),
    "reward penalised with the wrong sign": Fault(
        ("kl_in", "top_entropy"), RewardKL, "__call__", lambda right: lambda *x: -right(*x)
    ),
    "the whole square": Fault(
        ("kl_estimator", "update_epochs"),
        algorithms,
        "ESTIMATORS",
        lambda right: {**right, "k2": lambda *x: 2 * right["k2"](*x)},
    ),
    "standing reference": Fault(("agent", "reference"), Reference, "refresh", constant(lambda *_: None)),
    "importance weights all 1": Fault(("importance_sampling", "truncated"), ImportanceSampling, "__call__", unweighted),
    "weights cut in place of masked": Fault(("mask", "lora"), ImportanceSampling, "__call__", with_bound("truncate")),
    "a token masked for its sequence": Fault(("reject", "lora"), ImportanceSampling, "__call__", with_bound("mask")),
    "ratios of one's own": Fault(
        ("old_logps", "update_epochs"),
        rl_step,
        "compute_logps",
        lambda right: lambda *x, old_logps, **more: right(*x, old_logps="self", **more),
    ),
    "cut samples are learned from": Fault(
        ("agent", "truncated"),
        rl_step,
        "not_cut",
        constant(lambda groups_P: np.ones((len(groups_P), len(groups_P[0])), bool)),
    ),
    "lowest entropies": Fault(
        ("top_entropy", "kl_in"),
        rl_step,
        "top_entropy",
        lambda right: lambda parts, entropies, share: right(parts, [-one for one in entropies], share),
    ),
    "teacher pushed away": Fault(
        ("teachers", "truncated"),
        rl_step,
        "add_teachers",
        lambda right: lambda batch, teacher, coef: right(batch, teacher, -coef),
    ),
    "first teacher alone": Fault(("teacher_column", "lora"), Teachers, "logps", first_teacher),
    # Conversations.
    "a token of the environment": Fault(("env", "lora"), Transcript, "add_turn", after_the_last_turn),
    "a result of a tool": Fault(("tools", "updates"), Transcript, "add", replies_are_sampled),
    "turns counted as samples": Fault(
        ("split_turns", "lora"), reduce, "sample_counts", lambda right: lambda w, s, _: right(w, s, None)
    ),
    "rewards at the end": Fault(
        ("turn_advantages", "lora"), rl_step, "turn_advantages", lambda right: lambda *x: right(*x[:2], {})
    ),
    "rows counted as samples": Fault(
        ("agent", "teachers"), reduce, "sample_counts", lambda right: lambda w, s, _: right(w, s, None)
    ),
    # Sampling and updates.
    "stale samples without weights": Fault(("asynchronous", "lora"), ImportanceSampling, "__call__", unweighted),
    "samples in flight without weights": Fault(
        ("in_flight", "lora"), RLSection, "weighs_samples", constant(property(lambda _: False))
    ),
    "useless groups": Fault(
        ("refill", "lora"), collector, "filter_of", lambda right: lambda *x: lambda rewards: ~right(*x)(rewards)
    ),
    "pass rates that stay": Fault(("curriculum", "lora"), sampler.Curriculum, "seen", without_rates),
    "another temperature": Fault(("temperature", "lora"), objective, "token_stats", one_temperature),
    "a grammar without weights": Fault(("grammar", "lora"), ImportanceSampling, "__call__", unweighted),
    "one part alone": Fault(("updates", "lora"), rl_step, "_order", constant(lambda parts, *_: iter([0] * parts))),
    "one epoch": Fault(("update_epochs", "lora"), rl_step, "_order", constant(lambda parts, *_: iter(range(parts)))),
    "evaluations that are drawn": Fault(("eval_dataset", "lora"), posttrain.config.rollout, "GREEDY", constant({})),
    "score of the first token": Fault(
        ("model", "lora"), ModelReward, "_reduced", lambda _: lambda self, scores, tokens, start: scores[0]
    ),
    # Models, optimisers and devices.
    "another direction": Fault(("truncated", "muon"), muon, "orthogonalized", constant(lambda x, *_: x)),
    "rates of adam": Fault(
        ("truncated", "lion"),
        transformations.optax,
        "lion",
        constant(lambda rate, **_: transformations.optax.adam(rate)),
    ),
    "rates that are not relative": Fault(
        ("truncated", "adafactor"), transformations, "_adafactor", without_parameter_scale
    ),
    "gradients that are not clipped": Fault(("kl_in", "fn"), programs, "clipped", constant(lambda grads, *_: grads)),
    "heads that are not clipped": Fault(("truncated", "qk_clip"), programs, "clip_factors", constant(lambda *_: {})),
    "experts of one's own": Fault(
        ("asynchronous", "record_routing"),
        importlib.import_module("posttrain.rl.assemble"),
        "_sample",
        experts_unread,
    ),
    "no pictures": Fault(("truncated", "vision"), Trainer, "_arguments", without_pictures),
    "half an adapter": Fault(("truncated", "lora"), ModelWeights, "trainable", half_of_adapter),
    "scales of 8 bits": Fault(("lora", "rollout.quantize"), quantize, "quantized", with_larger_scales),
    "drafted tokens with other logps": Fault(("lora", "speculative"), speculative, "_joined", with_drafts_unread),
    "drafts that do not learn": Fault(("truncated", "speculative"), DrafterLearner, "step", constant(lambda *_: {})),
    "values lost in 8 bits": Fault(("lora", "cache_dtype"), KVCache, "rounded", without_values),
    "old weights elsewhere": Fault(("lora", "placement"), ReshardedReplica, "update", constant(lambda *_: (0, 0))),
    "a base with its adapter": Fault(
        ("reference.model", "truncated"), reference, "without_adapter", constant(lambda weights: weights)
    ),
    "masters that stand still": Fault(("truncated", "dtype"), Optimizer, "_updated", without_new_masters),
    "rows of the first device on each": Fault(("truncated", "fsdp"), VocabSharding, "gathered", first_rows_alone),
    "tokens chosen on each device": Fault(("truncated", "tensor"), VocabSharding, "chosen", counted_on_each),
    "gradient of one device": Fault(("lora", "data"), objective, "part_of_sum", constant(lambda x, *_: x)),
}
"""Faults by what is wrong."""
