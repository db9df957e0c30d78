"""Causes of stages that sample, in the order in which they are told: what destroys or cuts answers comes before what
the rewards say of them, and this before the rate, the penalties and the data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from posttrain.config import OnlineSection, RLSection
from posttrain.diagnosis.causes import Cause, Check
from posttrain.diagnosis.evidence import Change, Evidence, RecordedSample, nan_mean
from posttrain.diagnosis.hacks import HACKS
from posttrain.diagnosis.words import count, shown_range, shown_text
from posttrain.reward.lab.cases import ANSWER_COLUMNS
from posttrain.rollout.trajectory import LIMITS
from posttrain.statistics import LEVEL, mean_interval

UNCHANGED_Z = 3.0
"""Standard errors below which a change of the reward counts as none: two in a hundred runs reach 2.3 by chance."""
CONSEQUENCES = (
    "answers_cut",
    "never_stops",
    "format_never_asked",
    "reward_constant",
    "sampling_too_cold",
    "too_easy",
    "too_hard",
    "kl_outweighs",
    "rate_too_small",
    "stale",
    "noisy_data",
    "little_signal",
    "evaluation_too_small",
    "overfitting",
)
"""All that a destroyed policy, or one that reads its prompts wrongly, shows as well."""


def section_of(evidence: Evidence) -> OnlineSection:
    assert isinstance(evidence.section, OnlineSection)
    return evidence.section


def rate_of(evidence: Evidence) -> float:
    """Learning rate of the stage, or the one that an optimizer takes by itself."""
    rate = section_of(evidence).optimizer.learning_rate
    return float(np.nanmax(evidence.column("learning_rate"))) if rate is None else rate


def reward_words(change: Change | None) -> str:
    """Change of the reward in words."""
    return "reward: too few steps to compare" if change is None else f"reward {change}"


def stands_still(evidence: Evidence) -> bool:
    """True if the reward has neither risen nor fallen, as far as its noise lets see."""
    change = evidence.change("reward")
    return change is not None and abs(change.z) < UNCHANGED_Z


FALL_Z = 6.0
"""A fall is looked for over the whole stage, so that its standard errors must be more than those of one comparison."""
LEAST_FALL = 0.5
"""Least share of the reward above the lowest that is lost."""
FAR_KL = 1.0
"""Nats per token from the reference; trained policies end at 0.01 to 0.5."""
OTHER_ENTROPY = 3.0
"""Factor of the entropy, up or down, where no KL is measured."""


def rate_too_large(evidence: Evidence) -> Cause | None:
    """The policy was destroyed: the reward has fallen for good, and the policy is far from where it began."""
    rewards, errors = evidence.column("reward"), evidence.column("reward_stderr")
    if np.isfinite(rewards).sum() < 3:
        return None
    # The first step is that of the initial policy; a policy may also be destroyed after it has learned something.
    means = [nan_mean(rewards[i : i + 3]) for i in range(max(1, len(rewards) - 4))]
    best = int(np.nanargmax(means))
    before = max(float(rewards[0]), means[best])
    last = max(2, len(rewards) // 5)
    after, low = nan_mean(rewards[-last:]), min(0.0, float(np.nanmin(rewards)))
    noise = math.hypot(nan_mean(errors[: best + 3]), nan_mean(errors[-last:]) / math.sqrt(last))
    noise = noise if noise > 0 else 1e-9
    if before - after < LEAST_FALL * (before - low) or (before - after) / noise < FALL_Z:
        return None
    kl, entropy = evidence.column("kl"), evidence.column("entropy")
    farthest = float(np.nanmax(kl)) if np.isfinite(kl).any() else math.nan
    ratio = nan_mean(entropy[-last:]) / max(float(entropy[0]), 1e-6)
    if not (farthest > FAR_KL or not 1 / OTHER_ENTROPY < ratio < OTHER_ENTROPY):
        return None
    # The first step whose reward is nearer to the end than to the beginning.
    when = next(i for i in range(len(rewards)) if i >= best and rewards[i] < (before + after) / 2)
    step, rate = evidence.steps[when]["step"], rate_of(evidence)
    far = "" if math.isnan(farthest) else f"KL to the start up to {farthest:.3g} nats a token, "
    norms = evidence.column("grad_norm")
    return Cause(
        name="rate_too_large",
        summary=f"the policy was destroyed: reward {before:.2f} -> {after:.2f} from step {step} on, {far}"
        f"at optimizer.learning_rate={rate:g}",
        evidence=[
            f"entropy {entropy[0]:.2f} -> {nan_mean(entropy[-last:]):.2f} nats; grad_norm up to {np.nanmax(norms):.3g}",
            f"the rewards told samples apart before: {before:.2f}, now {after:.2f}; they are not what has changed",
        ],
        advice=f"begin anew, in another output, with optimizer.learning_rate={rate / 30:.1g} or lower",
        explains=CONSEQUENCES,
        proof={"optimizer.learning_rate": rate / 30},
    )


ENTROPY_GROWTH = 1.5
LEAST_ENTROPY_GROWTH = 0.3
"""Nats per token."""


def entropy_outweighs(evidence: Evidence) -> Cause | None:
    """The entropy bonus is what is learned: entropy grows, the reward does not."""
    section = section_of(evidence)
    bonus = section.algorithm.entropy_coef if isinstance(section, RLSection) else 0.0
    entropy, reward = evidence.change("entropy"), evidence.change("reward")
    if not bonus or entropy is None or reward is None or reward.z >= UNCHANGED_Z:
        return None
    if not entropy.rises(max(LEAST_ENTROPY_GROWTH, (ENTROPY_GROWTH - 1) * entropy.before)):
        return None
    return Cause(
        name="entropy_outweighs",
        summary=f"the entropy bonus outweighs the reward: entropy {entropy.before:.2f} -> {entropy.after:.2f} nats at "
        f"algorithm.entropy_coef={bonus:g}, {reward_words(reward)}",
        evidence=[f"groups with different rewards: {evidence.mean('frac_mixed'):.0%}"],
        advice=f"algorithm.entropy_coef={bonus / 10:g} or 0; entropy_target keeps entropy without a fixed pull",
        explains=("rate_too_large", *CONSEQUENCES),
        proof={"algorithm.entropy_coef": 0.0},
    )


PASSES_LITTLE = 0.2
"""Pass rate at the start below which a wrong form of the prompts is a likely reason."""


def wrong_template(evidence: Evidence) -> Cause | None:
    """The prompts are rendered otherwise than those that the model was trained on."""
    data = evidence.section.datasets[0]
    if data.chat is None or _first_pass_rate(evidence) > PASSES_LITTLE or evidence.source_tokenizer is None:
        return None
    form = evidence.source_tokenizer.form
    if form is None or data.chat == form.chat:
        return None
    before, now = (
        ("with the chat template", "as plain text") if form.chat else ("as plain text", "with the chat template")
    )
    return Cause(
        name="wrong_template",
        summary=f"the prompts are rendered {now}, and the model was trained on prompts {before}",
        evidence=[
            f"pass rate {_first_pass_rate(evidence):.1%} in the first steps",
            f"{evidence.mean('completions/clipped_ratio'):.0%} of the answers are cut",
            *_first_sample(evidence),
        ],
        advice=f"dataset.chat={str(form.chat).lower()}, as the model was trained; null takes the model's own form",
        explains=CONSEQUENCES,
    )


def _first_pass_rate(evidence: Evidence) -> float:
    return evidence.mean("pass_rate", slice(evidence.part))


def _first_sample(evidence: Evidence) -> list[str]:
    if not evidence.records:
        return []
    return [f"first sample: {shown_text(evidence.text_of(evidence.records[0]))}"]


MOSTLY = 0.5
"""Share of cut answers that leaves most rewards to unfinished text."""
LONGEST = 0.95
"""Share of the data's answers that must have room."""
BEGINS_RIGHT = 0.15
"""Share of cut answers that begin with the right one, which only a missing end explains: by chance none does."""


