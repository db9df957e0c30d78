"""Losses on token statistics: sums with their weights, in plain array arithmetic, without a model."""

from posttrain.losses.distill import DistillLoss
from posttrain.losses.policy import (
    BNPO,
    CISPO,
    DAPO,
    GMPO,
    GRPO,
    GSPO,
    GSPO_TOKEN,
    LUSPO,
    PPO,
    REINFORCE,
    RLOO,
    SAPO,
    VESPO,
    PolicyLoss,
    dr_grpo,
)
from posttrain.losses.ratios import ImportanceSampling, k1, k2, k3
from posttrain.losses.reduce import ConstantLength, Reduction, sequence_mean, sequence_total, token_mean
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.losses.value import ValueLoss

__all__ = [
    "BNPO",
    "CISPO",
    "DAPO",
    "GMPO",
    "GRPO",
    "GSPO",
    "GSPO_TOKEN",
    "LUSPO",
    "PPO",
    "REINFORCE",
    "RLOO",
    "SAPO",
    "VESPO",
    "ConstantLength",
    "DFTLoss",
    "DistillLoss",
    "ImportanceSampling",
    "PolicyLoss",
    "Reduction",
    "SFTLoss",
    "ValueLoss",
    "dr_grpo",
    "k1",
    "k2",
    "k3",
    "sequence_mean",
    "sequence_total",
    "token_mean",
]
