"""Monitor of reward hacking: compares the last steps with earlier ones, and raises an alarm where the reward grows by
something else than better answers. After the kinds of arXiv:2209.13085 and arXiv:2210.10760."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from posttrain.config import OnlineSection
from posttrain.data.messages import shown_text
from posttrain.errors import ConfigError, did_you_mean
from posttrain.reward.function import Reward
from posttrain.reward.keywords import accepted
from posttrain.reward.lab.cases import ANSWER_COLUMNS
from posttrain.reward.types import Rewards
from posttrain.rollout.trajectory import Example, Group

RECENT = 8
"""Steps whose mean is compared."""
GAP = 12
"""Steps between these and the earlier ones, in which hacking may have begun."""
EARLIER = 40
"""Maximum number of earlier steps."""
LEAST_EARLIER = 8
MIN_Z = 4.0
"""Least difference of the means in standard errors."""
LENGTH_CORRELATION = 0.5


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Sign of reward hacking, with the samples that show it best."""

    kind: str
    text: str
    samples: Sequence[tuple[int, int]]
    """Group and number of samples, at most two."""


@dataclass(frozen=True)
class Change:
    """Change of a value from the earlier steps to the last ones, also in standard errors (z)."""

    before: float
    after: float
    z: float

    @property
    def by(self) -> float:
        return self.after - self.before

    def rises(self, least: float) -> bool:
        return self.by >= least and self.z >= MIN_Z

    def falls(self, least: float) -> bool:
        return -self.by >= least and self.z <= -MIN_Z


