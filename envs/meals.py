"""Food assistant that sees: drawn meals, tools that look foods up in a SQLite database and add, demonstrations, and the
tokenizer's words. Facts are of USDA's food composition table (SR 28), from its CSV or the few that stand here."""

from __future__ import annotations

import csv as csv_files
import hashlib
import io
import random
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw

from posttrain.tools.function import function_schema

SIDE, CELL = 48, 16
"""Pixels of a picture's side, and of each of a plate's three by three places."""
MOST_KINDS, MOST_PIECES = 3, 3
QUESTION, NAMING = "How much energy and protein is on the plate?", "What is on the plate?"


class Food(NamedTuple):
    """Food with its number in USDA's table, its weight a piece, and what 100 g have, as the table says."""

    number: int
    grams: float
    kcal: float
    protein: float


FOODS: Mapping[str, Food] = {
    "egg": Food(1129, 50, 155, 12.58),
    "banana": Food(9040, 120, 89, 1.09),
    "tomato": Food(11529, 90, 18, 0.88),
    "broccoli": Food(11091, 80, 35, 2.38),
    "rice": Food(20545, 150, 130, 2.69),
    "salmon": Food(15237, 120, 206, 22.1),
    "bread": Food(18064, 30, 274, 10.67),
    "cheese": Food(1009, 30, 404, 22.87),
    "peas": Food(11305, 80, 84, 5.36),
    "carrot": Food(11124, 60, 41, 0.93),
    "apple": Food(9003, 180, 52, 0.26),
    "blueberries": Food(9050, 70, 57, 0.74),
}
"""Weights of a piece are the example's own; energy (kcal) and protein (g) of 100 g are USDA's, in the public domain."""

Meal = Sequence[tuple[str, int]]
"""Foods of a plate, in the order of `FOODS`, with the number of pieces of each."""


# --- tools ------------------------------------------------------------------------------------------------------------


def lookup_nutrition(food: str, count: int, csv: Path | None = None) -> str:
    """Look up the energy and protein of pieces of a food.

    Args:
        food: Name of the food, such as "egg".
        count: Number of pieces.
    """
    with closing(sqlite3.connect(database(csv), uri=True)) as connection:
        found = connection.execute("SELECT grams, kcal, protein FROM foods WHERE name = ?", (food,)).fetchone()
    if found is None:
        raise LookupError(f"no food {food!r}")
    if not 0 < count < 100:
        raise ValueError(f"count={count} is not from 1 to 99")
    grams, kcal, protein = found
    return f"kcal {round(count * grams * kcal / 100)} protein {round(count * grams * protein / 100)}"


def add(numbers: list[int]) -> str:
    """Add numbers.

    Args:
        numbers: Numbers to add.
    """
    return str(sum(numbers))


_OPEN: list[sqlite3.Connection] = []
"""Connections that keep the databases in memory."""


def database(csv: Path | None) -> str:
    """Address of a database in memory, with the foods' values from a table, or those of `FOODS`."""
    return _database(None if csv is None else csv.read_bytes())


@cache
def _database(table_text: bytes | None) -> str:
    table = _values(table_text)
    name = hashlib.sha256(table_text or b"").hexdigest()[:16]
    address = f"file:posttrain-meals-{name}?mode=memory&cache=shared"
    connection = sqlite3.connect(address, uri=True, check_same_thread=False)
    with connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS foods (name TEXT PRIMARY KEY, grams REAL, kcal REAL, protein REAL)"
        )
        rows = [(name, food.grams, *table[food.number]) for name, food in FOODS.items()]
        connection.executemany("INSERT OR REPLACE INTO foods VALUES (?, ?, ?, ?)", rows)
    _OPEN.append(connection)
    return address


def _values(table_text: bytes | None) -> dict[int, tuple[float, float]]:
    if table_text is None:
        return {food.number: (food.kcal, food.protein) for food in FOODS.values()}
    lines = io.StringIO(table_text.decode("utf-8"), newline="")
    rows = {int(row["NDB_No"]): row for row in csv_files.DictReader(lines)}
    return {
        food.number: (float(rows[food.number]["Energ_Kcal"]), float(rows[food.number]["Protein_(g)"]))
        for food in FOODS.values()
    }


# --- data -------------------------------------------------------------------------------------------------------------


def naming(*, count: int, seed: int) -> list[dict[str, Any]]:
    """Pictures with the names and counts of their foods, such as "egg 2, rice 1"."""
    return [
        {"image": picture, "prompt": NAMING, "completion": ", ".join(f"{name} {pieces}" for name, pieces in meal)}
        for meal, picture in _meals(count, seed)
    ]


def questions(*, count: int, seed: int, csv: Path | None = None, system: str | None = None) -> list[dict[str, Any]]:
    """Questions about pictures, with the drawn `foods` and the right `kcal` and `protein`, after a message `system`."""
    rows = []
    told = [] if system is None else [{"role": "system", "content": system}]
    for meal, picture in _meals(count, seed):
        kcal, protein = totals([result_of(name, pieces, csv) for name, pieces in meal])
        prompt = [*told, {"role": "user", "content": QUESTION}]
        rows.append({"image": picture, "prompt": prompt, "foods": list(map(list, meal)), "kcal": kcal})
        rows[-1] |= {"protein": protein}
    return rows


