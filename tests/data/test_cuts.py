"""What rows lose on their way: counted in one place, said at the start, and no neighbour drops a row of KTO."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.config import DatasetSection, PreferenceSection, SFTSection
from posttrain.data.chat import Renderer
from posttrain.data.cuts import Cut, RowCuts, cut_of, mean_metrics
from posttrain.data.pair_examples import PairExamples
from posttrain.data.pipeline import make_batches, row_tokenizer
from posttrain.data.preference import MISMATCHED
from posttrain.data.sources import RowError, load_rows
from posttrain.data.tokenizer import load_tokenizer

MODEL = """{tokenizer: bytes, init: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
  num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 256, rms_norm_eps: 1e-5}}"""


def written(folder: Path, rows: list[dict[str, Any]]) -> DatasetSection:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetSection(path=str(folder / "rows.jsonl"), chat=False)


def call(folder: Path, command: str, rows: list[dict[str, Any]], **fields: Any) -> str:
    written(folder, rows)
    fields = {
        "output": folder / "run",
        "seed": 0,
        "model": MODEL,
        "dataset": "{path: rows.jsonl, chat: false}",
        **fields,
    }
    (folder / "run.yaml").write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
    result = CliRunner().invoke(app, [command, str(folder / "run.yaml")])
    assert result.exit_code == 0, result.output
    return result.output


def kto(folder: Path, lengths: list[int], row_tokens: int, overlong: str, **fields: Any) -> PairExamples:
    """Units of answers of these lengths to different prompts of three bytes."""
    rows = [{"prompt": f"Q{i:x}:", "completion": "x" * n, "label": i % 2 == 0} for i, n in enumerate(lengths)]
    dataset = written(folder, rows)
    section = PreferenceSection(dataset=dataset, loss="kto", row_tokens=row_tokens, overlong=overlong, num_steps=1)
    renderer = Renderer(load_tokenizer("bytes"), False)
    return PairExamples(
        section=section,
        dataset=dataset,
        rows=load_rows(dataset),
        renderer=renderer,
        kind="answers_and_others",
        **fields,
    )


def other_length(unit: dict[str, np.ndarray]) -> int:
    """Bytes of the mismatched answer, without its end."""
    return int((unit["roles"] == MISMATCHED).sum()) - 1


@pytest.mark.parametrize("share_prompts", [False, True])
def test_a_long_neighbour_drops_no_row(tmp_path: Path, share_prompts: bool) -> None:
    """Alternating lengths: a short row has the next short one beside it, the last the first."""
    units = kto(tmp_path, [8, 200] * 10, 60, "drop", share_prompts=share_prompts)
    made = [units(number) for number in range(20)]
    assert [one is None for one in made] == [False, True] * 10
    assert all(one is not None and other_length(one) == 8 for one in made[::2])
    assert sum(units.cuts[number].dropped for number in range(20) if number in units.cuts) == 10


def test_the_row_that_is_too_long_is_named(tmp_path: Path) -> None:
    units = kto(tmp_path, [8, 8, 8, 200, 8], 60, "error")
    assert all(units(number) is not None for number in (0, 1, 2, 4))
    with pytest.raises(RowError, match="row 3: it has 2"):
        units(3)


def test_the_next_answer_that_fits_is_taken(tmp_path: Path) -> None:
    """Row 0 takes 2 + 3 + 9 + 1 tokens alone, and beside it fits an answer of 20 of the next rows."""
    units = kto(tmp_path, [9, 70, 50, 20, 5], 45, "drop")
    first = units(0)
    assert first is not None and other_length(first) == 20
    # A row that fits beside none is dropped, whatever its neighbours.
    assert units(1) is None and units(2) is None
    whole = kto(tmp_path, [9, 30], 1000, "error")
    assert other_length(whole(0) or {}) == 30


def test_sums() -> None:
    assert cut_of([10, 7, 5], [4, None, 5]) == Cut(1, 6, 1, 7)
    cuts = RowCuts.of([Cut(1, 6, 0, 0), Cut(0, 0, 1, 7)], total=4, kept_tokens=27)
    assert cuts.metrics == {"data/dropped_ratio": 0.25, "data/truncated_ratio": 0.25, "data/lost_tokens_ratio": 13 / 40}
    none = RowCuts.of([], total=4, kept_tokens=9)
    assert set(none.metrics.values()) == {0.0} and none.truncation_note("rows", "x", 8) == []
    mixed = mean_metrics([cuts, none], [3.0, 1.0])
    assert mixed["data/lost_tokens_ratio"] == pytest.approx(0.75 * 13 / 40)


TEXT = "once upon a time there was a girl. " * 20


@pytest.mark.parametrize(
    ("fields", "row", "tokens", "kept"),
    [
        ({"kind": "sft", "batch_rows": 2}, {"text": TEXT}, 702, 64),
        (
            {"kind": "preference", "loss": "simpo", "batch_rows": 2, "share_prompts": "false"},
            {"prompt": "q", "chosen": "a" * 100, "rejected": "b" * 100},
            2 * 104,
            64,
        ),
    ],
)
def test_truncated_tokens_are_said_and_recorded(
    tmp_path: Path, fields: dict[str, Any], row: dict[str, Any], tokens: int, kept: int
) -> None:
    """A byte is a token, beside the tokens that begin and end a text."""
    rows = [{**row, "prompt": f"q{i}"} if "prompt" in row else row for i in range(4)]
    output = call(tmp_path, "run", rows, num_steps=1, row_tokens=64, overlong="truncate", **fields)
    line = f"4 of 4 rows of rows.jsonl are truncated to row_tokens=64: {4 * (tokens - kept):,} of {4 * tokens:,} tokens"
    assert line in " ".join(output.split())
    (file,) = (tmp_path / "run").rglob("metrics.jsonl")
    first = json.loads(file.read_text().splitlines()[0])
    first = first.get("metrics", first)
    assert first["data/truncated_ratio"] == 1 and first["data/dropped_ratio"] == 0
    assert first["data/lost_tokens_ratio"] == pytest.approx(1 - kept / tokens)


def test_columns_that_are_not_read_are_said(tmp_path: Path) -> None:
    rows = [{"text": "abc", "title": "t"}, {"text": "abc", "source": "s"}]
    output = call(tmp_path, "check", rows, kind="sft", num_steps=1, row_tokens=64)
    assert "columns that are not read: title, source" in " ".join(output.split())


@pytest.mark.parametrize("row_tokens", [2, 5, 16, 21, 22, 23])
def test_a_split_text_has_loss_once_on_each_token(tmp_path: Path, row_tokens: int) -> None:
    """Parts join to the text, and each token but the first is learned after the one before it."""
    tokenizer = load_tokenizer("bytes")
    text = "once upon a time, twice"[:20]
    dataset = written(tmp_path, [{"text": text}])
    rows = load_rows(dataset)
    section = SFTSection(dataset=dataset, row_tokens=row_tokens, overlong="split", num_steps=1)
    parts = row_tokenizer(section, dataset, rows, Renderer(tokenizer, False))(0)
    whole = Renderer(tokenizer, False).text(text).tokens
    pairs = []
    for part in parts:
        assert part is not None and 2 <= len(part["tokens"]) <= row_tokens
        tokens, weights = part["tokens"].tolist(), part["loss_weight"].tolist()
        assert weights[0] == 0
        pairs += [(a, b) for a, b, w in zip(tokens, tokens[1:], weights[1:], strict=False) if w == 1]
    assert pairs == list(itertools.pairwise(whole))


def test_split_is_for_texts(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    rows = [{"prompt": "q", "completion": "a" * 50}]
    with pytest.raises(RowError, match="split is for texts with loss on all tokens"):
        next(make_batches(rows, tokenizer, batch_rows=1, row_tokens=16, seed=None, chat=False, overlong="split"))
    batches = list(
        make_batches([{"text": "a" * 50}], tokenizer, batch_rows=1, row_tokens=16, seed=None, overlong="split")
    )
    assert sum(float(batch.loss_weight.sum()) for batch in batches) == 51
