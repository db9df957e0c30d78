"""Attention behind one function; each implementation in a file of its own."""

from posttrain.config import AttentionKernel
from posttrain.kernels.attention.dispatch import attention

__all__ = ["AttentionKernel", "attention"]
