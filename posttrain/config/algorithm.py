"""Algorithms of RL stages: one section for each kind, with its own fields and their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, get_args

from pydantic import Field

from posttrain.config.base import Flag, Section, with_kind
from posttrain.config.locator import Named, UserObject
from posttrain.config.rollout import CriticSection

Level = Literal["token", "sequence_mean", "sequence_sum"]
"""Level of ratios and weights, see `ClippedSection.ratio`."""
OldLogps = Literal["self", "trainer", "sampler"]
"""Sources of the log-probabilities of pi_old, see `AlgorithmSection.old_logps`."""
ZeroAdvantage = Literal["skip", "update"]


class ImportanceSection(Section):
    """Importance sampling weights pi_old / pi_behaviour of the surrogate, for samples from another policy than the
    trainer's."""

    apply: Literal["auto", "always", "never"] = "auto"
    """Condition for weights. `auto`: if the sampler's distribution differs from the trainer's: top-k, top-p, min-p,
    penalties, logit bias, allowed tokens, `rollout.quantize`, `rollout.cache_dtype` or `asynchronous`."""
    level: Level = "token"
    """Level of the weights: per token, or per sequence as exp of the mean (geometric) or sum of its log-ratios."""
    bound: Literal["truncate", "mask", "reject"] = "truncate"
    """Treatment of weights beyond `low` and `high`: `truncate` to the bound (TIS), `mask` the token with weight 0 (MIS;
    with a `level` of sequences the sequence), or `reject` every sequence with such a token."""
    low: Annotated[float, Field(ge=0, lt=1)] | None = None
    high: Annotated[float, Field(gt=1)] | None = 2.0


# --- surrogates -------------------------------------------------------------------------------------------------------


class Temperatures(Section):
    """Fields of the soft gate of SAPO, arXiv:2511.20347."""

    temperature_positive: Annotated[float, Field(gt=0)] = 1.0
    """Temperature for positive advantages; a larger one bounds the ratio more."""
    temperature_negative: Annotated[float, Field(gt=0)] = 1.05


class SequenceWeights(Section):
    """Fields of the weights w^k exp(rate (1 - w)) of VESPO, arXiv:2602.10693."""

    k_positive: Annotated[float, Field(gt=0)] = 2.0
    """Exponent k of the weight w^k exp(rate (1 - w)) for positive advantages."""
    k_negative: Annotated[float, Field(gt=0)] = 3.0
    rate_positive: Annotated[float, Field(gt=0)] = 3.0
    rate_negative: Annotated[float, Field(gt=0)] = 2.0


class CISPOSurrogate(Section):
    """Clipped importance weights on log-probabilities, arXiv:2506.13585; it reads `clip_high` alone."""

    kind: Literal["cispo"] = "cispo"


class SAPOSurrogate(Temperatures):
    """Soft gate in place of the clip, arXiv:2511.20347."""

    kind: Literal["sapo"] = "sapo"


class VESPOSurrogate(SequenceWeights):
    """Weights of sequences in place of ratios, arXiv:2602.10693."""

    kind: Literal["vespo"] = "vespo"


class GMPOSurrogate(Section):
    """Geometric mean of ratios, arXiv:2507.20673, whose clip bounds are of log-ratios."""

    kind: Literal["gmpo"] = "gmpo"


Surrogate = CISPOSurrogate | SAPOSurrogate | VESPOSurrogate | GMPOSurrogate

# --- fields whose value depends on the kind ---------------------------------------------------------------------------

Filter = Annotated[
    Named | None,
    Field(
        description="Groups to learn from: those with different rewards (`mixed`), or those for which a function of "
        "rewards_PG, given as `advantage`, returns true; by default all. They alone count in the loss's mean."
    ),
]
KLCoef = Annotated[float, Field(ge=0, description="Coefficient of the KL from the reference; 0: none.")]
KLBiasCorrection = Annotated[
    Flag,
    Field(
        description="Multiply the KL by the ratio pi / pi_old, so that its gradient is that of KL(policy || reference);"
        " approximate with `ratio: sequence_mean`. arXiv:2512.02556."
    ),
]
ClipLow = Annotated[
    float, Field(gt=0, description="Lower clip bound: the ratio pi / pi_old is clipped to 1 - clip_low and above.")
]
ClipHigh = Annotated[
    float, Field(gt=0, description="Upper clip bound: the ratio pi / pi_old is clipped to 1 + clip_high and below.")
]
Ratio = Annotated[
    Level | Literal["sequence_mean_token"],
    Field(
        description="Level of the ratio: per token, or per sequence as exp of the mean (GSPO) or sum (RLOO) of its "
        "log-ratios; `sequence_mean_token` (GSPO-token) has the gradient of each token."
    ),
]
Reduce = Annotated[
    Literal["sequence_mean", "token_mean", "constant_length", "sequence_total"],
    Field(
        description="Reduction of the loss: mean over samples of token means (GRPO), mean over all tokens (DAPO), sum "
        "over tokens divided by the number of samples and by `sampling.max_tokens` (Dr. GRPO), or by the number of "
        "samples alone (LUSPO). A sample counts once, however many rows it has."
    ),
]
SCALE = "Deviation that advantages are divided by: of the group's rewards, of the batch's, or `none`."
Scale = Annotated[Literal["group", "batch", "none"], Field(description=SCALE)]


