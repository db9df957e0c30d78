from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.config import DatasetSection, SFTSection
from posttrain.data.chat import Renderer
from posttrain.data.format import use_chat
from posttrain.data.pipeline import SFTBatches
from posttrain.data.sources import load_rows
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from tests.data.batches import efficiency, sequences


def batches(shared: Path, tokenizer: Tokenizer, dataset: DatasetSection, **fields: Any) -> SFTBatches:
    rows = load_rows(dataset)
    section = SFTSection(dataset=dataset, num_steps=1, batch_rows=8, optimizer={"learning_rate": 1.0}, **fields)
    return SFTBatches(section, rows, Renderer(tokenizer, use_chat(dataset, tokenizer, rows.columns)), seed=0)


@pytest.mark.thorough
def test_stories_as_plain_text(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "models" / "stories260k")
    dataset = DatasetSection(path=str(shared / "data/text/tinystories_v2gpt4_train_head.jsonl"), shuffle=False)
    rows = load_rows(dataset)
    assert len(rows) == 1727
    stream = batches(shared, tokenizer, dataset, row_tokens=512, overlong="drop")
    found = {tokenizer.decode(tokens.tolist()): (tokens, w) for b in islice(stream, 4) for tokens, w in sequences(b)}
    assert len(found) > 30
    whole = {rows[i]["text"] for i in range(120)}
    for text, (tokens, weight) in found.items():
        assert text in whole
        assert (tokens[0], tokens[-1]) == (1, 2)
        np.testing.assert_array_equal(weight, [0.0] + [1.0] * (len(tokens) - 1))


@pytest.mark.thorough
def test_gsm8k_through_the_qwen3_template(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "tokenizers" / "qwen3")
    path = str(shared / "data" / "math" / "gsm8k_train.jsonl")
    dataset = DatasetSection(path=path, prompt="{question}", completion="{answer}")
    rows = load_rows(dataset)
    by_question = {rows[i]["question"]: rows[i]["answer"] for i in range(len(rows))}
    assert len(rows) == 7473
    stream = batches(shared, tokenizer, dataset, row_tokens=512, overlong="drop")
    head, think = "<|im_start|>user\n", "<think>\n\n</think>\n\n"
    efficiencies = []
    for batch in islice(stream, 3):
        efficiencies.append(efficiency(batch))
        for tokens, weight in sequences(batch):
            text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
            question, answer = text.removeprefix(head).split("<|im_end|>\n<|im_start|>assistant\n")
            assert answer == f"{think}{by_question[question]}<|im_end|>\n"
            with_loss = tokenizer.decode(tokens[weight > 0].tolist(), skip_special_tokens=False)
            assert with_loss == answer.removesuffix("\n")
    assert min(efficiencies) > 0.9


@pytest.mark.parametrize("packing", [True, False])
def test_instructions_with_a_template_over_columns(shared: Path, packing: bool) -> None:
    tokenizer = load_tokenizer(shared / "tokenizers" / "mistral-7b-instruct")
    dataset = DatasetSection(
        path=str(shared / "data/instruct/rasbt_instruction_data.json"),
        prompt="{instruction}\n{input}",
        completion="{output}",
        chat=False,
    )
    rows = load_rows(dataset)
    expected = {f"{rows[i]['instruction']}\n{rows[i]['input']}{rows[i]['output']}" for i in range(len(rows))}
    for batch in islice(batches(shared, tokenizer, dataset, row_tokens=256, packing=packing), 3):
        for tokens, weight in sequences(batch):
            assert tokenizer.decode(tokens.tolist()) in expected
            assert (tokens[0], tokens[-1], weight[-1]) == (1, 2, 1.0)
            assert 0 < weight.sum() < len(tokens) - 1
