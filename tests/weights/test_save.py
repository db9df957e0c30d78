"""Checkpoints out: what is written loads in transformers and back, a little at a time, and keeps what came along."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.testing import assert_allclose
from safetensors import safe_open
from safetensors.numpy import load_file

from posttrain.config import LoRA, MeshSection
from posttrain.errors import ConfigError
from posttrain.mesh import make_mesh
from posttrain.models.decoder import Decoder
from posttrain.weights import pieces, save
from posttrain.weights.load import init_model, load_model
from posttrain.weights.lora import merged_lora, sites
from posttrain.weights.save import hf_tensors, save_model
from posttrain.weights.state import ModelWeights
from tests.models.checkpoints import GOLDENS, LLAMA, assert_same
from tests.often import often
from tests.tiny import forward, model_of_fields, shake, tiny_model

GOLDEN = GOLDENS / "qwen3"


def built(name: str) -> Decoder:
    if name == "llama":
        model = model_of_fields(LLAMA)
    elif name == "qwen2":
        model = tiny_model(qk_norm=False, bias=True, tie_embeddings=False)
    else:
        model = tiny_model()
    shake(model, seed=2)
    return model


@pytest.mark.few(1)
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
        (Path(path) / "generation_config.json").write_text('{"eos_token_id": 90}')
        templates = Path(path) / "additional_chat_templates"
        templates.mkdir()
        (templates / "tools.jinja").touch()


def written(model: Decoder, target: Path, tokenizer: Tokenizer | None) -> tuple[dict[str, Any], dict[str, Any]]:
    save_model(model, target, tokenizer=tokenizer)
    generation, config = (json.loads((target / f"{name}.json").read_text()) for name in ("generation_config", "config"))
    return generation, config


def test_generation_config_names_where_to_stop(tmp_path: Path) -> None:
    model = model_of_fields(LLAMA)

    def ends(tokenizer: Tokenizer | None) -> tuple[Any, Any]:
        generation, config = written(model, tmp_path / "out", tokenizer)
        return generation["eos_token_id"], config["eos_token_id"]

    assert ends(None) == (5, 5)
    assert ends(Tokenizer([7])) == (7, 5)
    assert ends(Tokenizer([7, 8])) == ([7, 8], 5)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_generation_config_of_the_source_travels_along(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN, tmp_path / "model", copy_function=shutil.copyfile))
    given = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "eos_token_id": [2, 3],
        "pad_token_id": 9,
    }
    (folder / "generation_config.json").write_text(json.dumps(given | {"_from_model_config": True}))
    model = load_model(folder)
    own = json.loads((GOLDEN / "config.json").read_text())
    generation, config = written(model, tmp_path / "out", None)
    assert generation == given | {"bos_token_id": own["bos_token_id"]}
    assert {key: config[key] for key in own if key.endswith("_token_id")} == {
        key: value for key, value in own.items() if key.endswith("_token_id")
    }
    assert written(load_model(tmp_path / "out"), tmp_path / "again", Tokenizer([2]))[0] == generation | {
        "eos_token_id": 2
    }
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config.json: must hold a JSON object"):
        load_model(folder)


def test_large_models_are_split_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "MAX_SHARD_BYTES", 40_000)
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
    with pytest.raises(ConfigError, match=rf"{files[1]} listed in model.safetensors.index.json not found"):
        load_model(tmp_path / "out")


def test_saving_replaces_a_model_but_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    save_model(tiny_model(seed=0), target, tokenizer=Tokenizer([1]))
    save_model(tiny_model(seed=1), target)
    assert_same(tiny_model(seed=1), load_model(target))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (target / "notes.md").touch()
    with pytest.raises(ConfigError, match=r"is not a model folder, it contains notes.md; give a new or empty folder"):
        save_model(tiny_model(seed=2), target)
    (target / "notes.md").unlink()

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(save, "write_tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        save_model(tiny_model(seed=2), target)
    assert_same(tiny_model(seed=1), load_model(target))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_changed_byte_of_saved_weights_is_told(tmp_path: Path) -> None:
    """Configurations may be edited."""
    save_model(tiny_model(), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    whole = file.read_bytes()
    for place in (len(whole) // 2, len(whole) - 2):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ConfigError, match=r"model.safetensors differs from what was saved; copy it again"):
            load_model(tmp_path / "out")
    (tmp_path / "out" / "digests.json").unlink()
    load_model(tmp_path / "out")
    save_model(tiny_model(), tmp_path / "edited")
    edited = tmp_path / "edited" / "generation_config.json"
    edited.write_text(edited.read_text() + " ")
    assert_same(tiny_model(), load_model(tmp_path / "edited"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", often(("qwen3_moe", "gpt_oss", "phi3"), "gpt_oss"))
def test_layers_fetched_one_by_one_are_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = GOLDENS / name
    expected = load_file(folder / "model.safetensors")
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 0)
    mesh = make_mesh(MeshSection(fsdp=2, tensor=2, expert=2)) if name == "qwen3_moe" else None
    got = dict(hf_tensors(load_model(folder, mesh=mesh)))
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].dtype == value.dtype
        np.testing.assert_array_equal(got[key], value, err_msg=key)


def test_every_reader_finds_numbers_at_multiples_of_their_size(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = load_model(GOLDENS / "deepseek_v3", dtype=jnp.bfloat16)
    # An odd number of 2-byte values before those of 4 bytes would move these.
    save_model(model, tmp_path / "out")
    from safetensors.torch import load_file as load_torch

    expected = dict(hf_tensors(model))
    assert {x.dtype for x in expected.values()} == {jnp.dtype(jnp.bfloat16), jnp.dtype(np.float32)}
    for name, tensor in load_torch(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor.float(), torch.from_numpy(expected[name].astype(np.float32))), name
    header = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    places = {name: entry for name, entry in json.loads(header[8 : 8 + length]).items() if name != "__metadata__"}
    assert length % 8 == 0
    assert all(entry["data_offsets"][0] % 4 == 0 for entry in places.values() if entry["dtype"] == "F32")


@pytest.mark.thorough
def test_saving_holds_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 1 << 20)
    fields = LLAMA | {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}
    model = init_model(fields, dtype=jnp.float32, seed=0, mesh=make_mesh(MeshSection(fsdp=4, tensor=2)))
    save_model(model, tmp_path / "out")
    largest = 4096 * 256 * 4
    assert sum(w.nbytes for w in ModelWeights(model).read().values()) > 10 * largest
    tracemalloc.start()
    save_model(model, tmp_path / "out")
    left, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # What was fetched, and the tensor in the checkpoint's layout; nothing stays on the host.
    assert peak < 2 * largest + (2 << 20)
    assert left < 1 << 20


@pytest.mark.few(1)
@pytest.mark.parametrize("adapted", [False, True])
def test_saving_fetches_one_expert_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapted: bool) -> None:
    model = load_model(GOLDENS / "qwen3_moe", lora=LoRA(rank=2, targets=("experts",)) if adapted else None, seed=0)
    if adapted:
        shake(model, seed=1)
    expert = max(site.matrix[...][0, 0].nbytes for path, site in sites(model).items() if "experts" in path)
    sizes, fetch = list[int](), pieces._on_host

    def measured(array: Array) -> np.ndarray:
        sizes.append(array.nbytes)
        return fetch(array)

    monkeypatch.setattr(pieces, "_on_host", measured)
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", expert)
    save_model(model, tmp_path / "out")
    largest = max(tensor.nbytes for tensor in load_file(tmp_path / "out" / "model.safetensors").values())
    assert max(sizes) <= max(largest, expert)
    assert_same(merged_lora(model) if adapted else model, load_model(tmp_path / "out"))


def test_code_of_the_source_is_not_announced(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling.Model"}}))
    save_model(load_model(tmp_path / "in"), tmp_path / "out")
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