class AlgorithmSection(Section):
    """Fields of every algorithm."""

    loss: UserObject | None = None
    """Loss in place of the algorithm's: a class, which is called with its settings, an object or a function, given as
    `advantage`; `posttrain check --loss` tests it."""
    filter: Filter = None
    kl_coef: KLCoef = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL: a term of the loss, or a penalty in the reward, of whole samples, with `ppo` per token."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """KL estimator, see `posttrain.losses.ratios`. By default k3, which in the loss has the gradient of KL(policy ||
    reference) with `kl_bias_correction`; in the reward k1, the only one that has it there."""
    kl_bias_correction: KLBiasCorrection = True
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the entropy bonus; with `entropy_target` its start."""
    entropy_target: Annotated[float, Field(gt=0)] | None = None
    """Mean entropy in nats per token to keep: the coefficient of the bonus rises by `entropy_step` after a step below
    it and falls else, and acts only at or below it. arXiv:2505.22312."""
    entropy_step: Annotated[float, Field(gt=0)] = 0.005
    """Change of the coefficient after each batch of rollouts, with `entropy_target`."""
    reduce: Reduce
    off_policy_mask: Annotated[float, Field(gt=0)] | None = None
    """Largest mean of log(pi_behaviour / pi) in nats per token: samples of negative advantage beyond it are not learned
    from. arXiv:2512.02556."""
    top_entropy: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of tokens to learn from, those of highest entropy in the batch. arXiv:2506.01939; by default all."""
    truncated: Literal["keep", "mask"] = "keep"
    """Samples whose last answer was cut, at `sampling.max_tokens` or `row_tokens`: `mask` leaves them out of the loss,
    but not out of their group's mean. arXiv:2503.14476."""
    old_logps: Literal["auto", OldLogps] = "auto"
    """Source of the log-probabilities of pi_old. `self`: the same forward pass, so that the ratio is exactly 1, for a
    single update per batch of rollouts; `trainer`: a forward pass before the first update; `sampler`: the rollout
    engine's, which differ by rounding, enough to clip GSPO and RLOO in bfloat16. `auto`: `self`, or `trainer` where
    that is wrong: with several `updates` or `update_epochs`, and with teachers and samples of another policy."""
    importance_sampling: ImportanceSection = ImportanceSection()
    """Importance sampling for samples from another policy than the trainer's."""
    zero_advantage: ZeroAdvantage = "skip"
    """Steps whose advantages are all 0 (no group has different rewards): `skip` the update, or `update` with KL
    penalty, entropy bonus, momentum and weight decay alone."""

    @property
    def compares(self) -> bool:
        """True if samples of a prompt are compared with each other."""
        return True

    @property
    def of_turns(self) -> str | None:
        """Field that is set and acts on the turns of conversations alone."""
        return None

    def _mistakes(self) -> Iterator[str]:
        """Refuse values that another one of the kind leaves without effect."""
        plain = type(self).model_fields
        changed = [name for name in plain if getattr(self, name) != plain[name].default]
        if "entropy_step" in changed and self.entropy_target is None:
            yield f"entropy_step={self.entropy_step} has no effect without entropy_target"
        if "kl_bias_correction" in changed and self.kl_in == "reward":
            yield "kl_bias_correction has no effect with kl_in: reward, where nothing is differentiated"
        if self.kl_in == "reward" and self.kl_coef <= 0:
            yield f"kl_in=reward with kl_coef={self.kl_coef:g} has no effect; set kl_coef above 0"
        if len(several := [name for name in OF_ADVANTAGES if name in changed]) > 1:
            yield f"{' and '.join(several)} each choose the advantages; remove all but one"
        of_reward = ("kl_coef", "kl_estimator") if self.kl_in == "reward" else ()
        unread = [name for name in changed if name in OF_LOSS and name not in of_reward]
        if self.loss is not None and unread:
            yield f"{', '.join(unread)} without effect on a loss of your own; remove it, or loss"


