"""Causes of stages that train on given texts: SFT, preferences, reward models, distillation."""

from __future__ import annotations

from posttrain.diagnosis.causes import Check

SFT_CAUSES: tuple[Check, ...] = ()
PREFERENCE_CAUSES: tuple[Check, ...] = ()
REWARD_MODEL_CAUSES: tuple[Check, ...] = ()
DISTILL_CAUSES: tuple[Check, ...] = ()