def dialogues(*, count: int, seed: int, careless: float = 0.5, csv: Path | None = None) -> list[dict[str, Any]]:
    """Conversations about pictures, with their tools. A share `careless` of those about several foods forgets the last
    of them, or says the numbers of one food in place of adding."""
    draw = random.Random(seed)
    tools = [function_schema(lookup_nutrition, ["csv"]), function_schema(add, [])]
    return [
        {"image": picture, "messages": _dialogue(meal, draw, careless, csv), "tools": tools}
        for meal, picture in _meals(count, seed)
    ]


def _dialogue(meal: Meal, draw: random.Random, careless: float, csv: Path | None) -> list[dict[str, Any]]:
    fault = draw.choice(("forgets", "guesses")) if len(meal) > 1 and draw.random() < careless else None
    named = meal[:-1] if fault == "forgets" else meal
    results = [result_of(name, pieces, csv) for name, pieces in named]
    messages = [{"role": "user", "content": QUESTION}]
    messages += _calls("lookup_nutrition", [{"food": name, "count": pieces} for name, pieces in named], results)
    kcal, protein = _numbers(results[-1])
    if len(named) > 1 and fault != "guesses":
        kcal, protein = totals(results)
        columns = zip(*map(_numbers, results), strict=True)
        arguments = [{"numbers": list(column)} for column in columns]
        messages += _calls("add", arguments, [str(kcal), str(protein)])
    return [*messages, {"role": "assistant", "content": f"kcal {kcal} protein {protein}"}]


def _calls(name: str, arguments: Sequence[dict[str, Any]], results: Sequence[str]) -> list[dict[str, Any]]:
    calls = [
        {"type": "function", "id": f"call{index:05}", "function": {"name": name, "arguments": one}}
        for index, one in enumerate(arguments)
    ]
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "name": name, "content": result}
        for call, result in zip(calls, results, strict=True)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *answers]


def result_of(name: str, pieces: int, csv: Path | None = None) -> str:
    return lookup_nutrition(name, pieces, csv)


def totals(results: Sequence[str]) -> tuple[int, int]:
    """Sums of energy and protein of results of the tool."""
    kcal, protein = zip(*map(_numbers, results), strict=True)
    return sum(kcal), sum(protein)


def _numbers(result: str) -> tuple[int, int]:
    _, kcal, _, protein = result.split()
    return int(kcal), int(protein)


def _meals(count: int, seed: int) -> list[tuple[Meal, bytes]]:
    draw = random.Random(seed)
    return [(meal, picture_of(meal, draw)) for meal in (meal_of(draw) for _ in range(count))]


def meal_of(draw: random.Random) -> Meal:
    """Draw a meal of one to three kinds of food, one to three pieces each."""
    names = draw.sample(list(FOODS), draw.randint(1, MOST_KINDS))
    return [(name, draw.randint(1, MOST_PIECES)) for name in sorted(names, key=list(FOODS).index)]


# --- pictures ---------------------------------------------------------------------------------------------------------

Colour = tuple[int, int, int]
Shade = Callable[[int, int, int], Colour]
"""Jitter of a colour."""
Shape = Callable[[ImageDraw.ImageDraw, float, float, float, Shade], None]


def picture_of(meal: Meal, draw: random.Random) -> bytes:
    """Draw a meal as a PNG: a plate on a table, its pieces in different places of it, with jitter in place, size and
    colour."""
    image = Image.new("RGB", (SIDE, SIDE), draw.choice([(120, 85, 60), (70, 90, 110), (150, 150, 140), (95, 110, 80)]))
    canvas = ImageDraw.Draw(image)
    canvas.rounded_rectangle((1, 1, SIDE - 2, SIDE - 2), 6, fill=(238, 238, 235), outline=(205, 205, 200))

    def shade(red: int, green: int, blue: int) -> Colour:
        r, g, b = (max(0, min(255, part + draw.randint(-12, 12))) for part in (red, green, blue))
        return r, g, b

    places = draw.sample([(x, y) for x in (-1, 0, 1) for y in (-1, 0, 1)], sum(pieces for _, pieces in meal))
    for name in (name for name, pieces in meal for _ in range(pieces)):
        column, row = places.pop()
        x, y = (SIDE / 2 + CELL * place + draw.uniform(-1.0, 1.0) for place in (column, row))
        SHAPES[name](canvas, x, y, draw.uniform(6.0, 7.5), shade)
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _disc(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: Colour, tall: float = 1) -> None:
    canvas.ellipse((x - r, y - r * tall, x + r, y + r * tall), fill=fill)


