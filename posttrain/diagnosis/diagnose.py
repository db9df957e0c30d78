"""Diagnosis of a stage: its causes, by its kind."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.diagnosis.causes import Cause, Check, find_causes
from posttrain.diagnosis.evidence import Evidence
from posttrain.diagnosis.offline_causes import DISTILL_CAUSES, PREFERENCE_CAUSES, REWARD_MODEL_CAUSES, SFT_CAUSES

OFFLINE = {
    "sft": SFT_CAUSES,
    "preference": PREFERENCE_CAUSES,
    "reward_model": REWARD_MODEL_CAUSES,
    "distill": DISTILL_CAUSES,
}
SAMPLED = ("rl", "online_preference")


def diagnose(evidence: Evidence) -> list[Cause]:
    """Causes of a stage, the first one first; none where nothing stands out."""
    return find_causes(evidence, checks_of(evidence.kind))


def checks_of(kind: str) -> Sequence[Check]:
    """Checks of a kind of stage, in the order in which their causes are told; other kinds have none."""
    if kind in SAMPLED:
        # Imported on first use, so that other stages load nothing of RL.
        from posttrain.diagnosis.rl_causes import RL_CAUSES

        return RL_CAUSES
    return OFFLINE.get(kind, ())
