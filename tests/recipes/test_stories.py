"""The real pretrained model: a short run of its configuration, and its greedy text in transformers and here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from posttrain.config_file import load_config
from posttrain.data.tokenizer import load_tokenizer
from posttrain.recipes.generate import generate
from posttrain.recipes.run import run
from posttrain.weights.load import load_model

NEW_TOKENS = 32
OPENINGS = ["Once upon a time, there was a little dog named Max.", "One day, a girl", "The sun"]
SMALL = (
    "num_steps=1",
    "prompts_per_step=2",
    "group_size=4",
    "row_tokens=80",
    "sampling.max_tokens=16",
    "eval_sampling.max_tokens=16",
    "dataset.args.limit=200",
    "eval_dataset.args.limit=4",
    "rollout.warm_up=false",
)


@pytest.mark.thorough
def test_the_saved_model_says_the_same_in_transformers(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    loaded = load_config("configs/grpo_stories.yaml", [*SMALL, f"output={tmp_path / 'run'}"])
    result = run(loaded.config, loaded.base_dir)
    folder = result.model_path

    assert sorted(json.loads((folder / "generation_config.json").read_text())["eos_token_id"]) == [1, 2]
    ours = generate(
        load_model(folder), load_tokenizer(folder), OPENINGS, max_new_tokens=NEW_TOKENS, temperature=0.0, chat=False
    )
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for opening, text in zip(OPENINGS, ours, strict=True):
        tokens = tokenizer(opening, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(**tokens, max_new_tokens=NEW_TOKENS, max_length=None, do_sample=False, pad_token_id=0)
        new = out[0, tokens["input_ids"].shape[1] :]
        assert tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text
    assert np.isfinite(result.results[0]["after"]["mean"])
