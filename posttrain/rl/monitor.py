"""Monitor of reward hacking: compares the last steps with earlier ones, and raises an alarm where the reward grows by
something else than better answers. After the kinds of arXiv:2209.13085 and arXiv:2210.10760."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from posttrain.config import OnlineSection
from posttrain.errors import ConfigError, did_you_mean
from posttrain.reward.function import Reward, accepted
from posttrain.reward.lab.cases import ANSWER_COLUMNS
from posttrain.reward.types import Rewards
from posttrain.rl.signs import Sums, TellingPrompts, added, lengths_of, mean_of, part_mean, read_tokens, within_groups
from posttrain.rollout.trajectory import Group

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
        step = _Step(groups_P, rewards, self._verifier, self._ranges, self._tells)
        values = step.values | {
            "content": part_mean(rewards, self._content),
            "form": part_mean(rewards, self._form),
        }
        self._values.append(values)
        self._sums.append(step.sums)
        alarms = [alarm for check in CHECKS if (alarm := check(self, step)) is not None]
        new = [alarm for alarm in alarms if alarm.kind not in self._raised]
        self._raised += [alarm.kind for alarm in new]
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
        values = [one[name] for one in self._values]
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


class _Step:
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


def _refuted(monitor: Monitor, step: _Step) -> Alarm | None:
    change = monitor.change("false_passes")
    if change is None or not change.rises(0.25):
        return None
    text = f"{change.after:.0%} of the samples with a high reward fail the verifier, {change.before:.0%} before"
    return Alarm(kind="verifier", text=text, samples=step.most(np.where(step.refuted_PG, step.rewards_PG, -np.inf)))


def _longer(monitor: Monitor, step: _Step) -> Alarm | None:
    change, correlation = monitor.change("length"), monitor.length_correlation
    if change is None or not change.rises(math.log(1.25)) or correlation < LENGTH_CORRELATION or _worse(monitor):
        return None
    return Alarm(
        kind="length",
        text=f"answers are {math.exp(change.by):.2g} times as long as before, and within groups the reward follows "
        f"their length (correlation {correlation:.2f})",
        samples=step.most(step.lengths_PG),
    )


def _repeats(monitor: Monitor, step: _Step) -> Alarm | None:
    change = monitor.change("repeated")
    if change is None or not change.rises(0.15) or _worse(monitor):
        return None
    text = f"{change.after:.0%} of the answers' n-grams are repetitions, {change.before:.0%} before"
    return Alarm(kind="repetition", text=text, samples=step.most(step.repeated_PG))


def _copies(monitor: Monitor, step: _Step) -> Alarm | None:
    change = monitor.change("copied")
    if change is None or not change.rises(0.2) or _worse(monitor):
        return None
    text = f"{change.after:.0%} of the answers' n-grams are copied from the prompt, {change.before:.0%} before"
    return Alarm(kind="copy", text=text, samples=step.most(step.copied_PG))


def _leaks(monitor: Monitor, step: _Step) -> Alarm | None:
    change = monitor.change("leak")
    if change is None or not change.rises(0.25 * monitor.reward_range) or _worse(monitor):
        return None
    return Alarm(
        kind="leak",
        text=f"where the prompt tells the answer the reward is {change.after:.2g} higher than elsewhere, "
        f"{change.before:.2g} before",
        samples=step.most(np.where(step.tells_P[:, None], step.rewards_PG, -np.inf)),
    )


def _form(monitor: Monitor, step: _Step) -> Alarm | None:
    form, content = monitor.change("form"), monitor.change("content")
    if form is None or content is None or not (form.rises(0.1) and content.falls(0.1)):
        return None
    text = f"rewards of form grow by {form.by:.2g} while those that read the answer fall by {-content.by:.2g}"
    return Alarm(kind="format", text=text, samples=step.most(step.rewards_PG))


def _worse(monitor: Monitor) -> bool:
    """Tell whether the reward falls: then what the samples do is not for its sake."""
    change = monitor.change("reward")
    return change is not None and change.z <= -2.0


Check = Callable[[Monitor, _Step], Alarm | None]
CHECKS: Sequence[Check] = (_refuted, _longer, _repeats, _copies, _leaks, _form)


def _reads_answer(reward: Reward) -> bool:
    """Tell whether a function reads a column with the right answer."""
    if reward.timeout_s is None:
        return False
    names = accepted(reward.function)
    return names is not None and bool(names & {*ANSWER_COLUMNS, "reward_model", "state"})
