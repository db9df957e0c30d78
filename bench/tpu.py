"""Programs compiled for TPU slices that are not there: peak memory, wire and compile time, as Markdown.

.venv-aot/bin/python bench/tpu.py [grpo] [sft] [sft-8b] [decode] [experts]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from posttrain.config import MeshSection, OptimizerSection
from posttrain.kernels.platform import traced_for
from posttrain.losses.policy import GRPO
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import BATCH_SPEC, make_mesh, param_sharding
from posttrain.models.config import Compute, MLPConfig, MoEConfig, RouterConfig
from posttrain.models.decoder import Decoder
from posttrain.models.layers import Init
from posttrain.models.moe import Experts
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


def experts(expert: int) -> Iterator[str]:
    """Rows of the table on one layer of experts of Qwen3-30B-A3B with its gradients, 4,096 tokens a chip, v5p:2x2x4."""
    sizes = MeshSection(data=-1, fsdp=1, expert=expert, tensor=1)
    mesh = make_mesh(sizes, topology_devices("v5p", "2x2x4"))
    config = MoEConfig(num_experts=128, top_k=8, expert=MLPConfig(dim=768), router=RouterConfig())
    width, tokens, compute = 2048, 4096 * mesh.size, Compute(dtype=DTYPE, mesh=mesh)

    def make() -> Experts:
        return Experts(config, 1, width, Init(0.02, DTYPE, nnx.Rngs(0)))

    graph, state = nnx.split(nnx.eval_shape(make))

    def placed(w: Any) -> Any:
        sharding = param_sharding(mesh, "experts", w.get_metadata("dims")[1:], w.shape[1:])
        return w.replace(jax.ShapeDtypeStruct(w.shape[1:], w.dtype, sharding=sharding))

    weights = jax.tree.map(placed, state, is_leaf=lambda w: isinstance(w, nnx.Variable))

    def on_rows(size: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((tokens, size), dtype, sharding=NamedSharding(mesh, BATCH_SPEC))

    def step(weights: Any, x: Any, experts: Any, shares: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(lambda w, x, shares: nnx.merge(graph, w)(x, experts, shares, compute), weights, x, shares)
        return out, pull(d_out)

    given = on_rows(width, DTYPE), on_rows(8, jnp.int32), on_rows(8, jnp.float32), on_rows(width, DTYPE)
    found, seconds = compiled(lambda: jax.jit(traced_for(mesh, step)).lower(weights, *given), mesh.size)
    if isinstance(found, str):
        yield f"does not fit: {found}"
        return
    # The gradients of weights, which `data` adds up, have three dimensions.
    exchanged = sum(c.wire * c.executions() for c in found.text.collectives if len(c.results[0].dims) < 3)
    once = [m.buffer for m in found.text.made if not m.loops and len(m.buffer.dims) == 2 and m.buffer.dims[1] >= 768]
    written, rows = sum(b.bytes for b in once), max(b.dims[0] for b in once)
    yield (
        f"tokens' wire {exchanged / MIB:.0f} MiB a chip; arrays of rows written {written / GIB:.2f} GiB, of at most "
        f"{rows:,} rows; temporaries {found.temporaries / GIB:.2f} GiB; {seconds:.0f} CPU s"
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
    "experts": {
        f"layer of experts, 30B-A3B, 4,096 tokens a chip, v5p:2x2x4, expert={size}": lambda size=size: experts(size)  # type: ignore[misc]
        for size in (2, 4, 8, 16)
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


def begin(script: str, machine: str) -> None:
    """Print the conditions; exit where TPU's compiler is missing."""
    jax.config.update("jax_platforms", "cpu")
    if not has_libtpu():
        sys.exit(f"{script}: needs libtpu; see CONTRIBUTING.md, The TPU compiler")
    print(f"jax {jax.__version__}, libtpu {libtpu_version()}, {machine}, bfloat16, remat full\n")


def main() -> None:
    begin("bench/tpu.py", "v5e:2x4")
    print("| work | posttrain |\n|---|---|", flush=True)
    for name in sys.argv[1:] or CASES:
        for title, case in CASES[name].items():
            for line in case():
                print(f"| {title} | {line} |", flush=True)


if __name__ == "__main__":
    main()