class ClippedSection(AlgorithmSection):
    """Fields of algorithms with the clipped ratio of PPO."""

    surrogate: Annotated[Annotated[Surrogate, Field(discriminator="kind")], with_kind(Surrogate)] | None = None
    """Objective as a function of ratio and advantage in place of PPO's clip: `cispo`, `sapo`, `vespo` or `gmpo`, as in
    the algorithms of these names."""
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound of the ratio for negative advantages, arXiv:1912.09729; at least 1 + clip_high."""
    ratio: Ratio = "token"


class RewardAdvantages(AlgorithmSection):
    """Fields of algorithms whose advantages come from rewards alone."""

    advantage: UserObject | None = None
    """Advantage function in place of the algorithm's: `file.py:name`, with settings `{fn: file.py:name, ...}`, or in
    Python the function. It takes those of rewards_PG, parts_PG (by name of the reward), weights and lengths_PG that it
    names; a single parameter of another name is rewards_PG."""
    turn_advantages: Flag = False
    """Advantages per turn with `env`: the sum of rewards from the turn on, standardised over the samples of the group
    that have this turn, in place of one advantage for each sample."""

    @property
    def of_turns(self) -> str | None:
        return "turn_advantages" if self.turn_advantages else None


class ScaledAdvantages(RewardAdvantages):
    """Fields of algorithms whose advantages are rewards less the group's mean."""

    advantage_scale: Scale = "group"


OF_ADVANTAGES = ("advantage", "advantage_scale", "turn_advantages")
"""Fields that choose the advantage function."""
OF_LOSS = (
    *("kl_coef", "kl_estimator", "kl_bias_correction", "entropy_coef", "entropy_target", "reduce", "off_policy_mask"),
    *("surrogate", "clip_low", "clip_high", "dual_clip", "ratio"),
    *Temperatures.model_fields,
    *SequenceWeights.model_fields,
)
"""Fields of the algorithm's own loss."""

# --- kinds ------------------------------------------------------------------------------------------------------------


class GRPO(ClippedSection, ScaledAdvantages):
    """GRPO, arXiv:2402.03300: k3 against the reference with coefficient 0.04 (section 4.2); PPO's clip range."""

    kind: Literal["grpo"] = "grpo"
    kl_coef: KLCoef = 0.04
    reduce: Reduce = "sequence_mean"


