"""Files of PEFT with other fields and tensors: how they are read, what is refused, and what cannot be written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from posttrain.config import LoRA
from posttrain.errors import ConfigError
from posttrain.weights.load import load_model
from posttrain.weights.lora import has_lora, merged_lora
from posttrain.weights.peft_load import absent_targets
from posttrain.weights.peft_save import save_adapter
from posttrain.weights.save import hf_tensors, save_model
from posttrain.weights.state import ModelWeights

GOLDENS = Path(__file__).parent.parent / "goldens"


def changed(tmp_path: Path, case: str, config: dict[str, Any], tensors: dict[str, np.ndarray | None]) -> Path:
    """A golden adapter with other fields and tensors; None takes one away."""
    folder = tmp_path / "changed"
    shutil.copytree(GOLDENS / "lora" / case, folder)
    fields = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    file = folder / "adapter_model.safetensors"
    stored = {key: value for key, value in (load_file(file) | tensors).items() if value is not None}
    save_file(stored, file)
    return folder


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "adapter_config.json: peft_type='LOHA' is not supported"),
        ({"bias": "all"}, "adapter_config.json: bias='all' is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which changes the base, is not supported"),
        ({"target_parameters": ["a.b"]}, "adapter_config.json: target_parameters='a.b' matches no matrix of the model"),
        ({"target_parameters": ["up_proj.weight"]}, "safetensors: up_proj.weight of target_parameters is missing"),
        ({"trainable_token_indices": [1]}, "adapter_config.json: trainable_token_indices=[1] is not supported"),
        ({"target_modules": ["q_proj", "v_proj", "up_proj"]}, "safetensors: up_proj of target_modules is missing"),
        ({"target_modules": ["query", "dense"]}, "safetensors: target_modules: the model has none of query, dense"),
        ({"modules_to_save": ["lm_head"]}, "safetensors: lm_head of modules_to_save is missing"),
        (
            {"use_dora": True},
            "safetensors: model.layers.0.self_attn.q_proj has shapes {'A': (4, 32), 'B': (64, 4)}, expected",
        ),
    ],
)
def test_fields_that_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_model(GOLDENS / "models" / "llama", adapter=changed(tmp_path, "lora", config, {}))
    assert message in str(raised.value)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj", "query_key_value"]},
        {"target_modules": ["q_proj", "v_proj", "up_proj"], "exclude_modules": ["up_proj"]},
        {"target_modules": ["q_proj", "v_proj", "up_proj"], "exclude_modules": r".*\.up_proj"},
    ],
)
def test_names_that_no_module_has_are_ignored_as_in_peft(config: dict[str, Any], tmp_path: Path) -> None:
    llama = GOLDENS / "models" / "llama"
    folder = changed(tmp_path, "lora", config, {})
    plain, other = (load_model(llama, adapter=adapter) for adapter in (GOLDENS / "lora" / "lora", folder))
    assert absent_targets(other, folder) == [t for t in config["target_modules"] if t == "query_key_value"]
    same = jax.tree.map(lambda a, b: bool((a == b).all()), *(ModelWeights(m).read() for m in (plain, other)))
    assert jax.tree.all(same)


EMBED, HEAD = (f"base_model.model.{name}" for name in ("model.embed_tokens.weight", "lm_head.weight"))


@pytest.mark.few(2)
@pytest.mark.parametrize("rows", [104, 88])
@pytest.mark.parametrize("trained", [True, False])
def test_added_tokens_resize_the_embedding(rows: int, trained: bool, tmp_path: Path) -> None:
    """The adapter's tables are the model's: in the adapter written again, and merged. PEFT's logits were compared."""
    tables = {key: np.random.default_rng(0).normal(size=(rows, 32)).astype(np.float32) for key in (EMBED, HEAD)}
    names = ["embed_tokens", "lm_head"] if trained else None
    unused = {EMBED.replace(".weight", ".original_module.weight"): tables[HEAD]} if trained else {}
    folder = changed(tmp_path, "lora", {"modules_to_save": names}, {**tables, **unused})
    model = load_model(GOLDENS / "models" / "llama", adapter=folder, num_tokens=rows - 2)
    assert (model.config.vocab_size, model.config.num_tokens) == (rows, rows - 2)
    assert ModelWeights(model).saved() == ({"embed.embedding", "head.kernel"} if trained else set())
    save_adapter(model, tmp_path / "again")
    save_model(merged_lora(model), tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["vocab_size"] == rows
    plain = dict(hf_tensors(load_model(tmp_path / "merged")))
    for key, table in tables.items():
        np.testing.assert_array_equal(load_file(tmp_path / "again" / "adapter_model.safetensors")[key], table)
        np.testing.assert_array_equal(plain[key.removeprefix("base_model.model.")], table)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {EMBED: (104, 32)},
            "gave the embedding 104 rows in place of the base's 96, and lm_head.weight, which is",
        ),
        ({EMBED: (104, 32), HEAD: (96, 32)}, "and lm_head.weight does not have them; merge it with PEFT"),
        ({EMBED.replace(".weight", ".lora_embedding_A"): (4, 104)}, "104 rows in place of the base's 96"),
    ],
)
def test_rows_of_added_tokens_that_are_not_there(tensors: Any, message: str, tmp_path: Path) -> None:
    zeros = {key: np.zeros(shape, np.float32) for key, shape in tensors.items()}
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_model(GOLDENS / "models" / "llama", adapter=changed(tmp_path, "lora", {}, zeros))


