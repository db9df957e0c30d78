"""Tunix's programs compiled for v5e:2x4, for `bench/tpu.py --tunix PYTHON`; its environment needs libtpu as well.

python tunix_programs.py CASE FOLDER: writes CASE.hlo, the optimised program, and CASE.json, the compiler's figures.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tunix.generate import sampler as sampler_module
from tunix.generate import tokenizer_adapter
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common, function_registry
from tunix.rl import trainer as rl_trainer
from tunix.rl.grpo import grpo_learner
from tunix.sft import peft_trainer
from tunix.sft import utils as sft_utils

PAD, EOS = 0, 1
SIZES = {"0.6b": qwen3.ModelConfig.qwen3_0p6b, "8b": qwen3.ModelConfig.qwen3_8b}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"kind": "grpo", "size": "0.6b", "rows": 16, "length": 2048},
    "sft": {"kind": "sft", "size": "0.6b", "rows": 8, "length": 4096},
    "sft-8b-4096": {"kind": "sft", "size": "8b", "rows": 8, "length": 4096},
    "sft-8b-1024": {"kind": "sft", "size": "8b", "rows": 8, "length": 1024},
    "decode-fsdp8": {"kind": "decode", "size": "0.6b", "rows": 64, "length": 1024},
    "decode-tensor4": {"kind": "decode", "size": "0.6b", "rows": 64, "length": 1024, "tensor": 4},
    "decode-tensor8": {"kind": "decode", "size": "0.6b", "rows": 64, "length": 1024, "tensor": 8},
}


def mesh_of(tensor: int) -> Mesh:
    jax.devices()  # the CPU's, before the topology's
    jax.default_backend = lambda: "tpu"  # asked by kernels; JAX itself asks elsewhere
    topology = topologies.get_topology_desc(topology_name="v5e:2x4", platform="tpu")
    from jax._src.pallas.mosaic import tpu_info

    tpu_info.get_device_kind = lambda: topology.devices[0].device_kind
    tpu_info.get_num_device_cores = lambda: 1
    return Mesh(np.array(topology.devices).reshape(-1, tensor), ("fsdp", "tp"))


def model_of(size: str, mesh: Mesh, remat: qwen3.RematConfig) -> Any:
    """Shapes of a model, and its settings: bfloat16, with flash attention, as in Tunix's examples."""
    # Tunix's own function leaves arrays alone where the first device is a CPU.
    qwen3.shard = lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
    config = dataclasses.replace(
        SIZES[size](),
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
        remat_config=remat,
        use_flash_attention=True,
        flash_attention_block_size=256,
        shd_config=qwen3.ShardingConfig.get_default_sharding(),
    )
    return placed(nnx.eval_shape(lambda: qwen3.Qwen3(config, rngs=nnx.Rngs(params=0))), mesh), config


def placed(tree: Any, mesh: Mesh) -> Any:
    """Shapes with the shardings that Tunix gives to their parameters."""
    graph, state = nnx.split(tree)

    def one(leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
        fits = isinstance(spec, P) and len(spec) <= len(leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec if fits else P()))

    specs = nnx.get_partition_spec(state)
    return nnx.merge(graph, jax.tree.map(one, state, specs, is_leaf=lambda x: isinstance(x, P)))


def update(kind: str, size: str, rows: int, length: int) -> Callable[[], Any]:
    """Step of Tunix's trainer with AdamW whose moments are bfloat16, as its parameters are."""
    mesh = mesh_of(1)
    model, _ = model_of(size, mesh, qwen3.RematConfig.DECODER)
    with mesh:
        optimizer = nnx.eval_shape(lambda m: nnx.Optimizer(m, optax.adamw(1e-5), wrt=nnx.Param), model)

    def given(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("fsdp")))

    trainer, batch = (sft_trainer if kind == "sft" else grpo_trainer)(rows, length, given)
    trainer._lora_enabled = False
    step = nnx.jit(trainer.create_train_step_fn(), donate_argnames=("optimizer",))

    def lower() -> Any:
        with mesh:
            return step.lower(model, placed(optimizer, mesh), batch)

    return lower


def sft_trainer(rows: int, length: int, given: Callable[..., Any]) -> tuple[Any, Any]:
    trainer = object.__new__(peft_trainer.PeftTrainer)
    trainer._has_aux, trainer.loss_fn = False, peft_trainer._default_loss_fn

    def inputs(batch: Any) -> dict[str, Any]:
        mask = batch.input_tokens != PAD
        return {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": sft_utils.build_positions_from_mask(mask),
            "attention_mask": sft_utils.make_causal_attn_mask(mask),
        }

    trainer.gen_model_input_fn = inputs
    shape = rows, length
    return trainer, peft_trainer.TrainingInput(input_tokens=given(shape, jnp.int32), input_mask=given(shape, jnp.bool_))