class DrGRPO(ClippedSection, ScaledAdvantages):
    """Dr. GRPO, arXiv:2503.20783: neither the group's deviation nor the answer's length divides, no KL."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    advantage_scale: Scale = "none"
    reduce: Reduce = "constant_length"


class DAPO(ClippedSection, ScaledAdvantages):
    """DAPO, arXiv:2503.14476: higher upper clip bound, token-level mean, groups with different rewards, no KL."""

    kind: Literal["dapo"] = "dapo"
    filter: Filter = "mixed"
    clip_high: ClipHigh = 0.28
    reduce: Reduce = "token_mean"


class BNPO(ClippedSection, ScaledAdvantages):
    """GRPO with the mean over all tokens of the batch, no KL; the loss type `bnpo` of TRL."""

    kind: Literal["bnpo"] = "bnpo"
    reduce: Reduce = "token_mean"


class GSPO(ClippedSection, ScaledAdvantages):
    """GSPO, arXiv:2507.18071: one length-normalised ratio per sequence, bounds of section 5.1, no KL."""

    kind: Literal["gspo"] = "gspo"
    kl_bias_correction: KLBiasCorrection = False
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    ratio: Ratio = "sequence_mean"
    reduce: Reduce = "sequence_mean"


class GSPOToken(ClippedSection, ScaledAdvantages):
    """GSPO-token, arXiv:2507.18071 eq. 14: the ratio of GSPO, with a gradient per token, for advantages per token."""

    kind: Literal["gspo_token"] = "gspo_token"
    kl_bias_correction: KLBiasCorrection = False
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    ratio: Ratio = "sequence_mean_token"
    reduce: Reduce = "sequence_mean"


class LUSPO(ClippedSection, ScaledAdvantages):
    """LUSPO, arXiv:2602.05261: GSPO with each sequence weighted by its length."""

    kind: Literal["luspo"] = "luspo"
    kl_bias_correction: KLBiasCorrection = False
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    ratio: Ratio = "sequence_mean"
    reduce: Reduce = "sequence_total"


class GMPO(ScaledAdvantages):
    """GMPO, arXiv:2507.20673: geometric mean of ratios, clipped to e^-0.4 .. e^0.4 per token, no KL."""

    kind: Literal["gmpo"] = "gmpo"
    clip_low: ClipLow = 0.4
    clip_high: ClipHigh = 0.4
    reduce: Reduce = "sequence_mean"


class CISPO(ScaledAdvantages):
    """CISPO, arXiv:2506.13585: clipped importance weights on log-probabilities, ratios up to 5, arXiv:2510.13786."""

    kind: Literal["cispo"] = "cispo"
    clip_high: ClipHigh = 4.0
    ratio: Ratio = "token"
    reduce: Reduce = "token_mean"


class SAPO(ScaledAdvantages, Temperatures):
    """SAPO, arXiv:2511.20347: a soft gate in place of the clip, no KL."""

    kind: Literal["sapo"] = "sapo"
    ratio: Ratio = "token"
    reduce: Reduce = "sequence_mean"


class VESPO(ScaledAdvantages, SequenceWeights):
    """VESPO, arXiv:2602.10693: sequence weights in place of ratios, no KL."""

    kind: Literal["vespo"] = "vespo"
    reduce: Reduce = "token_mean"


class RLOO(ClippedSection, ScaledAdvantages):
    """RLOO, arXiv:2402.14740: a whole completion is one action, the mean of the others its baseline, no KL."""

    kind: Literal["rloo"] = "rloo"
    advantage_scale: Annotated[Literal["batch", "none"], Field(description=SCALE)] = "none"
    ratio: Ratio = "sequence_sum"
    reduce: Reduce = "sequence_mean"


class ReinforcePlusPlus(ClippedSection, RewardAdvantages):
    """REINFORCE++, arXiv:2501.03262: rewards standardised over the batch, without groups."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    reduce: Reduce = "token_mean"

    @property
    def compares(self) -> bool:
        return self.advantage is not None


class ReinforcePlusPlusBaseline(ClippedSection, RewardAdvantages):
    """REINFORCE++-baseline, arXiv:2501.03262: rewards less the group's mean, standardised over the batch."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    reduce: Reduce = "token_mean"


class GDPO(ClippedSection, RewardAdvantages):
    """GDPO, arXiv:2601.05242: GRPO with each reward standardised within the group before the sum."""

    kind: Literal["gdpo"] = "gdpo"
    kl_coef: KLCoef = 0.04
    reduce: Reduce = "sequence_mean"


class PPO(ClippedSection):
    """PPO, arXiv:1707.06347: clipped surrogate with an advantage per token, from the values of a critic."""

    kind: Literal["ppo"] = "ppo"
    reduce: Reduce = "token_mean"
    critic: CriticSection = CriticSection()
    """Value model."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount per token, or per turn."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Weight of longer returns in the advantages (GAE, arXiv:1506.02438)."""
    gae_level: Literal["token", "turn"] = "token"
    """Step of `gamma` and `gae_lambda` with `env`: a sampled token, or a turn, whose tokens share one advantage."""
    value_clip: Annotated[float, Field(gt=0)] = 0.2
    """Largest change of a value by the value loss."""

    @property
    def compares(self) -> bool:
        return False

    @property
    def of_turns(self) -> str | None:
        return "gae_level" if self.gae_level != "token" else None


class OnPolicyDistill(ClippedSection, ScaledAdvantages):
    """On-policy distillation, with `teachers`: the advantage of a token is log(teacher / student), so that the expected
    gradient is that of the reverse KL after each prefix. arXiv:2306.13649 with beta 1."""

    kind: Literal["distill"] = "distill"
    advantage_scale: Scale = "none"
    reduce: Reduce = "token_mean"


Kind = (
    GRPO
    | DrGRPO
    | DAPO
    | BNPO
    | GSPO
    | GSPOToken
    | LUSPO
    | GMPO
    | CISPO
    | SAPO
    | VESPO
    | RLOO
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | GDPO
    | PPO
    | OnPolicyDistill
)
AnyAlgorithm = Annotated[Annotated[Kind, Field(discriminator="kind")], with_kind(Kind)]
"""Section of one kind, or the word of a kind with its values."""
ALGORITHMS: Mapping[str, type[AlgorithmSection]] = {one.model_fields["kind"].default: one for one in get_args(Kind)}
"""Section of each kind of algorithm."""
