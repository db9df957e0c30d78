"""Attention behind one function; each implementation in a file of its own."""

from posttrain.kernels.attention.dispatch import AttentionKernel, attention

__all__ = ["AttentionKernel", "attention"]
