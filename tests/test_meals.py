"""The food assistant that sees: its tools say what the table says, pictures show what their labels say, words are
lossless, demonstrations are as careless as they shall be, and rewards are not had by guessing."""

from __future__ import annotations

import asyncio
import csv
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from envs import food101, meals
from posttrain.config import RLSection
from posttrain.config.yaml_file import load_config
from posttrain.data.tokenizer import load_tokenizer
from posttrain.environments.conversation import Environments
from posttrain.runs.finished import load_generator
from posttrain.tools.formats import make_format
from posttrain.tools.function import FunctionTool, function_schema
from rewards import food101 as photographs
from rewards import meals as rewards
from tests.stages.runs import ROOT, lines, posttrain

FOLDER = ROOT / "configs/rl/food/meals"


def call(tool: FunctionTool, **arguments: Any) -> str:
    return asyncio.run(tool(arguments))


def test_the_tool_says_what_the_table_says(shared: Path) -> None:
    table = shared / "data/food/usda_sr28_abbrev.csv"
    limits: dict[str, Any] = {"timeout_s": 20.0, "max_chars": 200}
    tools = [FunctionTool(meals.lookup_nutrition, **limits, args={"csv": csv}) for csv in (None, table)]
    for name in meals.FOODS:
        assert call(tools[0], food=name, count=2) == call(tools[1], food=name, count=2)
    assert call(tools[0], food="egg", count=2) == "kcal 155 protein 13"
    assert call(tools[0], food="pizza", count=1) == "Error: LookupError: no food 'pizza'"
    assert "count must be" in call(tools[0], food="egg", count="two")
    assert call(FunctionTool(meals.add, **limits), numbers=[155, 107]) == "262"


def test_pictures_show_their_meals() -> None:
    """Another seed draws another picture of the same meal, and each food and piece changes the plate."""
    plates = {}
    for name in meals.FOODS:
        for pieces in (1, 3):
            one, other = (meals.picture_of([(name, pieces)], random.Random(seed)) for seed in (0, 1))
            assert one != other and one == meals.picture_of([(name, pieces)], random.Random(0))
            plates[name, pieces] = np.asarray(Image.open(io.BytesIO(one)), np.int32)
    covered = {key: int((np.abs(plate - 238).sum(-1) > 30)[4:44, 4:44].sum()) for key, plate in plates.items()}
    assert len({plate.tobytes() for plate in plates.values()}) == 2 * len(meals.FOODS) and all(covered.values())
    draw = random.Random(3)
    drawn = [meals.meal_of(draw) for _ in range(200)]
    assert {len(meal) for meal in drawn} == {1, 2, 3} and {n for meal in drawn for _, n in meal} == {1, 2, 3}
    assert all(len(dict(meal)) == len(meal) for meal in drawn)


def test_words_are_lossless_and_calls_are_read() -> None:
    tokenizer = load_tokenizer(FOLDER)
    schemas = [function_schema(meals.lookup_nutrition, ["csv"]), function_schema(meals.add, [])]
    written = '[lookup_nutrition(food="egg", count=2), lookup_nutrition(food="rice", count=1)]'
    for text in (written, "[add(numbers=[155, 107]), add(numbers=[13, 1])]", "Error: no 'pi~zza'\n{}", meals.QUESTION):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(written)) == 9
    parsed = make_format("pythonic", tokenizer, schemas).parse(written)
    assert [one.arguments for one in parsed.calls] == [{"food": "egg", "count": 2}, {"food": "rice", "count": 1}]


def test_the_words_are_those_of_the_example(tmp_path: Path) -> None:
    meals.write_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


def conversation(foods: list[tuple[str, int]], *, adds: bool = True, answer: str | None = None) -> list[dict[str, Any]]:
    results = [meals.result_of(*one) for one in foods]
    made = meals._calls("lookup_nutrition", [{"food": f, "count": n} for f, n in foods], results) if foods else []
    kcal, protein = meals.totals(results) if foods else (0, 0)
    if adds and len(foods) > 1:
        columns = [[int(text.split()[at]) for text in results] for at in (1, 3)]
        made += meals._calls("add", [{"numbers": column} for column in columns], [str(kcal), str(protein)])
    return [*made, {"role": "assistant", "content": answer or f"kcal {kcal} protein {protein}"}]


def scores(one: list[dict[str, Any]], foods: list[tuple[str, int]]) -> tuple[float, ...]:
    kcal, protein = meals.totals([meals.result_of(*food) for food in foods])
    columns: dict[str, Any] = {"foods": [foods], "kcal": [kcal], "protein": [protein]}
    functions = (rewards.formed, rewards.looked_up, rewards.sums, rewards.right_totals)
    return tuple(function([one], **columns)[0] for function in functions)


MEAL = [("egg", 2), ("rice", 1)]


def test_rewards_are_not_had_by_guessing() -> None:
    assert scores(conversation(MEAL), MEAL) == (1, 1, 1, 1)
    assert scores(conversation(MEAL[:1]), MEAL[:1]) == (1, 1, 1, 1)
    mean = conversation([], answer="kcal 350 protein 17")
    assert scores(mean, MEAL) == (1, 0, 0, 0), "the right numbers without looking are none"
    again = conversation([*MEAL, MEAL[0]])
    assert scores(again, MEAL)[1] == pytest.approx(0.8) and scores(again, MEAL)[3] == 0
    assert scores(conversation([*MEAL, ("apple", 1), *MEAL, *MEAL]), MEAL)[0] == 0, "at most six calls"
    forgets = scores(conversation(MEAL[:1]), MEAL)
    assert forgets[0] == 1 and forgets[1] == pytest.approx(2 / 3) and forgets[2] == 0
    said = " ".join(("kcal", *meals.result_of(*MEAL[1]).split()[1:]))
    assert scores(conversation(MEAL, adds=False, answer=said), MEAL)[2] == 0
    wrong = conversation([("egg", 1), ("rice", 1)])
    assert scores(wrong, MEAL)[1] == 0.5
    assert scores([*conversation(MEAL)[:-1], {"role": "assistant", "content": "about 350"}], MEAL)[0] == 0
    malformed = [{"role": "assistant", "content": "[lookup(", "malformed_calls": 1}, *conversation(MEAL)]
    assert scores(malformed, MEAL)[0] == 0


