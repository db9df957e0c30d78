"""Checkpoints in: read a little at a time into the right places, and every fault of the files is one clear error."""

from __future__ import annotations

import gc
import json
import logging
import math
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file, save_file

from posttrain.config import LoRA, MeshSection
from posttrain.errors import ConfigError
from posttrain.kernels.logits.token_stats import token_stats
from posttrain.mesh import make_mesh
from posttrain.models.config import Compute
from posttrain.rollout.sampling import Sampling, sample
from posttrain.weights import pieces
from posttrain.weights.files import HUB_FILES, HUB_OTHERS, find_folder
from posttrain.weights.load import init_model, load_model, outline_of
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights
from tests.models.checkpoints import GOLDENS, LLAMA, assert_same, edit, weights_of
from tests.tiny import tiny_config, tiny_model

GOLDEN = GOLDENS / "qwen3"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "model", copy_function=shutil.copyfile))


def fault(path: str | Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load_model(path, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("qwen3_moe", {"fsdp": 2, "tensor": 2, "expert": 2}),
        pytest.param("gpt_oss", {"expert": 2, "fsdp": 4, "tensor": 1}, marks=pytest.mark.thorough),
        ("gpt_oss_mxfp4", None),
        pytest.param("phi3", {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.thorough),
    ],
)
def test_loading_in_pieces(name: str, axes: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_model(GOLDENS / name)
    mesh = None if axes is None else make_mesh(MeshSection(**axes))
    monkeypatch.setattr(pieces, "MIN_PIECE_BYTES", 600)
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 600)
    pieces.write.clear_cache()  # of what other tests have loaded
    gc.collect()  # what is freed later would count as less than none
    before = pieces.write._cache_size()
    loaded = load_model(GOLDENS / name, mesh=mesh)
    assert_same(loaded, whole)
    weights = ModelWeights(loaded).read()
    # One program for all layers and experts.
    assert 0 < pieces.write._cache_size() - before <= len({w.shape for w in weights.values()})
    for path, w in weights.items():
        part = math.prod(w.shape) if mesh is None else math.prod(w.sharding.shard_shape(w.shape))
        assert all(shard.data.size == part for shard in w.addressable_shards), path
    if mesh is not None:
        assert any(shard.data.size < w.size for w in weights.values() for shard in w.addressable_shards)


LARGEST = 8192 * 128 * 2
"""Bytes of the embedding of `large`."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of many times its largest tensor."""
    folder = tmp_path_factory.mktemp("large")
    fields = LLAMA | {"vocab_size": 8192, "hidden_size": 128, "intermediate_size": 2048, "num_hidden_layers": 12}
    model = init_model(fields, dtype=jnp.bfloat16, seed=0)
    assert sum(w.nbytes for w in ModelWeights(model).read().values()) > 8 * LARGEST
    save_model(model, folder)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("axes", [None, pytest.param({"fsdp": 4, "tensor": 2}, marks=pytest.mark.thorough)])
def test_host_holds_less_than_two_tensors(
    axes: dict[str, int] | None, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "MIN_PIECE_BYTES", 1 << 18)
    mesh = None if axes is None else make_mesh(MeshSection(**axes))
    load_model(large, mesh=mesh)
    tracemalloc.start()
    loaded = load_model(large, mesh=mesh)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Python's and NumPy's memory: what the devices hold is not in it.
    assert peak < 2 * LARGEST
    assert_same(loaded, load_model(large))


@pytest.mark.thorough
def test_loading_onto_a_mesh_and_saving_from_it(tmp_path: Path) -> None:
    mesh = make_mesh(MeshSection(fsdp=4, tensor=2))
    model = tiny_model()
    save_model(model, tmp_path / "one")
    spread = load_model(tmp_path / "one", mesh=mesh, lora=LoRA(rank=2), seed=0)
    kernel = spread.stages[0].blocks[0].attention.q
    assert kernel.kernel[...].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    save_model(spread, tmp_path / "two")
    assert_same(model, load_model(tmp_path / "two"))


def test_a_changed_outline_changes_no_other() -> None:
    config, compute = tiny_config(), Compute.of(jnp.float32)
    first = outline_of(config, compute, jnp.dtype(jnp.float32))
    first.unroll, first.stages[0].blocks[0].mlp.up.shape = True, (1, 1)
    second = outline_of(config, compute, jnp.dtype(jnp.float32))
    assert not second.unroll and second.stages[0].blocks[0].mlp.up.shape == (32, 48)


def test_same_seed_same_model() -> None:
    one, two, other = (init_model(LLAMA, dtype=jnp.float32, seed=seed) for seed in (3, 3, 4))
    assert_same(one, two)
    kernel = "stages.0.blocks.0.mlp.up.kernel"
    assert np.abs(weights_of(one)[kernel] - weights_of(other)[kernel]).max() > 0.05
    assert weights_of(one)[kernel].std() == pytest.approx(0.1, rel=0.05)


def test_all_wrong_tensors_in_one_error(folder: Path) -> None:
    changes = {
        "model.layers.1.mlp.up_proj.weight": None,
        "model.layers.2.self_attn.q_norm.weight": np.zeros(8, np.float32),
        "model.layers.9.mlp.up_proj.weight": np.zeros((60, 32), np.float32),
        "model.norm.weight": None,
        "model.layers.0.input_layernorm.weight": np.ones(32, np.int8),
    }
    edit(folder, **changes)
    assert fault(folder) == (
        f"{folder}: tensors do not match config.json: model.norm.weight: missing; "
        "model.layers.1.mlp.up_proj.weight: missing; model.layers.9.mlp.up_proj.weight: unknown; "
        "model.layers.2.self_attn.q_norm.weight: shape (8,), config.json says (16,); "
        "model.layers.0.input_layernorm.weight: type I8 is not supported"
    )


def test_wrong_tensors_are_grouped_and_all_listed(folder: Path) -> None:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    stored = load_file(folder / "model.safetensors")
    renamed = {name: None for name in stored if "q_proj" in name}
    edit(folder, **renamed, **{name.replace("self_attn", "attn"): stored[name] for name in renamed})
    assert fault(folder) == (
        f"{folder}: tensors do not match config.json: model.layers.*.self_attn.q_proj.weight ({layers} tensors): "
        "missing (the files have model.layers.*.attn.q_proj.weight); "
        f"model.layers.*.attn.q_proj.weight ({layers} tensors): unknown"
    )
    edit(folder, **{f"model.extra_{letter}.weight": np.zeros(1, np.float32) for letter in "abcdefghijklmnopqrst"})
    assert all(f"model.extra_{letter}.weight: unknown" in fault(folder) for letter in "abcdefghijklmnopqrst")


def test_harmless_extras_and_tied_heads(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32), "lm_head.weight": embedding}
    edit(folder, **extras)
    assert_same(load_model(folder), load_model(GOLDEN))
    edit(folder, **{"lm_head.weight": embedding + 1})
    assert fault(folder).endswith(
        "lm_head.weight differs from model.embed_tokens.weight, although tie_word_embeddings is true; set it to false "
        "in config.json if the head is the model's own, else remove the tensor"
    )


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(shutil.copytree(GOLDENS / "deepseek_v3", tmp_path / "model", copy_function=shutil.copyfile))
    fields = json.loads((folder / "config.json").read_text())
    after = fields["num_hidden_layers"]
    edit(folder, **{f"model.layers.{after}.enorm.weight": np.ones(4, np.float32)})
    (folder / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 0}))
    assert fault(folder).endswith(f"model.layers.{after}.enorm.weight: unknown")
    (folder / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}))
    with caplog.at_level(logging.INFO, logger="posttrain.weights"):
        assert_same(load_model(folder), load_model(GOLDENS / "deepseek_v3"))
    assert "1 tensors of multi-token prediction layers are not loaded" in caplog.text


