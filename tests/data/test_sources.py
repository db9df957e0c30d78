import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import DatasetSection
from posttrain.data import sources
from posttrain.data.sources import listed, load_rows
from posttrain.errors import ConfigError

pytestmark = pytest.mark.fast

ROWS = [{"question": f"q{i}", "answer": i, "note": None if i % 2 else "x"} for i in range(7)]


def load(path: str, base_dir: Path, **fields: Any) -> list[dict[str, Any]]:
    rows = load_rows(DatasetSection.model_validate({"path": path, **fields}, context=base_dir))
    return [rows[i] for i in range(len(rows))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    import datasets

    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "rows.jsonl").write_text(lines + "\n")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "data.json").write_text(json.dumps({"data": ROWS}))
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "test": table.select(range(2))}).save_to_disk(str(tmp_path / "dict"))
    (tmp_path / "hub").mkdir()
    table.select(range(4)).to_parquet(str(tmp_path / "hub" / "train-00000-of-00002.parquet"))
    table.select(range(4, 7)).to_parquet(str(tmp_path / "hub" / "train-00001-of-00002.parquet"))
    table.select(range(2)).to_parquet(str(tmp_path / "hub" / "test-00000-of-00001.parquet"))
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    (tmp_path / "parts" / "b.json").write_text(json.dumps(ROWS[3:]))
    (tmp_path / "make.py").write_text(
        f"ROWS = {ROWS!r}\ndef rows(count=7):\n    return (row for row in ROWS[:count])\n"
        "def fails():\n    return [1 / 0]\ndef text():\n    return 'abc'\ndef numbers():\n    return [1]\nTABLE = []\n"
        "def leaves():\n    raise SystemExit('no')\n"
        "import json, pathlib\nfrom pathlib import Path\n"
        "def opens(path):\n    return json.loads(pathlib.Path('no' + path).read_text())\n"
        "def finds(path: Path):\n    return json.loads(path.read_text())\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    "path", ["rows.jsonl", "rows.json", "data.json", "rows.parquet", "saved", "dict", "hub", "parts", "make.py:rows"]
)
def test_every_source_gives_the_same_rows(folder: Path, path: str) -> None:
    assert load(path, folder) == ROWS
    assert load(path, folder, skip=2, limit=3) == ROWS[2:5]
    assert load(path, folder, skip=5, limit=9) == ROWS[5:]
    assert load(str(folder / path), folder / "elsewhere") == ROWS


def test_nulls_of_structs_are_left_out(tmp_path: Path) -> None:
    """Red without: a call gets the arguments of other rows' calls as null. JSON Lines keep what was written."""
    import datasets

    calls = [{"name": "f", "arguments": {"city": "Paris"}}, {"name": "g", "arguments": {"a": 1}}]
    table = [{"calls": [call], "list": [1, None], "plain": None} for call in calls]
    arrow = datasets.Dataset.from_list(table)
    assert arrow[0]["calls"][0]["arguments"] == {"city": "Paris", "a": None}
    arrow.to_parquet(str(tmp_path / "rows.parquet"))
    arrow.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "make.py").write_text(
        "import datasets\ndef rows():\n    return datasets.load_from_disk('SAVED')\n".replace(
            "SAVED", str(tmp_path / "saved")
        )
    )
    real = [{**row, "calls": [{**row["calls"][0], "none": None}]} for row in table]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in real))
    assert all(load(name, tmp_path) == table for name in ("rows.parquet", "saved", "make.py:rows"))
    assert listed(arrow) == listed(arrow.to_iterable_dataset()) == table
    assert load("rows.jsonl", tmp_path) == real


def test_splits_and_args(folder: Path) -> None:
    assert load("hub", folder, split="test") == load("dict", folder, split="test") == ROWS[:2]
    assert load("make.py:rows", folder, args={"count": 3}) == ROWS[:3]


def test_paths_of_a_function_are_found_like_others(folder: Path) -> None:
    assert load("make.py:finds", folder, args={"path": "rows.json"}) == ROWS


