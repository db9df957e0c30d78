"""Monitor of reward hacking in online stages."""

from __future__ import annotations

from typing import Literal

from posttrain.config.base import Section, Text


class MonitorSection(Section):
    """Monitor of reward hacking: metrics `hacking/*`, and an alarm with samples where the reward grows by length,
    repetition, copies of the prompt, form or told answers, or apart from a verifier."""

    verifier: Text | None = None
    """Name of a reward with weight 0 that training does not follow, such as a stricter check; by default the first such
    reward."""
    on_alarm: Literal["warn", "stop"] = "warn"
    """`stop`: abort the run at an alarm, to be resumed from the last checkpoint with another reward in a new output."""
