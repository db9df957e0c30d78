"""Qwen3-30B-A3B into Qwen3-0.6B as configs/ say it: what a v5e-8 host has to hold, found without any weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from posttrain.batch import Batch
from posttrain.cluster.reference import FrozenModel
from posttrain.config import DistillSection, MeshSection, RunConfig
from posttrain.config.yaml_file import load_config
from posttrain.distill.teachers import DEFAULT_TOP_K
from posttrain.mesh import BATCH_SPEC, make_mesh, param_sharding
from posttrain.models.config import Compute, ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_hf
from posttrain.train.transformations import make_optimizer
from posttrain.weights.load import outline_of, with_tokens
from posttrain.weights.prune import Pruning, pruned_config
from posttrain.weights.quantize import quantized_outline
from posttrain.weights.state import ModelWeights
from tests.stages.runs import ROOT

pytestmark = pytest.mark.fast

CHIP = 16 * 2**30
"""Bytes of memory of a v5e chip, cloud.google.com/tpu/docs/v5e."""
TOKENS = 151_669
ALIKE = {"head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151_936}
LARGE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "max_position_embeddings": 40_960, "tie_word_embeddings": False, **ALIKE,
}  # fmt: skip
SMALL = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 3072, "max_position_embeddings": 40_960,
    "tie_word_embeddings": True, **ALIKE,
}  # fmt: skip
"""Of the `config.json` of Qwen/Qwen3-30B-A3B and Qwen/Qwen3-0.6B, huggingface.co."""


def outline(fields: dict[str, Any], mesh: Mesh) -> Decoder:
    compute = Compute(
        dtype=jnp.dtype(jnp.bfloat16),
        remat="full",
        attention="auto",
        decode_attention="auto",
        grouped_matmul="auto",
        mesh=mesh,
    )
    return outline_of(with_tokens(config_from_hf(fields), TOKENS), compute, jnp.dtype(jnp.bfloat16))


def placed(model: Decoder, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes in place of the parameters, where these would lie."""
    arrays = {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(nnx.state(model))}
    return {
        path: jax.ShapeDtypeStruct(shape, arrays[path].dtype, sharding=param_sharding(mesh, path, dims, shape))
        for path, dims, shape in ModelWeights(model).shapes()
    }


def bytes_of_a_chip(arrays: Any, like: dict[str, jax.ShapeDtypeStruct]) -> int:
    """Of arrays that lie as the parameters at the end of their paths do."""
    total = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(arrays)[0]:
        names = [str(getattr(key, "key", "")) for key in path]
        sharding = next((like[name].sharding for name in names if name in like), None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(MeshSection(fsdp=8))


def section_of(name: str) -> tuple[RunConfig, DistillSection]:
    config = load_config(Path(ROOT) / "configs" / f"{name}.yaml")
    (section,) = config.stages
    assert isinstance(section, DistillSection)
    assert (config.model.path, section.teachers[0].path) == ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B")
    return config, section


@pytest.mark.thorough
def test_the_teacher_in_int8_fits_the_chips(mesh: Mesh) -> None:
    """All that it needs to say its 64 most probable ids of a pass, in the program that a CPU would run."""
    _, section = section_of("distill_qwen3")
    (teacher,) = section.teachers
    assert (teacher.dtype, teacher.quantize) == ("bfloat16", "int8") and section.cache is not None
    whole = outline(LARGE, mesh)
    assert sum(math.prod(shape) for _, _, shape in ModelWeights(whole).shapes()) == 30_532_122_624
    model = quantized_outline(whole, teacher.quantize)
    weights = placed(model, mesh)
    assert 3.5e9 < bytes_of_a_chip(weights, weights) < 4.5e9
    frozen = FrozenModel(model, mesh, temperature=section.temperature, k=section.top_k or DEFAULT_TOP_K)
    rows = (section.micro_batch_rows or section.batch_rows, section.row_tokens)
    empty = np.zeros(rows, np.int32)
    host = Batch(tokens=empty, positions=empty, segments=empty, loss_weight=np.zeros(rows, np.float32))
    placement = NamedSharding(mesh, BATCH_SPEC)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement), host)
    used = frozen._top_k.lower(weights, batch).compile().memory_analysis()
    assert used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes < 0.75 * CHIP


@pytest.mark.parametrize("name", ["distill_qwen3", "distill_qwen3_served"])
def test_training_holds_the_student_alone(mesh: Mesh, name: str) -> None:
    """Its parameters, their float32 masters and moments and a gradient; a cache or a server is all of the teacher."""
    config, section = section_of(name)
    assert (section.cache is None) != (section.teachers[0].url is None)
    assert (config.model.dtype, config.model.remat) == ("bfloat16", "full")
    params = placed(outline(SMALL, mesh), mesh)
    assert sum(math.prod(p.shape) for p in params.values()) == 596_049_920
    model = outline(SMALL, mesh)
    made = make_optimizer(section.optimizer, section.num_steps, model=model)
    state = jax.eval_shape(made.init, params)
    gradient = {path: jax.ShapeDtypeStruct(p.shape, np.float32) for path, p in params.items()}
    held = [bytes_of_a_chip(tree, params) for tree in (params, state, gradient)]
    assert held[1] > 3 * held[0] and sum(held) < 0.1 * CHIP, held


def test_a_student_can_be_cut_out_of_the_teacher() -> None:
    """Dense, of every second layer, with the eight most used experts side by side, and narrower."""
    plan = Pruning(experts=8, layers=tuple(range(0, 48, 2)), embed_dim=1024, mlp_dim=3072, kv_heads=2)
    student: ModelConfig = pruned_config(config_from_hf(LARGE), plan)
    block = student.blocks[0]
    assert (student.num_layers, student.embed_dim, student.mixtures) == (24, 1024, ())
    assert (block.attention.num_heads, block.attention.num_kv_heads, block.attention.head_dim) == (16, 2, 128)