def test_types_of_parameters(folder: Path) -> None:
    halves = {name: x.astype(np.float16) for name, x in load_file(folder / "model.safetensors").items()}
    edit(folder, **halves)
    model = load_model(folder)
    assert model.compute.dtype == jnp.float32
    assert_array_equal(model.final_norm.scale[...], halves["model.norm.weight"].astype(np.float32))
    bfloats = {name: x.astype(jnp.bfloat16) for name, x in halves.items()}
    edit(folder, **(bfloats | {"model.norm.weight": np.full(32, 1 + 2**-12, np.float32)}))
    # One vector in float32 does not double the model.
    model = load_model(folder)
    assert {w.dtype for w in weights_of(model).values()} == {jnp.dtype(jnp.bfloat16)}
    assert load_model(folder, dtype=jnp.float32).final_norm.scale[...][0] == 1 + 2**-12
    kinds = {path: w.dtype for path, w in weights_of(load_model(GOLDENS / "deepseek_v3", dtype=jnp.bfloat16)).items()}
    assert {path.rsplit(".", 1)[-1] for path, kind in kinds.items() if kind == jnp.float32} == {"correction"}


def damaged(weights: Path, content: bytes) -> str:
    weights.write_bytes(content)
    message = fault(weights.parent)
    assert message.startswith(f"{weights}: damaged or incomplete (") and message.endswith("); copy it again")
    return message


