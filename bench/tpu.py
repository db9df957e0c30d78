"""Programs compiled for TPU slices that are not there: peak memory, wire and compile time, as Markdown.

.venv-aot/bin/python bench/tpu.py [--tunix PYTHON] [WORK ...]

`--tunix`: the same works of Tunix beside them, by the Python of an environment with google-tunix and libtpu.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from posttrain.config import AdamW, LoRA, MeshSection, Remat, RematName, RolloutSection, SamplerTensor, SavedActivations
from posttrain.kernels.platform import CHIPS, traced_for
from posttrain.losses.policy import GRPO
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import BATCH_SPEC, make_mesh, param_sharding, ring_hops
from posttrain.models import decoder
from posttrain.models.activations import ATTENTION, attention_flops, saved_names
from posttrain.models.config import Compute, MLPConfig, ModelConfig, MoEConfig, RouterConfig
from posttrain.models.decoder import Decoder
from posttrain.models.drafter import DrafterConfig
from posttrain.models.layers import Init
from posttrain.models.moe import Experts
from posttrain.plan.hlo import ProgramText, read_program
from posttrain.plan.lowered import POLICY_ARRAYS, Figures, batch_of, compile_program, model_of, vocabulary_trips
from posttrain.plan.machine import GIB, has_libtpu, libtpu_version, topology_devices
from posttrain.plan.sampling import RolloutShapes
from posttrain.train.objective import TrainSettings
from posttrain.train.programs import TrainPrograms
from posttrain.train.transformations import make_optimizer
from posttrain.weights.drafter import CONFIG, WEIGHTS, described
from posttrain.weights.lora import attach_lora
from posttrain.weights.state import active_parameters
from posttrain.weights.tensor_file import Outline, write_tensors

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
EXPERTS_30B = LARGE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rope_theta": 150000,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
}
MOONLIGHT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "rope_theta": 50000.0,
}
CLOCKS = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
"""Cycles a second."""
KERNEL_TIME = 2.0
"""Time of an operation of the attention kernels, of which the compiler says nothing, relative to the chip's peak."""
MEDIUM = SMALL | {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 9728,
}
MIB = 2**20
DTYPE = jnp.dtype(jnp.bfloat16)
LOW: dict[str, Any] = {"moments": "bfloat16", "stochastic_rounding": True}


def mesh_of(kind: str = "v5e", shape: str = "2x4", **axes: int) -> Mesh:
    sizes = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1} | axes
    return make_mesh(MeshSection(**sizes), topology_devices(kind, shape))


def model(fields: dict[str, Any], mesh: Mesh, remat: Remat = "full") -> Decoder:
    return model_of(fields, Compute(dtype=DTYPE, mesh=mesh, remat=remat), DTYPE)


def compiled(lower: Callable[[], jax.stages.Lowered], devices: int) -> tuple[Figures | str, float]:
    """Figures, or the reason why the compiler gave up; processor seconds."""
    start = time.process_time()
    try:
        found: Figures | str = compile_program(lower(), devices)
    except jax.errors.JaxRuntimeError as error:
        found = reason(str(error))
    return found, time.process_time() - start


def reason(error: str) -> str:
    """Line of a compiler's error that has the sizes."""
    lines = error.splitlines()
    return next((line.strip() for line in lines if "Used" in line or "exceed" in line), lines[0])[:120]


