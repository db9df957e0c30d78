"""Diagnosis of a run: the causes of each of its stages, by their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.diagnosis.causes import Cause, Check, find_causes
from posttrain.diagnosis.evidence import Evidence
from posttrain.diagnosis.offline_causes import DISTILL_CAUSES, PREFERENCE_CAUSES, REWARD_MODEL_CAUSES, SFT_CAUSES
from posttrain.diagnosis.rl_causes import RL_CAUSES

CAUSES: Mapping[str, Sequence[Check]] = {
    "sft": SFT_CAUSES,
    "preference": PREFERENCE_CAUSES,
    "reward_model": REWARD_MODEL_CAUSES,
    "distill": DISTILL_CAUSES,
    "rl": RL_CAUSES,
    "online_preference": RL_CAUSES,
}
"""Checks by kind of stage, in the order in which their causes are told; other kinds have none."""


def diagnose(evidence: Evidence) -> list[Cause]:
    """Causes of a stage, the first one first; none where nothing stands out."""
    return find_causes(evidence, CAUSES.get(evidence.kind, ()))
