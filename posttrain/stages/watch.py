"""Watch over the steps of an online stage: the monitor of reward hacking, and warnings about steps without a signal."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.config import OnlineSection, RLSection
from posttrain.errors import ConfigError, RunError, did_you_mean
from posttrain.reward.function import Reward, accepted
from posttrain.reward.lab.cases import ANSWER_COLUMNS
from posttrain.reward.rubric import Rubric
from posttrain.reward.types import Rewards
from posttrain.rl.monitor import Alarm, Monitor
from posttrain.rl.warnings import SignalWarnings
from posttrain.rollout.trajectory import Group
from posttrain.tracking.console import console, cut, printable

SHOWN_CELLS = 300
"""Maximum number of characters of a sample in an alarm."""


def monitor_of(section: OnlineSection, rubric: Rubric) -> Monitor | None:
    """Make the monitor of a stage with rewards; None without. ConfigError for a verifier that cannot be one."""
    given = section.monitor
    if given is None:
        return None
    weights = {reward.name: reward.weight for reward in rubric.rewards}
    verifier = given.verifier
    if verifier is not None and verifier not in weights:
        raise ConfigError(
            f"monitor.verifier: no reward is called {verifier!r}{did_you_mean(verifier, weights)}; there are "
            f"{', '.join(weights)}"
        )
    if verifier is not None and weights[verifier]:
        raise ConfigError(
            f"monitor.verifier: the reward {verifier} has weight {weights[verifier]:g}, so training follows it; name "
            "one with weight 0"
        )
    if not weights:
        return None
    verifier = verifier or next((name for name, weight in weights.items() if not weight), None)
    content = {reward.name for reward in rubric.rewards if _reads_answer(reward)}
    return Monitor(
        verifier=verifier,
        content={name: weight for name, weight in weights.items() if name in content},
        form={name: weight for name, weight in weights.items() if name not in content},
    )


def _reads_answer(reward: Reward) -> bool:
    """Tell whether a function reads a column with the right answer."""
    if reward.timeout_s is None:
        return False
    names = accepted(reward.function)
    return names is not None and bool(names & {*ANSWER_COLUMNS, "reward_model", "state"})


class StepWatch:
    """Watch over the steps of a stage: prints warnings and alarms."""

    def __init__(self, section: OnlineSection, monitor: Monitor | None):
        self._monitor = monitor
        self._stops = section.monitor is not None and section.monitor.on_alarm == "stop"
        conversation = isinstance(section, RLSection) and section.converses
        self._warnings = SignalWarnings(
            max_tokens=section.sampling.max_tokens, scored=section.scored, converses=conversation
        )

    def __call__(self, step: int, groups_P: Sequence[Group], rewards: Rewards) -> dict[str, float]:
        """Observe a step; return the monitor's metrics. RunError for an alarm, if the section says so."""
        for line in self._warnings.observe(groups_P, rewards):
            _print(f"WARNING, step {step}: {line}")
        if self._monitor is None:
            return {}
        metrics, alarms = self._monitor.observe(groups_P, rewards)
        for alarm in alarms:
            _print(alarm_line(step, alarm, groups_P, rewards))
        if alarms and self._stops:
            raise RunError(
                f"step {step}: reward hacking: {alarms[0].text}; monitor.on_alarm=stop. Change the reward and start "
                "anew, or set on_alarm: warn"
            )
        return metrics


def alarm_line(step: int, alarm: Alarm, groups_P: Sequence[Group], rewards: Rewards) -> str:
    """Alarm in words, with its samples."""
    shown = [
        f"{float(rewards.total_PG[p, g]):.3g} for {cut(groups_P[p][g].answer.text, SHOWN_CELLS)!r}"
        for p, g in alarm.samples
    ]
    return f"REWARD HACKING ({alarm.kind}), step {step}: {alarm.text}. Samples: {'; '.join(shown)}"


def _print(line: str) -> None:
    console().print(printable(line, console().encoding), style="bold yellow", markup=False, soft_wrap=True)