def update(
    fields: dict[str, Any],
    rows: int,
    length: int,
    loss: Any,
    arrays: tuple[str, ...] = (),
    remat: Remat = "full",
    lora: LoRA | None = None,
    slice_of: tuple[str, str] = ("v5e", "2x4"),
    **settings: Any,
) -> str:
    """Figures of one update with `fsdp` over a slice; `settings` of the optimizer."""
    mesh, chip = mesh_of(*slice_of, fsdp=-1), CHIPS[slice_of[0]]
    made = model(fields, mesh, remat)
    if lora is not None:
        made = nnx.eval_shape(lambda made: attached(made, lora), made)
    optimizer = make_optimizer(AdamW(learning_rate=1e-5, **settings), 100, seed=0, model=made)
    programs = TrainPrograms(made, loss, optimizer, TrainSettings(temperature=1.0, max_grad_norm=1.0), mesh=mesh)
    found, seconds = compiled(lambda: programs.lower_update(batch_of(rows, length, arrays=arrays)), mesh.size)
    if isinstance(found, str):
        return f"does not fit: {found}"
    trips = vocabulary_trips(mesh, rows, length, fields["vocab_size"])
    tokens, forward = rows * length / mesh.size, attention_flops(made.config, rows, length) / mesh.size
    frozen = 1 - sum(x.size for x in programs.params.values()) / sum(x.size for x in programs.weights.values())
    ideal = ((6 - 2 * frozen) * active_parameters(made) * tokens + 3.5 * forward) / chip.flops
    again = 0 if ATTENTION in saved_names(remat) else 1
    kernels = KERNEL_TIME * (3.5 + again) * forward / chip.flops
    cycles = (math.prod(n or trips for n in at) * count for at, count in found.text.cycles.items())
    estimate = sum(cycles) / CLOCKS[slice_of[0]]
    return (
        f"estimated {estimate:.2f} s without kernels, MFU at most {ideal / (estimate + kernels):.0%}; "
        f"{update_text(found.text, found.peak, found.code, seconds, trips)}"
    )


def attached(made: Decoder, lora: LoRA) -> Decoder:
    """Model of shapes with an adapter."""
    attach_lora(made, lora, seed=0)
    return made


def update_text(text: ProgramText, peak: int, code: int, seconds: float, trips: int) -> str:
    """`trips`: at most so many of the loop over the vocabulary, whose number only the run knows."""
    loop = sum(c.wire * c.executions() for c in text.collectives if c.in_dynamic_loop)
    once = text.wire() - loop
    of_loop = f", of it the vocabulary at most {trips} x {loop / MIB:.1f} MiB" if loop else ""
    return (
        f"wire {(once + trips * loop) / GIB:.2f} GiB a chip and step{of_loop}; peak {peak / GIB:.2f} GiB; "
        f"code {code / MIB:.0f} MiB; {seconds:.0f} CPU s"
    )


def experts(expert: int) -> str:
    """Figures of one layer of experts of Qwen3-30B-A3B with its gradients, 4,096 tokens a chip, v5p:2x2x4."""
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
        return f"does not fit: {found}"
    # The gradients of weights, which `data` adds up, have three dimensions.
    exchanged = sum(c.wire * c.executions() for c in found.text.collectives if len(c.results[0].dims) < 3)
    once = [m.buffer for m in found.text.made if not m.loops and len(m.buffer.dims) == 2 and m.buffer.dims[1] >= 768]
    written, rows = sum(b.bytes for b in once), max(b.dims[0] for b in once)
    return (
        f"tokens' wire {exchanged / MIB:.0f} MiB a chip; arrays of rows written {written / GIB:.2f} GiB, of at most "
        f"{rows:,} rows; temporaries {found.temporaries / GIB:.2f} GiB; {seconds:.0f} CPU s"
    )


