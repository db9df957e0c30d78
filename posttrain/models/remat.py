"""What the backward pass finds saved and what it computes again, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from posttrain.config import Remat

BLOCK_INPUT = "block_input"
"""Name of what enters each block."""


def rematerialized(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`function` with the policy: `none` saves all, `full` nothing but its inputs, `dots` matrix products, `offload`
    its inputs, in the host's memory."""
    policies = jax.checkpoint_policies
    if remat == "none":
        return function
    if remat == "full":
        return jax.checkpoint(function)
    if remat == "dots":
        return jax.checkpoint(function, policy=policies.checkpoint_dots_with_no_batch_dims)
    return jax.checkpoint(
        function,
        policy=policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[BLOCK_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    )