def answers_cut(evidence: Evidence) -> Cause | None:
    """Most answers are cut: there is no room for the data's own, or for what the model writes before it answers."""
    section = section_of(evidence)
    limit, cut = section.sampling.max_tokens, _cut_ratio(evidence)
    if cut is None:
        return None
    need = _tokens_needed(evidence)
    too_long = need is not None and need > limit
    if not too_long and cut < MOSTLY:
        return None
    if not too_long and _begins_right(evidence) >= BEGINS_RIGHT:
        return None  # the answer is there: the model never stops
    wanted = need if too_long else 2 * limit
    room = f", and {LONGEST:.0%} of the data's own answers need up to {need}" if too_long else ""
    return Cause(
        name="answers_cut",
        summary=f"{cut:.0%} of the answers are cut at sampling.max_tokens={limit}{room}",
        evidence=_paid_when_cut(evidence),
        advice=f"sampling.max_tokens={wanted} (and row_tokens for prompt and answer), or see in the samples why "
        "they do not end",
        explains=("too_hard", "little_signal", "sampling_too_cold", "rate_too_small", "format_never_asked"),
    )


def never_stops(evidence: Evidence) -> Cause | None:
    """The model answers and goes on: its end was never trained, or another stop token was."""
    cut, limit = _cut_ratio(evidence), section_of(evidence).sampling.max_tokens
    if cut is None or cut < MOSTLY:
        return None
    need, right = _tokens_needed(evidence), _begins_right(evidence)
    if right < BEGINS_RIGHT or (need is not None and need > limit):
        return None
    return Cause(
        name="never_stops",
        summary=f"the model never stops: {cut:.0%} of its answers reach sampling.max_tokens={limit}, and the data's "
        f"need {need}",
        evidence=[
            f"{right:.0%} of the cut answers begin with the right one, and go on",
            *_paid_when_cut(evidence),
            *_first_sample(evidence),
        ],
        advice="give the token that ends an answer (model.stop_tokens, or sampling.stop), or train its end: SFT rows "
        "that end, with the template of the model (dataset.chat)",
        explains=("too_hard", "little_signal", "sampling_too_cold", "rate_too_small", "format_never_asked"),
    )


