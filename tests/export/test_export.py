"""Export: what was written is read again, and a checkpoint that is not the model does not get its name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from posttrain.config import LoRA
from posttrain.data.tokenizer import load_tokenizer
from posttrain.export.export import compare_with_source
from posttrain.export.proof import prove
from posttrain.export.readers import ProofError, Reader, compare_tokenizers, default_reader
from posttrain.models.decoder import Decoder
from posttrain.runs.environment import versions
from posttrain.runs.folder import versions_of
from posttrain.weights.load import load_model
from posttrain.weights.peft_save import save_adapter
from posttrain.weights.save import save_model
from posttrain.weights.scalar_head import add_scalar_head
from posttrain.weights.state import ModelWeights, without_adapter
from tests.often import often
from tests.stages.runs import INIT, posttrain, sft_stage, write_run
from tests.stages.test_preference import preference_stage, write_pairs
from tests.tiny import on_device, shake, tiny_model

GOLDENS = Path(__file__).parent.parent / "goldens" / "models"
READERS = ["posttrain", pytest.param("transformers", marks=pytest.mark.skipif(
    default_reader(adapter=False) != "transformers", reason="needs torch, the independent reader"))]  # fmt: skip


def adapted(name: str) -> Decoder:
    """A golden model with an adapter that changes what it says."""
    model = load_model(GOLDENS / name, dtype=jnp.float32, lora=LoRA(rank=2), seed=0)
    shake(model, seed=1, stddev=0.03)
    return model


def change(folder: Path, tensors: Callable[[dict[str, np.ndarray]], None]) -> None:
    file = folder / "model.safetensors"
    content = load_file(file)
    tensors(content)
    save_file(content, file, metadata={"format": "pt"})


def unmerged(folder: Path, model: Decoder) -> None:
    weights = ModelWeights(model)
    save_model(weights.bind(without_adapter(weights.read())), folder)


def swapped_experts(folder: Path, model: Decoder) -> None:
    def swap(content: dict[str, np.ndarray]) -> None:
        for name in [name for name in content if ".experts.0." in name]:
            other = name.replace(".experts.0.", ".experts.1.")
            content[name], content[other] = content[other], content[name]

    change(folder, swap)


def transposed_kernel(folder: Path, model: Decoder) -> None:
    def transpose(content: dict[str, np.ndarray]) -> None:
        name = next(name for name, x in content.items() if x.ndim == 2 and x.shape[0] == x.shape[1])
        content[name] = np.ascontiguousarray(content[name].T)

    change(folder, transpose)


def wrong_tie(folder: Path, model: Decoder) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["tie_word_embeddings"] = True
    file.write_text(json.dumps(config))

    def drop_head(content: dict[str, np.ndarray]) -> None:
        del content["lm_head.weight"]

    change(folder, drop_head)


def missing_shard(folder: Path, model: Decoder) -> None:
    content = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(content)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in list(halves.items())[:1]:
        save_file({name: content[name] for name in held}, folder / file, metadata={"format": "pt"})
    places = {name: file for file, held in halves.items() for name in held}
    index = {"metadata": {"total_size": sum(x.nbytes for x in content.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lost_score_head(folder: Path, model: Decoder) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["architectures"] = [config["architectures"][0].replace("SequenceClassification", "CausalLM")]
    for labels in ("id2label", "label2id"):
        del config[labels]
    file.write_text(json.dumps(config))

    def replace_head(content: dict[str, np.ndarray]) -> None:
        del content["score.weight"]
        content["lm_head.weight"] = content["model.embed_tokens.weight"].copy()

    change(folder, replace_head)


def other_score_head(folder: Path, model: Decoder) -> None:
    def draw(content: dict[str, np.ndarray]) -> None:
        content["score.weight"] = np.random.default_rng(0).normal(0, 0.02, (1, 32)).astype(np.float32)

    change(folder, draw)


FAULTS = {
    "unmerged": (unmerged, "mixtral"),
    "swapped_experts": (swapped_experts, "mixtral"),
    "transposed_kernel": (transposed_kernel, "smollm3"),
    "wrong_tie": (wrong_tie, "llama"),
    "missing_shard": (missing_shard, "llama"),
    "lost_score_head": (lost_score_head, "reward"),
    "other_score_head": (other_score_head, "reward"),
}


@pytest.fixture(scope="module")
def models() -> dict[str, Decoder]:
    reward = adapted("llama")
    add_scalar_head(reward, seed=3)
    return {name: adapted(name) for name in ("mixtral", "llama", "smollm3")} | {"reward": reward}


@pytest.mark.few(1)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", often(["mixtral", "llama", "smollm3", "reward"], "smollm3", "reward"))
def test_what_was_written_is_the_model(models: dict[str, Decoder], tmp_path: Path, name: str, reader: str) -> None:
    save_model(models[name], tmp_path / "out")
    proof = prove(models[name], tmp_path / "out", None, reader)
    assert proof.reader == reader and 0 <= proof.mean <= proof.largest < 2e-4
    assert proof.num_tensors == len(load_file(tmp_path / "out" / "model.safetensors"))


@pytest.mark.few(7)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_are_caught(models: dict[str, Decoder], tmp_path: Path, fault: str, reader: str) -> None:
    spoil, name = FAULTS[fault]
    save_model(models[name], tmp_path / "out")
    spoil(tmp_path / "out", models[name])
    with pytest.raises(ProofError):
        prove(models[name], tmp_path / "out", None, reader)


@pytest.mark.few(1)
@pytest.mark.parametrize("reader", READERS)
def test_the_adapter_of_a_reward_model_brings_its_head(tmp_path: Path, reader: Reader) -> None:
    model, draw = load_model(GOLDENS / "llama", lora=LoRA(rank=2), seed=0), np.random.default_rng(1)
    add_scalar_head(model, seed=3)
    weights = ModelWeights(model)
    trained = weights.read(weights.trainable().__contains__)
    weights.write(
        {path: on_device(np.asarray(w) + draw.normal(0, 0.03, w.shape), w.dtype) for path, w in trained.items()}
    )
    save_adapter(model, tmp_path / "out", base=str(GOLDENS / "llama"))
    assert prove(model, tmp_path / "out", None, reader, base=str(GOLDENS / "llama")).scores


@pytest.mark.thorough
def test_merging_into_bfloat16_is_told_from_not_merging(tmp_path: Path) -> None:
    model = load_model(GOLDENS / "llama_bf16", lora=LoRA(rank=2), seed=0)
    shake(model, seed=1, stddev=0.03)
    save_model(model, tmp_path / "out")
    assert prove(model, tmp_path / "out", None, "posttrain").mean > 0
    unmerged(tmp_path / "out", model)
    with pytest.raises(ProofError, match="is not the model"):
        prove(model, tmp_path / "out", None, "posttrain")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that trained an adapter over a checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    base = tiny_model(num_layers=1, windows=(None,), vocab_size=261)
    save_model(base, folder / "base", tokenizer=load_tokenizer("bytes"))
    config = write_run(folder, sft_stage(num_steps=2), model={"path": "base", "lora": {"rank": 2}})
    done = posttrain("run", config)
    assert done.code == 0, done
    return folder / "out"


@pytest.mark.parametrize(
    ("to", "again"), often([("merged", False), ("merged", True), ("peft", False)], ("merged", False))
)
def test_a_run_is_exported(run: Path, tmp_path: Path, to: str, again: bool) -> None:
    """Another Python may read the tokenizer again."""
    out = tmp_path / "exported" if to == "merged" else run / "0-sft" / "export-peft"
    also = ["--also-read-with", sys.executable] if again else []
    done = posttrain("export", run, *([out] if to == "merged" else []), "--to", to, *also)
    assert done.code == 0 and "log-probabilities differ by" in done.out, done
    assert ("reads the same tokens and template" in done.out) == again, done
    assert (out / ("config.json" if to == "merged" else "adapter_config.json")).is_file()
    assert not out.with_name(f"{out.name}.unproved").exists()
    assert versions_of(out) == [versions()]
    if to == "merged":
        folders = (tmp_path / "exported", run / "0-sft" / "model")
        ours, theirs = (ModelWeights(load_model(folder)).read() for folder in folders)
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_another_reader_of_the_tokenizer_tells_what_differs(tmp_path: Path) -> None:
    """A stand-in for another environment, which reads the end token of another file."""
    tokenizer = load_tokenizer("bytes")
    reader = tmp_path / "python"
    reader.write_text("#!/bin/sh\necho '[\"4.0\", [], null, 0, 0]'\n")
    reader.chmod(0o755)
    with pytest.raises(ProofError, match="transformers 4.0 reads another tokens"):
        compare_tokenizers(tmp_path, tokenizer, str(reader))
    reader.write_text("#!/bin/sh\necho 'no class TokenizersBackend' >&2\nexit 1\n")
    with pytest.raises(ProofError, match="cannot read configuration and tokenizer: no class TokenizersBackend"):
        compare_tokenizers(tmp_path, tokenizer, str(reader))
    with pytest.raises(ProofError, match="cannot be started"):
        compare_tokenizers(tmp_path, tokenizer, str(tmp_path / "none"))


@pytest.mark.thorough
def test_a_run_over_a_quantized_base_is_exported(run: Path, tmp_path: Path) -> None:
    """Merged it is what was trained; the adapter alone is proved beside the base as it is in its files."""
    model = {"path": str(run.parent / "base"), "lora": {"rank": 2}, "quantize": "nf4"}
    assert posttrain("run", write_run(tmp_path, sft_stage(num_steps=2), model=model)).code == 0
    merged = posttrain("export", tmp_path / "out", "--to", "merged")
    assert merged.code == 0 and "have the names and shapes of the source; their values are not" in merged.out, merged
    peft = posttrain("export", tmp_path / "out", "--to", "peft")
    assert peft.code == 0 and "both beside the base in full precision, not in nf4 as in training" in peft.out, peft


@pytest.mark.thorough
def test_a_reward_model_is_exported_with_its_head(tmp_path: Path) -> None:
    model = {"init": {**INIT, "num_key_value_heads": 2}, "tokenizer": "bytes"}
    file = write_pairs(tmp_path, preference_stage(kind="reward_model", num_steps=1), model=model)
    assert posttrain("run", file).code == 0
    done = posttrain("export", tmp_path / "out", "--to", "hf")
    assert done.code == 0 and "scores differ by" in done.out, done
    stage = tmp_path / "out" / "0-reward_model"
    exported, saved = (load_file(stage / folder / "model.safetensors") for folder in ("export-hf", "model"))
    assert exported.keys() == saved.keys() and "score.weight" in exported
    assert np.array_equal(exported["score.weight"], saved["score.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--to", "hf"], "export: the run trains an adapter; give --to merged or --to peft"),
        (["--to", "merged", "--step", "7"], "no checkpoint of step 7; available: [2]"),
    ],
)
def test_what_cannot_be_exported(run: Path, tmp_path: Path, change: list[str], message: str) -> None:
    done = posttrain("export", run, tmp_path / "exported", *change)
    assert done.code == 2 and message in done.err
    assert not (tmp_path / "exported").exists()


# --- the tensors themselves ------------------------------------------------------------------------------------------


def small_adapter(name: str, **fields: Any) -> Decoder:
    """A golden model whose adapter alone is changed."""
    model, draw = load_model(GOLDENS / name, lora=LoRA(rank=2, **fields), seed=0), np.random.default_rng(1)
    weights = ModelWeights(model)
    trained = weights.read(weights.trainable().__contains__)
    weights.write(
        {path: on_device(np.asarray(w) + draw.normal(0, 0.03, w.shape), w.dtype) for path, w in trained.items()}
    )
    return model


@pytest.mark.parametrize("name", ["llama", "llama_bf16", "mixtral"])
def test_merged_tensors_are_the_source_and_the_adapter(tmp_path: Path, name: str) -> None:
    model = small_adapter(name, targets=("q_proj", "o_proj"), rslora=True)
    save_model(model, tmp_path / "out")
    save_adapter(model, tmp_path / "adapter")
    told = compare_with_source(tmp_path / "out", GOLDENS / name, tmp_path / "adapter", trained=False)
    assert f"; {2 * model.config.num_layers} are it with the adapter added by numpy" in told


@pytest.mark.parametrize(
    ("name", "num"),
    often([("gpt_oss", 4 * 2), ("deepseek_v3", 3 * 3 + 2 * 8 * 3), ("mixtral", 5 * 3)], ("gpt_oss", 4 * 2)),
)
def test_merged_experts_are_the_source_and_the_adapter(tmp_path: Path, name: str, num: int) -> None:
    model = small_adapter(name, targets=("mlp",), layers=(0,) if name == "mixtral" else None)
    save_model(model, tmp_path / "out")
    save_adapter(model, tmp_path / "adapter")
    told = compare_with_source(tmp_path / "out", GOLDENS / name, tmp_path / "adapter", trained=False)
    assert f"; {num} are it with the adapter added by numpy" in told


@pytest.mark.parametrize("fault", ["unmerged", "swapped_experts", "missing_shard", "lost_tensor"])
def test_the_tensors_show_seeded_faults_without_another_reader(tmp_path: Path, fault: str) -> None:
    model = small_adapter("mixtral", targets=("q_proj", "o_proj"))
    save_model(model, tmp_path / "out")
    save_adapter(model, tmp_path / "adapter")
    if fault == "lost_tensor":
        change(tmp_path / "out", lambda content: (content.pop("model.norm.weight"), None)[1])
    else:
        FAULTS[fault][0](tmp_path / "out", model)
    with pytest.raises(ProofError, match="is changed|is missing|with the adapter added"):
        compare_with_source(tmp_path / "out", GOLDENS / "mixtral", tmp_path / "adapter", trained=False)
