"""Causes of stages that sample: the task, the samples, the rate, the reward, the penalties, the data."""

from __future__ import annotations

from posttrain.diagnosis.causes import Check

RL_CAUSES: tuple[Check, ...] = ()