def _cut_ratio(evidence: Evidence) -> float | None:
    """Share of answers that are cut, in the first steps and still at the end; None where few are, or it was later that
    they grew, for which the reward may be the reason."""
    section = section_of(evidence)
    if isinstance(section, RLSection) and section.converses:
        return None  # a turn may be cut and the conversation go on
    part = evidence.part
    first, last = (evidence.mean("completions/clipped_ratio", part) for part in (slice(part), slice(-part, None)))
    return last if first >= MOSTLY / 2 and last >= MOSTLY / 2 else None


def _tokens_needed(evidence: Evidence) -> int | None:
    """Tokens of the longest of the data's own answers but 5 %, with their end; None where they are not known."""
    texts, tokenizer = evidence.answers.texts, evidence.tokenizer
    if not texts or tokenizer is None:
        return None
    return math.ceil(float(np.quantile([len(tokenizer.encode(text)) + 1 for text in texts], LONGEST)))


def _begins_right(evidence: Evidence) -> float:
    """Share of the cut answers that begin with the right one; 0 where that is not known."""
    known = [(sample, evidence.answers.text_of(sample.row)) for sample in evidence.records if sample.is_cut]
    pairs = [(sample, answer.strip()) for sample, answer in known if answer is not None and answer.strip()]
    if not pairs:
        return 0.0
    return float(np.mean([evidence.text_of(sample).strip().startswith(answer) for sample, answer in pairs]))


def _paid_when_cut(evidence: Evidence) -> list[str]:
    cut = np.asarray([sample.reward for sample in evidence.records if sample.is_cut], np.float64)
    ended = np.asarray([sample.reward for sample in evidence.records if not sample.is_cut], np.float64)
    if not cut.size:
        return []
    line = f"mean reward of cut answers {nan_mean(cut):.3g} ({len(cut):,})"
    return [f"{line}, of ended ones {nan_mean(ended):.3g} ({len(ended):,})" if ended.size else f"{line}; none ends"]


UNFINISHED = 0.5


def conversations_unfinished(evidence: Evidence) -> Cause | None:
    """Most conversations end at a limit, before the environment is done."""
    last = slice(-evidence.part, None)
    if math.isnan(evidence.mean("env/unfinished", last)):
        return None
    unfinished = max(evidence.mean("env/unfinished", last), evidence.mean("completions/clipped_ratio", last))
    if unfinished <= UNFINISHED:
        return None
    shares = {limit: evidence.mean(f"env/unfinished_{limit}", slice(-evidence.part, None)) for limit in LIMITS}
    limit = max(shares, key=lambda name: nan_mean(np.asarray([shares[name], 0.0])))
    setting = "sampling.max_tokens" if limit == "max_tokens" else limit
    return Cause(
        name="conversations_unfinished",
        summary=f"{unfinished:.0%} of the conversations end before the environment is done, or in a cut answer",
        evidence=[f"{share:.0%} at {name}" for name, share in shares.items() if share > 0],
        advice=f"raise {setting}, or see in the samples why they do not end; those at a limit have the reward "
        "`unfinished`",
        explains=("too_hard", "little_signal"),
    )


