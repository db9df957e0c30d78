"""Hacks: the reward grows by something else than better answers. After the kinds of arXiv:2209.13085 and
arXiv:2210.10760."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from posttrain.config import OnlineSection, RewardSection
from posttrain.config.locator import callable_of
from posttrain.diagnosis.causes import Cause, Check
from posttrain.diagnosis.evidence import Change, Evidence, RecordedSample, nan_mean
from posttrain.diagnosis.words import shown_text
from posttrain.errors import ConfigError
from posttrain.reward.keywords import accepted
from posttrain.reward.lab.cases import ANSWER_COLUMNS

WORSE_Z = -2.0
"""Fall of the reward, in standard errors, below which what the samples do is not for its sake."""
OUTWEIGHED = ("answers_cut", "never_stops", "overfitting", "evaluation_too_small", "noisy_data", "little_signal")
"""Causes that a hack brings with it."""


def is_watched(evidence: Evidence) -> bool:
    """True unless `monitor` is null."""
    return isinstance(evidence.section, OnlineSection) and evidence.section.monitor is not None


def is_paid(evidence: Evidence) -> bool:
    """True unless the reward falls."""
    changes = (evidence.change("reward"), evidence.recent_change("reward"))
    return all(change is None or change.z > WORSE_Z for change in changes)


LONGER = 1.25
"""Least factor of the mean length."""
EXPLAINED = 0.4
"""Least share of the reward's gain that the growth of the length explains."""
LEAST_PART = 5
"""Least steps of each part of a change."""
FEW_VALUES = 4
"""Different rewards of a step up to which it cannot pay for each token."""
CORRELATION = 0.5
"""Least correlation of reward and length within groups, of the last steps."""
RECENT = 8


def pays_for_length(evidence: Evidence) -> Cause | None:
    """Within groups the reward follows the length of the answers, and these grow."""
    length, reward = _longer(evidence), _gain(evidence)
    if not is_watched(evidence) or length is None or not is_paid(evidence):
        return None
    # Right answers may be longer: a reward of few values pays for them, not for their tokens.
    graded = not evidence.mean("hacking/reward_values") <= FEW_VALUES
    slope = _length_slope(evidence) if graded else 0.0
    explained = slope * length.by / reward.by if reward is not None and slope > 0 else 0.0
    correlation = nan_mean(evidence.column("hacking/length_correlation")[-RECENT:])
    if not (explained >= EXPLAINED or correlation >= CORRELATION):
        return None
    said = f"{slope:+.3g} a token" if explained >= EXPLAINED else f"correlation {correlation:.2f}"
    explains = (
        f", which explains {explained:.0%} of its gain of {reward.by:.2g}" if explained >= EXPLAINED and reward else ""
    )
    lines = [f"mean length {length.before:.3g} -> {length.after:.3g} tokens, z {length.z:+.1f}", *_reward_line(reward)]
    cut = evidence.change("completions/clipped_ratio")
    if cut is not None and cut.after > cut.before + 0.1:
        lines.append(
            f"answers that are cut: {cut.before:.0%} -> {cut.after:.0%}; more tokens would only make longer answers"
        )
    return _hack(
        "pays_for_length",
        f"the reward pays for length: within groups {said}{explains}",
        [*lines, *_sample_lines(evidence, lambda sample: float(len(sample.tokens)))],
        "take the length out of the reward, or add a penalty (rewards/soft_overlong.py:penalty); do not raise "
        "sampling.max_tokens; a strict verifier with weight 0 shows the rest",
    )


LENGTH_ALONE = 0.9
"""Least correlation within groups of a reward that is the length, whatever else it reads."""


def reward_is_length(evidence: Evidence) -> Cause | None:
    """Within groups the reward follows nothing but the length of the answers."""
    found = evidence.column("hacking/length_correlation")[-RECENT:]
    correlation = nan_mean(found)
    if not is_watched(evidence) or np.isfinite(found).sum() < 3 or not abs(correlation) >= LENGTH_ALONE:
        return None
    return _hack(
        "pays_for_length",
        f"within groups the reward follows the length of the answers alone (correlation {correlation:.2f}): "
        f"{'longer' if correlation > 0 else 'shorter'} ones are learned, whatever they say",
        _sample_lines(evidence, lambda sample: sample.reward),
        "try the functions with posttrain reward",
    )


