"""Programs compiled for TPU slices that are not there: peak memory, wire and compile time, as Markdown.

.venv-aot/bin/python bench/tpu.py [grpo] [sft] [sft-8b] [decode]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from posttrain.config import MeshSection, OptimizerSection
from posttrain.losses.policy import GRPO
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import make_mesh
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.plan.build import POLICY_ARRAYS, RolloutShapes, batch_of, model_of, train_programs
from posttrain.plan.loops import vocabulary_trips
from posttrain.plan.lowered import Figures, compile_program
from posttrain.plan.machine import CHIPS, GIB, has_libtpu, libtpu_version, topology_devices
from posttrain.train.optim import make_optimizer

SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
}
LARGE = SMALL | {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
MIB = 2**20
DTYPE = jnp.dtype(jnp.bfloat16)


def mesh_of(**axes: int) -> Mesh:
    sizes = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1} | axes
    return make_mesh(MeshSection(**sizes), topology_devices("v5e", "2x4"))


def model(fields: dict[str, Any], mesh: Mesh) -> Decoder:
    return model_of(fields, Compute(dtype=DTYPE, mesh=mesh, remat="full"), DTYPE)


def compiled(lower: Callable[[], jax.stages.Lowered], devices: int) -> tuple[Figures | str, float]:
    """Figures, or the reason why the compiler gave up; processor seconds."""
    start = time.process_time()
    try:
        found: Figures | str = compile_program(lower(), devices)
    except jax.errors.JaxRuntimeError as error:
        lines = str(error).splitlines()
        found = next((line.strip() for line in lines if "Used" in line or "exceed" in line), lines[0])[:120]
    return found, time.process_time() - start


def update(fields: dict[str, Any], rows: int, length: int, loss: Any, arrays: tuple[str, ...] = ()) -> Iterator[str]:
    """Rows of the table on one update at fsdp=8."""
    mesh = mesh_of(fsdp=8)
    optimizer = make_optimizer(OptimizerSection(learning_rate=1e-5), 100)
    programs = train_programs(model(fields, mesh), loss, optimizer, mesh)
    found, seconds = compiled(lambda: programs.lower_update(batch_of(rows, length, arrays=arrays)), mesh.size)
    if isinstance(found, str):
        yield f"does not fit: {found}"
        return
    trips = vocabulary_trips(mesh, rows, length, fields["vocab_size"])
    loop = sum(c.wire * c.executions() for c in found.text.collectives if c.in_dynamic_loop)
    once = found.text.wire() - loop
    yield (
        f"wire {once / GIB:.2f} GiB a chip and step, and the vocabulary loop, at most {trips} x {loop / MIB:.1f} MiB: "
        f"{trips * loop / GIB:.2f} GiB; peak {found.peak / GIB:.2f} GiB; {seconds:.0f} CPU s"
    )


def decode(**axes: int) -> Iterator[str]:
    """Rows of the table on decoding 64 slots of 1024 positions."""
    mesh = mesh_of(**axes)
    rollout = RolloutShapes(
        model(SMALL, mesh), mesh, slots=64, max_length=1024, steps=32, max_tokens=512, memory=CHIPS["v5e"].memory
    )
    found, seconds = compiled(rollout.lower_decode, mesh.size)
    if isinstance(found, str):
        yield f"does not fit: {found}"
        return
    loop = sum(c.wire * c.executions() for c in found.text.collectives if c.in_dynamic_loop)
    yield (
        f"wire {loop / MIB:.2f} MiB a token, temporaries {found.temporaries / GIB:.2f} GiB, "
        f"peak {found.peak / GIB:.2f} GiB; {seconds:.0f} CPU s"
    )


CASES: dict[str, dict[str, Callable[[], Iterator[str]]]] = {
    "decode": {
        f"decode, 0.6B, 64 x 1024, {', '.join(f'{axis}={size}' for axis, size in axes.items())}": (
            lambda axes=axes: decode(**axes)  # type: ignore[misc]
        )
        for axes in ({"fsdp": 8}, {"data": 8}, {"data": 2, "tensor": 4}, {"tensor": 8})
    },
    "grpo": {"GRPO update, 0.6B, 16 x 2048, fsdp=8": lambda: update(SMALL, 16, 2048, GRPO, POLICY_ARRAYS)},
    "sft": {"SFT step, 0.6B, 8 x 4096, fsdp=8": lambda: update(SMALL, 8, 4096, SFTLoss())},
    "sft-8b": {
        f"SFT step, 8B, 8 x {length}, fsdp=8": (
            lambda length=length: update(LARGE, 8, length, SFTLoss())  # type: ignore[misc]
        )
        for length in (4096, 1024)
    },
}


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    if not has_libtpu():
        sys.exit("bench/tpu.py: needs libtpu; see CONTRIBUTING.md, The TPU compiler")
    print(f"jax {jax.__version__}, libtpu {libtpu_version()}, v5e:2x4, bfloat16, remat full\n")
    print("| work | posttrain |\n|---|---|", flush=True)
    for name in sys.argv[1:] or CASES:
        for title, case in CASES[name].items():
            for line in case():
                print(f"| {title} | {line} |", flush=True)


if __name__ == "__main__":
    main()