DEAD = 0.5
"""Share of the steps without any group of different rewards, beyond which the stage has learned next to nothing."""
ALIKE = 1.5
"""Different texts in a group, of 3 or more, below which the samples are alike."""
SAMPLED_AT = 0.8
"""Least temperature at which equal samples say that the model is sure."""
COLD_MIXED = 0.25
"""Share of groups with different rewards below which alike samples are what is missing."""
GOOD = 0.95


def no_signal(evidence: Evidence) -> float | None:
    """Share of the steps in which no group has two different rewards; None where most have some."""
    mixed = evidence.column("frac_mixed")
    mixed = mixed[np.isfinite(mixed)]
    if len(mixed) < 2:
        return None
    dead = float(np.mean(mixed == 0.0))
    return dead if dead > DEAD else None


def _without_update(evidence: Evidence) -> str:
    """Beginning of what is said of steps without a signal."""
    mixed, skipped = evidence.column("frac_mixed"), evidence.column("update_skipped")
    steps = f"{int((mixed == 0.0).sum())} of {len(mixed)} steps"
    made = "nothing was learned at all" if len(skipped) and (skipped == 1.0).all() else "nothing was learned"
    return f"{made} in {steps}: no group had two different rewards"


def _little_words(evidence: Evidence) -> str:
    if no_signal(evidence) is not None:
        return _without_update(evidence)
    return f"little to learn from: only {evidence.mean('frac_mixed'):.0%} of the groups have different rewards"


def format_never_asked(evidence: Evidence) -> Cause | None:
    """The reward refuses the data's own right answers: it asks for a form that prompts and data do not have."""
    answers = evidence.answers
    if no_signal(evidence) is None or not answers.scored:
        return None
    right = answers.rewards[np.isfinite(answers.rewards)]
    if right.max() > _reward_range(evidence)[0] or _passes(evidence)[0]:
        return None
    if right.max() > 0:
        return None  # it pays all alike
    text = answers.texts[int(np.flatnonzero(np.isfinite(answers.rewards))[0])]
    passed, total = _passes(evidence)
    return Cause(
        name="format_never_asked",
        summary=f"{_without_update(evidence)}; the reward gives {right.max():g} to the data's own right answers",
        evidence=[
            f"{count(len(right), 'right answer')} of the data score {shown_range(right)}, such as {shown_text(text)}",
            f"{passed:,} of {total:,} recorded samples score more",
            *_first_sample(evidence),
        ],
        advice="the reward asks for a form that prompts and data do not have: change it (try it with posttrain "
        "reward), ask for the form in the prompt, or train it first with SFT",
        explains=("reward_constant", "too_hard", "too_easy", "sampling_too_cold", "little_signal"),
    )


def reward_constant(evidence: Evidence) -> Cause | None:
    """The reward gives every answer the same, right or wrong."""
    answers = evidence.answers
    wrong = answers.wrong[np.isfinite(answers.wrong)]
    if no_signal(evidence) is None or not answers.scored or not wrong.size:
        return None
    values = np.concatenate([answers.rewards[np.isfinite(answers.rewards)], wrong])
    lowest, highest = _reward_range(evidence)
    if np.ptp(values) > 0 or lowest != highest:
        return None
    return Cause(
        name="reward_constant",
        summary=f"{_without_update(evidence)}; the reward gives {values[0]:g} to right and to wrong answers",
        evidence=[
            f"{count(len(values), 'answer')} of the data and {len(evidence.records):,} samples all score {values[0]:g}"
        ],
        advice="the reward function tells nothing apart; examine it with posttrain reward",
        explains=("too_hard", "too_easy", "sampling_too_cold", "little_signal"),
    )