def pays_without_end(evidence: Evidence) -> Cause | None:
    """Answers that no longer end, and are paid for it: at the limit their lengths differ no more, so that the reward
    follows them within no group."""
    cut, reward = evidence.grows("completions/clipped_ratio", 0.5), _gain(evidence)
    if not is_watched(evidence) or cut is None or reward is None:
        return None
    return _hack(
        "pays_for_length",
        f"the reward pays for length, or for the beginning alone: {cut.after:.0%} of the answers are cut at the limit "
        f"of tokens, {cut.before:.0%} before, and it grows",
        [*_reward_line(reward), *_sample_lines(evidence, lambda sample: float(len(sample.tokens)))],
        "ask for an end in the reward: the whole answer must be right; do not raise sampling.max_tokens",
    )


def pays_for_repetition(evidence: Evidence) -> Cause | None:
    """Answers repeat themselves more and more."""
    return _share_grows(
        evidence,
        "pays_for_repetition",
        "hacking/repetition",
        0.15,
        "the reward pays for repetition: {after:.0%} of the answers' n-grams are repetitions, {before:.0%} before",
        "a penalty for repetition in the reward, and a check of the whole answer instead of its words",
        lambda sample: 1.0 - len(set(sample.tokens)) / max(len(sample.tokens), 1),
    )


def pays_for_copies(evidence: Evidence) -> Cause | None:
    """Answers copy their prompt more and more."""
    return _share_grows(
        evidence,
        "pays_for_copies",
        "hacking/copied",
        0.2,
        "the reward pays for copies of the prompt: {after:.0%} of the answers' n-grams are in it, {before:.0%} before",
        "score the answer alone, without what it quotes",
        lambda sample: len(set(sample.tokens) & set(sample.prompt)) / max(len(set(sample.tokens)), 1),
    )


LEAK = 0.25
"""Least growth of the gap, in widths of the reward's range."""


def pays_for_told_answers(evidence: Evidence) -> Cause | None:
    """Prompts that tell their answer are paid more and more above the others."""
    width = np.ptp([sample.reward for sample in evidence.records if math.isfinite(sample.reward)] or [0.0, 1.0])
    return _share_grows(
        evidence,
        "pays_for_told_answers",
        "hacking/answer_leak",
        LEAK * float(width),
        "answers are taken from the prompt: where it tells the answer the reward is {after:.2g} higher than elsewhere, "
        "{before:.2g} before",
        "remove the answer from these prompts",
        None,
    )


def fails_verifier(evidence: Evidence) -> Cause | None:
    """Samples with a high reward fail the verifier that training does not follow."""
    change = evidence.grows("hacking/false_passes", 0.25)
    if not is_watched(evidence) or change is None:
        return None
    return _hack(
        "fails_verifier",
        f"the reward and the verifier part: {change.after:.0%} of the samples with a high reward fail the verifier, "
        f"{change.before:.0%} before",
        [*_reward_line(_gain(evidence)), *_sample_lines(evidence, lambda sample: sample.reward)],
        "correct the reward by the samples that the verifier refuses, or train on the verifier",
    )


def pays_for_form(evidence: Evidence) -> Cause | None:
    """Rewards of form grow while those that read the answer fall."""
    if not is_watched(evidence):
        return None
    assert isinstance(evidence.section, OnlineSection)
    weighted = [reward for reward in evidence.section.rewards if reward.weight > 0]
    known = [(reward, _part_change(evidence, _metric_of(reward))) for reward in weighted]
    changes = [(reward, change) for reward, change in known if change is not None]
    # User code is imported only where something may depend on what it reads.
    if not (any(one.rises(0.0) for _, one in changes) and any(one.falls(0.0) for _, one in changes)):
        return None
    reads = {reward.fn: _reads_answer(reward) for reward, _ in changes}
    form, content = (
        _summed([one for reward, one in changes if reads[reward.fn] is reads_it]) for reads_it in (False, True)
    )
    if form is None or content is None or not (form.rises(0.1) and content.falls(0.1)):
        return None
    return _hack(
        "pays_for_form",
        f"the reward pays for form: rewards of form grow by {form.by:.2g} while those that read the answer fall by "
        f"{-content.by:.2g}",
        _sample_lines(evidence, lambda sample: sample.reward),
        "a smaller weight for the form, or the form as a condition: nothing is paid for it without a right answer",
    )


SAME_TEXT = 0.6
"""Share of all samples, over different prompts, that are one text."""
LEAST_PROMPTS = 8