def test_float64_is_read_as_float32(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    wide = {name: array.astype(np.float32).astype(np.float64) for name, array in stored.items()}
    save_file(wide, folder / "model.safetensors")
    ours, theirs = (ModelWeights(load_model(f, dtype="float32")).read() for f in (folder, GOLDEN))
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        assert_array_equal(array, theirs[path])


def test_unusable_files(folder: Path) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    assert f"{len(whole)} bytes expected, {len(whole) - 100} found" in damaged(weights, whole[:-100])
    assert f"{len(whole)} bytes expected, {len(whole) + 1} found" in damaged(weights, whole + b"x")
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [31]
    text = json.dumps(header).encode()
    bent = len(text).to_bytes(8, "little") + text + whole[8 + length :]
    assert "128 bytes for the shape (31,) of F32" in damaged(weights, bent)
    for content in (b"", b"not safetensors", whole[:100], (2).to_bytes(8, "little") + b"[]"):
        damaged(weights, content)
    weights.unlink()
    assert fault(folder) == f"{folder}: has neither model.safetensors nor model.safetensors.index.json"
    (folder / "pytorch_model.bin").touch()
    assert fault(folder).endswith("index.json; pytorch_model.bin is not read, convert it to safetensors")
    config.write_text("{")
    assert fault(folder).startswith(f"{config}: not valid JSON (")
    config.write_text(json.dumps(LLAMA | {"model_type": "lama"}))
    assert fault(folder).startswith(f"{config}: model_type='lama' is not supported; did you mean 'llama'?")
    config.unlink()
    assert fault(folder) == f"{config}: no such file; give the folder of a checkpoint in Hugging Face layout"


def test_path_that_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    assert fault(tmp_path / "absent") == f"model {tmp_path / 'absent'}: no such folder"
    assert fault("./absent") == "model ./absent: no such folder"
    file = tmp_path / "model.safetensors"
    file.touch()
    assert fault(file) == f"model {file}: is a file; give the folder with config.json"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    message = fault("someone/something")
    assert message.startswith(
        "model someone/something: not a local folder, and the Hugging Face hub did not provide it ("
    )
    assert message.endswith("); give an existing folder, or check the id and the network")


def test_model_of_the_hub_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    cache = tmp_path / "models--someone--something"
    shutil.copytree(GOLDEN, cache / "snapshots" / ("a" * 40), copy_function=shutil.copyfile)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert find_folder("someone/something") == cache / "snapshots" / ("a" * 40)
    assert_same(load_model("someone/something"), load_model(GOLDEN))


def test_only_needed_files_are_downloaded() -> None:
    utils = pytest.importorskip("huggingface_hub.utils")
    needed = [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
    ]
    others = [
        ".gitattributes",
        "README.md",
        "consolidated.safetensors",
        "consolidated.00.pth",
        "pytorch_model-00001-of-00002.bin",
        "original/model.safetensors",
        "original/config.json",
        "onnx/model.onnx",
        "metal/model.bin",
        "model-q4_0.gguf",
        "tf_model.h5",
        "flax_model.msgpack",
    ]
    chosen = utils.filter_repo_objects([*needed, *others], allow_patterns=HUB_FILES, ignore_patterns=HUB_OTHERS)
    assert list(chosen) == needed


def test_ids_without_a_token_have_no_probability() -> None:
    plain, padded = load_model(GOLDEN), load_model(GOLDEN, num_tokens=90)
    rows = plain.config.vocab_size
    assert (rows, padded.config.num_tokens) == (96, 90)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 90, (2, 12)), jnp.int32)
    keys = jnp.asarray(rng.integers(0, 2**32, (4096, 2)), jnp.uint32)

    @jax.jit
    def run(hidden: jax.Array) -> Any:
        def stats(hidden: jax.Array) -> Any:
            return token_stats(padded.logits, hidden, tokens, jnp.ones_like(tokens), temperature=0.5, vocab_size=rows)

        gradient = jax.grad(lambda hidden: stats(hidden).logps.sum())(hidden)
        logits = padded.logits(hidden)
        # Hot: every token has about the same probability.
        names = {"temperature": 1e4, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        options = {name: jnp.full(4096, value) for name, value in names.items()}
        sampling = Sampling(keys=keys, processors=None, **options)
        drawn = sample(jnp.broadcast_to(logits[0, :1], (4096, rows)), jnp.arange(4096), sampling, None)
        return plain.logits(hidden), logits, stats(hidden), gradient, drawn

    expected, got, stats, gradient, drawn = run(jax.random.normal(jax.random.key(0), (2, 12, 32)))
    assert_array_equal(got[..., :90], expected[..., :90])
    over_tokens = np.asarray(jax.nn.log_softmax(expected[..., :90] / 0.5, axis=-1))
    chosen = np.take_along_axis(over_tokens[:, :-1], np.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
    assert_allclose(stats.logps[:, 1:], chosen, atol=1e-5)
    assert_allclose(stats.entropy[:, 1:], -(np.exp(over_tokens) * over_tokens).sum(-1)[:, :-1], atol=1e-5)
    assert np.isfinite(gradient).all()
    assert set(np.asarray(drawn.tokens).tolist()) == set(range(90))
    assert_allclose(drawn.logps, -np.log(90), atol=1e-2)


def test_more_tokens_than_rows() -> None:
    line = "the tokenizer has 97 token ids, the model's embedding only 96 rows; give the model's own tokenizer"
    assert fault(GOLDEN, num_tokens=97).startswith(line) and "resize_token_embeddings" in fault(GOLDEN, num_tokens=97)
    with pytest.raises(ConfigError, match=line):
        init_model(LLAMA, dtype=jnp.float32, seed=0, num_tokens=97)
    assert load_model(GOLDEN, num_tokens=96).config == load_model(GOLDEN).config


def test_how_to_compute_is_passed_on() -> None:
    model = load_model(GOLDEN, compute_dtype=jnp.bfloat16, remat="full", decode_attention="gather")
    compute = model.compute
    assert (compute.dtype, compute.remat, compute.decode_attention) == (jnp.bfloat16, "full", "gather")


@pytest.mark.thorough
def test_unused_keys_and_values_of_layers_that_share_are_left_out(tmp_path: Path) -> None:
    """transformers writes none, but files that were written otherwise have them."""
    source = Path(__file__).parent.parent / "goldens" / "models" / "gemma4_text"
    shutil.copytree(source, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    unused = {name: name.replace("layers.0.", "layers.5.") for name in tensors if "layers.0.self_attn.k_proj" in name}
    assert unused and not set(unused.values()) & set(tensors)
    save_file({**tensors, **{new: tensors[old] for old, new in unused.items()}}, file, metadata={"format": "pt"})
    loaded, plain = (ModelWeights(load_model(folder)).read() for folder in (tmp_path / "model", source))
    assert all((loaded[path] == plain[path]).all() for path in plain)