def test_csv_gives_strings(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('question,answer\n"a, ""b""",1\nc,2\n')
    assert load("a.csv", tmp_path) == [{"question": 'a, "b"', "answer": "1"}, {"question": "c", "answer": "2"}]
    (tmp_path / "a.csv").write_text("question,answer\nc,2\nd\n")
    with pytest.raises(ConfigError, match=r"a\.csv:3 has another number of fields than the header, which names 2"):
        load("a.csv", tmp_path)


def test_rows_know_their_place(folder: Path) -> None:
    rows = load_rows(DatasetSection(path=str(folder / "rows.jsonl"), skip=2))
    with rows.named(0) as row:
        assert row == rows[0]
    with pytest.raises(ConfigError, match="rows.jsonl row 2: broken"), rows.named(0):
        raise ConfigError("broken")
    assert rows.columns == ("question", "answer", "note")
    with pytest.raises(IndexError):
        rows[5]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("row.jsonl", {}, r"dataset.path: no file .*row\.jsonl; did you mean 'rows\.json.?'\?"),
        ("no/rows.jsonl", {}, r"no folder .*no \(the path exists up to"),
        ("rows.txt", {}, r"unknown kind of file '\.txt'; use one of \.jsonl, \.json, \.parquet, \.csv"),
        ("broken.jsonl", {}, r"broken\.jsonl:2 is not JSON: Expecting value at column 7"),
        ("list.jsonl", {}, r"list\.jsonl:1 holds a list; each line must be an object"),
        ("broken.json", {}, r"broken\.json:2 is not JSON: .*one object per line is named \.jsonl"),
        ("number.json", {}, r'must hold a list of objects, or \{"data": \[...\]\}; it holds a int'),
        ("broken.parquet", {}, r"broken\.parquet cannot be read as parquet"),
        ("latin.jsonl", {}, r"latin\.jsonl is not UTF-8 text"),
        ("latin.csv", {}, r"latin\.csv is not UTF-8 text \(byte 6\); save it as UTF-8"),
        ("a folder.jsonl/x.jsonl", {}, r"dataset.path: no file"),
        ("damaged", {}, r"dataset.path=damaged: the saved dataset is damaged or incomplete \(.*\); save it anew"),
        ("make.py:leaves", {}, r"make\.py:leaves raised SystemExit: sys.exit\('no'\) is called \(.*make\.py:12\)"),
        ("make.py:opens", {"args": {"path": "rows.json"}}, r"FileNotFoundError: .* \(.*make\.py:16\)"),
        ("make.py:finds", {"args": {"path": "rose.json"}}, r"rose\.json: no such file or folder; did you mean"),
        ("empty.jsonl", {}, r"dataset.path=empty\.jsonl: the dataset is empty"),
        ("nothing", {}, r"no \.jsonl, \.json, \.parquet, \.csv in the folder; it holds readme\.md"),
        ("rows.jsonl", {"skip": 7}, r"dataset.skip=7 leaves none of the 7 rows"),
        ("rows.jsonl", {"split": "test"}, r"dataset.split='test': rows\.jsonl is a single file and has no splits"),
        ("rows.jsonl", {"args": {"count": 1}}, r"dataset.args=.* cannot be used with rows\.jsonl"),
        ("hub", {"split": "tset"}, r"hub has the splits test, train; did you mean 'test'\?"),
        ("dict", {"split": "dev"}, r"dict has the splits test, train"),
        ("parts", {"split": "test"}, r"parts has no splits; remove split"),
        ("make.py:row", {}, r"make\.py has no 'row'; did you mean 'rows'\?"),
        ("make.py:rows", {"args": {"cuont": 1}}, r"dataset.args=\{'cuont': 1\} do not fit make\.py:rows: .*'cuont'"),
        ("make.py:fails", {}, r"make\.py:fails raised ZeroDivisionError: division by zero \(.*make\.py:5\)"),
        ("make.py:text", {}, r"make\.py:text returned a str; it must return a list of dicts"),
        ("make.py:numbers", {}, r"make\.py:numbers row 0 is a int; each row must be an object"),
        ("make.py:TABLE", {}, r"make\.py:TABLE is a list, not a function"),
    ],
)
def test_errors_are_one_line(folder: Path, path: str, fields: dict[str, Any], message: str) -> None:
    (folder / "rows.txt").write_text("a")
    (folder / "broken.jsonl").write_text('{"a": 1}\n{"a": }\n')
    (folder / "list.jsonl").write_text("[1]\n")
    (folder / "broken.json").write_text('{"a": 1}\n{"a": 2}\n')
    (folder / "number.json").write_text("3")
    (folder / "broken.parquet").write_text("nonsense")
    (folder / "latin.jsonl").write_bytes(b'{"a": "\xe9"}\n')
    (folder / "latin.csv").write_bytes(b"a,b\n1,\xe9\n")
    shutil.copytree(folder / "saved", folder / "damaged")
    (folder / "damaged" / "state.json").write_text("{")
    (folder / "empty.jsonl").write_text("\n")
    (folder / "nothing").mkdir()
    (folder / "nothing" / "readme.md").write_text("")
    with pytest.raises(ConfigError, match=message) as caught:
        load(path, folder, **fields)
    assert "\n" not in str(caught.value)


def test_unreachable_hub_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(sources, "hub_is_reachable", lambda: False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match="no such file or folder here; the hub cannot be reached") as caught:
        load("owner/no-such-dataset-here", tmp_path)
    assert "\n" not in str(caught.value)