def decode(split: SamplerTensor, fields: dict[str, Any], length: int, **axes: int) -> str:
    """Figures of decoding 64 slots of `length` positions; `split`: `rollout.tensor`."""
    mesh = mesh_of(**axes)
    sizes: dict[str, Any] = {"slots": 64, "max_length": length, "steps": 32, "max_tokens": length // 2}
    settings = RolloutSection(tensor=split)
    rollout = RolloutShapes(model(fields, mesh), mesh, **sizes, memory=CHIPS["v5e"].memory, settings=settings)
    found, seconds = compiled(rollout.lower_decode, mesh.size)
    if isinstance(found, str):
        return f"does not fit: {found}"
    return token_text(found, "v5e") + decode_text(found.text, found.temporaries, found.peak, found.code, seconds)


def decode_text(text: ProgramText, temporaries: int, peak: int, code: int, seconds: float) -> str:
    loop = sum(c.wire * c.executions() for c in text.collectives if c.in_dynamic_loop)
    return (
        f"wire {loop / MIB:.2f} MiB a token, temporaries {temporaries / GIB:.2f} GiB, peak {peak / GIB:.2f} GiB; "
        f"code {code / MIB:.0f} MiB; {seconds:.0f} CPU s"
    )


def decode_experts(fields: dict[str, Any], machine: tuple[str, str], slots: int, **axes: int) -> str:
    """Figures of decoding `slots` of 2048 positions, with copies of experts and estimated time of a token."""
    mesh = make_mesh(MeshSection(**({"fsdp": 1} | axes)), topology_devices(*machine))
    made = model(fields, mesh)
    sizes: dict[str, Any] = {"slots": slots, "max_length": 2048, "steps": 32, "max_tokens": 1024}
    rollout = RolloutShapes(made, mesh, **sizes, memory=CHIPS[machine[0]].memory)
    found, seconds = compiled(rollout.lower_decode, mesh.size)
    if isinstance(found, str):
        return f"does not fit: {found}"
    mixture = made.config.mixtures[0]
    per_device = mixture.num_experts // mesh.shape["expert"], mixture.expert.dim // mesh.shape["tensor"]
    layer = sorted((*per_device, made.config.embed_dim))
    experts = [m for m in found.text.made if sorted(m.buffer.dims[-3:]) == layer and not m.op.endswith("-start")]
    copied = sum(m.buffer.bytes * runs(m.loops) for m in experts if m.loops)
    laid_out = sum(m.buffer.bytes for m in experts if not m.loops)
    return (
        f"experts copied {copied / GIB:.2f} GiB a token, {laid_out / GIB:.2f} GiB a dispatch; "
        + token_text(found, machine[0])
        + decode_text(found.text, found.temporaries, found.peak, found.code, seconds)
    )


def token_text(found: Figures, kind: str) -> str:
    cycles = sum(count * runs(loops) for loops, count in found.text.cycles.items() if loops)
    return f"estimated {1e3 * cycles / CLOCKS[kind]:.1f} ms a token without kernels; "


def drafted(fields: dict[str, Any], kind: str, tokens: int, slots: int, **axes: int) -> str:
    """Bytes that a chip moves for one token of every slot of 1024 positions, and for a round that judges `tokens`
    drafts of n-grams or of a block drafter: by the compiler's count for two and four layers, without loops, whose
    bodies it counts once, and from both for all layers."""
    decoder.SPLIT_LAYERS["tpu"] = 4
    mesh, counts = mesh_of(**axes), []
    for layers in (2, 4):
        made = model(fields | {"num_hidden_layers": layers}, mesh)
        sizes: dict[str, Any] = {"slots": slots, "max_length": 1024, "steps": 32, "max_tokens": 512}
        with tempfile.TemporaryDirectory() as folder:
            speculative: dict[str, Any] = {"kind": kind, "tokens": tokens}
            if kind == "block":
                speculative["path"] = folder
                write_drafter(Path(folder), made.config, tokens)
            settings: dict[str, Any] = {"speculative": speculative, "tensor": "trained"}
            sizes |= {"memory": CHIPS["v5e"].memory, "settings": RolloutSection(**settings)}
            rollout = RolloutShapes(made, mesh, **sizes)
        assert rollout.drafted is not None
        calls = rollout.lower_decode(), rollout.runner.lower(rollout.loaded, rollout.drafted)
        counts.append([call.compile().cost_analysis()["bytes accessed"] / MIB for call in calls])
    more = fields["num_hidden_layers"] / 2 - 1
    one, judged = (two + more * (four - two) for two, four in zip(*counts, strict=True))
    return (
        f"{one:,.0f} MiB a chip for one token of each slot, {judged:,.0f} for a round, {judged / one:.2f} times; of a "
        f"layer {(counts[1][0] - counts[0][0]) / 2:.1f} and {(counts[1][1] - counts[0][1]) / 2:.1f}"
    )


def write_drafter(folder: Path, target: ModelConfig, tokens: int) -> None:
    """Write a block drafter of zeros."""
    config = DrafterConfig(embed_dim=target.embed_dim, vocab_size=target.vocab_size, tokens=tokens, window=8, layers=1)
    (folder / CONFIG).write_text(json.dumps({"target": described(target), **dataclasses.asdict(config)}))
    arrays = {name: np.zeros(tensor.shape, np.float32) for name, tensor in config.parameters.items()}
    write_tensors(folder / WEIGHTS, [Outline(name, x.dtype, x.shape) for name, x in arrays.items()], arrays.values())


def runs(loops: tuple[int | None, ...]) -> int:
    """Runs in one token; loops of unknown trips count once."""
    return math.prod(trips or 1 for trips in loops)


def tunix(python: str, case: str, devices: int = 8) -> str:
    """Figures of Tunix's program of a case of `peers/tunix_programs.py`, read as ours are."""
    driver = Path(__file__).parent / "peers" / "tunix_programs.py"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([python, driver, case, folder], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"failed: {done.stderr.strip().splitlines()[-1]}"
        figures = json.loads((Path(folder) / f"{case}.json").read_text())
        if "error" in figures:
            return f"does not fit: {reason(figures['error'])}"
        text = read_program((Path(folder) / f"{case}.hlo").read_text(), devices)
    peak, code, seconds = figures["peak"], figures["code"], figures["seconds"]
    if case.startswith("decode"):
        return decode_text(text, figures["temporaries"], peak, code, seconds)
    return update_text(text, peak, code, seconds, 1)


def decode_case(split: SamplerTensor = "auto", **axes: int) -> tuple[str, Callable[[], str]]:
    shown = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    shown += "" if split == "auto" else f", rollout.tensor={split}"
    return f"decode, 0.6B, 64 x 1024, {shown}", lambda: decode(split, SMALL, 1024, **axes)


def large_case(length: int, *saved: RematName) -> tuple[str, Callable[[], str]]:
    """State as Tunix has it: moments in bfloat16, no masters."""
    title = f"SFT step, 8B, 8 x {length}, fsdp=8, bfloat16 moments and no masters{titled(saved)}"
    return title, lambda: update(LARGE, 8, length, SFTLoss(), remat=SavedActivations(save=saved), **LOW)


def lora_case(*saved: RematName) -> tuple[str, Callable[[], str]]:
    """Adapters of rank 16 of 8B."""
    title, lora = f"LoRA step, 8B, 8 x 4096, fsdp=8{titled(saved)}", LoRA(rank=16)
    return title, lambda: update(LARGE, 8, 4096, SFTLoss(), remat=SavedActivations(save=saved), lora=lora)


def slice_case(of: tuple[str, str], rows: int, *saved: RematName) -> tuple[str, Callable[[], str]]:
    rows *= math.prod(map(int, of[1].split("x")))
    title = f"SFT step, 8B, {rows} x 4096, {':'.join(of)}{titled(saved)}"
    return title, lambda: update(LARGE, rows, 4096, SFTLoss(), remat=SavedActivations(save=saved), slice_of=of, **LOW)


def titled(saved: tuple[RematName, ...]) -> str:
    return f", remat [{', '.join(saved)}]" if saved else ""


OF_8B: tuple[RematName, ...] = ("attention", "qkv", "projection")
"""Activations that `remat: auto` saves in the SFT step of 8B with 8 x 4096 on v5e-8; of LoRA `gate` as well."""


def mesh_case(kind: str, shape: str, **axes: int) -> tuple[str, Callable[[], str]]:
    """Links between neighbours on a ring of each axis."""
    sizes = ", ".join(f"{axis}={size}" for axis, size in axes.items())

    def far() -> str:
        devices = topology_devices(kind, shape)
        mesh = make_mesh(MeshSection(**{"fsdp": 1} | axes), devices)
        own = np.asarray(devices, dtype=object).reshape(mesh.devices.shape)
        before, now = ([round(n, 2) for n in ring_hops(grid) or [] if n] for grid in (own, mesh.devices))
        return f"{now}; in the devices' own order {before}"

    return f"links of a ring step, {kind}:{shape}, {sizes}", far


CASES: dict[str, list[tuple[tuple[str, Callable[[], str]], str | None]]] = {
    "decode": [
        (decode_case(fsdp=8), "decode-fsdp8"),
        (decode_case(2, fsdp=8), None),
        *[
            ((f"decode, 4B, 64 x 2048, fsdp=8, rollout.tensor={n}", partial(decode, n, MEDIUM, 2048, fsdp=8)), None)
            for n in (2, 4, 8)
        ],
        (decode_case(data=8), None),
        (decode_case(data=2, tensor=4), "decode-tensor4"),
        (decode_case(tensor=8), "decode-tensor8"),
    ],
    "decode-experts": [
        ((f"{name}, {slots} x 2048, {':'.join(on)}, {axes}", partial(decode_experts, fields, on, slots, **axes)), None)
        for name, fields, on, slots, axes in (
            ("30B-A3B", EXPERTS_30B, ("v5p", "2x2x2"), 256, {"expert": 8}),
            ("30B-A3B", EXPERTS_30B, ("v6e", "2x4"), 256, {"expert": 2, "tensor": 4}),
            ("gpt-oss-20b", GPT_OSS_20B, ("v5e", "2x4"), 64, {"expert": 8}),
            ("Moonlight-16B", MOONLIGHT, ("v5e", "2x4"), 64, {"expert": 8}),
        )
    ],
    "drafts": [
        ((f"decode, {name}, 8 x 1024, {axes}, 4 drafts ({kind})", partial(drafted, fields, kind, 4, 8, **axes)), None)
        for name, fields, axes in (("0.6B", SMALL, {"data": 8}), ("8B", LARGE, {"tensor": 8}))
        for kind in ("ngram", "block")
    ],
    "experts": [((f"30B-A3B, 4,096 tokens, v5p:2x2x4, expert={n}", partial(experts, n)), None) for n in (2, 4, 8, 16)],
    "grpo": [(("GRPO update, 0.6B, 16 x 2048, fsdp=8", lambda: update(SMALL, 16, 2048, GRPO, POLICY_ARRAYS)), "grpo")],
    "mesh": [
        (mesh_case(kind, shape, **axes), None)
        for kind, shape, axes in (
            ("v5e", "2x4", {"fsdp": 8}),
            ("v5e", "2x4", {"fsdp": 2, "tensor": 4}),
            ("v5e", "4x4", {"data": 4, "fsdp": 4}),
            ("v5e", "16x16", {"data": 16, "fsdp": 16}),
            ("v5e", "16x16", {"data": 32, "fsdp": 8}),
            ("v5e", "16x16", {"fsdp": 256}),
            ("v5p", "4x4x4", {"data": 4, "fsdp": 16}),
            ("v6e", "4x8", {"data": 4, "fsdp": 8}),
        )
    ],
    "sft": [(("SFT step, 0.6B, 8 x 4096, fsdp=8", lambda: update(SMALL, 8, 4096, SFTLoss())), "sft")],
    "sft-8b": [(large_case(4096), "sft-8b-4096"), (large_case(1024), "sft-8b-1024")],
    "slices": [
        *[(slice_case(("v5p", "4x4x4"), *case), None) for case in ((1,), (4, *OF_8B, "gate", "up"))],
        (slice_case(("v6e", "16x16"), 2, *OF_8B), None),
    ],
    "remat": [(large_case(4096, *OF_8B), None), (lora_case(), None), (lora_case(*OF_8B, "gate"), None)],
}
"""Works: title, program, and the case of `peers/tunix_programs.py` that does the same."""


def begin(script: str, machine: str) -> None:
    """Print the conditions; exit where TPU's compiler is missing."""
    jax.config.update("jax_platforms", "cpu")
    if not has_libtpu():
        sys.exit(f"{script}: needs libtpu; see CONTRIBUTING.md, The TPU compiler")
    print(f"jax {jax.__version__}, libtpu {libtpu_version()}, {machine}, bfloat16, remat full\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("works", nargs="*", metavar="WORK", help=", ".join(CASES))
    parser.add_argument("--tunix", metavar="PYTHON")
    given = parser.parse_args()
    if unknown := set(given.works) - CASES.keys():
        parser.error(f"no such work: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    begin("bench/tpu.py", "v5e:2x4")
    print("| work | posttrain | Tunix |\n|---|---|---|" if given.tunix else "| work | posttrain |\n|---|---|")
    for name in given.works or CASES:
        for (title, case), peer in CASES[name]:
            line = f"| {title} | {case()} |"
            if given.tunix:
                line += f" {tunix(given.tunix, peer) if peer else ''} |"
            print(line, flush=True)


if __name__ == "__main__":
    main()
