"""Attention kernels: one entry point for packed rows, one for a paged KV cache; one file per implementation."""

from posttrain.config import AttentionKernel
from posttrain.kernels.attention.call import Variant
from posttrain.kernels.attention.dispatch import attention, supports_parents
from posttrain.kernels.attention.paged import heads_apart, padded_head, ragged_paged_attention, ragged_refusal

__all__ = [
    "AttentionKernel",
    "Variant",
    "attention",
    "heads_apart",
    "padded_head",
    "ragged_paged_attention",
    "ragged_refusal",
    "supports_parents",
]