def grpo_trainer(rows: int, length: int, given: Callable[..., Any], prompt: int = 1024) -> tuple[Any, Any]:
    trainer = object.__new__(rl_trainer.Trainer)
    config = grpo_learner.GRPOConfig(num_generations=8)
    config.temperature = 1.0
    loss = function_registry.get_policy_loss_fn(config.policy_loss_fn)
    trainer._has_aux = True
    trainer.loss_fn = lambda model, train_example, algo_config: loss(
        model, train_example, algo_config=algo_config, pad_id=PAD, eos_id=EOS
    )
    trainer.gen_model_input_fn = lambda example: {"train_example": example, "algo_config": config}
    asked, answered = (rows, prompt), (rows, length - prompt)
    return trainer, common.TrainExample(
        prompt_ids=given(asked, jnp.int32),
        prompt_mask=given(asked, jnp.bool_),
        completion_ids=given(answered, jnp.int32),
        completion_mask=given(answered, jnp.bool_),
        advantages=given((rows,), jnp.float32),
        ref_per_token_logps=given(answered, jnp.float32),
        old_per_token_logps=None,
    )


class Tokenizer(tokenizer_adapter.TokenizerAdapter):
    """Ids that the sampler asks for; nothing is encoded."""

    def __init__(self) -> None:
        pass

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def decode(size: str, rows: int, length: int, tensor: int, prompt: int = 256) -> Callable[[], Any]:
    """Decoding after a prefill, whose outputs have the shardings that the compiler chose for it."""
    mesh = mesh_of(tensor)
    model, config = model_of(size, mesh, qwen3.RematConfig.NONE)

    def cache(self: Any, batch: int, size: int, dtype: Any) -> dict[str, Any]:
        keys = jax.ShapeDtypeStruct((batch, size, config.num_kv_heads, config.head_dim), config.dtype)
        end = jax.ShapeDtypeStruct((batch,), jnp.int32)
        return {f"layer_{i}": {"k": keys, "v": keys, "end_index": end} for i in range(config.num_layers)}

    qwen3.Qwen3.init_cache = cache
    shape = sampler_module.CacheConfig(
        cache_size=length, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
    )
    sampler = sampler_module.Sampler(model, Tokenizer(), shape)
    sampler.eos_ids = jnp.array([EOS])
    state = sampler.init_sample_state(
        jnp.full((rows, prompt), 5, jnp.int32),
        include_logits=False,
        total_sampling_steps=length,
        forbidden_token_ids=None,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        seed=jax.random.PRNGKey(0),
        beam_size=None,
        include_logprobs=False,
    )
    state = jax.tree.map(lambda x: x if isinstance(x, int | float) else jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    weights = sampler._flattened_transformer_state

    def lower() -> Any:
        with mesh:
            prefill = sampler._compiled_prefill_fn.lower(weights, state, None, echo=False)
        chosen = jax.tree.leaves(prefill.compile().output_shardings)
        shapes, structure = jax.tree.flatten(prefill.out_info)
        fitting = [
            s if len(getattr(s, "spec", ())) <= len(x.shape) else NamedSharding(mesh, P())
            for x, s in zip(shapes, chosen, strict=True)
        ]
        after = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(shapes, fitting, strict=True)]
        with mesh:
            return sampler._compiled_decode_fn.lower(weights, jax.tree.unflatten(structure, after))

    return lower


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    settings = dict(CASES[case])
    kind = settings.pop("kind")
    lower = decode(**{"tensor": 1, **settings}) if kind == "decode" else update(kind, **settings)
    start = time.process_time()
    figures: dict[str, Any] = {"version": version("google-tunix")}
    try:
        lowered = lower()
        compiled = getattr(lowered, "lowered", lowered).compile()
    except jax.errors.JaxRuntimeError as error:
        figures["error"] = str(error)
    else:
        memory = compiled.memory_analysis()
        figures["peak"] = memory.peak_memory_in_bytes
        figures["temporaries"] = memory.temp_size_in_bytes
        figures["code"] = memory.generated_code_size_in_bytes
        (folder / f"{case}.hlo").write_text(compiled.as_text() or "")
    figures["seconds"] = time.process_time() - start
    (folder / f"{case}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
