import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from posttrain.config import DatasetSection
from posttrain.data import sources
from posttrain.data.files import files_note, listed
from posttrain.data.pipeline import fingerprint
from posttrain.data.sources import load_rows
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


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize(("path", "image"), [("photos", "train/a b.PNG"), ("photos/train/metadata", "a b.PNG")])
def test_pictures_of_a_folder_with_metadata(tmp_path: Path, path: str, image: str, suffix: str) -> None:
    """Hugging Face's ImageFolder: `file_name` is relative to its own file, wherever the dataset's folder is."""
    file = tmp_path / f"photos/train/metadata{suffix}"
    file.parent.mkdir(parents=True)
    table = pyarrow.table({"file_name": ["a b.PNG"], "text": ["A disc."]})
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, file)
    elif suffix == ".csv":
        pyarrow.csv.write_csv(table, file)
    else:
        file.write_text(json.dumps(table.to_pylist()[0]) + "\n")
    place = tmp_path / (path if path == "photos" else path + suffix)
    assert [*load_rows(DatasetSection(path=place))] == [{"text": "A disc.", "image": image}]


def test_splits_and_args(folder: Path) -> None:
    assert load("hub", folder, split="test") == load("dict", folder, split="test") == ROWS[:2]
    assert load("make.py:rows", folder, args={"count": 3}) == ROWS[:3]


def test_paths_of_a_function_are_found_like_others(folder: Path) -> None:
    assert load("make.py:finds", folder, args={"path": "rows.json"}) == ROWS


