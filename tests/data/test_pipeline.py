import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.batch import Batch
from posttrain.config import DatasetSection, SFTSection
from posttrain.data.chat import Renderer
from posttrain.data.pipeline import Prompts, SFTBatches, eval_batches, make_batches
from posttrain.data.sources import Rows, load_rows
from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import ConfigError
from tests.data.batches import sequences
from tests.often import often

NUM_ROWS = 11


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "rows.jsonl", "n")
    return tmp_path


def write(path: Path, letter: str) -> None:
    rows = [{"prompt": f"{i}:", "completion": letter * (1 + i % 5)} for i in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def stage(folder: Path, **fields: Any) -> tuple[SFTSection, Rows, Renderer]:
    dataset = DatasetSection(path=str(folder / "rows.jsonl"), chat=False, **fields.pop("dataset", {}))
    defaults = {"num_steps": 1, "batch_rows": 2, "row_tokens": 24, "optimizer": {"learning_rate": 1.0}}
    section = SFTSection(dataset=dataset, **{**defaults, **fields})
    return section, load_rows(dataset), Renderer(load_tokenizer("bytes"), chat=False)


def stream(folder: Path, *, seed: int = 3, **fields: Any) -> SFTBatches:
    return SFTBatches(*stage(folder, **fields), seed=seed)


def texts(batches: Iterator[Batch] | list[Batch]) -> list[str]:
    tokenizer = load_tokenizer("bytes")
    return [tokenizer.decode(tokens.tolist()) for batch in batches for tokens, _ in sequences(batch)]


def test_turns_that_a_template_rewrites_are_rows_of_their_own(folder: Path) -> None:
    """As if each turn were a row: the same sequences and weights in every epoch, in the held-out pass, after a resume;
    a turn that is too long is dropped alone."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.hf.chat_template = (
        "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '-' }}<|im_end|>{% endfor %}"
    )
    talks = [[f"{i}?" if n % 2 == 0 else "n" * (1 + n) for n in range(2 + i % 5)] for i in range(NUM_ROWS)]
    roles = ("user", "assistant")
    rows = [{"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(talk)]} for talk in talks]
    alone = [{"messages": row["messages"][: n + 1]} for row in rows for n in range(1, len(row["messages"]), 2)]
    section, *_ = stage(folder, dataset={"shuffle": False}, overlong="drop", row_tokens=18, packing=False)
    chat = section.model_copy(update={"dataset": section.dataset.model_copy(update={"chat": None})})

    def made(rows: list[dict[str, Any]], last_turn_only: bool) -> tuple[list[bytes], SFTBatches]:
        table, renderer = Rows("x", rows, 0, len(rows)), Renderer(tokenizer, chat=True)
        section = chat.model_copy(update={"last_turn_only": last_turn_only})
        held_out = eval_batches(section.model_copy(update={"packing": True}), section.dataset, table, renderer)
        parts = [part.tobytes() for batch in held_out for pair in sequences(batch) for part in pair]
        return parts, SFTBatches(section, table, renderer, seed=1)

    (together, stream), (apart, one_by_one) = made(rows, False), made(alone, True)
    assert together == apart and 2 * len(rows) < len(together) < 2 * len(alone)
    states, batches = [json.dumps(stream.state())], []
    for _ in range(9):
        batches.append(next(stream))
        states.append(json.dumps(stream.state()))
        assert equal(batches[-1], next(one_by_one))
    stream.restore(json.loads(states[4]))
    assert all(equal(next(stream), batch) for batch in batches[4:])


EXPECTED = Counter(f"{i}:{'n' * (1 + i % 5)}" for i in range(NUM_ROWS))


def equal(a: Batch, b: Batch) -> bool:
    names = ("tokens", "positions", "segments", "loss_weight")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


@pytest.mark.parametrize("packing", [True, False])
def test_resumed_stream_is_the_uninterrupted_one_at_every_step(folder: Path, packing: bool) -> None:
    whole = stream(folder, packing=packing)
    states, batches = [], []
    for _ in range(6):
        states.append(json.dumps(whole.state()))
        batches.append(next(whole))
    for step, state in enumerate(states):
        resumed = stream(folder, packing=packing)
        next(resumed)
        resumed.restore(json.loads(state))
        assert json.dumps(resumed.state()) == state
        for expected in batches[step:]:
            assert equal(next(resumed), expected)


@pytest.mark.parametrize(("packing", "shuffle"), [(False, True), (True, False), (False, False)])
def test_every_epoch_trains_each_row_once(folder: Path, packing: bool, shuffle: bool) -> None:
    seen = texts(islice(stream(folder, packing=packing, batch_rows=1, dataset={"shuffle": shuffle}), 50))
    epochs = [seen[i : i + NUM_ROWS] for i in range(0, len(seen) - NUM_ROWS, NUM_ROWS)]
    assert len(epochs) >= 4
    if not packing:
        assert all(Counter(epoch) == EXPECTED for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == (len(epochs) if shuffle else 1)


def test_packing_loses_and_doubles_no_row(folder: Path) -> None:
    """Rows of one window may leave in another order than they came; after many epochs each count is within one."""
    counts = Counter(texts(islice(stream(folder, packing=True), 30)))
    assert set(counts) == set(EXPECTED)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_seed_decides_the_order(folder: Path) -> None:
    first = texts(islice(stream(folder, packing=False), 20))
    assert texts(islice(stream(folder, packing=False), 20)) == first
    others = [texts(islice(stream(folder, packing=False, seed=seed), 20)) for seed in (0, 4)]
    assert first not in others
    assert others[0][NUM_ROWS:] != others[1][: len(others[0]) - NUM_ROWS]


def test_loss_only_on_completions(folder: Path) -> None:
    batch = next(stream(folder))
    tokenizer = load_tokenizer("bytes")
    for tokens, weight in sequences(batch):
        kept = tokenizer.decode(tokens[weight > 0].tolist(), skip_special_tokens=False)
        assert kept == tokenizer.decode(tokens.tolist()).split(":")[1] + "<eos>"
    batch = next(stream(folder, train_on_prompt=True))
    np.testing.assert_array_equal(batch.loss_weight > 0, batch.positions > 0)


def test_resuming_with_other_data_or_layout_is_an_error(folder: Path) -> None:
    state = stream(folder).state()
    with pytest.raises(ConfigError, match="cannot resume: seed was 3 when the checkpoint was written and is 4 now"):
        stream(folder, seed=4).restore(state)
    with pytest.raises(ConfigError, match=r"cannot resume: batch_rows was 2 .* and is 3 now"):
        stream(folder, batch_rows=3).restore(state)
    with pytest.raises(ConfigError, match="cannot resume: tokens was"):
        stream(folder, dataset={"prompt": "Q {prompt}"}).restore(state)
    with pytest.raises(ConfigError, match="cannot resume: dataset was"):
        stream(folder, dataset={"limit": 10}).restore(state)
    write(folder / "rows.jsonl", "m")
    with pytest.raises(ConfigError, match="cannot resume: dataset was"):
        stream(folder).restore(state)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved", "memory"])
def test_each_row_of_a_dataset_is_compared(tmp_path: Path, kind: str) -> None:
    """One row of 200 differs, of the same length, which no sample of rows need hold."""
    import datasets

    def state(number: int, restored: Any = None) -> Any:
        rows = [{"text": f"row {i} of {number if i == 1 else 0}"} for i in range(200)]
        path = tmp_path / f"{number}" / "rows" if kind == "saved" else tmp_path / f"{number}" / f"rows.{kind}"
        path.parent.mkdir(exist_ok=True)
        if kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif kind == "saved":
            datasets.Dataset.from_list(rows).save_to_disk(str(path))
        elif kind == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(str(path))
        sizes: dict[str, Any] = {"batch_rows": 2, "row_tokens": 32, "seed": 0}
        made = make_batches(rows if kind == "memory" else path, load_tokenizer("bytes"), **sizes)
        assert isinstance(made, SFTBatches)
        if restored is not None:
            made.restore(restored)
        return made.state()

    first = state(0)
    assert state(0, first) == first
    with pytest.raises(ConfigError, match="cannot resume: dataset was 'rows.*, 200 rows, .* restore it"):
        state(1, first)


def test_errors_name_the_row(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl row 4: it has 9 tokens, more than row_tokens=8"):
        stream(folder, row_tokens=8)
    with pytest.raises(ConfigError, match=r"every row of .*rows\.jsonl is dropped as longer than row_tokens=3"):
        stream(folder, row_tokens=3, overlong="drop")
    dropped = Counter(texts(islice(stream(folder, row_tokens=7, overlong="drop", packing=False), 40)))
    assert set(dropped) == {text for text in EXPECTED if len(text) + 2 <= 7}
    lines = (folder / "rows.jsonl").read_text() + json.dumps({"prompt": "x", "completed": "y"}) + "\n"
    (folder / "rows.jsonl").write_text(lines)
    with pytest.raises(
        ConfigError, match=rf"rows\.jsonl row {NUM_ROWS}: .*no column 'completion' among prompt, completed"
    ):
        list(islice(stream(folder, dataset={"completion": "{completion}"}), 20))


@pytest.mark.parametrize("packing", [True, False])
def test_evaluation_is_one_pass(folder: Path, packing: bool) -> None:
    section, rows, renderer = stage(folder, packing=packing, batch_rows=3)
    batches = list(eval_batches(section, section.dataset, rows, renderer))
    assert Counter(texts(batches)) == EXPECTED
    assert all(batch.shape == (3, 24) for batch in batches)
    assert len(texts(batches)) == NUM_ROWS


def prompts(folder: Path, *, seed: int = 3, **fields: Any) -> Prompts:
    section = DatasetSection(path=str(folder / "rows.jsonl"), **fields)
    return Prompts(section, load_rows(section), seed=seed)


def test_prompts_resume_and_cover_every_epoch(folder: Path) -> None:
    whole = prompts(folder)
    states, issued = [], []
    for _ in range(3 * NUM_ROWS - 2):
        states.append(json.dumps(whole.state()))
        issued.append(next(whole))
    for number, state in enumerate(states):
        resumed = prompts(folder)
        resumed.restore(json.loads(state))
        assert [next(resumed) for _ in issued[number:]] == issued[number:]
    for start in range(0, len(issued) - NUM_ROWS + 1, NUM_ROWS):
        assert sorted(issued[start : start + NUM_ROWS]) == list(range(NUM_ROWS))
    assert all(type(index) is int for index in issued)


def test_prompts_keep_the_order_without_shuffle(folder: Path) -> None:
    assert list(islice(prompts(folder, shuffle=False), 12)) == [*range(11), 0]
    shuffled = list(islice(prompts(folder), 12))
    assert shuffled != [*range(11), 0]
    assert list(islice(prompts(folder), 12)) == shuffled
    with pytest.raises(ConfigError, match="cannot resume: seed was 3"):
        prompts(folder, seed=4).restore(prompts(folder).state())


def test_a_single_row_repeats(folder: Path) -> None:
    assert list(islice(prompts(folder, limit=1), 4)) == [0, 0, 0, 0]


@pytest.mark.thorough
@pytest.mark.parametrize("code", often((0, 2), 2))
def test_a_process_with_an_open_stream_ends_quietly(folder: Path, code: int) -> None:
    program = (
        "from posttrain.config import DatasetSection, SFTSection\n"
        "from posttrain.data.chat import Renderer\n"
        "from posttrain.data.pipeline import SFTBatches\n"
        "from posttrain.data.sources import load_rows\n"
        "from posttrain.data.tokenizer import load_tokenizer\n"
        f"data = DatasetSection(path={str(folder / 'rows.jsonl')!r}, chat=False)\n"
        "adam = {'learning_rate': 1.0}\n"
        "section = SFTSection(dataset=data, num_steps=1, batch_rows=2, row_tokens=24, optimizer=adam)\n"
        "rows = load_rows(data)\n"
        "stream = SFTBatches(section, rows, Renderer(load_tokenizer('bytes'), chat=False), seed=0)\n"
        "print(next(stream).shape)\n"
        f"raise SystemExit({code})\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "error", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (code, "(2, 24)\n", "")


def test_batches_of_ones_own_are_those_of_a_stage(folder: Path) -> None:
    rows, path = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()], folder / "rows.jsonl"
    layout: dict[str, Any] = {"batch_rows": 2, "row_tokens": 24, "chat": False}
    expected = list(islice(stream(folder, seed=3), 6))
    tokenizer = load_tokenizer("bytes")
    for source in (rows, path, str(path), iter(rows)):
        made = list(islice(make_batches(source, tokenizer, seed=3, **layout), 6))
        for one, other in zip(made, expected, strict=True):
            assert all(np.array_equal(*two) for two in zip(vars(one).values(), vars(other).values(), strict=True))
    once = list(make_batches(rows, tokenizer, seed=None, **layout))
    assert texts(once) == texts(list(eval_batches(stage(folder)[0], *stage(folder)[0].datasets, *stage(folder)[1:])))
    resumed, endless = (make_batches(rows, tokenizer, seed=3, **layout) for _ in range(2))
    assert isinstance(resumed, SFTBatches) and isinstance(endless, SFTBatches)
    next(endless)
    resumed.restore(endless.state())
    assert texts([next(resumed)]) == texts([next(endless)])


def test_what_is_odd_in_rows_of_ones_own_is_a_warning() -> None:
    row = {"prompt": "1", "completion": "2", "images": ["plate.png"]}
    layout: Any = {"seed": 0, "batch_rows": 1, "row_tokens": 24, "chat": False}
    with pytest.warns(UserWarning, match="^row 0: the column images is not read: the model takes no images$"):
        next(make_batches([row], load_tokenizer("bytes"), **layout))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows: there is none"),
        ([{"promt": "1", "completion": "2"}], "did you mean|SFT needs messages, or prompt and completion"),
        ([{"prompt": "1" * 90, "completion": "2"}], "more than row_tokens=24"),
    ],
)
def test_rows_of_ones_own_are_checked(rows: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(make_batches(rows, load_tokenizer("bytes"), seed=0, batch_rows=2, row_tokens=24, chat=False))
