"""Losses on token statistics: sums with their weights, in plain array arithmetic, without a model."""

from posttrain.losses.distill import DistillLoss
from posttrain.losses.kl import k1, k2, k3
from posttrain.losses.policy import DAPO, GRPO, GSPO, RLOO, PolicyLoss, dr_grpo
from posttrain.losses.reduce import ConstantLength, Reduction, sequence_mean, token_mean
from posttrain.losses.sft import DFTLoss, SFTLoss

__all__ = [
    "DAPO",
    "GRPO",
    "GSPO",
    "RLOO",
    "ConstantLength",
    "DFTLoss",
    "DistillLoss",
    "PolicyLoss",
    "Reduction",
    "SFTLoss",
    "dr_grpo",
    "k1",
    "k2",
    "k3",
    "sequence_mean",
    "token_mean",
]
