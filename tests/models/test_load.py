"""Checkpoints: what is written loads in transformers and back, and every fault of the files is one clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from posttrain.config import ConfigError, LoRA, MeshSection
from posttrain.mesh import make_mesh
from posttrain.models import load
from posttrain.models.decoder import Decoder
from posttrain.models.load import init_model, load_model
from posttrain.models.save import hf_tensors, save_model
from posttrain.models.weights import ModelWeights
from tests.tiny import forward, shake, tiny_config, tiny_model

GOLDEN = Path(__file__).parent.parent / "goldens" / "models" / "qwen3"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "attention_bias": True,
    "mlp_bias": True,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "initializer_range": 0.1,
    "eos_token_id": 5,
}


def weights_of(model: Decoder) -> dict[str, np.ndarray]:
    return {path: np.asarray(w) for path, w in ModelWeights(model).read().items()}


def assert_same(one: Decoder, two: Decoder) -> None:
    expected, got = weights_of(one), weights_of(two)
    assert expected.keys() == got.keys()
    for path, value in expected.items():
        assert got[path].dtype == value.dtype
        assert_array_equal(got[path], value, err_msg=path)


def built(name: str) -> Decoder:
    if name == "llama":
        model = init_model(LLAMA, dtype=jnp.float32, seed=0)
    elif name == "qwen2":
        model = tiny_model(qk_norm=False, bias=True, tie_embeddings=False)
    else:
        model = tiny_model()
    shake(model, seed=2)
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_saved_model_is_the_same_in_transformers_and_here(name: str, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = built(name)
    save_model(model, tmp_path / "out")
    assert_same(model, load_model(tmp_path / "out"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[name] + "ForCausalLM"
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 14))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    assert_allclose(forward(model, tokens), expected, atol=2e-4)


def test_loaded_checkpoint_keeps_its_config(tmp_path: Path) -> None:
    model = load_model(GOLDEN, dtype=jnp.bfloat16)
    save_model(model, tmp_path / "out")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (GOLDEN, tmp_path / "out"))
    assert after == before | {"dtype": "bfloat16"}
    assert_same(model, load_model(tmp_path / "out"))
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


class Tokenizer:
    def __init__(self, stop_ids: Sequence[int]):
        self.stop_ids = stop_ids

    def save(self, path: str | Path) -> None:
        (Path(path) / "tokenizer.json").write_text("{}")


def test_generation_config_names_where_to_stop(tmp_path: Path) -> None:
    model = init_model(LLAMA, dtype=jnp.float32, seed=0)

    def written(tokenizer: Tokenizer | None) -> tuple[Any, Any]:
        save_model(model, tmp_path / "out", tokenizer=tokenizer)
        files = ("generation_config.json", "config.json")
        return tuple(json.loads((tmp_path / "out" / file).read_text())["eos_token_id"] for file in files)

    assert written(None) == (5, 5)
    assert written(Tokenizer([7])) == (7, 5)
    assert written(Tokenizer([7, 8])) == ([7, 8], 5)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_large_models_are_split_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_SHARD_BYTES", 40_000)
    model = tiny_model()
    save_model(model, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    # The embedding alone is larger than a shard may be.
    assert [sum(x.nbytes for x in load_file(tmp_path / "out" / f).values()) < 40_000 for f in files].count(False) == 1
    assert index["metadata"]["total_size"] == sum(x.nbytes for _, x in hf_tensors(model))
    assert_same(model, load_model(tmp_path / "out"))
    (tmp_path / "out" / files[1]).unlink()
    with pytest.raises(ConfigError, match=f"{files[1]} of model.safetensors.index.json not there"):
        load_model(tmp_path / "out")


def test_saving_replaces_a_model_but_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    save_model(tiny_model(seed=0), target)
    save_model(tiny_model(seed=1), target)
    assert_same(tiny_model(seed=1), load_model(target))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (target / "notes.md").touch()
    with pytest.raises(ConfigError, match="is not a model's folder, it holds notes.md; give a new or empty folder"):
        save_model(tiny_model(seed=2), target)
    (target / "notes.md").unlink()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(load, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_model(tiny_model(seed=2), target)
    assert_same(tiny_model(seed=1), load_model(target))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_loading_onto_a_mesh_and_saving_from_it(tmp_path: Path) -> None:
    mesh = make_mesh(MeshSection(fsdp=4, tensor=2))
    model = tiny_model()
    save_model(model, tmp_path / "one")
    spread = load_model(tmp_path / "one", mesh=mesh, lora=LoRA(rank=2), seed=0)
    kernel = spread.stages[0].blocks[0].attention.q
    assert kernel.kernel[...].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    assert kernel.lora_a[...].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", None)
    assert kernel.lora_b[...].sharding.spec == jax.sharding.PartitionSpec(None, None, "tensor")
    save_model(spread, tmp_path / "two")
    assert_same(model, load_model(tmp_path / "two"))


def test_same_seed_same_model() -> None:
    one, two, other = (init_model(LLAMA, dtype=jnp.float32, seed=seed) for seed in (3, 3, 4))
    assert_same(one, two)
    kernel = "stages.0.blocks.0.mlp.up.kernel"
    assert np.abs(weights_of(one)[kernel] - weights_of(other)[kernel]).max() > 0.05
    assert weights_of(one)[kernel].std() == pytest.approx(0.1, rel=0.05)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "model", copy_function=shutil.copyfile))


def edit(folder: Path, **changes: np.ndarray | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: x for name, x in changes.items() if x is not None}
    kept = {name: x for name, x in tensors.items() if changes.get(name, x) is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def fault(path: str | Path) -> str:
    with pytest.raises(ConfigError) as raised:
        load_model(path)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_all_wrong_tensors_in_one_error(folder: Path) -> None:
    changes = {
        "model.layers.1.mlp.up_proj.weight": None,
        "model.layers.2.self_attn.q_norm.weight": np.zeros(8, np.float32),
        "model.layers.9.mlp.up_proj.weight": np.zeros((60, 32), np.float32),
        "model.norm.weight": None,
    }
    edit(folder, **changes)
    assert fault(folder) == (
        f"{folder}: the tensors do not fit config.json: missing model.norm.weight; "
        "missing model.layers.1.mlp.up_proj.weight; unknown model.layers.9.mlp.up_proj.weight; "
        "model.layers.2.self_attn.q_norm.weight is (8,), config.json says (16,)"
    )


def test_harmless_extras_and_tied_heads(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32), "lm_head.weight": embedding}
    edit(folder, **extras)
    assert_same(load_model(folder), load_model(GOLDEN))
    edit(folder, **{"lm_head.weight": embedding + 1})
    assert fault(folder).endswith(
        "lm_head.weight differs from model.embed_tokens.weight, although tie_word_embeddings is true"
    )


def test_float16_is_loaded_as_float32(folder: Path) -> None:
    halves = {name: x.astype(np.float16) for name, x in load_file(folder / "model.safetensors").items()}
    edit(folder, **halves)
    model = load_model(folder)
    assert model.compute.dtype == jnp.float32
    assert_array_equal(model.final_norm.scale[...], halves["model.norm.weight"].astype(np.float32))
    edit(folder, **{"model.norm.weight": np.ones(32, np.int8)})
    assert fault(folder) == f"{folder}: tensors of type I8 are not supported"


def test_unusable_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    message = fault(folder)
    assert message.startswith(f"{weights}: is damaged or incomplete (")
    assert message.endswith("; copy it anew")
    weights.write_bytes(b"not safetensors")
    assert fault(folder).startswith(f"{weights}: is damaged or incomplete (")
    weights.unlink()
    assert fault(folder) == f"{folder}: has neither model.safetensors nor model.safetensors.index.json"
    config.write_text("{")
    assert fault(folder).startswith(f"{config}: is no JSON (")
    config.write_text(json.dumps(LLAMA | {"model_type": "lama"}))
    assert fault(folder).startswith(f"{config}: model_type='lama' is not supported; did you mean 'llama'?")
    config.unlink()
    assert fault(folder) == f"{config}: no such file; give the folder of a checkpoint in Hugging Face layout"


def test_path_that_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    assert fault(tmp_path / "absent") == f"model {tmp_path / 'absent'}: there is no such folder"
    assert fault("./absent") == "model ./absent: there is no such folder"
    file = tmp_path / "model.safetensors"
    file.touch()
    assert fault(file) == f"model {file}: is a file; give the folder that holds config.json"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    message = fault("someone/something")
    assert message.startswith("model someone/something: is no local folder, and the Hugging Face hub did not give it (")
    assert message.endswith("); give an existing folder, or check the id and the network")


def test_compute_dtype_and_remat_are_passed_on() -> None:
    model = load_model(GOLDEN, compute_dtype=jnp.bfloat16, remat="full")
    assert (model.compute.dtype, model.compute.remat) == (jnp.bfloat16, "full")