def _egg(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, shade: Shade) -> None:
    canvas.ellipse((x - r, y - 0.8 * r, x + r, y + 0.8 * r), fill=(255, 255, 255), outline=(190, 190, 190))
    _disc(canvas, x, y, 0.4 * r, shade(240, 180, 30))


def _banana(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, shade: Shade) -> None:
    canvas.arc((x - r, y - 1.6 * r, x + r, y + 0.7 * r), 15, 165, fill=shade(235, 205, 50), width=4)


def _tomato(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, shade: Shade) -> None:
    _disc(canvas, x, y, 0.9 * r, shade(210, 40, 35))
    canvas.line((x - 2, y - 0.7 * r, x + 2, y - 0.7 * r), fill=(40, 120, 40), width=2)


def _broccoli(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, shade: Shade) -> None:
    canvas.rectangle((x - 1.5, y, x + 1.5, y + r), fill=shade(150, 190, 110))
    for dx, dy in ((-0.5, 0), (0.5, 0), (0, -0.5)):
        _disc(canvas, x + dx * r, y + dy * r, 0.5 * r, shade(40, 120, 45))


def _rice(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, shade: Shade) -> None:
    _disc(canvas, x, y, r, shade(215, 210, 195), 0.8)
    for dx, dy in ((-0.6, 0), (0, -0.4), (0.4, 0.1), (-0.1, 0.4), (0.1, 0)):
        canvas.line((x + dx * r, y + dy * r, x + dx * r + 2, y + dy * r + 1), fill=(255, 255, 255))


def _salmon(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, shade: Shade) -> None:
    canvas.rectangle((x - r, y - 0.6 * r, x + r, y + 0.6 * r), fill=shade(245, 130, 95))
    for dx in (-0.5, 0, 0.5):
        canvas.line((x + dx * r, y - 0.6 * r, x + dx * r - 1, y + 0.6 * r), fill=(255, 200, 180))


def _bread(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, shade: Shade) -> None:
    box = (x - 0.85 * r, y - 0.85 * r, x + 0.85 * r, y + 0.85 * r)
    canvas.rounded_rectangle(box, 2.5, fill=shade(205, 165, 110), outline=(125, 80, 40))


def _cheese(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, shade: Shade) -> None:
    canvas.polygon((x - r, y + 0.7 * r, x + r, y + 0.7 * r, x + 0.6 * r, y - 0.8 * r), fill=shade(245, 195, 55))


def _peas(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, shade: Shade) -> None:
    for dx, dy in ((-0.6, -0.4), (0, -0.5), (0.6, -0.3), (-0.4, 0.3), (0.3, 0.3)):
        _disc(canvas, x + dx * r, y + dy * r, 0.3 * r, shade(120, 190, 60))


def _carrot(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, shade: Shade) -> None:
    canvas.polygon((x - r, y - 0.35 * r, x - r, y + 0.35 * r, x + r, y), fill=shade(240, 125, 25))
    canvas.line((x - r, y, x - 1.3 * r, y - 2), fill=(50, 140, 50), width=2)


def _apple(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, shade: Shade) -> None:
    _disc(canvas, x, y + 1, 0.85 * r, shade(150, 200, 70))
    canvas.line((x, y - 0.6 * r, x + 2, y - r), fill=(90, 55, 30), width=2)


def _blueberries(canvas: ImageDraw.ImageDraw, x: float, y: float, r: float, shade: Shade) -> None:
    for dx, dy in ((-0.5, 0.2), (0.5, 0.2), (0, -0.5), (0, 0.5)):
        _disc(canvas, x + dx * r, y + dy * r, 0.38 * r, shade(60, 70, 150))


SHAPES: Mapping[str, Shape] = {
    "egg": _egg,
    "banana": _banana,
    "tomato": _tomato,
    "broccoli": _broccoli,
    "rice": _rice,
    "salmon": _salmon,
    "bread": _bread,
    "cheese": _cheese,
    "peas": _peas,
    "carrot": _carrot,
    "apple": _apple,
    "blueberries": _blueberries,
}


# --- tokenizer --------------------------------------------------------------------------------------------------------

CONTROLS = ("<pad>", "<end>", "<user>", "<assistant>", "<tool>", "<tools>")
PIECES = (
    *FOODS,
    *(QUESTION, NAMING, "lookup_nutrition", "kcal ", " protein ", ", ", "], [", "count", "numbers"),
    *('[lookup_nutrition(food="', '", count=', '), lookup_nutrition(food="', ")]"),
    *("[add(numbers=[", "]), add(numbers=[", "])]"),
)
"""Texts that are one token each, beside the characters of ASCII."""


def write_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`: words of this example, and single characters for the rest."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in (9, 10, *range(32, 127))]
    words = dict.fromkeys([*CONTROLS, *sorted(PIECES, key=len, reverse=True), *characters, "\N{REPLACEMENT CHARACTER}"])
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, list(words)[-1]))
    escaped = ["".join(f"\\x{ord(c):02x}" for c in word) for word in sorted(PIECES, key=len, reverse=True)]
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*escaped, r"[\s\S]"])), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROLS])
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
