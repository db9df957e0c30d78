"""The greedy text of a saved model of stories, in transformers and here.

`python -m tests.export.greedy FOLDER` compares them.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from posttrain.data.tokenizer import load_tokenizer
from posttrain.generation import generate
from posttrain.weights.load import load_model

NEW_TOKENS = 32
OPENINGS = ["Once upon a time, there was a little dog named Max.", "One day, a girl", "The sun"]


def assert_same_greedy_text(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = generate(
        load_model(folder), load_tokenizer(folder), OPENINGS, max_new_tokens=NEW_TOKENS, temperature=0.0, chat=False
    )
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for opening, text in zip(OPENINGS, ours, strict=True):
        tokens = tokenizer(opening, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(**tokens, max_new_tokens=NEW_TOKENS, max_length=None, do_sample=False, pad_token_id=0)
        # By itself a completion would lose its first space.
        prompt, whole = (
            tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (tokens["input_ids"][0], out[0])
        )
        theirs = whole.removeprefix(prompt)
        assert theirs == text, f"after {opening!r} transformers says {theirs!r}, posttrain {text!r}"


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        print("skipped: greedy text in transformers, which needs torch")
    else:
        assert_same_greedy_text(Path(sys.argv[1]))
        print(f"{sys.argv[1]}: the greedy text of {len(OPENINGS)} openings is that of transformers")
