"""The model of a run by its fields: long context, an adapter that there is, a family in a file of its own."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from posttrain.config import LoRA
from posttrain.config.yaml_file import load_config
from posttrain.data.tokenizer import load_tokenizer
from posttrain.models import hf
from posttrain.runs.code_identity import code_digests
from posttrain.user_code import import_transformers
from posttrain.weights.load import init_model, load_model
from posttrain.weights.lora import attach_lora
from posttrain.weights.peft_save import save_adapter
from posttrain.weights.save import save_model
from posttrain.weights.state import ADAPTER, ModelWeights
from tests.models.test_config_json import LLAMA, PHI3
from tests.stages.runs import INIT, posttrain, rl_stage, sft_stage, write_run
from tests.tiny import shake, tiny_model


def checkpoint(folder: Path, fields: dict[str, Any]) -> Path:
    save_model(init_model({**fields, "vocab_size": 261}, dtype="float32", seed=0), folder)
    load_tokenizer("bytes").save(folder)
    return folder


# --- long context ----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_long_context_lets_rows_be_longer(tmp_path: Path) -> None:
    checkpoint(tmp_path / "phi3", {**PHI3, "pad_token_id": 0})  # by default 32,000, which transformers refuses
    file = write_run(tmp_path, sft_stage(row_tokens=32, num_steps=1, batch_rows=2), model={"path": "phi3"})
    error = posttrain("check", file).error
    assert "row_tokens=32 must be at most 16, for which the model's short RoPE factors are" in error
    assert error.endswith("model.long_context=true takes 64")
    done = posttrain("run", file, "model.long_context=true")
    assert done.code == 0, done.err
    exported = posttrain("export", tmp_path / "out", "--to", "hf")
    assert exported.code == 0, exported.err
    saved = json.loads((tmp_path / "out" / "0-sft" / "model" / "config.json").read_text())
    assert saved["rope_scaling"] == PHI3["rope_scaling"] and saved["max_position_embeddings"] == 64


def test_long_context_is_refused_where_there_is_no_choice(tmp_path: Path) -> None:
    checkpoint(tmp_path / "llama", LLAMA)
    file = write_run(tmp_path, sft_stage(), model={"path": "llama", "long_context": True})
    assert posttrain("check", file).error == (
        "model.long_context: this llama has no second set of RoPE factors; remove the option"
    )
    file = write_run(tmp_path, sft_stage(), model={"init": INIT, "tokenizer": "bytes", "long_context": True})
    assert "long_context chooses between the two sets of RoPE factors of a checkpoint" in posttrain("check", file).error


# --- an adapter ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base` and an `adapter` for it."""
    folder = tmp_path_factory.mktemp("adapted")
    save_model(
        tiny_model(num_layers=1, windows=(None,), vocab_size=261), folder / "base", tokenizer=load_tokenizer("bytes")
    )
    model = load_model(folder / "base", lora=LoRA(rank=2, targets=("q_proj", "mlp"), dropout=0.5), seed=0)
    shake(model, seed=1, stddev=0.02)
    save_adapter(model, folder / "adapter", base=str(folder / "base"))
    return folder