def pays_for_constant(evidence: Evidence) -> Cause | None:
    """One answer to every prompt, which the reward pays for."""
    late, early = evidence.late_records(0.2), [one for one in evidence.records if one.step <= evidence.num_steps / 5]
    if (
        not is_watched(evidence)
        or len({sample.row for sample in late}) < LEAST_PROMPTS
        or not early
        or _gain(evidence) is None
    ):
        return None
    common, number = Counter(sample.tokens for sample in late).most_common(1)[0]
    share, before = number / len(late), sum(sample.tokens == common for sample in early) / len(early)
    # A task may have few answers: then the data's own are alike too.
    texts = Counter(evidence.answers.texts)
    natural = max(texts.values()) / sum(texts.values()) if texts else 0.0
    if share < max(SAME_TEXT, natural + 0.3) or before > share / 2:
        return None
    shown = next(sample for sample in late if sample.tokens == common)
    paid = nan_mean(np.asarray([sample.reward for sample in late if sample.tokens == common]))
    return _hack(
        "pays_for_constant",
        f"the reward pays for one answer to every prompt: {share:.0%} of the last samples are "
        f"{shown_text(evidence.text_of(shown))}, {before:.0%} of the first",
        [
            f"mean reward of this text {paid:.3g}, over {len({sample.row for sample in late})} prompts",
            *_reward_line(_gain(evidence)),
        ],
        "the reward must read the prompt's own answer; try this text with posttrain reward",
    )


HACKS: tuple[Check, ...] = (
    fails_verifier,
    pays_for_constant,
    pays_for_repetition,
    pays_for_length,
    reward_is_length,
    pays_without_end,
    pays_for_copies,
    pays_for_told_answers,
    pays_for_form,
)


def _hack(name: str, summary: str, evidence: Sequence[str], advice: str) -> Cause:
    return Cause(name=name, summary=summary, evidence=evidence, advice=advice, hack=True, explains=OUTWEIGHED)


def _share_grows(
    evidence: Evidence,
    name: str,
    metric: str,
    least: float,
    summary: str,
    advice: str,
    score: Callable[[RecordedSample], float] | None,
) -> Cause | None:
    change = evidence.grows(metric, least)
    if not is_watched(evidence) or change is None or not is_paid(evidence):
        return None
    lines = [f"z {change.z:+.1f}", *_reward_line(_gain(evidence))]
    lines += [] if score is None else _sample_lines(evidence, score)
    return _hack(name, summary.format(before=change.before, after=change.after), lines, advice)


def _gain(evidence: Evidence) -> Change | None:
    """Growth of the reward, over the stage or lately; None where it does not grow."""
    return evidence.grows("reward", 0.0)


def _reward_line(reward: Change | None) -> list[str]:
    return [] if reward is None else [f"reward {reward}"]


def _longer(evidence: Evidence) -> Change | None:
    for change in (evidence.change("completions/mean_length"), evidence.recent_change("completions/mean_length")):
        if change is not None and change.rises((LONGER - 1) * change.before):
            return change
    return None


def _length_slope(evidence: Evidence) -> float:
    """Reward of a token more within groups, each step weighted by how much its lengths differ; 0 if they never do."""
    slope, spread = evidence.column("hacking/length_slope"), evidence.column("hacking/length_spread")
    weight = np.where(np.isfinite(slope) & np.isfinite(spread), np.square(spread), 0.0)
    return float(np.nansum(np.where(weight > 0, slope * weight, 0.0)) / weight.sum()) if weight.sum() else 0.0


def _sample_lines(evidence: Evidence, score: Callable[[RecordedSample], float]) -> list[str]:
    """One of the samples of the last steps that show it best, with its reward."""
    late = [sample for sample in evidence.late_records(0.2) if math.isfinite(sample.reward)]
    if not late:
        return []
    best = max(late, key=lambda sample: (score(sample), sample.reward))
    return [f"sample of step {best.step} with reward {best.reward:.3g}: {shown_text(evidence.text_of(best))}"]


def _summed(changes: Sequence[Change]) -> Change | None:
    """Change of the sum of some rewards, as sure as the weakest of them; None without any."""
    if not changes:
        return None
    z = min((change.z for change in changes), key=abs)
    return Change(sum(one.before for one in changes), sum(one.after for one in changes), z, changes[0].steps)


def _part_change(evidence: Evidence, name: str) -> Change | None:
    changes = [one for one in (evidence.change(name), evidence.recent_change(name)) if one is not None]
    # The spread of fewer steps is no measure of their noise.
    changes = [one for one in changes if one.steps >= LEAST_PART]
    return max(changes, key=lambda change: abs(change.z), default=None)


def _metric_of(reward: RewardSection) -> str:
    name = reward.name or ("" if reward.fn is None else str(reward.fn).rpartition(":")[2])
    return f"rewards/{name}/mean"


def _reads_answer(reward: RewardSection) -> bool | None:
    """Tell whether a function reads a column with the right answer; None: unknown."""
    if reward.fn is None:
        return None
    try:
        names = accepted(callable_of(reward.fn, "rewards.fn"))
    except (ConfigError, ValueError, TypeError):
        return None
    return names is not None and bool(names & {*ANSWER_COLUMNS, "reward_model", "state"})
