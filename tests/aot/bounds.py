"""Bounds of the compiled programs: Mosaic kernels, GiB at the peak, MiB on the wire in and out of loops."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Bounds of one program; bytes are those of one device."""

    kernels: frozenset[str]
    """Names of all Mosaic kernels."""
    peak_gib: float
    temporaries_gib: float = math.inf
    loop_mib: float = 0.0
    """Wire of one trip of the outermost loop whose trips are known only at run time: a decoded token, a chunk."""
    once_mib: float = 0.0
    """Wire outside of such loops, known trips counted."""
    kinds: frozenset[str] = frozenset()
    """Kinds of collectives in such loops."""


RAGGED = frozenset({"ragged_paged_attention_kernel"})
SPLASH = frozenset({"splash_mha_fwd_segmented_residuals", "splash_mha_dkv_segmented_no_residuals"})

DECODE = {
    "one": Bound(kernels=RAGGED, peak_gib=8.4),
    "data=8": Bound(kernels=RAGGED, peak_gib=2.1, loop_mib=1, kinds=frozenset({"all-reduce"})),
    "tensor=4": Bound(kernels=RAGGED, peak_gib=2.4, loop_mib=25, kinds=frozenset({"all-reduce", "all-to-all"})),
    "fsdp=8": Bound(kernels=RAGGED, peak_gib=1.3, loop_mib=10, kinds=frozenset({"all-reduce", "all-to-all"})),
}
"""Qwen3-0.6B, 64 slots of 1024 positions, 32 steps a dispatch, on v5e."""

LAYOUT_MIB = 80
"""Memory of laying Qwen3-0.6B out for sampling beside its arguments and results: pieces of 64 MiB."""

HEAD_8B_GIB = 2.0
"""Wire of the loss over the vocabulary in one step of 8 x 4096 tokens of Qwen3-8B, with its gradient, at fsdp=8."""

HEAD_8B_PEAK_GIB = 1.5
"""1.48 by libtpu 0.0.50."""

STEPS = {
    "grpo_0.6b": Bound(kernels=SPLASH, peak_gib=2.6, loop_mib=128, once_mib=4096),
    "sft_8b": Bound(kernels=SPLASH, peak_gib=14.5, loop_mib=1024, once_mib=64 * 1024),
    "sft_30b": Bound(
        kernels=SPLASH | {"kernel"}, peak_gib=70.0, temporaries_gib=14.0, loop_mib=2048, once_mib=64 * 1024
    ),
}
"""Whole updates: 0.6B with 16 x 2048 and, with bfloat16 moments, 8B with 8 x 4096 on v5e-8; 30B-A3B with 8 x 4096 on
v5p-16."""