def test_csv_gives_strings(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(f"question\tanswer\na, b\t{'long ' * 40_000}\n")
    assert load("a.tsv", tmp_path) == [{"question": "a, b", "answer": "long " * 40_000}]
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
        ("rows.txt", {}, r"unknown kind of file '\.txt'; use one of \.jsonl, .*, of text also with \.gz"),
        ("broken.jsonl", {}, r"broken\.jsonl:2 is not JSON: Expecting value at column 7"),
        ("list.jsonl", {}, r"list\.jsonl:1 holds a list; each line must be an object"),
        ("broken.json", {}, r"broken\.json:2 is not JSON: Expecting value"),
        ("number.json", {}, r'must hold a list of objects, or \{"data": \[...\]\}; it holds a int'),
        ("broken.parquet", {}, r"broken\.parquet cannot be read as parquet"),
        ("latin.jsonl", {}, r"latin\.jsonl is not UTF-8 text"),
        ("latin.csv", {}, r"latin\.csv is not UTF-8 text \(byte 6\); save it as UTF-8"),
        ("a folder.jsonl/x.jsonl", {}, r"dataset.path: no file"),
        ("damaged", {}, r"dataset.path=damaged: the saved dataset is damaged or incomplete \(.*\); save it anew"),
        ("make.py:leaves", {}, r"make\.py:leaves raised SystemExit: sys.exit\('no'\) is called \(.*make\.py:12\)"),
        ("make.py:opens", {"args": {"path": "rows.json"}}, r"FileNotFoundError: .* \(.*make\.py:16\)"),
        ("make.py:finds", {"args": {"path": "rose.json"}}, r"rose\.json: no such file or folder; did you mean"),
        ("space.csv", {}, r"space\.csv:1: the column ' b' begins or ends with a space; remove it from the header"),
        (
            "semicolons.csv",
            {},
            r"semicolons\.csv:1: the header 'a;b' is one column; its fields .* separated by ';'",
        ),
        ("twice.csv", {}, r"twice\.csv:1: the header names the column 'a' twice"),
        ("broken.jsonl.gz", {}, r"broken\.jsonl\.gz cannot be read: "),
        ("rows.parquet.gz", {}, r"unknown kind of file '\.gz'"),
        ("empty.jsonl", {}, r"dataset.path=empty\.jsonl: the dataset is empty"),
        ("nothing", {}, r"no \.jsonl, .*, \.arrow in the folder; it holds readme\.md"),
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
    (folder / "broken.json").write_text('{"a": 1}\n{"a": }\n')
    (folder / "number.json").write_text("3")
    (folder / "broken.parquet").write_text("nonsense")
    (folder / "latin.jsonl").write_bytes(b'{"a": "\xe9"}\n')
    (folder / "space.csv").write_text("a, b\n1,2\n")
    (folder / "semicolons.csv").write_text("\ufeffa;b\n1;2\n")
    (folder / "twice.csv").write_text("a,a\n1,2\n")
    (folder / "broken.jsonl.gz").write_text("nonsense")
    (folder / "rows.parquet.gz").write_text("nonsense")
    (folder / "latin.csv").write_bytes(b"a,b\n1,\xe9\n")
    shutil.copytree(folder / "saved", folder / "damaged")
    (folder / "damaged" / "state.json").write_text("{")
    (folder / "empty.jsonl").write_text("\n")
    (folder / "nothing").mkdir()
    (folder / "nothing" / "readme.md").write_text("")
    with pytest.raises(ConfigError, match=message) as caught:
        load(path, folder, **fields)
    assert "\n" not in str(caught.value)


CONFIGS = """---
configs:
- config_name: main
  data_files: main/*
- config_name: deep
  data_files: [{split: train, path: deep/a*}, {split: test, path: deep/b*}]
---
"""
SHARDS = ["data/train_sft-00000-of-00001", "data/train_prefs-00000-of-00001"]


def lay_out(folder: Path, names: list[str], **fields: Any) -> DatasetSection:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    if names[0] == "main/0":
        (folder / "README.md").write_text(CONFIGS)
    return DatasetSection.model_validate({"path": str(folder), **fields})


@pytest.mark.parametrize(
    ("names", "fields", "expected"),
    [
        (["train/0", "test/0"], {}, "train/0"),
        (["train/0", "test/0"], {"split": "test"}, "test/0"),
        (["gsm_train", "gsm_test", "more"], {}, "gsm_train"),
        (["data/train", "data/dev"], {"split": "validation"}, "data/dev"),
        (SHARDS, {"split": "train_sft"}, SHARDS[0]),
        (["train", ".old/train", "__old__/train", ".train"], {}, "train"),
        (["main/0", "deep/a", "deep/b"], {"args": {"name": "deep"}}, "deep/a"),
        (["main/0", "deep/a", "deep/b"], {"args": {"name": "deep"}, "split": "test"}, "deep/b"),
    ],
)
def test_splits_of_a_folder_are_those_of_datasets(
    tmp_path: Path, names: list[str], fields: dict[str, Any], expected: str
) -> None:
    section = lay_out(tmp_path, names, **fields)
    rows = load_rows(section)
    assert [rows[i] for i in range(len(rows))] == [{"text": expected}]
    note = files_note(section)
    assert note is not None and f"split {section.split} of {expected}.jsonl" in note
    others = [name for name in names if name != expected and not name.startswith((".", "_"))]
    assert all(f"{name}.jsonl" in note.partition("not read:")[2] for name in others)


@pytest.mark.parametrize(
    ("names", "fields", "message"),
    [
        (["train/0", "test/0"], {"split": "validation"}, "has the splits test, train"),
        (SHARDS, {}, "has the splits train_prefs, train_sft"),
        (["eval/0", "more"], {}, "dataset.split='train': .* has the splits test"),
        (["TRAIN", "Test"], {}, r"(TRAIN|Test)\.jsonl names a split with capital letters, which is not seen as one"),
        (["Train/0", "dev/0"], {}, r"Train/0\.jsonl names a split with capital letters"),
        (["train_test"], {}, r"train_test\.jsonl belongs to the splits train and test by its name"),
        (["main/0", "deep/a", "deep/b"], {}, r"README\.md has the configurations main, deep; give one as"),
        (["main/0", "deep/a"], {"args": {"name": "maim"}}, "there is no 'maim' .* did you mean 'main'"),
        (["main/0", "deep/a"], {"args": {"data_dir": "main"}}, "a folder takes only name"),
    ],
)
def test_a_folder_without_one_split_is_refused(
    tmp_path: Path, names: list[str], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rows(lay_out(tmp_path, names, **fields))


def test_a_default_configuration_and_files_that_hold_no_rows(tmp_path: Path) -> None:
    for name in ("main/0", "deep/a"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.json").write_text(json.dumps([{"text": name}]))
    (tmp_path / "main" / "stats.json").write_text('{"rows": 1}')
    (tmp_path / "README.md").write_text(CONFIGS.replace("main/*", "main/*\n  default: true"))
    assert load(str(tmp_path), tmp_path) == [{"text": "main/0"}]
    assert str(files_note(DatasetSection(path=str(tmp_path)))).endswith("not read: deep/a.json, main/stats.json")
    (tmp_path / "main" / "more.csv").write_text("text\nmore\n")
    with pytest.raises(ConfigError, match=r"files of several formats: main/0\.json, main/more\.csv"):
        load(str(tmp_path), tmp_path)
    (tmp_path / "README.md").write_text(CONFIGS.replace("main/*", 'main/*\n  sep: ";"'))
    with pytest.raises(ConfigError, match=r"README\.md: sep of the configuration main is not supported"):
        load(str(tmp_path), tmp_path, args={"name": "main"})


def test_tables_of_several_types_are_one(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = [
        pa.table({"text": ["a"], "note": pa.nulls(1), "id": pa.array([1], pa.int32())}),
        pa.table({"id": [2**60], "note": ["n"], "text": pa.array(["b"], pa.large_string())}),
        pa.table({"text": pa.array(["c"]).dictionary_encode(), "id": [3]}),
    ]
    for number, table in enumerate(tables):
        pq.write_table(table, tmp_path / f"train-{number}.parquet")
    expected = [("a", None, 1), ("b", "n", 2**60), ("c", None, 3)]
    assert [(row["text"], row["note"], row["id"]) for row in load(str(tmp_path), tmp_path)] == expected
    pq.write_table(pa.table({"text": [1]}), tmp_path / "train-3.parquet")
    with pytest.raises(ConfigError, match=r"train-3\.parquet: column 'text' holds int64, and .* in .*train-0\.parquet"):
        load(str(tmp_path), tmp_path)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst", "rows.json.bz2", "rows.csv.gz", "lines.json"])
def test_compressed_files_and_lines_named_json(tmp_path: Path, name: str) -> None:
    import pyarrow as pa

    lines = '{"a": "1"}\n{"a": "2"}\n'
    text = "a\n1\n2\n" if ".csv" in name else '[{"a": "1"}, {"a": "2"}]' if name == "rows.json.bz2" else lines
    with pa.output_stream(str(tmp_path / name), compression="detect") as file:
        file.write(text.encode())
    assert load(name, tmp_path) == [{"a": "1"}, {"a": "2"}]


def test_unreachable_hub_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(sources, "hub_is_reachable", lambda: False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match="no such file or folder here; the hub cannot be reached") as caught:
        load("owner/no-such-dataset-here", tmp_path)
    assert "\n" not in str(caught.value)


def test_streams_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset.args.streaming=True: rows are read by their numbers"):
        load("owner/name", tmp_path, args={"streaming": True})


def test_a_dataset_of_the_hub_is_known_by_its_rows_and_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library keeps the rows of each commit in a folder of that name."""
    import datasets

    commits = {revision: f"{number}" * 40 for number, revision in enumerate(("main", "earlier"), 1)}
    for revision, commit in commits.items():
        made = datasets.Dataset.from_dict({"a": [revision, "x"]})
        made.save_to_disk(str(tmp_path / "owner___name" / "default" / "0.0.0" / commit))

    def load_dataset(path: str, *, split: str, revision: str = "main") -> Any:
        assert (path, split) == ("owner/name", "train")
        folder = tmp_path / "owner___name" / "default" / "0.0.0" / commits[revision]
        return datasets.load_from_disk(str(folder))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "hub_is_reachable", lambda: True)
    texts = []
    for args in {}, {"revision": "earlier"}, {}:
        section = DatasetSection(path="owner/name", args=args)
        rows = load_rows(section)
        texts.append(fingerprint(section, rows))
        assert rows.revision == commits[args.get("revision", "main")]
    assert texts[0] == texts[2] != texts[1]
    assert texts[1].startswith("name, 2 rows, ") and texts[1].endswith(f", revision {'2' * 40}")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_maps_and_encoded_values_at_any_depth(suffix: str, tmp_path: Path) -> None:
    """A map is an object; dictionaries, run ends and views are their values, also in slices and beside nulls."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    talk: list[Any] = [
        [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}],
        None,
        [{"role": "x"}],
    ]
    pairs = [None if row is None else [list(message.items()) for message in row] for row in talk]
    roles = pa.DictionaryArray.from_arrays([0, 1, None, 0], ["u", "v"])
    mask = pa.array([False, True, False, False])
    struct = pa.StructArray.from_arrays([roles, pa.array([1, 2, 3, 4])], names=["r", "n"], mask=mask)
    columns = {
        "messages": pa.array(pairs, pa.list_(pa.map_(pa.string(), pa.string()))),
        "numbers": pa.array([[("a", 1)], None, [("b", None)]], pa.map_(pa.string(), pa.int64())),
        "structs": pa.ListArray.from_arrays([0, 2, 2, 4], struct),
        "views": pa.array(["a", None, "c"], pa.string_view()),
    }
    expected = {
        "messages": talk,
        "numbers": [{"a": 1}, None, {"b": None}],
        "structs": [[{"r": "u", "n": 1}, None], [], [{"n": 3}, {"r": "u", "n": 4}]],
        "views": ["a", None, "c"],
    }
    if suffix == ".arrow":
        columns["ends"] = pa.compute.run_end_encode(pa.array(["q", "q", "z"]))
        expected["ends"] = ["q", "q", "z"]
    table = pa.table(columns)
    for start in (0, 1):
        part = table.slice(start)
        if suffix == ".parquet":
            pq.write_table(part, tmp_path / "rows.parquet", row_group_size=2)
        else:
            with pa.ipc.new_file(str(tmp_path / "rows.arrow"), part.schema) as file:
                file.write_table(part)
        rows = load(f"rows{suffix}", tmp_path)
        assert [rows[i] for i in range(len(rows))] == [
            {name: values[i] for name, values in expected.items()} for i in range(start, 3)
        ]


def test_shards_with_encoded_and_plain_roles(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    talk = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    roles = pa.array(["user", "assistant"]).dictionary_encode()
    struct = pa.StructArray.from_arrays([roles, pa.array(["2+2", "4"])], names=["role", "content"])
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, 2], struct)}), tmp_path / "train-0.parquet")
    pq.write_table(pa.table({"messages": pa.array([talk])}), tmp_path / "train-1.parquet")
    assert [row["messages"] for row in load(str(tmp_path), tmp_path)] == [talk, talk]