def test_modules_to_save_are_ends_of_names(tmp_path: Path) -> None:
    """In PEFT `norm` stands for input_layernorm, too."""
    names = ("model.norm.weight", "model.layers.0.input_layernorm.weight")
    tensors = {f"base_model.model.{name}": np.full(32, i + 2, np.float32) for i, name in enumerate(names)}
    model = load_model(
        GOLDENS / "models" / "llama", adapter=changed(tmp_path, "lora", {"modules_to_save": ["norm"]}, tensors)
    )
    loaded = dict(hf_tensors(model))
    assert [loaded[name][0] for name in names] == [2.0, 3.0]


def test_tensors_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    tensors = {
        f"{FIRST}A.weight": np.zeros((4, 31), np.float32),
        f"{FIRST}B.weight".replace("layers.0", "layers.1"): None,
        "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": np.zeros((4, 32), np.float32),
        "base_model.model.model.norm.weight": np.ones(32, np.float32) * 7,
    }
    with pytest.raises(ConfigError) as raised:
        load_model(GOLDENS / "models" / "llama", adapter=changed(tmp_path, "lora", {}, tensors))
    for fault in (
        "layers.0.self_attn.q_proj has shapes {'A': (4, 31), 'B': (64, 4)}, expected {'A': (4, 32), 'B': (64, 4)}",
        "model.layers.1.self_attn.q_proj has shapes {'A': (4, 32)}, expected",
        "model.layers.7.self_attn.q_proj.lora_A.weight (4, 32) matches no parameter of the model",
        "model.norm.weight differs from the base and is not in modules_to_save",
    ):
        assert fault in str(raised.value), raised.value


def test_embeddings_kept_beside_the_adapter_must_be_the_base(tmp_path: Path) -> None:
    embedding = dict(hf_tensors(load_model(GOLDENS / "models" / "llama")))["model.embed_tokens.weight"]
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    folder = changed(tmp_path, "lm_head_embed", {}, {key: embedding})
    assert has_lora(load_model(GOLDENS / "models" / "llama", adapter=folder))


def test_a_tied_head_needs_to_be_said(tmp_path: Path) -> None:
    folder = changed(tmp_path, "all_linear", {"target_modules": ["embed_tokens"]}, {})
    with pytest.raises(
        ConfigError, match="embed_tokens of a model whose head is the embedding, without ensure_weight_"
    ):
        load_model(GOLDENS / "models" / "qwen3", adapter=folder)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    def write(name: str, **fields: Any) -> None:
        lora = LoRA(**({"rank": 2} | fields)) if fields else None
        save_adapter(load_model(GOLDENS / "models" / name, lora=lora, seed=0), tmp_path / "out")

    with pytest.raises(ConfigError, match="save_adapter: the model has no adapter; use save_model"):
        write("llama")
    with pytest.raises(ConfigError, match="PEFT does not support DoRA on a tied embedding"):
        write("qwen3", targets=("embed",), dora=True)
    with pytest.raises(ConfigError, match="PEFT does not support DoRA on experts"):
        write("qwen3_moe", targets=("experts",), dora=True)
    with pytest.raises(ConfigError, match="PEFT treats .*mlp.down_proj as a parameter, which does not support dropout"):
        write("qwen3_moe", targets=("mlp.down",), dropout=0.1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="out is not an adapter folder; give a new or empty folder"):
        write("llama", targets=("q_proj",))
    with pytest.raises(ConfigError, match="lora creates an adapter, adapter loads one; set only one of them"):
        load_model(GOLDENS / "models" / "llama", lora=LoRA(rank=2), adapter=tmp_path)


def test_adapters_that_began_with_eva(tmp_path: Path) -> None:
    """EVA chooses A before training and leaves the base as it is: its settings say nothing beside the tensors."""
    eva = {"rho": 2.0, "tau": 0.99, "use_label_mask": True, "whiten": False, "adjust_scaling_factors": True}
    folder = changed(tmp_path, "lora", {"init_lora_weights": "eva", "eva_config": eva}, {})
    llama = GOLDENS / "models" / "llama"
    plain, other = (load_model(llama, adapter=adapter) for adapter in (GOLDENS / "lora" / "lora", folder))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), *(ModelWeights(m).read() for m in (plain, other)))
    assert jax.tree.all(same)
