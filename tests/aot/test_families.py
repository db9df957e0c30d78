"""Train, prefill and decode programs of every family lower for TPU, with the kernels that they should have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from posttrain.config import AdamW, Remat, SavedActivations
from posttrain.kernels.platform import CHIPS, traced_for
from posttrain.losses.sft import SFTLoss
from posttrain.models import families
from posttrain.plan.hlo import kernel_names
from posttrain.plan.lowered import batch_of
from posttrain.plan.sampling import RolloutShapes
from posttrain.train.objective import TrainSettings
from posttrain.train.programs import TrainPrograms, placed_shapes
from posttrain.train.transformations import make_optimizer
from posttrain.weights.state import ModelWeights
from tests.aot.slices import FAMILIES, SMALL, mesh_of, model, on

BACKWARD = ("splash_mha_dkv", "splash_mha_dq")
JOINED = {"deepseek_v3", "gpt_oss", "llama", "smollm3", "gemma2", "gemma3_text", "gemma4_text"}
"""Latent attention, sinks, heads of 64, and several of 256: decoding by the own kernel."""


def family(name: str) -> str:
    """Kind of a Mosaic kernel: without its variants."""
    for kind in (*BACKWARD, "splash_mha_fwd", "ragged_paged_attention", "joined_attention"):
        if name.startswith(kind):
            return kind
    return name


def test_all_families_are_here() -> None:
    files = {Path(path).stem for folder in families.__path__ for path in Path(folder).glob("[a-z]*.py")}
    assert set(FAMILIES) == files - {"gemma3", "gemma4"}, "the multimodal wrappers hold a family each"


@pytest.mark.parametrize("name", FAMILIES)
def test_programs_lower_with_their_kernels(name: str) -> None:
    fields = SMALL | {"model_type": name} | FAMILIES[name]
    mesh = mesh_of("v5e", "2x2", fsdp=2, tensor=2)
    made = model(fields, mesh, "full")
    programs = TrainPrograms(
        made,
        SFTLoss(),
        make_optimizer(AdamW(learning_rate=1e-5), 10, model=made),
        TrainSettings(temperature=1.0, max_grad_norm=1.0),
        mesh=mesh,
    )
    update = {family(kernel) for kernel in kernel_names(programs.lower_update(batch_of(4, 512)).as_text())}
    assert {"splash_mha_fwd", "splash_mha_dkv"} <= update
    # gmm's kernels bear no name of their own.
    assert bool(made.config.mixtures) == ("kernel" in update)
    rollout = RolloutShapes(made, mesh, slots=8, max_length=512, steps=8, max_tokens=128, memory=CHIPS["v5e"].memory)
    decode = {family(kernel) for kernel in kernel_names(rollout.lower_decode().as_text())}
    kernels = {"ragged_paged_attention", "joined_attention"}
    assert decode & kernels == {"joined_attention" if name in JOINED else "ragged_paged_attention"}
    prefill = {family(kernel) for kernel in kernel_names(rollout.lower_prefill().as_text())}
    assert "splash_mha_fwd" in prefill


def test_saved_activations_are_not_computed_again() -> None:
    """Not in the compiler's program either: neither the forward kernel of attention, nor the six products and two
    rotations of the block."""
    mesh = mesh_of("v5e", "1x1")
    every = SavedActivations(save=("qkv", "attention", "projection", "gate", "up"))

    def counts(remat: Remat) -> tuple[int, int]:
        made = model(SMALL | {"model_type": "llama"} | FAMILIES["llama"], mesh, remat)
        weights, ids = ModelWeights(made), on(mesh, (1, 512), jnp.int32)

        def loss(arrays: Any, *inputs: Any) -> Any:
            return jnp.sum(weights.bind(arrays)(*inputs)[0].astype(jnp.float32))

        program = jax.jit(traced_for(mesh, jax.grad(loss)))
        text = program.lower(placed_shapes(weights, mesh), ids, ids, ids).compile().as_text() or ""
        return len(re.findall(r"%splash_mha_fwd[\w.]* = ", text)), len(re.findall(r" convolution\(", text))

    (kernels, products), (fewer_kernels, fewer_products) = counts("full"), counts(every)
    assert (kernels, fewer_kernels) == (2, 1) and products - fewer_products == 6 + 2
