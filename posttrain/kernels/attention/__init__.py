"""Attention behind one function for rows and one for pages; each implementation in a file of its own."""

from posttrain.config import AttentionKernel
from posttrain.kernels.attention.dispatch import attention, serves_parents
from posttrain.kernels.attention.paged import padded_head, ragged_paged_attention, ragged_refusal
from posttrain.kernels.attention.request import Variant

__all__ = [
    "AttentionKernel",
    "Variant",
    "attention",
    "padded_head",
    "ragged_paged_attention",
    "ragged_refusal",
    "serves_parents",
]
