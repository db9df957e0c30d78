"""Food assistant: a tool that looks foods up in a SQLite database made of USDA's food composition table (SR 28,
abbreviated, as CSV), questions about them, and demonstrations for a model that begins from nothing.

`envs/foods.csv` has thirty foods of that table, which is in the public domain. The whole of it, 8,790 foods, is the
argument `csv` of each function.
"""

from __future__ import annotations

import csv as csv_files
import hashlib
import os
import random
import re
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

Nutrient = Literal[
    "energy", "protein", "fat", "carbohydrate", "fiber", "sugar", "calcium", "iron", "sodium", "potassium"
]

TABLE = Path(__file__).with_name("foods.csv")
"""Thirty foods with their values."""

COLUMNS: dict[str, tuple[str, str]] = {
    "energy": ("Energ_Kcal", "kcal"),
    "protein": ("Protein_(g)", "g"),
    "fat": ("Lipid_Tot_(g)", "g"),
    "carbohydrate": ("Carbohydrt_(g)", "g"),
    "fiber": ("Fiber_TD_(g)", "g"),
    "sugar": ("Sugar_Tot_(g)", "g"),
    "calcium": ("Calcium_(mg)", "mg"),
    "iron": ("Iron_(mg)", "mg"),
    "sodium": ("Sodium_(mg)", "mg"),
    "potassium": ("Potassium_(mg)", "mg"),
}
"""Column of the table and unit of each nutrient."""
SHORT: tuple[str, ...] = ("energy", "protein", "fat", "fiber")
"""Nutrients of short questions."""
SYSTEM = (
    "You answer questions about food. Look every amount up with lookup_nutrition, several at once if you need several, "
    "and calculate from what it says. End with a line `Answer: NUMBER`."
)
MAX_MATCHES = 5
"""Maximum number of foods that an answer lists."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_SHORT = 12
"""Maximum length of the names in short questions."""


def lookup_nutrition(food: str, nutrient: Nutrient, csv: Path | None = None) -> str:
    """Look up how much of a nutrient is in 100 g of a food.

    Args:
        food: Name of the food, such as "kale, raw".
        nutrient: Nutrient to look up.
    """
    words = _words(food)
    with closing(sqlite3.connect(f"file:{database(csv)}?mode=ro", uri=True)) as connection:
        query = "SELECT name, amount FROM amounts WHERE nutrient = ? AND key LIKE ? ORDER BY length(key)"
        found = connection.execute(query, (nutrient, f"{' '.join(words)}%")).fetchall()
        if not found:
            found = connection.execute(query, (nutrient, f"%{'%'.join(words)}%")).fetchall()
    exact = [row for row in found if _words(row[0]) == words]
    if not found:
        raise LookupError(f"no food {food!r} with a value of {nutrient}")
    if not exact and len(found) > 1:
        names = "; ".join(name for name, _ in found[:MAX_MATCHES])
        return f"{len(found)} foods match {food!r}, look up one of them: {names}"
    name, amount = (exact or found)[0]
    return f"{amount:g} {COLUMNS[nutrient][1]} in 100 g of {name}"


def database(csv: Path | None = None) -> Path:
    """Database of a table, made at the first call for each content of the file."""
    file = TABLE if csv is None else csv
    return _made(file, _state(file))


def questions(
    *, count: int, seed: int, held_out: bool, short: bool = False, csv: Path | None = None
) -> list[dict[str, Any]]:
    """Rows with a question as `prompt`, the `calls` that answer it, and the number `answer`.

    Every fifth food is held out. Questions are about 100 g, a household portion, or two foods; with `short` "fat in
    KALE,RAW?", about foods with short names.
    """
    draw = random.Random(seed)
    if short:
        named = _short_foods(csv, held_out=held_out)
        return [_short_question(draw, named) for _ in range(count)]
    foods = [food for food in _foods(csv) if _is_held_out(food["Shrt_Desc"]) == held_out]
    kinds: list[Callable[[random.Random, list[dict[str, str]]], dict[str, Any]]] = [_amount, _portion, _two_foods]
    return [draw.choice(kinds)(draw, foods) for _ in range(count)]


def lessons(*, count: int, seed: int, right: float = 0.25, csv: Path | None = None) -> list[dict[str, Any]]:
    """Conversations about short questions, with their tools, to learn the form from: a share `right` of them looks up
    what was asked, the others guess a number or look up another nutrient.

    Amounts and half of the names are invented, so that they must be copied and cannot be known.
    """
    from posttrain.tools.function import function_schema

    draw = random.Random(seed)
    names = [food["Shrt_Desc"] for food in _short_foods(csv, held_out=False)]
    schema = function_schema(lookup_nutrition, ["csv"])
    made = (draw.choice(names) if draw.random() < 0.5 else _invented(draw) for _ in range(count))
    return [{"messages": _lesson(draw, name, right), "tools": [schema]} for name in made]


def _lesson(draw: random.Random, food: str, right: float) -> list[dict[str, Any]]:
    nutrient, kind = draw.choice(SHORT), draw.random()
    asked = [{"role": "user", "content": f"{nutrient} in {food}?"}]
    amount = f"{round(draw.uniform(0, draw.choice((0.5, 5, 50, 900))), draw.randint(0, 2)):g}"
    if kind > (1 + right) / 2:
        return [*asked, {"role": "assistant", "content": amount}]
    if kind > right:
        nutrient = draw.choice([name for name in SHORT if name != nutrient])
    arguments = {"food": food, "nutrient": nutrient}
    call = {"type": "function", "id": "call00000", "function": {"name": "lookup_nutrition", "arguments": arguments}}
    text = f"{amount} {_unit(nutrient)} in 100 g of {food}"
    return [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": "lookup_nutrition", "content": text},
        {"role": "assistant", "content": amount},
    ]


def _invented(draw: random.Random) -> str:
    """Name in the manner of the table, of at most `MAX_SHORT` characters."""
    first = "".join(draw.choices(LETTERS, k=draw.randint(3, 8)))
    second = "".join(draw.choices(LETTERS, k=draw.randint(2, 3)))
    return first if draw.random() < 0.2 else f"{first}{draw.choice(', ')}{second}"


def _short_foods(csv: Path | None, *, held_out: bool) -> list[dict[str, str]]:
    """Foods with short names and a value of each nutrient of short questions."""
    foods = [food for food in _foods(csv) if _is_held_out(food["Shrt_Desc"]) == held_out]
    known = [food for food in foods if all(food[COLUMNS[nutrient][0]] for nutrient in SHORT)]
    return [food for food in known if len(food["Shrt_Desc"]) <= MAX_SHORT and food["Shrt_Desc"].isascii()]


def _short_question(draw: random.Random, foods: list[dict[str, str]]) -> dict[str, Any]:
    food, nutrient, amount = _drawn(draw, foods, SHORT)
    text = f"{nutrient} in {food['Shrt_Desc']}?"
    return _row([{"role": "user", "content": text}], [(food, nutrient)], amount)


def _amount(draw: random.Random, foods: list[dict[str, str]]) -> dict[str, Any]:
    food, nutrient, amount = _drawn(draw, foods, get_args(Nutrient))
    return _asked(
        f"How much {nutrient} ({_unit(nutrient)}) is in 100 g of {_spoken(food)}?", [(food, nutrient)], amount
    )


def _portion(draw: random.Random, foods: list[dict[str, str]]) -> dict[str, Any]:
    portions = [food for food in foods if food["GmWt_1"] and float(food["GmWt_1"]) > 0 and food["GmWt_Desc1"]]
    food, nutrient, amount = _drawn(draw, portions, get_args(Nutrient))
    number, grams = draw.randint(2, 5), float(food["GmWt_1"])
    text = (
        f"A portion of {_spoken(food)} ({food['GmWt_Desc1']}) weighs {grams:g} g. How much {nutrient} "
        f"({_unit(nutrient)}) is in {number} of them?"
    )
    return _asked(text, [(food, nutrient)], amount * number * grams / 100)


def _two_foods(draw: random.Random, foods: list[dict[str, str]]) -> dict[str, Any]:
    first, nutrient, amount = _drawn(draw, foods, get_args(Nutrient))
    second, _, more = _drawn(draw, foods, (nutrient,))
    grams = [draw.randrange(20, 300, 10) for _ in range(2)]
    text = (
        f"How much {nutrient} ({_unit(nutrient)}) is in {grams[0]} g of {_spoken(first)} and {grams[1]} g of "
        f"{_spoken(second)} together?"
    )
    return _asked(text, [(first, nutrient), (second, nutrient)], (amount * grams[0] + more * grams[1]) / 100)


def _asked(text: str, looked_up: list[tuple[dict[str, str], str]], answer: float) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return _row(messages, looked_up, answer)


def _row(messages: list[dict[str, Any]], looked_up: list[tuple[dict[str, str], str]], answer: float) -> dict[str, Any]:
    calls = [
        {"name": "lookup_nutrition", "arguments": {"food": food["Shrt_Desc"], "nutrient": nutrient}}
        for food, nutrient in looked_up
    ]
    return {"prompt": messages, "calls": calls, "answer": f"{answer:.6g}"}


def _drawn(
    draw: random.Random, foods: list[dict[str, str]], nutrients: tuple[str, ...]
) -> tuple[dict[str, str], str, float]:
    """Food and nutrient that the table has a value for."""
    while True:
        food, nutrient = draw.choice(foods), draw.choice(nutrients)
        value = food[COLUMNS[nutrient][0]]
        if value:
            return food, nutrient, float(value)


def _unit(nutrient: str) -> str:
    return COLUMNS[nutrient][1]


def _spoken(food: dict[str, str]) -> str:
    return food["Shrt_Desc"].lower().replace(",", ", ")


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9%]+", name.lower())


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 5 == 0


def _state(csv: Path) -> tuple[int, int, int]:
    """Inode, size and time of change, which no program sets, of a file."""
    state = csv.stat()
    return state.st_ino, state.st_size, state.st_ctime_ns


@cache
def _read(csv: Path, state: tuple[int, int, int]) -> list[dict[str, str]]:
    with csv.open(encoding="utf-8", newline="") as file:
        # A table may begin with a line that says where it comes from.
        rows = list(csv_files.DictReader(line for line in file if not line.startswith("#")))
    # Two foods of one name could not be told apart.
    names = [" ".join(_words(row["Shrt_Desc"])) for row in rows]
    count = Counter(names)
    return [row for row, name in zip(rows, names, strict=True) if count[name] == 1]


def _foods(csv: Path | None) -> list[dict[str, str]]:
    file = TABLE if csv is None else csv
    return _read(file, _state(file))


@cache
def _made(csv: Path, state: tuple[int, int, int]) -> Path:
    # The database outlives the process: it is named by all that it is made of.
    name = hashlib.sha256(repr(COLUMNS).encode() + csv.read_bytes()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"posttrain-food-{name}.sqlite"
    if target.exists():
        return target
    handle, half = tempfile.mkstemp(dir=target.parent, suffix=".sqlite")
    os.close(handle)
    with closing(sqlite3.connect(half)) as connection, connection:
        connection.execute("CREATE TABLE amounts (key TEXT, name TEXT, nutrient TEXT, amount REAL)")
        connection.executemany(
            "INSERT INTO amounts VALUES (?, ?, ?, ?)",
            [
                (" ".join(_words(row["Shrt_Desc"])), row["Shrt_Desc"], nutrient, float(row[column]))
                for row in _foods(csv)
                for nutrient, (column, _) in COLUMNS.items()
                if row[column]
            ],
        )
        connection.execute("CREATE INDEX by_nutrient ON amounts (nutrient, key)")
    os.replace(half, target)
    return target