def sampling_too_cold(evidence: Evidence) -> Cause | None:
    """The samples of a group are the same text, so that there is nothing to compare."""
    section, change = section_of(evidence), evidence.change("reward")
    # A policy that has learned its task gives the same answers too: the first samples count, of a reward that stays.
    first = [sample for sample in evidence.records if sample.step <= max(3, evidence.num_steps / 3)]
    distinct = distinct_texts(evidence, first or evidence.records)
    little = no_signal(evidence) is not None or evidence.mean("frac_mixed") < COLD_MIXED
    if not little or (change is not None and change.z >= UNCHANGED_Z) or _first_pass_rate(evidence) >= GOOD:
        return None
    if section.group_size < 3 or distinct is None or distinct >= ALIKE:
        return None
    temperature, cold = section.sampling.temperature, _is_cold(section)
    advice = "sampling.temperature=1 (and no top_k, top_p or min_p)"
    if not cold:
        advice = (
            "a model whose samples differ: an earlier checkpoint, less SFT; or more samples with a higher temperature"
        )
    return Cause(
        name="sampling_too_cold",
        summary=f"{_little_words(evidence)}; the samples of a group are alike: {distinct:.2f} different texts in "
        f"{section.group_size} at sampling.temperature={temperature:g}",
        evidence=[f"entropy {evidence.mean('entropy'):.3g} nats a token", _passed_words(evidence)],
        advice=advice,
        explains=("too_hard", "too_easy", "little_signal", "rate_too_small"),
    )


def _is_cold(section: OnlineSection) -> bool:
    """True if the settings of sampling make the samples alike, whatever the model is sure of."""
    sampling = section.sampling
    return sampling.temperature < SAMPLED_AT or sampling.top_k == 1 or sampling.top_p < 0.5


def too_easy(evidence: Evidence) -> Cause | None:
    """The model solves the prompts before it is trained."""
    first = _first_pass_rate(evidence)
    if no_signal(evidence) is None or not first >= GOOD:
        return None
    return Cause(
        name="too_easy",
        summary=f"{_without_update(evidence)}; the task is too easy: {first:.1%} of the samples pass from the start",
        evidence=[_passed_words(evidence)],
        advice="harder prompts (a curriculum, or filter out those that always pass), or a stricter reward",
    )


def too_hard(evidence: Evidence) -> Cause | None:
    """The model never finds what the reward pays for."""
    if no_signal(evidence) is None or not _first_pass_rate(evidence) < PASSES_LITTLE:
        return None
    distinct, right = distinct_texts(evidence), evidence.answers.rewards
    size = section_of(evidence).group_size
    lines = [_passed_words(evidence)]
    if distinct is not None:
        lines.append(f"{distinct:.1f} different texts in a group of {size}: it does try")
    if evidence.answers.scored:
        lines.append(f"the data's own answers score {nan_mean(right):.2f}: the reward can be had")
    return Cause(
        name="too_hard",
        summary=f"{_without_update(evidence)}; the task is too hard for this model: pass rate "
        f"{evidence.mean('pass_rate'):.2%}",
        evidence=[*lines, *_first_sample(evidence)],
        advice="easier prompts first (curriculum), SFT on worked answers, a larger group_size, or a reward with steps "
        "between nothing and all",
        explains=("little_signal", "rate_too_small"),
    )


def distinct_texts(evidence: Evidence, records: Sequence[RecordedSample] | None = None) -> float | None:
    """Mean number of different completions in a recorded group; None without records."""
    groups = evidence.groups(records)
    return float(np.mean([len({sample.tokens for sample in group}) for group in groups])) if groups else None


def _reward_range(evidence: Evidence) -> tuple[float, float]:
    """Lowest and highest reward of a sample: of the records, else of the means of steps."""
    values = np.asarray([sample.reward for sample in evidence.records], np.float64)
    values = values if np.isfinite(values).any() else evidence.column("reward")
    return float(np.nanmin(values)), float(np.nanmax(values))


def _passes(evidence: Evidence) -> tuple[int, int]:
    """Recorded samples above `pass_above`, and all of them."""
    rewards = [sample.reward for sample in evidence.records if not math.isnan(sample.reward)]
    return sum(reward > section_of(evidence).pass_above for reward in rewards), len(rewards)


def _passed_words(evidence: Evidence) -> str:
    passed, total = _passes(evidence)
    if not total:
        return f"pass rate {evidence.mean('pass_rate'):.2%} (no records)"
    interval = mean_interval(np.arange(total) < passed)
    return f"{passed:,} of {total:,} recorded samples pass (95 %: {interval.low:.2%} to {interval.high:.2%})"


