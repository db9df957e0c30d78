"""Depth upscaling: copies are of their layer's kind, begin as the identity or as they were, and a run goes on there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.config import LoRA, MeshSection, ModelSection, Upscale
from posttrain.errors import ConfigError
from posttrain.export.resize import upscale
from posttrain.mesh import make_mesh
from posttrain.models.config import MoEConfig
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_hf
from posttrain.models.names import layers_of
from posttrain.weights.load import check_lora, load_model
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights
from posttrain.weights.upscale import upscaled_config, zero_paths
from tests.stages.runs import posttrain, rl_stage, sft_stage, write_run
from tests.tiny import forward, tiny_model

GOLDENS = Path(__file__).parent.parent / "goldens" / "models"
FAMILIES = sorted(folder.name for folder in GOLDENS.iterdir() if not folder.name.startswith("gemma4"))


def depth(name: str) -> int:
    return config(name).num_layers


def config(name: str, **changes: Any) -> Any:
    return config_from_hf(json.loads((GOLDENS / name / "config.json").read_text()) | changes)


def by_layer(model: Decoder) -> dict[tuple[str, int], np.ndarray]:
    """Parameters of each layer, by their name in a block."""
    found = {}
    for path, array in ModelWeights(model).read().items():
        prefix, name, layers = layers_of(model.config, path)
        found |= {(name, layer): np.asarray(array[i]) for i, layer in enumerate(layers)} if prefix else {}
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gemma2", *FAMILIES])
def test_every_layer_is_a_copy_of_its_source(name: str) -> None:
    """Zeros of the identity are where a copy adds to the stream, and nowhere else."""
    count = depth(name)
    band = [1, max(2, count - 1)]
    order = [*range(band[1]), *range(1, count)]
    source = load_model(GOLDENS / name)
    plain = by_layer(source)
    for start in ("copy", "identity"):
        model = load_model(GOLDENS / name, upscale=Upscale(layers=band, start=start))
        assert model.config.blocks == tuple(source.config.blocks[layer] for layer in order)
        zeros = {(layers_of(model.config, path)[1], layer) for path, at in zero_paths(
            model, Upscale(layers=band, start=start)).items() for layer in at}  # fmt: skip
        assert {layer for _, layer in zeros} == (set(range(band[1], 2 * band[1] - 1)) if start == "identity" else set())
        arrays = by_layer(model)
        assert len(arrays) > len(plain)
        for (leaf, layer), array in arrays.items():
            expected = plain[leaf, order[layer]]
            if (leaf, layer) in zeros:
                expected = np.full_like(expected, -source.config.norm_offset if "norm" in leaf else 0)
            assert_array_equal(array, expected, err_msg=f"{leaf} of layer {layer}")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", *FAMILIES])
def test_the_identity_changes_no_logit(name: str) -> None:
    tokens = np.load(GOLDENS / name / "golden.npz")["plain_input_ids"]
    plain = load_model(GOLDENS / name, dtype=jnp.float32)
    model = load_model(GOLDENS / name, dtype=jnp.float32, upscale=Upscale(layers=[1, depth(name)]))
    assert model.config.num_layers == 2 * depth(name) - 1
    assert_allclose(forward(model, tokens), forward(plain, tokens), atol=1e-6)


def test_fields_say_what_each_layer_is() -> None:
    def fields(name: str, band: list[int], **changes: Any) -> dict[str, Any]:
        grown = upscaled_config(config(name, **changes), Upscale(layers=band))
        told: dict[str, Any] = json.loads(grown.hf_json)
        assert told["num_hidden_layers"] == grown.num_layers
        return told

    kinds = fields("gemma3_text", [4, 6])["layer_types"]
    assert [kind[0] for kind in kinds] == [*"sssss", "f", "s", "f"]
    assert fields("smollm3", [2, 4])["no_rope_layers"] == [1, 1, 1, 0, 1, 0]
    mixed = fields("qwen3_moe", [1, 3])
    assert (mixed["decoder_sparse_step"], mixed["mlp_only_layers"]) == (1, [1, 3])
    assert [isinstance(block.mlp, MoEConfig) for block in config_from_hf(mixed).blocks] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert fields("deepseek_v3", [0, 1])["first_k_dense_replace"] == 2
    assert "layer_types" not in fields("llama", [0, 3])
    further = upscaled_config(config("deepseek_v3", num_nextn_predict_layers=1), Upscale(layers=[1, 3]))
    assert further.further_layers == 0 == json.loads(further.hf_json)["num_nextn_predict_layers"]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"layers": [0, 4]}, r"layers=\[0, 4\]: the model has 3 layers; end at 3"),
        ("deepseek_v3", {"layers": [0, 2]}, "no config.json of deepseek_v3 has layers of these kinds in this order"),
        ("gemma4_text", {"layers": [0, 2]}, "layers of this gemma4_text share keys and values with other layers"),
    ],
)
def test_layers_that_cannot_be_copied(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        upscaled_config(config(name), Upscale(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "m", "upscale": {"layers": [2, 2]}}, r"layers=\[2, 2\] is no band"),
        ({"path": "m", "upscale": {"layers": [2]}}, "upscale.layers"),
        ({"init": {}, "tokenizer": "bytes", "upscale": {"layers": [0, 1]}}, "give init as many layers as you want"),
        ({"path": "m", "adapter": "a", "upscale": {"layers": [0, 1]}}, "merge it, and upscale the merged model"),
        ({"path": "m", "vision": "frozen", "upscale": {"layers": [0, 1]}}, "text part alone; set vision to none"),
    ],
)
def test_sections_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSection(**fields)


def test_an_adapter_must_reach_the_zeros() -> None:
    band = Upscale(layers=[1, 3])
    grown = upscaled_config(config("llama"), band)
    check_lora(grown, LoRA(rank=2), upscale=band)
    check_lora(grown, LoRA(rank=2, targets=["attention.q"]), upscale=Upscale(layers=[1, 3], start="copy"))
    for adapter, lacks in [
        (LoRA(rank=2, targets=["attention"]), "mlp.down.kernel of the copied layers 3 to 4"),
        (LoRA(rank=2, layers=[0, 1, 2, 3]), "attention.o.kernel of the copied layers 3 to 4"),
    ]:
        with pytest.raises(ConfigError, match=f"start=identity: {lacks} begins as zeros, and lora leaves it out"):
            check_lora(grown, adapter, upscale=band)
    with pytest.raises(ConfigError, match=r"norms behind the layers of gemma2 begin as zeros \(attention_post_norm"):
        check_lora(upscaled_config(config("gemma2"), band), LoRA(rank=2), upscale=band)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("gpt_oss_mxfp4", "gemma3_mm")])
def test_transformers_reads_what_is_written(name: str, tmp_path: Path) -> None:
    for start in ("identity", "copy"):
        plan = Upscale(layers=[1, depth(name)], start=start)
        said = upscale(str(GOLDENS / name), tmp_path / start, plan, reader="transformers")
        assert f"{2 * depth(name) - 1} of {depth(name)} layers" in said and "read again with transformers" in said
    with pytest.raises(ConfigError, match="exists; give a new folder"):
        upscale(str(GOLDENS / name), tmp_path / "copy", plan)


@pytest.mark.thorough
def test_quantized_and_sharded() -> None:
    tokens = np.load(GOLDENS / "qwen3" / "golden.npz")["plain_input_ids"]
    band = Upscale(layers=[0, 2])
    for kind in ("int8", "nf4", "int4", "fp8"):
        options: dict[str, Any] = {"dtype": jnp.float32, "quantize": kind, "lora": LoRA(rank=2), "seed": 0}
        plain, model = (load_model(GOLDENS / "qwen3", upscale=plan, **options) for plan in (None, band))
        assert_allclose(forward(model, tokens), forward(plain, tokens), atol=1e-6)
    mesh = make_mesh(MeshSection(fsdp=2, tensor=2), jax.devices()[:4])
    for name in ("llama", "phi3"):
        alone, spread = (load_model(GOLDENS / name, upscale=Upscale(layers=[0, 2]), mesh=m) for m in (None, mesh))
        jax.tree.map(assert_array_equal, ModelWeights(alone).read(), ModelWeights(spread).read())


@pytest.mark.thorough
def test_a_run_of_two_stages_grows_once(tmp_path: Path) -> None:
    """The first loss is that of the source, the second stage has the same layers, and what is exported as well."""
    source = tmp_path / "source"
    save_model(tiny_model(windows=(None,)), source)
    first = sft_stage(name="a", eval_dataset={"path": "rows.jsonl", "chat": False})
    model = {"path": str(source), "tokenizer": "bytes"}
    grown = model | {"upscale": {"layers": [1, 3]}}
    lines = {}
    for name, section in (("plain", model), ("grown", grown)):
        file = write_run(tmp_path / name, first, rl_stage(num_steps=1, name="b"), model=section)
        checked = posttrain("check", file)
        assert checked.code == 0, checked.err
        done = posttrain("run", file)
        assert done.code == 0, done.err
        written = (tmp_path / name / "out" / "metrics.jsonl").read_text().splitlines()
        lines[name] = [json.loads(line) for line in written]
    losses = {name: next(line["loss"] for line in rows if "loss" in line) for name, rows in lines.items()}
    assert_allclose(losses["grown"], losses["plain"], atol=1e-5)
    for stage in ("0-a", "1-b"):
        assert load_model(tmp_path / "grown" / "out" / stage / "model").config.num_layers == 5
    exported = posttrain("export", tmp_path / "grown" / "out" / "0-a", "--to", "hf")
    assert exported.code == 0 and "which has fewer layers" in exported.out, exported.err
    file = write_run(tmp_path / "lora", sft_stage(), model=grown | {"lora": {"rank": 2}})
    assert posttrain("run", file).code == 0
    assert "the adapter's base has layers that" in posttrain("export", tmp_path / "lora" / "out", "--to", "peft").error
    other = write_run(tmp_path / "lora", sft_stage(num_steps=6), model=model | {"lora": {"rank": 2}})
    assert "in" in posttrain("run", other).err


@pytest.mark.thorough
def test_the_command_line(tmp_path: Path) -> None:
    done = posttrain("upscale", GOLDENS / "llama", tmp_path / "deeper", "--layers", "0", "2")
    assert done.code == 0 and "5 of 3 layers" in done.out, done.err
    wrong = posttrain("upscale", GOLDENS / "llama", tmp_path / "other", "--layers", "2", "1")
    assert "is no band" in wrong.error
