"""Rematerialization policies (`remat`): activations saved, recomputed or offloaded for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from posttrain.config import Remat

BLOCK_INPUT = "block_input"
"""Checkpoint name of each block's input."""


def rematerialized(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Wrap `function` with a policy: `none` saves everything, `full` only its inputs, `dots` matrix products, `offload`
    its inputs in host memory."""
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