LEAST_UPDATES = 10
"""Updates before it is said that they do not move the policy."""
STILL_KL = 0.005
"""Nats per token from the start, below which the policy has not moved; rewards that grow come with 0.01 and more."""
MOVED_KL = 0.02
"""Nats per token of a policy that has learned something."""
SAME_ANSWERS = 0.95
"""Share of held-out answers at temperature 0 that training has not changed."""
HOLDS = 0.5
"""Least pull of the KL penalty in units of that of the advantages. The gradient of the penalty is about
`kl_coef` sqrt(2 KL) for each token, that of the surrogate its advantage, about 1 in a group of different rewards."""


def kl_outweighs(evidence: Evidence) -> Cause | None:
    """The KL penalty holds the policy where it began, against the reward."""
    section, kl = section_of(evidence), evidence.mean("kl", slice(-evidence.part, None))
    coef = (section.algorithm.kl_coef or 0.0) if isinstance(section, RLSection) else 0.0
    if not coef or math.isnan(kl) or _updates(evidence) < LEAST_UPDATES or not stands_still(evidence):
        return None
    signal = evidence.mean("frac_mixed")
    pull = coef * math.sqrt(2 * max(kl, 0.0)) / max(signal, 0.05)
    if pull < HOLDS or kl > FAR_KL:
        return None
    norms = evidence.column("grad_norm")
    return Cause(
        name="kl_outweighs",
        summary=f"the KL penalty outweighs the reward: its pull is {pull:.1f} times that of the advantages at "
        f"algorithm.kl_coef={coef:g}, and the KL stays at {kl:.2g} nats a token",
        evidence=[
            f"{reward_words(evidence.change('reward'))}; groups with different rewards: {signal:.0%}",
            f"grad_norm {norms[0]:.3g} at the first step, where the KL is 0, then {np.nanmedian(norms[1:]):.3g}",
        ],
        advice="algorithm.kl_coef=0.04, the default of grpo, or 0",
        explains=("rate_too_small", "evaluation_too_small", "little_signal", "noisy_data"),
        proof={"algorithm.kl_coef": 0.0},
    )


def rate_too_small(evidence: Evidence) -> Cause | None:
    """Many updates, and the policy is where it began."""
    updates = _updates(evidence)
    if updates < LEAST_UPDATES or no_signal(evidence) is not None or not stands_still(evidence):
        return None
    kl, same = evidence.mean("kl", slice(-evidence.part, None)), _same_answers(evidence)
    if not (kl < STILL_KL or (math.isnan(kl) and same is not None and same >= SAME_ANSWERS)):
        return None
    rate = rate_of(evidence)
    # The KL grows with the square of the distance.
    factor = 30.0 if math.isnan(kl) else min(max(math.sqrt(MOVED_KL / max(kl, 1e-12)), 10.0), 300.0)
    lines = [
        f"{reward_words(evidence.change('reward'))}; groups with different rewards: {evidence.mean('frac_mixed'):.0%}, "
        f"grad_norm {evidence.mean('grad_norm'):.3g}"
    ]
    if same is not None:
        lines.append(f"{same:.0%} of the held-out answers are the same as before training")
    moved = f"{same:.0%} of the held-out answers are the same" if math.isnan(kl) else f"KL to the start {kl:.1e} nats"
    return Cause(
        name="rate_too_small",
        summary=f"the policy has not moved: {moved} after {updates:,} updates at optimizer.learning_rate={rate:g}",
        evidence=lines,
        advice=f"optimizer.learning_rate={rate * factor:.1g}, and more if the KL stays below 0.01",
        explains=("evaluation_too_small", "noisy_data", "little_signal"),
        proof={"optimizer.learning_rate": rate * factor},
    )


def _updates(evidence: Evidence) -> int:
    """Steps with an update."""
    skipped = evidence.column("update_skipped")
    return int((~(skipped == 1.0)).sum())


def _same_answers(evidence: Evidence) -> float | None:
    """Share of held-out answers that are the same before and after; None without both."""
    both = [evidence.result.get(when, {}).get("samples") for when in ("before", "after")]
    if not all(both):
        return None
    pairs = list(zip(*both, strict=False))
    return float(np.mean([old["completion"] == new["completion"] for old, new in pairs]))


OLD = 3.0
"""Mean age of sampled tokens in updates; asynchronous runs learn well up to 2."""