@pytest.mark.thorough
def test_training_of_an_adapter_goes_on(adapted: Path, tmp_path: Path) -> None:
    model = {"path": str(adapted / "base"), "adapter": str(adapted / "adapter")}
    file = write_run(tmp_path, sft_stage(num_steps=1, optimizer={"learning_rate": 1e-9}), model=model)
    assert "ok" in posttrain("check", file).out
    done = posttrain("run", file)
    assert done.code == 0, done.err
    done = posttrain("export", tmp_path / "out", tmp_path / "exported", "--to", "peft")
    assert done.code == 0, (done.out, done.err)
    before, after = (
        ModelWeights(load_model(adapted / "base", adapter=folder)).read(lambda path: ADAPTER in path)
        for folder in (adapted / "adapter", tmp_path / "exported")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), before, after)
    told = [posttrain("generate", adapted / "base", "1+1=", "--max-tokens", "8", *more).out for more in
            ([], ["--adapter", str(adapted / "adapter")])]  # fmt: skip
    assert told[0] != told[1]


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, an `adapter` with rows for added tokens, and their `tokenizer`."""
    folder, fields = tmp_path_factory.mktemp("extended"), {"num_layers": 1, "windows": (None,)}
    save_model(tiny_model(vocab_size=261, **fields), folder / "base", tokenizer=load_tokenizer("bytes"))
    model = tiny_model(vocab_size=264, **fields)
    attach_lora(model, LoRA(rank=2, targets=("q_proj",)), seed=0)
    shake(model, seed=1, stddev=0.02)
    model.config = replace(model.config, resized=True)
    save_adapter(model, folder / "adapter", base=str(folder / "base"))
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.add_tokens(["<a>", "<b>"], special_tokens=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    shutil.copytree(folder / "adapter", folder / "whole")
    shutil.copytree(folder / "tokenizer", folder / "whole", dirs_exist_ok=True)
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "<a>2<b>"}\n' * 4)
    return folder


@pytest.mark.thorough
def test_added_tokens_of_an_adapter_need_their_tokenizer(extended: Path, tmp_path: Path) -> None:
    rows = {**sft_stage(num_steps=1, batch_rows=2, row_tokens=32), "dataset": {"path": str(extended / "rows.jsonl")}}
    model = {"path": str(extended / "base"), "adapter": str(extended / "adapter")}
    file = write_run(tmp_path, rows, model=model)
    refused = "added tokens gave the embedding 264 rows in place of the base's 261, and the tokenizer"
    generate = ("generate", extended / "base", "1+1=", "--adapter", extended / "adapter")
    for command in [("check", file), ("check", file, "model.tokenizer=bytes"), generate]:
        assert refused in posttrain(*command).error
    named = posttrain("check", file, f"model.tokenizer={extended / 'tokenizer'}")
    assert named.code == 0, named.error
    told = posttrain("check", file, f"model.adapter={extended / 'whole'}")
    assert "vocabulary 264" in told.out and "model.adapter: the tokenizer is that of" in told.out


@pytest.mark.thorough
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_training_with_added_tokens_goes_on(extended: Path, tmp_path: Path, quantize: str) -> None:
    model = {"path": str(extended / "base"), "adapter": str(extended / "whole"), "quantize": quantize}
    rows = {**sft_stage(num_steps=1, batch_rows=2, row_tokens=32), "dataset": {"path": str(extended / "rows.jsonl")}}
    file = write_run(tmp_path, rows, model=model)
    for command in [("run", file), ("run", file, "stages.sft.num_steps=2")]:
        assert (done := posttrain(*command)).code == 0, done.err
    for to in ("peft", "merged"):
        assert (done := posttrain("export", tmp_path / "out", tmp_path / to, "--to", to)).code == 0, done.err
    with_adapter = (extended / "base", "--adapter", tmp_path / "peft")
    told = [
        posttrain("generate", *which, "1+1=", "--max-tokens", "8").out
        for which in (with_adapter, (tmp_path / "merged",))
    ]
    assert told[0] == told[1] or quantize != "none"


@pytest.mark.parametrize(
    ("model", "stages", "message"),
    [
        ({"lora": {"rank": 2}}, [sft_stage()], "adapter continues an existing adapter, lora starts a new one"),
        ({}, [sft_stage(), rl_stage()], "model.adapter: a stage leaves its adapter merged"),
        ({"adapter": "./missing"}, [sft_stage()], "model.adapter: ./missing: no such file or folder"),
    ],
)
def test_adapters_that_cannot_go_on(
    adapted: Path, tmp_path: Path, model: dict[str, Any], stages: list[Any], message: str
) -> None:
    given = {"path": str(adapted / "base"), "adapter": str(adapted / "adapter"), **model}
    assert message in posttrain("check", write_run(tmp_path, *stages, model=given)).error


def test_an_adapter_of_another_model_is_found_by_check(adapted: Path, tmp_path: Path) -> None:
    save_model(tiny_model(num_layers=1, windows=(None,), vocab_size=261, intermediate_size=40), tmp_path / "other",
               tokenizer=load_tokenizer("bytes"))  # fmt: skip
    model = {"path": "other", "adapter": str(adapted / "adapter")}
    error = posttrain("check", write_run(tmp_path, sft_stage(), model=model)).error
    assert (
        error.startswith("model.adapter: ")
        and "model.layers.0.mlp.up_proj has shapes {'A': (2, 32), 'B': (48, 2)}" in error
    )


def test_check_says_what_peft_cannot_hold(tmp_path: Path) -> None:
    save_model(
        tiny_model(num_layers=1, windows=(None,), vocab_size=261), tmp_path / "base", tokenizer=load_tokenizer("bytes")
    )
    lora = {"rank": 2, "targets": ["embed", "attention"], "dora": True}
    told = posttrain("check", write_run(tmp_path, sft_stage(), model={"path": "base", "lora": lora})).out
    assert "PEFT does not support DoRA on a tied embedding; of this adapter there is only export --to merged" in (
        " ".join(told.split())
    )


# --- a family --------------------------------------------------------------------------------------------------------


def test_a_family_in_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "ADDED", {})
    shutil.copy(Path(hf.families.__path__[0]) / "qwen3.py", tmp_path / "qwen99.py")
    model = {"init": {**INIT, "model_type": "qwen99"}, "tokenizer": "bytes"}
    assert (
        "model_type='qwen99' is not supported"
        in posttrain("check", write_run(tmp_path, sft_stage(), model=model)).error
    )
    file = write_run(tmp_path, sft_stage(), model=model | {"family": "qwen99.py"})
    done = posttrain("check", file)
    assert done.code == 0 and "model: qwen99, 1 layers" in done.out
    # In the same process another text of the file is another family, and other code of a run.
    before = code_digests(load_config(file))
    family = tmp_path / "qwen99.py"
    family.write_text(family.read_text() + "\n\ndef config_from_hf(fields):\n    raise ValueError('edited')\n")
    changed = code_digests(load_config(file))
    assert before.keys() == changed.keys() == {"model.family=qwen99.py"} and before != changed
    edited = posttrain("check", file)
    assert edited.code != 0 and "edited" in edited.err, (edited.out, edited.err)
    (tmp_path / "qwen98.py").write_text("NAMES = {}")
    error = posttrain("check", write_run(tmp_path, sft_stage(), model=model | {"family": "qwen98.py"})).error
    assert error.startswith("model.family: ") and error.endswith("qwen98.py: lacks ARCHITECTURE, config_from_hf")