def test_demonstrations_are_as_careless_as_they_shall_be() -> None:
    rows = meals.dialogues(count=400, seed=0, careless=0.5)
    careful = meals.dialogues(count=60, seed=0, careless=0.0)
    meals_of = [meal for meal, _ in meals._meals(60, 0)]
    for row, meal in zip(careful, meals_of, strict=True):
        assert scores(row["messages"][1:], list(meal)) == (1, 1, 1, 1)
    several = [(row, list(meal)) for row, (meal, _) in zip(rows, meals._meals(400, 0), strict=True) if len(meal) > 1]
    sloppy = [min(scores(row["messages"][1:], meal)) < 1 for row, meal in several]
    assert abs(sum(sloppy) / len(sloppy) - 0.5) < 0.08


def test_dishes_of_food101_have_the_values_of_the_table(shared: Path) -> None:
    with (shared / "data/food/usda_sr28_abbrev.csv").open(encoding="utf-8") as file:
        rows = {int(row["NDB_No"]): row for row in csv.DictReader(file)}
    for dish, (number, kcal, protein) in food101.KNOWN.items():
        row = rows[number]
        assert (float(row["Energ_Kcal"]), float(row["Protein_(g)"])) == (kcal, protein), (dish, row["Shrt_Desc"])


def test_rewards_of_food101_are_not_had_without_the_right_lookup() -> None:
    assert len(set(food101.DISHES)) == 101 and set(food101.KNOWN) < set(food101.DISHES)
    pizza, baklava = (food101.DISHES.index(name) for name in ("pizza", "baklava"))

    def conversation(*dishes: str, answer: str) -> list[dict[str, Any]]:
        calls = [{"function": {"name": "lookup_dish", "arguments": {"dish": dish}}} for dish in dishes]
        made = [{"role": "assistant", "content": "", "tool_calls": calls}] if calls else []
        return [*made, {"role": "assistant", "content": answer}]

    def scores(one: list[dict[str, Any]], label: int) -> list[float]:
        functions = (photographs.formed, photographs.looked_up, photographs.answered)
        return [fn([one], label=[label])[0] for fn in functions]

    right = "Let me see.\npizza: kcal 266 protein 11"
    assert food101.lookup_dish("Pizza") == "kcal 266 protein 11" and food101.lookup_dish("baklava") == "unknown"
    assert scores(conversation("pizza", answer=right), pizza) == [1, 1, 1]
    assert scores(conversation("baklava", answer="baklava: unknown"), baklava) == [1, 1, 1]
    assert scores(conversation(answer=right), pizza) == [1, 0, 0], "a guess"
    assert scores(conversation("pizza", answer="pizza: kcal 300 protein 11"), pizza) == [1, 1, 0.5]
    assert scores(conversation("pizza", answer=right), baklava) == [1, 0, 0], "another dish"
    assert scores(conversation(*food101.DISHES, answer=right), pizza)[:2] == [0, pytest.approx(1 / 101)]
    assert scores(conversation("pizza", answer="kcal 266"), pizza) == [0, 1, 0]
    with pytest.raises(LookupError):
        food101.lookup_dish("gravel")


@pytest.mark.thorough
def test_a_run_sees_calls_and_is_scored(tmp_path: Path) -> None:
    """A step of each stage of the example, with few rows."""
    example = yaml.safe_load((ROOT / "configs/rl/food_vision.yaml").read_text())
    for stage in example["stages"]:
        stage |= {"num_steps": 1, "optimizer": {"learning_rate": 1e-3}}
        for dataset in (stage["dataset"], stage.get("eval_dataset")):
            if dataset is not None:
                dataset["args"]["count"] = 32
        if stage["kind"] == "sft":
            stage |= {"batch_rows": 4}
            stage.pop("eval_dataset", None)
    example["stages"][2] |= {"prompts_per_step": 2, "group_size": 2}
    example["stages"][2].pop("eval_dataset")
    (file := tmp_path / "run.yaml").write_text(yaml.safe_dump(example | {"output": str(tmp_path / "out")}))
    outcome = posttrain("run", file)
    assert outcome.code == 0, outcome.err
    last = lines(tmp_path / "out")[-1]
    assert {"reward", "rewards/looked_up/mean", "rewards/right_totals/mean", "env/malformed_calls"} <= last.keys()
    assert last["env/errors"] == 0
    found = load_generator(str(tmp_path / "out"))
    assert [dict(tool.args) for tool in found.tools] == [{"csv": None}, {}] and found.tool_format == "pythonic"


@pytest.mark.parametrize("name", ["food_vision", "food_vision_qwen3_vl_4b"])
def test_configurations_are_valid(name: str) -> None:
    config = load_config(ROOT / f"configs/rl/{name}.yaml", [])
    section = config.stages[-1]
    assert config.model.vision != "none" and isinstance(section, RLSection) and len(section.tools) == 2
    names = [str(reward.fn).rpartition(":")[2] for reward in section.rewards]
    assert names == ["formed", "looked_up", "sums", "right_totals"]
    environments = Environments.of(section, load_tokenizer(FOLDER), [])
    assert environments.unfinished is None, "tools give no reward `env`"