def sampler_differs(evidence: Evidence) -> Cause | None:
    """The trainer gives the sampled tokens other probabilities than the sampler has drawn them with."""
    found, limit = (evidence.column(f"sampling/logp_difference/{name}") for name in ("mean", "limit"))
    over = found > limit
    if not over.any():
        return None
    first = int(np.flatnonzero(over)[0])
    return Cause(
        name="sampler_differs",
        summary=f"sampler and trainer disagree: log-probabilities of the sampled tokens differ by "
        f"{np.nanmax(found):.3g} on average, and {limit[first]:.2g} is the limit",
        evidence=[f"{int(over.sum())} of {len(found)} steps, the first one {evidence.steps[first]['step']}"],
        advice="the same precision and temperature in both: rollout.quantize=none, rollout.cache_dtype=compute, and an "
        "engine that serves the weights of now",
        explains=("rate_too_small", "little_signal"),
    )


def stale(evidence: Evidence) -> Cause | None:
    """The samples are from a policy of long ago."""
    age = evidence.mean("sampling/staleness/mean")
    change = evidence.change("reward")
    if not age >= OLD or change is None or change.z >= UNCHANGED_Z:
        return None
    oldest = np.nanmax(evidence.column("sampling/staleness/max"))
    return Cause(
        name="stale",
        summary=f"the samples are {age:.1f} updates old on average (up to {oldest:g})",
        evidence=[reward_words(change), f"clipped {evidence.mean('clip_ratio/region_mean'):.1%} of the tokens"],
        advice="fewer updates per batch of samples (updates, update_epochs), or a smaller lag (asynchronous)",
    )


SURE_OF = 0.75
"""Share of a group's samples with the same answer, of which the model is then sure."""
REFUSED = 0.10
"""Share of groups whose common answer is refused: as much noise in the data costs as much reward."""
ELSE_GOOD = 0.85
"""Mean reward of the other groups in which the model is sure: a model that errs in many ways stays below."""
LEAST_GROUPS = 24


def noisy_data(evidence: Evidence) -> Cause | None:
    """The model is sure of answers that the data calls wrong, and right where it is sure of others."""
    if _is_cold(section_of(evidence)):
        return None
    sure: list[tuple[list[RecordedSample], RecordedSample, int]] = []
    for group in evidence.groups(evidence.late_records()):
        tokens, most = Counter(sample.tokens for sample in group).most_common(1)[0]
        if len(group) >= 4 and most >= SURE_OF * len(group):
            sure.append((group, next(sample for sample in group if sample.tokens == tokens), most))
    if len(sure) < LEAST_GROUPS:
        return None
    lowest, highest = _reward_range(evidence)
    middle = (lowest + highest) / 2
    refused = [one for one in sure if one[1].reward <= middle]
    accepted = [one[1].reward for one in sure if one[1].reward > middle]
    interval = mean_interval([float(one[1].reward <= middle) for one in sure])
    others = [_mean_reward(group) for group in evidence.groups(evidence.late_records()) if _mean_reward(group) > middle]
    good = (np.mean(others) - lowest) / max(highest - lowest, 1e-9) if others else 0.0
    if interval.low < REFUSED or not accepted or good < ELSE_GOOD or not _keeps_failing(evidence):
        return None
    rows = list(dict.fromkeys(one[1].row for one in refused))
    return Cause(
        name="noisy_data",
        summary=f"in {interval.mean:.0%} of the last groups the model is sure of an answer that the data calls wrong: "
        f"noisy answers in the data, or one error of the model",
        evidence=[
            f"{len(refused)} of {len(sure)} groups (95 %: {interval.low:.0%} to {interval.high:.0%}); elsewhere it is "
            f"right: {good:.0%}",
            *[_refused_words(evidence, *one) for one in refused[:3]],
            f"rows of the dataset: {', '.join(map(str, rows[:12]))}{', ...' if len(rows) > 12 else ''}",
        ],
        advice="look at these rows; correct or remove them if the data is wrong",
        sure=False,
        explains=("little_signal", "sampling_too_cold"),
    )


def _mean_reward(group: Sequence[RecordedSample]) -> float:
    return nan_mean(np.asarray([sample.reward for sample in group], np.float64))


def _keeps_failing(evidence: Evidence) -> bool:
    """True if groups without any good sample do not get fewer, although the others have been learned."""
    bad, mixed = evidence.change("frac_all_bad"), evidence.change("frac_mixed")
    return bad is not None and mixed is not None and bad.after >= REFUSED and bad.z > -UNCHANGED_Z


