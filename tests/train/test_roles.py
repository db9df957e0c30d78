"""What a parameter is, by a table that was written by hand from the families' papers and files: weight decay, moments
in few bits and Muon act on exactly what the table says, of every family, tower, drafter, head and adapter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from posttrain.config import AdamW, LoRA, Muon
from posttrain.errors import ConfigError
from posttrain.losses.sft import SFTLoss
from posttrain.models.config import Compute, VisionConfig
from posttrain.models.decoder import Decoder
from posttrain.models.drafter import DrafterConfig
from posttrain.models.hf import config_from_init
from posttrain.models.vision.gemma3 import Siglip
from posttrain.models.vision.gemma4 import Gemma4Vision
from posttrain.models.vision.mistral3 import Pixtral
from posttrain.models.vision.qwen2_5_vl import QwenVision
from posttrain.models.vision.qwen3_vl import Qwen3Vision
from posttrain.train.layer_matching import Matching
from posttrain.train.objective import TrainSettings
from posttrain.train.optimizers import Optimizer
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.weights.drafter import attach_drafter
from posttrain.weights.load import outline_of
from posttrain.weights.lora import attach_lora
from posttrain.weights.scalar_head import add_scalar_head
from posttrain.weights.state import ModelWeights
from tests.often import often
from tests.random_families import FAMILIES, random_fields
from tests.tiny import tiny_config, tiny_model

pytestmark = pytest.mark.fast

MUON, MATRIX, TABLE, VECTOR, BUFFER = "muon", "matrix", "table", "vector", "buffer"
"""Matrix between hidden states of the layers; another matrix; table of tokens or positions; what never decays; what is
never trained."""

TEXT: dict[str, str] = {
    "embed.embedding": TABLE,
    "head.kernel": MATRIX,
    "final_norm.scale": VECTOR,
    **{f"attention.{name}.kernel": MUON for name in ("q", "k", "v", "o", "q_down", "q_up", "kv_down", "kv")},
    **{f"attention.{name}.bias": VECTOR for name in ("q", "k", "v", "o", "q_down", "kv_down")},
    **{f"attention.{name}_norm.scale": VECTOR for name in ("q", "k", "kv")},
    "attention.sinks": VECTOR,
    **{f"{name}.scale": VECTOR for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")},
    **{f"mlp.{name}.kernel": MUON for name in ("gate", "up", "down")},
    **{f"mlp.{name}.bias": VECTOR for name in ("gate", "up", "down")},
    **{f"mlp.experts.{name}": MUON for name in ("gate", "up", "down")},
    **{f"mlp.experts.{name}_bias": VECTOR for name in ("gate", "up", "down")},
    **{f"mlp.shared.{name}.kernel": MUON for name in ("gate", "up", "down")},
    "mlp.shared_gate.kernel": MATRIX,
    "mlp.router.proj.kernel": MATRIX,
    "mlp.router.proj.bias": VECTOR,
    "mlp.router.correction": VECTOR,
    # Gemma 4: norms inside of the MLPs, a scale for each expert, inputs of each layer, a layer's scale.
    **{f"mlp.{part}.{name}.scale": VECTOR for part in ("experts", "shared") for name in ("norm", "post_norm")},
    "mlp.router.norm.scale": VECTOR,
    "mlp.router.scale": VECTOR,
    "input_gate.kernel": MUON,
    "input_projection.kernel": MUON,
    "input_norm.scale": VECTOR,
    "layer_inputs.embed.embedding": TABLE,
    "layer_inputs.projection.kernel": MATRIX,
    "layer_inputs.norm.scale": VECTOR,
    "scale": BUFFER,
}
SIZES: dict[str, Any] = {
    "embed_dim": 32,
    "depth": 2,
    "width": 24,
    "num_heads": 2,
    "mlp_dim": 36,
    "patch_size": 4,
    "merge": 2,
    "eps": 1e-6,
    "mean": (0.5,) * 3,
    "std": (0.5,) * 3,
    "train": "tower",
}


def named(kind: str, names: str, pattern: str = "{}") -> dict[str, str]:
    return {f"tower.{pattern.format(name)}": kind for name in names.split()}


def of_linear(kind: str, names: str) -> dict[str, str]:
    return named(kind, names, "{}.weight") | named(VECTOR, names, "{}.bias")


TOWERS: dict[str, tuple[VisionConfig, dict[str, str]]] = {
    "siglip": (
        Siglip(model_type="gemma3", side=4, **SIZES),
        of_linear(MATRIX, "patch_embedding")
        | named(TABLE, "position_embedding.weight")
        | of_linear(VECTOR, "layers.layer_norm1 layers.layer_norm2 post_layernorm")
        | of_linear(MATRIX, " ".join(f"layers.self_attn.{x}_proj" for x in ("q", "k", "v", "out")))
        | of_linear(MATRIX, "layers.mlp.fc1 layers.mlp.fc2")
        | named(VECTOR, "projector.mm_soft_emb_norm.weight")
        | named(MATRIX, "projector.mm_input_projection_weight"),
    ),
    "gemma4": (
        Gemma4Vision(
            model_type="gemma4",
            head_dim=12,
            theta=100.0,
            positions=8,
            standardize=True,
            clipped=False,
            **SIZES,
        ),
        named(MATRIX, "input_proj.weight")
        | named(TABLE, "position_embedding_table")
        | named(BUFFER, "std_bias std_scale")
        | named(VECTOR, "q_norm k_norm", "layers.self_attn.{}.weight")
        | named(VECTOR, "input post_attention pre_feedforward post_feedforward", "layers.{}_layernorm.weight")
        | named(MATRIX, "q k v o", "layers.self_attn.{}_proj.linear.weight")
        | named(MATRIX, "gate up down", "layers.mlp.{}_proj.linear.weight")
        | named(MATRIX, "projector.embedding_projection.weight"),
    ),
    "pixtral": (
        Pixtral(
            model_type="mistral3", head_dim=12, theta=1e4, activation="silu", used=2, text_eps=1e-6, bias=True, **SIZES
        ),
        named(MATRIX, "patch_conv.weight")
        | named(VECTOR, "ln_pre layers.attention_norm layers.ffn_norm projector.norm", "{}.weight")
        | named(MATRIX, "q k v o", "layers.attention.{}_proj.weight")
        | named(MATRIX, "gate up down", "layers.feed_forward.{}_proj.weight")
        | named(MATRIX, "projector.patch_merger.merging_layer.weight")
        | of_linear(MATRIX, "projector.linear_1 projector.linear_2"),
    ),
    "qwen2_5_vl": (
        QwenVision(model_type="qwen2_5_vl", window=2, whole=(1,), **SIZES),
        named(MATRIX, "patch_embed.proj.weight")
        | named(VECTOR, "layers.norm1 layers.norm2 projector.ln_q", "{}.weight")
        | of_linear(MATRIX, "layers.attn.qkv layers.attn.proj projector.mlp.0 projector.mlp.2")
        | of_linear(MATRIX, "layers.mlp.gate_proj layers.mlp.up_proj layers.mlp.down_proj"),
    ),
    "qwen3_vl": (
        Qwen3Vision(model_type="qwen3_vl", side=7, deepstack=(0,), **SIZES),
        of_linear(MATRIX, "patch_embed.proj")
        | named(TABLE, "pos_embed.weight")
        | of_linear(VECTOR, "layers.norm1 layers.norm2 projector.merger.norm projector.deepstack_merger_list.0.norm")
        | of_linear(MATRIX, "layers.attn.qkv layers.attn.proj layers.mlp.linear_fc1 layers.mlp.linear_fc2")
        | of_linear(MATRIX, "projector.merger.linear_fc1 projector.merger.linear_fc2")
        | named(MATRIX, "1 2", "projector.deepstack_merger_list.0.linear_fc{}.weight")
        | named(VECTOR, "1 2", "projector.deepstack_merger_list.0.linear_fc{}.bias"),
    ),
}


def drafted() -> Decoder:
    model = tiny_model(num_layers=1, windows=(None,))
    config = model.config
    sizes = DrafterConfig(embed_dim=config.embed_dim, vocab_size=config.vocab_size, tokens=2, window=3, layers=1)
    attach_drafter(model, sizes, seed=0)
    return model


def scored() -> Decoder:
    model = tiny_model(num_layers=1, windows=(None,), qk_norm=False, bias=True)
    add_scalar_head(model, seed=0)
    return model


def adapted() -> Decoder:
    """DoRA on attention and embedding, the head and the norms trained in full."""
    model = tiny_model(num_layers=2, windows=(None,), tie_word_embeddings=False)
    lora = LoRA(rank=2, dora=True, targets=("attention", "^embed"), modules_to_save=("lm_head", "norm"))
    attach_lora(model, lora, seed=0)
    return model


BESIDE: dict[str, tuple[Callable[[], Decoder], Mapping[str, str]]] = {
    "drafter": (
        drafted,
        {
            **{f"drafter.weights.{name}": TABLE for name in ("ages", "places")},
            **{f"drafter.weights.{name}": MATRIX for name in ("hidden", "token", "follows_in", "follows_out")},
            **{f"drafter.weights.{name}_0": MATRIX for name in (*"qkvo", "gate", "up", "down")},
            **{f"drafter.weights.{name}": VECTOR for name in ("attention_norm_0", "mlp_norm_0", "final_norm")},
        },
    ),
    "scalar head": (scored, {"score.kernel": MATRIX}),
    "dora": (
        adapted,
        {
            **{f"attention.{x}.adapters.kernel.lora_{ab}": MATRIX for x in "qkvo" for ab in "ab"},
            **{f"attention.{x}.adapters.kernel.lora_magnitude": "magnitude" for x in "qkvo"},
            **{f"embed.adapters.embedding.lora_{ab}": MATRIX for ab in "ab"},
            "embed.adapters.embedding.lora_magnitude": "magnitude",
        },
    ),
}


def short(path: str) -> str:
    return re.sub(r"^stages\.\d+\.blocks\.\d+\.", "", path)


def of_family(name: str) -> Decoder:
    """All that a family may have: norms, biases, experts, latent attention, inputs of layers, by several draws."""
    fields = random_fields(name, 0)
    if name == "gemma4_text":
        fields |= {"hidden_size_per_layer_input": 6, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 64}
        fields |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    if name in ("deepseek_v3", "glm4_moe"):
        fields |= {"n_shared_experts": 1, "first_k_dense_replace": 1}
    if name == "deepseek_v3":
        fields |= {"q_lora_rank": 8}
    if "attention_bias" in fields and name != "qwen2_moe":
        fields |= {"attention_bias": True}
    if "mlp_bias" in fields:
        fields |= {"mlp_bias": True}
    if "tie_word_embeddings" in fields and name not in ("gemma2", "gemma3_text", "gemma4_text"):
        fields |= {"tie_word_embeddings": False}
    return outline_of(config_from_init(fields), Compute.of(jnp.float32), jnp.dtype(jnp.float32))


def with_tower(name: str) -> Decoder:
    config = replace(tiny_config(num_layers=1, windows=(None,)), vision=TOWERS[name][0])
    return outline_of(config, Compute.of(jnp.float32), jnp.dtype(jnp.float32))


CASES = [*FAMILIES, *TOWERS, *BESIDE]
OFTEN = ("gpt_oss", "gemma4_text", "deepseek_v3", "gemma4", "siglip", "drafter", "dora")


def case_of(name: str) -> tuple[Decoder, dict[str, str]]:
    """Model, perhaps of shapes, and what each of its trained parameters and buffers is, by hand."""
    if name in FAMILIES:
        model, table = of_family(name), TEXT
    elif name in TOWERS:
        model, table = with_tower(name), {**TEXT, **TOWERS[name][1]}
    else:
        make, own = BESIDE[name]
        model, table = make(), {**TEXT, **own}
    weights = ModelWeights(model)
    every, trained = weights.structs(), weights.trainable()
    kinds = {path: table[short(path)] for path in every if path in trained or table.get(short(path)) == BUFFER}
    if name in TOWERS:
        assert set(TOWERS[name][1]) <= {*kinds}
    # What is never trained is no trained parameter, and else all that the model trains is in the table.
    assert {path for path, kind in kinds.items() if kind != BUFFER} == {*trained}
    return model, {path: kind for path, kind in kinds.items() if kind != BUFFER}


def updated(optimizer: Optimizer, gradients: dict[str, Any]) -> dict[str, np.ndarray]:
    """Parameters after one update of ones."""
    ones = jax.tree.map(jnp.ones_like, gradients)

    @jax.jit
    def update(gradients: Any, params: Any) -> Any:
        return optimizer.update(gradients, optimizer.init(params), params, lambda x: x, None)[0]

    new: dict[str, np.ndarray] = jax.device_get(update(gradients, ones))
    return new


@pytest.mark.parametrize("name", often(CASES, *OFTEN))
def test_weight_decay_acts_on_matrices_and_tables_alone(name: str) -> None:
    """Without gradients a matrix of ones becomes 1 - rate x decay."""
    model, kinds = case_of(name)
    shapes = ModelWeights(model).structs()
    optimizer = make_optimizer(AdamW(learning_rate=0.1, weight_decay=0.5), 4, model=model)
    new = updated(optimizer, {path: jnp.zeros(shapes[path].shape) for path in kinds})
    for path, kind in kinds.items():
        assert_allclose(new[path], 1.0 if kind == VECTOR else 0.95, rtol=1e-6, err_msg=f"{path}, a {kind}")


@pytest.mark.parametrize("moments", ["int8", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_moments_of_matrices_and_tables_alone_have_few_bits(name: str, moments: Any) -> None:
    model, kinds = case_of(name)
    shapes = ModelWeights(model).structs()
    optimizer = make_optimizer(AdamW(learning_rate=0.1, moments=moments), 4, seed=0, model=model)
    state = jax.eval_shape(optimizer.init, {path: shapes[path] for path in kinds})
    for path, kind in kinds.items():
        for moment in (state.inner[0].mu[path], state.inner[0].nu[path]):
            few = any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(moment))
            assert few == (kind in (MUON, MATRIX, TABLE)), f"{path}, a {kind}"


@pytest.mark.parametrize("name", often([*FAMILIES, *TOWERS], "gpt_oss", "gemma4_text", "siglip"))
def test_muon_takes_matrices_between_hidden_states_alone(name: str) -> None:
    """The first update of AdamW is the rate for every number; that of Muon has singular values of one size."""
    model, kinds = case_of(name)
    shapes, draw = ModelWeights(model).structs(), np.random.default_rng(0)
    gradients = {path: jnp.asarray(draw.normal(size=shapes[path].shape), jnp.float32) for path in kinds}
    section = Muon(learning_rate=0.1, scale="original", num_iterations=14, weight_decay=0.0)
    new = updated(make_optimizer(section, 4, model=model), gradients)
    for path, kind in kinds.items():
        change = 1.0 - new[path]
        if kind != MUON:
            assert_allclose(np.abs(change), 0.1, rtol=1e-3, err_msg=f"{path}, a {kind}")
            continue
        singular = np.linalg.svd(change, compute_uv=False)
        size = 0.1 * max(1.0, change.shape[-1] / change.shape[-2]) ** 0.5
        assert_allclose(singular, size, rtol=2e-2, err_msg=path)


def test_projections_of_layer_matching_decay_and_are_in_groups() -> None:
    """They are matrices beside the model: AdamW's under Muon, and a group's if its pattern matches them."""
    model, path = tiny_model(num_layers=2, windows=(None,)), "matching.1.projection"
    matching = Matching(hidden=((1, 1),), widths=(32, 48), seed=0)
    groups = [{"match": "^matching", "learning_rate": 0.4}]
    for section, rate in (
        (AdamW(learning_rate=0.1, weight_decay=0.5), 0.1),
        (Muon(learning_rate=0.1, weight_decay=0.5), 0.1),
        (AdamW(learning_rate=0.1, weight_decay=0.5, groups=groups), 0.4),
    ):
        optimizer = make_optimizer(section, 4, matching=matching, model=model)
        params = {path: jnp.ones((32, 48))}
        state = optimizer.init(params)
        new, _ = optimizer.update({path: jnp.zeros((32, 48))}, state, params, lambda x: x, None)
        assert_allclose(new[path], 1.0 - 0.5 * rate, rtol=1e-6)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    """Made before the adapter, or without the layer matching of its trainer."""
    model = tiny_model(num_layers=1, windows=(None,))
    optimizer = make_optimizer(AdamW(learning_rate=0.1, weight_decay=0.1), 4, model=model)
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0)
    matched = replace(settings, matching=Matching(hidden=((0, 0),), widths=(32, 32), seed=0))
    with pytest.raises(ConfigError, match=r"made for other parameters, without matching.0.projection"):
        Trainer(model, SFTLoss(), optimizer, matched, teachers=[tiny_model(num_layers=1, windows=(None,))])
    attach_lora(model, LoRA(rank=2), seed=0)
    with pytest.raises(ConfigError, match=r"made for other parameters, without stages.0.*lora_a.* after its adapter"):
        Trainer(model, SFTLoss(), optimizer, settings)


def test_a_parameter_without_a_role_is_refused() -> None:
    model = tiny_model(num_layers=1, windows=(None,))
    model.final_norm.scale.set_metadata("role", None)
    with pytest.raises(ValueError, match=r"final_norm.scale has no role"):
        ModelWeights(model).parameters()


def test_what_is_never_trained_is_refused_where_it_is_named() -> None:
    """Gemma 4's scale of a layer and a router's correction: neither groups nor modules_to_save act on them."""
    scales, correction = of_family("gemma4_text"), of_family("deepseek_v3")
    for model, pattern, module in (
        (scales, r"blocks\.\d+\.scale", "layer_scalar"),
        (with_tower("gemma4"), "std_", None),
        (correction, "correction", "e_score_correction_bias"),
    ):
        section = AdamW(learning_rate=0.1, groups=[{"match": pattern, "weight_decay": 0.5}])
        with pytest.raises(ConfigError, match=r"matches no trained parameter|follows the load of the experts"):
            make_optimizer(section, 4, model=model)
        if module is not None:
            lora = LoRA(rank=2, targets=("attention",), modules_to_save=(module,))
            with pytest.raises(ConfigError, match=rf"{module}' matches .* alone, which no gradient trains; remove it"):
                attach_lora(model, lora, seed=0)


def test_rates_by_width_are_not_those_of_tables() -> None:
    """A drafter's tables of places are no matrices that read hidden states, though they have such dimensions."""
    model = drafted()
    kinds, shapes = BESIDE["drafter"][1], ModelWeights(model).structs()
    optimizer = make_optimizer(AdamW(learning_rate=0.1, base_width=model.config.embed_dim // 4), 4, model=model)
    new = updated(optimizer, {path: jnp.ones(shapes[path].shape) for path in kinds})
    for path, kind in kinds.items():
        assert_allclose(new[path], 1.0 - (0.025 if kind == MATRIX else 0.1), rtol=1e-4, err_msg=path)
