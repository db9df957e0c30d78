"""Reward models on disk: what we save is a sequence classifier of transformers with the same scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import LoRA, load_model, save_model
from posttrain.errors import ConfigError
from posttrain.weights.scalar_head import SCORE, add_scalar_head, reward_config, with_padding
from posttrain.weights.state import ModelWeights
from tests.models.checkpoints import GOLDENS, assert_same

TOKENS = np.array([[7, 10, 72, 41, 16, 48, 18, 2]], np.int32)


OTHERS = (
    *("mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "olmo2", "olmo3"),
    *("smollm3", "glm4", "gpt_oss", "deepseek_v3"),
)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "qwen3", *(pytest.param(f, marks=pytest.mark.thorough) for f in OTHERS)])
def test_transformers_gives_the_same_scores(tmp_path: Path, family: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch, which the extra [test] installs on Python 3.11")
    from transformers import AutoModelForSequenceClassification

    model = load_model(GOLDENS / family)
    add_scalar_head(model, seed=1)
    model.config = with_padding(model.config, pad_id=0, stop_ids=(2,))
    save_model(model, tmp_path / "rm")
    positions = np.arange(TOKENS.shape[1])[None]
    hidden, _ = model(jnp.asarray(TOKENS), jnp.asarray(positions), jnp.ones_like(jnp.asarray(TOKENS)))
    ours = np.asarray(model.scores(hidden))[:, -1]
    other = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", experts_implementation="eager")
    with torch.no_grad():
        theirs = other(torch.tensor(np.pad(TOKENS, ((0, 0), (0, 3))), dtype=torch.long)).logits.numpy()
    assert theirs.shape == (1, 1)
    np.testing.assert_allclose(ours, theirs[:, 0], atol=1e-4)
    again = load_model(tmp_path / "rm")
    assert again.config.scalar_head
    assert_same(model, again)


def test_the_head_is_trained_beside_an_adapter() -> None:
    model = load_model(GOLDENS / "llama", lora=LoRA(rank=2))
    add_scalar_head(model, seed=0)
    weights = ModelWeights(model)
    assert SCORE in weights.trainable() and "final_norm.scale" not in weights.trainable()
    assert "head.kernel" not in weights.read()


def test_what_has_no_form_on_disk() -> None:
    config = load_model(GOLDENS / "llama").config
    with pytest.raises(ConfigError, match="no sequence classifier for granite"):
        reward_config(replace(config, model_type="granite"))
    with pytest.raises(ConfigError, match="is no model ForCausalLM"):
        reward_config(replace(config, hf_json=json.dumps({"architectures": ["BertModel"]})))
    assert json.loads(with_padding(config, pad_id=2, stop_ids=(2,)).hf_json)["pad_token_id"] is None