def _refused_words(evidence: Evidence, group: Sequence[RecordedSample], sample: RecordedSample, most: int) -> str:
    row = evidence.rows[sample.row] if sample.row < len(evidence.rows) else {}
    right = next((str(row[name]) for name in ANSWER_COLUMNS if row.get(name) is not None), None)
    data = "" if right is None else f", the data's answer is {shown_text(right)}"
    return f"row {sample.row}: {most} of {len(group)} samples say {shown_text(evidence.text_of(sample))}{data}"


LITTLE = 0.15
"""Share of groups with different rewards below which most of a step's samples teach nothing."""


def little_signal(evidence: Evidence) -> Cause | None:
    """Few groups have different rewards, and the reward does not rise."""
    mixed, change = evidence.mean("frac_mixed"), evidence.change("reward")
    if not mixed < LITTLE or change is None or change.z >= UNCHANGED_Z or no_signal(evidence) is not None:
        return None
    passed = evidence.mean("pass_rate")
    if passed >= GOOD:
        return None
    distinct = distinct_texts(evidence)
    lines = [_passed_words(evidence), reward_words(change)]
    if distinct is not None:
        lines.append(f"{distinct:.1f} different texts in a group of {section_of(evidence).group_size}")
    return Cause(
        name="little_signal",
        summary=f"little to learn from: only {mixed:.0%} of the groups have different rewards",
        evidence=lines,
        advice="a larger group_size, sampling.temperature=1, prompts of a fitting difficulty (curriculum, refill)",
        sure=False,
    )


EPOCHS = 2.0
"""Passes over the prompts after which they can be learned by heart."""


def overfitting(evidence: Evidence) -> Cause | None:
    """The reward grows on the prompts of training, and not on held-out ones."""
    change, held_out = evidence.change("reward"), _held_out(evidence)
    if change is None or held_out is None or not change.rises(0.0) or held_out["high"] >= change.by / 4:
        return None
    epochs = _epochs(evidence)
    if epochs is None or epochs < EPOCHS:
        return None
    return Cause(
        name="overfitting",
        summary=f"the prompts are learned by heart: {reward_words(change)} in training, held out "
        f"{held_out['mean']:+.3f} ({held_out['low']:+.3f} to {held_out['high']:+.3f})",
        evidence=[f"each prompt was seen {epochs:.1f} times"],
        advice="more prompts, fewer steps (evaluate.keep_best keeps the best model), or a KL penalty "
        "(algorithm.kl_coef)",
    )


def evaluation_too_small(evidence: Evidence) -> Cause | None:
    """The held-out set is too small to see the gain of training."""
    change, held_out = evidence.change("reward"), _held_out(evidence)
    if change is None or held_out is None or not change.rises(0.0, UNCHANGED_Z):
        return None
    if held_out["p_value"] < 1.0 - LEVEL or held_out["high"] < change.by / 2:
        return None
    width = held_out["high"] - held_out["low"]
    prompts = held_out["n"] * (width / max(change.by, 1e-9)) ** 2
    return Cause(
        name="evaluation_too_small",
        summary=f"the evaluation is too small to see the effect: {held_out['mean']:+.3f} ({held_out['low']:+.3f} to "
        f"{held_out['high']:+.3f}) over {held_out['n']} prompts, and training gained {change.by:+.3f}",
        evidence=[reward_words(change)],
        advice=f"about {max(2 * held_out['n'], math.ceil(prompts)):,} held-out prompts, or several samples of each "
        "(evaluate.samples)",
        sure=False,
    )


def _held_out(evidence: Evidence) -> dict[str, float] | None:
    """Difference of the held-out reward from before to after training, with its interval; None without one."""
    differences = evidence.result.get("difference") or {}
    found = differences.get("eval/reward")
    return dict(found) if found is not None else None


def _epochs(evidence: Evidence) -> float | None:
    if evidence.answers.num_rows is None:
        return None
    return evidence.num_steps * section_of(evidence).prompts_per_step / evidence.answers.num_rows


RL_CAUSES: tuple[Check, ...] = (
    entropy_outweighs,
    rate_too_large,
    wrong_template,
    sampler_differs,
    *HACKS,
    answers_cut,
    never_stops,
    conversations_unfinished,
    format_never_asked,
    reward_constant,
    sampling_too_cold,
    too_easy,
    too_hard,
    kl_outweighs,
    rate_too_small,
    stale,
    overfitting,
    noisy_data,
    little_signal,
    evaluation_too_small,
)
