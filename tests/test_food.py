"""The food assistant: its tool says what the table says, its questions have the answers that they claim, and a run
talks to the tool."""

from __future__ import annotations

import asyncio
import csv
import json
import os
from pathlib import Path

import pytest
import yaml

from envs import food
from posttrain.config import RLSection
from posttrain.config.yaml_file import load_config
from posttrain.tools.function import FunctionTool
from rewards import tool_use
from tests.stages.runs import INIT, ROOT, posttrain, rl_stage, write_run


@pytest.fixture(scope="module")
def table(shared: Path) -> Path:
    return shared / "data/food/usda_sr28_abbrev.csv"


def test_the_project_has_thirty_foods_of_the_table(table: Path) -> None:
    """With the values that the table says, and a note of where they come from."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = {row["Shrt_Desc"]: row for row in csv.DictReader(file)}
    text = food.TABLE.read_text(encoding="utf-8")
    assert "USDA" in text.partition("\n")[0] and "public domain" in text.partition("\n")[0]
    few = list(csv.DictReader(text.splitlines()[1:]))
    assert len(few) == 30
    assert [{name: rows[row["Shrt_Desc"]][name] for name in row} for row in few] == few


@pytest.mark.parametrize("short", [True, False])
def test_questions_about_the_thirty_foods(short: bool) -> None:
    """Nothing but the repository is needed: each call of a question has an answer."""
    rows = {held: food.questions(count=200, seed=0, held_out=held, short=short) for held in (False, True)}
    names = {held: {one["arguments"]["food"] for row in of for one in row["calls"]} for held, of in rows.items()}
    assert not names[False] & names[True] and len(names[False]) == 22 and len(names[True]) == 8
    tool = FunctionTool(food.lookup_nutrition, timeout_s=20.0, max_chars=200, args={"csv": None})
    for row in rows[True][:20]:
        for one in row["calls"]:
            assert answer_of(tool, **given(one)).endswith(f"in 100 g of {one['arguments']['food']}")
    assert len(food.lessons(count=10, seed=0)) == 10


@pytest.fixture(scope="module")
def tool(table: Path) -> FunctionTool:
    return FunctionTool(food.lookup_nutrition, timeout_s=20.0, max_chars=200, args={"csv": table})


def answer_of(tool: FunctionTool, name: str, nutrient: str) -> str:
    return asyncio.run(tool({"food": name, "nutrient": nutrient}))


def test_the_tool_says_what_the_table_says(table: Path, tool: FunctionTool) -> None:
    with table.open(encoding="utf-8", newline="") as file:
        rows = {row["Shrt_Desc"]: row for row in csv.DictReader(file)}
    for name in ("KALE,RAW", "BUTTER,WITH SALT", "CHEESE,FETA"):
        for nutrient, (column, unit) in food.COLUMNS.items():
            amount = float(rows[name][column])
            assert answer_of(tool, name, nutrient) == f"{amount:g} {unit} in 100 g of {name}"
    assert answer_of(tool, "butter, with salt", "fat") == "81.11 g in 100 g of BUTTER,WITH SALT"
    assert answer_of(tool, "feta", "fat") == "21.28 g in 100 g of CHEESE,FETA"
    assert answer_of(tool, "cheese", "fat").startswith("100 foods match 'cheese', look up one of them: CHEESE,BLUE; ")
    assert answer_of(tool, "unobtainium", "fat") == "Error: LookupError: no food 'unobtainium' with a value of fat"
    assert 'nutrient must be one of ["energy"' in answer_of(tool, "kale", "salt")


def test_another_table_of_the_same_size_and_time_is_another(table: Path, tmp_path: Path) -> None:
    """Red without: the database of the old table, which outlives its process, answers for the new one."""
    copy = tmp_path / "foods.csv"
    text = table.read_text(encoding="utf-8")
    copy.write_text(text, encoding="utf-8")
    before, first = copy.stat(), food.database(copy)
    tool = FunctionTool(food.lookup_nutrition, timeout_s=20.0, max_chars=200, args={"csv": copy})
    assert answer_of(tool, "butter, with salt", "fat") == "81.11 g in 100 g of BUTTER,WITH SALT"
    copy.write_text(text.replace("81.11", "18.88"), encoding="utf-8")
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert copy.stat().st_size == before.st_size and copy.stat().st_mtime_ns == before.st_mtime_ns
    assert food.database(copy) != first
    assert answer_of(tool, "butter, with salt", "fat") == "18.88 g in 100 g of BUTTER,WITH SALT"


@pytest.mark.parametrize("short", [True, False])
def test_questions_have_their_answers(table: Path, tool: FunctionTool, short: bool) -> None:
    """A conversation that makes the calls and calculates from them has every reward."""
    rows = food.questions(csv=table, count=60, seed=0, held_out=True, short=short)
    other = food.questions(csv=table, count=200, seed=0, held_out=False, short=short)
    names = [{one["arguments"]["food"] for row in some for one in row["calls"]} for some in (rows, other)]
    assert not names[0] & names[1], "held-out foods are never trained on"
    for row in rows:
        amounts = [float(answer_of(tool, **given(one)).split()[0]) for one in row["calls"]]
        question = row["prompt"][-1]["content"]
        calls = [{"type": "function", "id": "a", "function": one} for one in row["calls"]]
        asked = {"role": "assistant", "content": "", "tool_calls": calls}
        if "weighs" in question:
            portion, number = question.split("weighs ")[1].split(" g.")[0], question.split("is in ")[1].split(" of")[0]
            amounts = [amounts[0] * float(portion) * float(number) / 100]
        elif "together" in question:
            grams = [int(part.split()[-1]) for part in question.split(" g of ")[:-1]]
            amounts = [sum(amount * gram / 100 for amount, gram in zip(amounts, grams, strict=True))]
        answer = {"role": "assistant", "content": f"Answer: {amounts[0]}"}
        assert tool_use.right_calls([[asked, answer]], [row["calls"]]) == [1.0]
        assert tool_use.right_number([[asked, answer]], [row["answer"]]) == [1.0], question


def given(one: dict[str, dict[str, str]]) -> dict[str, str]:
    return {"name": one["arguments"]["food"], "nutrient": one["arguments"]["nutrient"]}


def test_demonstrations_are_right_as_often_as_they_shall(table: Path) -> None:
    rows = food.lessons(csv=table, count=600, seed=0, right=0.25)
    asked = [row["messages"][0]["content"].partition(" in ")[0] for row in rows]
    called = [list(tool_use.calls_of(row["messages"])) for row in rows]
    right = [
        bool(calls) and calls[0]["arguments"]["nutrient"] == wanted for calls, wanted in zip(called, asked, strict=True)
    ]
    assert abs(sum(right) / len(rows) - 0.25) < 0.06
    assert abs(sum(map(bool, called)) / len(rows) - 0.625) < 0.06


@pytest.mark.thorough
def test_a_run_talks_to_the_tool(tmp_path: Path) -> None:
    """A step of a policy that knows nothing: its turns are made, sent to the tool and scored."""
    example = yaml.safe_load((ROOT / "configs/rl/food_assistant.yaml").read_text())
    shown = example["stages"][1]
    same = {name: shown[name] for name in ("tools", "rewards", "env")}
    dataset = {"path": "envs/food.py:questions", "args": {**shown["dataset"]["args"], "count": 4}}
    stage = rl_stage(**same, dataset=dataset, num_steps=1, row_tokens=128, sampling={"max_tokens": 16})
    model = {"init": INIT | {"max_position_embeddings": 128}, "tokenizer": "bytes"}
    model["chat_template"] = example["model"]["chat_template"]
    outcome = posttrain("run", write_run(tmp_path, stage, model=model))
    assert outcome.code == 0, outcome.err
    (line,) = [
        line for line in map(json.loads, (tmp_path / "out/metrics.jsonl").read_text().splitlines()) if line["step"]
    ]
    assert {"reward", "rewards/right_calls/mean", "env/malformed_calls", "env/tool_failures"} <= line.keys()
    assert line["env/errors"] == 0


@pytest.mark.parametrize("name", ["food_assistant", "food_qwen3_4b", "food_gemma3_4b"])
def test_configurations_are_valid(name: str) -> None:
    config = load_config(ROOT / f"configs/rl/{name}.yaml", [])
    section = config.stages[-1]
    assert isinstance(section, RLSection) and section.tools and section.env is not None and section.env.fn is None