class Monitor:
    """Monitor of the steps of a stage. Each kind of alarm is raised once.

    `verifier`: name of a reward with weight 0 that training does not follow. `content`: names and weights of rewards
    that read the right answer; `form`: of the others.
    """

    def __init__(self, *, verifier: str | None, content: Mapping[str, float], form: Mapping[str, float]):
        self._verifier = verifier
        self._content = [name for name, weight in content.items() if weight > 0]
        self._form = [name for name, weight in form.items() if weight > 0]
        self._values: deque[dict[str, float]] = deque(maxlen=RECENT + GAP + EARLIER)
        self._sums: deque[Sums] = deque(maxlen=RECENT)
        self._ranges: dict[str, tuple[float, float]] = {}
        self._raised: list[str] = []
        self._tells = TellingPrompts()

    @classmethod
    def of(cls, section: OnlineSection, rewards: Sequence[Reward]) -> Monitor | None:
        """Make the monitor of a stage with these rewards; None without a section or rewards. ConfigError for a verifier
        that cannot be one."""
        if section.monitor is None:
            return None
        verifier, weights = section.monitor.verifier, {reward.name: reward.weight for reward in rewards}
        if verifier is not None and verifier not in weights:
            raise ConfigError(
                f"monitor.verifier: no reward is called {verifier!r}{did_you_mean(verifier, weights)}; there are "
                f"{', '.join(weights)}"
            )
        if verifier is not None and weights[verifier]:
            raise ConfigError(
                f"monitor.verifier: the reward {verifier} has weight {weights[verifier]:g}, so training follows it; "
                "name one with weight 0"
            )
        if not weights:
            return None
        reads_answer = {reward.name for reward in rewards if _reads_answer(reward)}
        return cls(
            verifier=verifier or next((name for name, weight in weights.items() if not weight), None),
            content={name: weight for name, weight in weights.items() if name in reads_answer},
            form={name: weight for name, weight in weights.items() if name not in reads_answer},
        )

    def observe(self, groups_P: Sequence[Group], rewards: Rewards) -> tuple[dict[str, float], list[Alarm]]:
        """Metrics of a step, and new alarms."""
        step = _StepValues(groups_P, rewards, self._verifier, self._ranges, self._tells)
        values = step.values | {
            "content": part_mean(rewards, self._content),
            "form": part_mean(rewards, self._form),
        }
        self._values.append(values)
        self._sums.append(step.sums)
        new: list[Alarm] = []
        for check in CHECKS:
            alarm = check(self, step)
            if alarm is not None and alarm.kind not in self._raised:
                new.append(alarm)
                self._raised.append(alarm.kind)
        metrics = {
            "hacking/length_correlation": step.sums.correlation,
            "hacking/repetition": values["repeated"],
            "hacking/copied": values["copied"],
            "hacking/answer_leak": values["leak"],
            "hacking/alarms": float(len(self._raised)),
        }
        if self._verifier is not None:
            metrics["hacking/false_passes"] = values["false_passes"]
        return metrics, new

    def change(self, name: str) -> Change | None:
        """Change of a value; None with too few steps that have one."""
        values = [one[name] for one in self._values if name in one]
        recent = [value for value in values[-RECENT:] if not math.isnan(value)]
        earlier = [value for value in values[: -RECENT - GAP][-EARLIER:] if not math.isnan(value)]
        if len(recent) < RECENT // 2 or len(earlier) < LEAST_EARLIER:
            return None
        before, after = float(np.mean(earlier)), float(np.mean(recent))
        spread = max(float(np.std(earlier, ddof=1)), float(np.std(recent, ddof=1)) / 2, 1e-3 * (abs(before) + 1e-3))
        error = spread * math.sqrt(1 / len(recent) + 1 / len(earlier))
        return Change(before, after, (after - before) / error)

    @property
    def length_correlation(self) -> float:
        """Correlation of reward and length within groups, over the last steps."""
        return added(self._sums).correlation

    @property
    def reward_range(self) -> float:
        """Distance from the lowest to the highest reward so far."""
        low, high = self._ranges.get("reward", (0.0, 0.0))
        return high - low

    def state(self) -> dict[str, Any]:
        """Position for a checkpoint."""
        return {
            "values": [{name: None if math.isnan(v) else v for name, v in one.items()} for one in self._values],
            "sums": [one.values for one in self._sums],
            "ranges": {name: list(pair) for name, pair in self._ranges.items()},
            "raised": list(self._raised),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._values.clear()
        self._values.extend({name: math.nan if v is None else v for name, v in one.items()} for one in state["values"])
        self._sums.clear()
        self._sums.extend(Sums(xx=xx, xy=xy, yy=yy, count=count) for xx, xy, yy, count in state["sums"])
        self._ranges = {name: (low, high) for name, (low, high) in state["ranges"].items()}
        self._raised = list(state["raised"])


class _StepValues:
    """Values of a step. `ranges` are widened by it."""

    def __init__(
        self,
        groups_P: Sequence[Group],
        rewards: Rewards,
        verifier: str | None,
        ranges: dict[str, tuple[float, float]],
        tells: TellingPrompts,
    ):
        self.rewards_PG = np.asarray(rewards.total_PG, np.float64)
        self.lengths_PG = lengths_of(groups_P)
        self.repeated_PG, self.copied_PG = read_tokens(groups_P)
        self.sums = within_groups(np.log1p(self.lengths_PG), self.rewards_PG)
        self.tells_P = tells(groups_P)
        self.verified_PG = None if verifier is None else np.asarray(rewards.parts_PG[verifier], np.float64)
        _widen(ranges, "reward", self.rewards_PG)
        low, high = ranges.get("reward", (0.0, 0.0))
        self.passes_PG = self.rewards_PG > (low + high) / 2
        self.values = {
            "reward": mean_of(self.rewards_PG),
            "length": float(np.log(self.lengths_PG.mean() + 1)),
            "cut": float(np.mean([[sample.is_cut for sample in group] for group in groups_P])),
            "repeated": mean_of(self.repeated_PG),
            "copied": mean_of(self.copied_PG),
            "leak": _answer_leak(self.rewards_PG, self.tells_P),
            "false_passes": math.nan,
        }
        self.refuted_PG = np.zeros_like(self.passes_PG)
        if self.verified_PG is not None:
            _widen(ranges, "verifier", self.verified_PG)
            middle = sum(ranges.get("verifier", (0.0, 0.0))) / 2
            self.refuted_PG = self.passes_PG & (self.verified_PG <= middle)
            if self.passes_PG.any():
                self.values["false_passes"] = float(self.refuted_PG.sum() / self.passes_PG.sum())

    def most(self, score_PG: Float[np.ndarray, "P G"]) -> list[tuple[int, int]]:
        """Samples of different groups with the highest scores."""
        score_PG = np.where(np.isnan(score_PG), -np.inf, score_PG)
        best_P = score_PG.argmax(1)
        order = np.argsort(-score_PG.max(1), kind="stable")[:2]
        return [(int(p), int(best_P[p])) for p in order]


def _widen(ranges: dict[str, tuple[float, float]], name: str, values: np.ndarray) -> None:
    valid = values[~np.isnan(values)]
    if valid.size:
        low, high = ranges.get(name, (math.inf, -math.inf))
        ranges[name] = (min(low, float(valid.min())), max(high, float(valid.max())))


def _answer_leak(rewards_PG: np.ndarray, tells_P: np.ndarray) -> float:
    """Mean reward where the prompt tells the answer, less that elsewhere; NaN without both."""
    if tells_P.all() or not tells_P.any():
        return math.nan
    return mean_of(rewards_PG[tells_P]) - mean_of(rewards_PG[~tells_P])


def _refuted(monitor: Monitor, step: _StepValues) -> Alarm | None:
    change = monitor.change("false_passes")
    if change is None or not change.rises(0.25):
        return None
    text = f"{change.after:.0%} of the samples with a high reward fail the verifier, {change.before:.0%} before"
    return Alarm(kind="verifier", text=text, samples=step.most(np.where(step.refuted_PG, step.rewards_PG, -np.inf)))


def _longer(monitor: Monitor, step: _StepValues) -> Alarm | None:
    change, correlation = monitor.change("length"), monitor.length_correlation
    if change is None or not change.rises(math.log(1.25)) or correlation < LENGTH_CORRELATION or _worse(monitor):
        return None
    return Alarm(
        kind="length",
        text=f"answers are {math.exp(change.by):.2g} times as long as before, and within groups the reward follows "
        f"their length (correlation {correlation:.2f})",
        samples=step.most(step.lengths_PG),
    )


def _endless(monitor: Monitor, step: _StepValues) -> Alarm | None:
    """Answers that no longer end, and are paid for it: at the limit their lengths differ no more, so that the reward
    follows them within no group."""
    cut, reward = monitor.change("cut"), monitor.change("reward")
    if cut is None or reward is None or not cut.rises(0.5) or not reward.rises(0.0):
        return None
    text = (
        f"{cut.after:.0%} of the answers are cut at the limit of tokens, {cut.before:.0%} before, and the reward grows "
        f"({reward.before:.3g} to {reward.after:.3g}): it pays for length, or for the beginning alone"
    )
    return Alarm(kind="length", text=text, samples=step.most(step.lengths_PG))


def _repeats(monitor: Monitor, step: _StepValues) -> Alarm | None:
    change = monitor.change("repeated")
    if change is None or not change.rises(0.15) or _worse(monitor):
        return None
    text = f"{change.after:.0%} of the answers' n-grams are repetitions, {change.before:.0%} before"
    return Alarm(kind="repetition", text=text, samples=step.most(step.repeated_PG))


def _copies(monitor: Monitor, step: _StepValues) -> Alarm | None:
    change = monitor.change("copied")
    if change is None or not change.rises(0.2) or _worse(monitor):
        return None
    text = f"{change.after:.0%} of the answers' n-grams are copied from the prompt, {change.before:.0%} before"
    return Alarm(kind="copy", text=text, samples=step.most(step.copied_PG))


def _leaks(monitor: Monitor, step: _StepValues) -> Alarm | None:
    change = monitor.change("leak")
    if change is None or not change.rises(0.25 * monitor.reward_range) or _worse(monitor):
        return None
    return Alarm(
        kind="leak",
        text=f"where the prompt tells the answer the reward is {change.after:.2g} higher than elsewhere, "
        f"{change.before:.2g} before",
        samples=step.most(np.where(step.tells_P[:, None], step.rewards_PG, -np.inf)),
    )


def _form(monitor: Monitor, step: _StepValues) -> Alarm | None:
    form, content = monitor.change("form"), monitor.change("content")
    if form is None or content is None or not (form.rises(0.1) and content.falls(0.1)):
        return None
    text = f"rewards of form grow by {form.by:.2g} while those that read the answer fall by {-content.by:.2g}"
    return Alarm(kind="format", text=text, samples=step.most(step.rewards_PG))


def _worse(monitor: Monitor) -> bool:
    """Tell whether the reward falls: then what the samples do is not for its sake."""
    change = monitor.change("reward")
    return change is not None and change.z <= -2.0


Check = Callable[[Monitor, _StepValues], Alarm | None]
CHECKS: Sequence[Check] = (_refuted, _longer, _endless, _repeats, _copies, _leaks, _form)


def _reads_answer(reward: Reward) -> bool:
    """Tell whether a function reads a column with the right answer."""
    if reward.timeout_s is None:
        return False
    names = accepted(reward.function)
    return names is not None and bool(names & {*ANSWER_COLUMNS, "reward_model", "state"})


NGRAM_TOKENS = 4
MAX_READ = 128
"""Maximum number of samples of a step whose tokens are read for repetition and copies."""
MAX_TOKENS = 4096
"""Tokens of a sample that are read."""
LEAST_ANSWER, LONGEST_ANSWER = 2, 40
"""Characters of answers that are looked for in prompts; shorter ones stand there by chance."""
HASH = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums of products of deviations from the group's mean, of which correlations of several steps are made."""

    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    count: int = 0
    """Samples less groups."""

    @property
    def correlation(self) -> float:
        """Correlation within groups; 0 without any deviation."""
        scale = np.sqrt(self.xx * self.yy)
        return float(self.xy / scale) if scale > 0 else 0.0

    @property
    def values(self) -> tuple[float, float, float, int]:
        return self.xx, self.xy, self.yy, self.count


def added(sums: Sequence[Sums]) -> Sums:
    """Sums of several steps."""
    return Sums(
        xx=sum(one.xx for one in sums),
        xy=sum(one.xy for one in sums),
        yy=sum(one.yy for one in sums),
        count=sum(one.count for one in sums),
    )


def within_groups(x_PG: Float[np.ndarray, "P G"], y_PG: Float[np.ndarray, "P G"]) -> Sums:
    """Products of deviations within groups, over the samples where both are numbers."""
    xx = xy = yy = 0.0
    count = 0
    for x, y in zip(x_PG, y_PG, strict=True):
        valid = ~(np.isnan(x) | np.isnan(y))
        if valid.sum() < 2:
            continue
        dx, dy = x[valid] - x[valid].mean(), y[valid] - y[valid].mean()
        xx, xy, yy = xx + float(dx @ dx), xy + float(dx @ dy), yy + float(dy @ dy)
        count += int(valid.sum()) - 1
    return Sums(xx=xx, xy=xy, yy=yy, count=count)


def lengths_of(groups_P: Sequence[Group]) -> Float[np.ndarray, "P G"]:
    """Number of sampled tokens of each sample."""
    return np.asarray([[float(sample.num_sampled) for sample in group] for group in groups_P])


def read_tokens(groups_P: Sequence[Group]) -> tuple[Float[np.ndarray, "P G"], Float[np.ndarray, "P G"]]:
    """Share of each sample's n-grams that it repeats, and share that its prompt has; NaN for samples not read."""
    shape = len(groups_P), len(groups_P[0])
    repeated_PG, copied_PG = np.full(shape, np.nan), np.full(shape, np.nan)
    per_group = max(1, min(shape[1], MAX_READ // shape[0]))
    for p, group in enumerate(groups_P[:MAX_READ]):
        prompt = _ngrams(group[0].example.prompt_tokens)
        for g, sample in enumerate(group[:per_group]):
            ngrams = _ngrams(sample.completion_tokens[:MAX_TOKENS])
            if ngrams.size:
                repeated_PG[p, g] = 1 - len(np.unique(ngrams)) / len(ngrams)
                copied_PG[p, g] = float(np.isin(ngrams, prompt).mean())
            else:
                repeated_PG[p, g] = copied_PG[p, g] = 0.0
    return repeated_PG, copied_PG


def _ngrams(tokens: Sequence[int]) -> np.ndarray:
    """Hashes of the n-grams of tokens."""
    ids = np.asarray(tokens, np.uint64)
    if len(ids) < NGRAM_TOKENS:
        return ids[:0]
    found = np.zeros(len(ids) - NGRAM_TOKENS + 1, np.uint64)
    for offset in range(NGRAM_TOKENS):
        found = found * HASH + ids[offset : offset + len(found)] + np.uint64(1)
    return found


class TellingPrompts:
    """Prompts that contain the answer of their row, each looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}

    def __call__(self, groups_P: Sequence[Group]) -> np.ndarray:
        """True for groups whose prompt contains the answer."""
        return np.asarray([self._tells(group[0].example) for group in groups_P], bool)

    def _tells(self, example: Example) -> bool:
        if example.index not in self._known:
            answer = answer_text(example.row)
            fits = answer is not None and LEAST_ANSWER <= len(answer) <= LONGEST_ANSWER
            prompt = " ".join(shown_text(message) for message in example.messages)
            self._known[example.index] = fits and re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", prompt) is not None  # type: ignore[type-var]
        return self._known[example.index]


def answer_text(row: Mapping[str, Any]) -> str | None:
    """Right answer of a row, if a column with a usual name holds a text or a number."""
    nested = row.get("reward_model")
    given = [nested.get("ground_truth")] if isinstance(nested, Mapping) else []
    given += [row.get(name) for name in ANSWER_COLUMNS]
    found = next((value for value in given if isinstance(value, str | int | float)), None)
    return None if found is None else str(found).strip()


def mean_of(values: np.ndarray) -> float:
    """Mean of the numbers among values; NaN without any."""
    return float(np.nanmean(values)) if values.size and not np.isnan(values).all() else float("nan")


def part_mean(rewards: Rewards, names: Sequence[str]) -> float:
    """Sum of the means of some rewards; NaN without any."""
    return float(sum(mean_of(rewards.parts_PG[name]) for name in names)) if names else float("nan")
