"""Food assistant for photographs of Food-101 (Bossard et al., 2014): the names of its dishes, and a tool with the
values of those that stand in USDA's food composition table (SR 28)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_NAMES = """
apple pie, baby back ribs, baklava, beef carpaccio, beef tartare, beet salad, beignets, bibimbap, bread pudding,
breakfast burrito, bruschetta, caesar salad, cannoli, caprese salad, carrot cake, ceviche, cheesecake, cheese plate,
chicken curry, chicken quesadilla, chicken wings, chocolate cake, chocolate mousse, churros, clam chowder, club
sandwich, crab cakes, creme brulee, croque madame, cup cakes, deviled eggs, donuts, dumplings, edamame, eggs
benedict, escargots, falafel, filet mignon, fish and chips, foie gras, french fries, french onion soup, french
toast, fried calamari, fried rice, frozen yogurt, garlic bread, gnocchi, greek salad, grilled cheese sandwich,
grilled salmon, guacamole, gyoza, hamburger, hot and sour soup, hot dog, huevos rancheros, hummus, ice cream,
lasagna, lobster bisque, lobster roll sandwich, macaroni and cheese, macarons, miso soup, mussels, nachos, omelette,
onion rings, oysters, pad thai, paella, pancakes, panna cotta, peking duck, pho, pizza, pork chop, poutine, prime
rib, pulled pork sandwich, ramen, ravioli, red velvet cake, risotto, samosa, sashimi, scallops, seaweed salad,
shrimp and grits, spaghetti bolognese, spaghetti carbonara, spring rolls, steak, strawberry shortcake, sushi, tacos,
takoyaki, tiramisu, tuna tartare, waffles
"""
DISHES = [" ".join(name.split()) for name in _NAMES.split(",")]
"""Dishes by the `label` of `ethz/food101`; other copies of the dataset may have another order."""


class Values(NamedTuple):
    """Number of a dish in USDA's table, and what 100 g of it have, as the table says."""

    number: int
    kcal: float
    protein: float


KNOWN: Mapping[str, Values] = {
    "cheesecake": Values(18147, 321, 5.5),
    "chicken quesadilla": Values(21488, 294, 15.05),
    "chicken wings": Values(5103, 254, 23.79),
    "chocolate cake": Values(18096, 389, 3.48),
    "chocolate mousse": Values(19182, 225, 4.14),
    "clam chowder": Values(6230, 61, 3.24),
    "crab cakes": Values(15142, 155, 20.21),
    "donuts": Values(18250, 426, 5.2),
    "edamame": Values(11212, 121, 11.91),
    "falafel": Values(16138, 333, 13.31),
    "french fries": Values(11403, 158, 2.75),
    "french toast": Values(18269, 229, 7.7),
    "fried calamari": Values(15176, 175, 17.94),
    "fried rice": Values(36602, 174, 4.05),
    "frozen yogurt": Values(19293, 159, 4.0),
    "garlic bread": Values(18963, 350, 8.36),
    "grilled salmon": Values(15209, 182, 25.44),
    "hot and sour soup": Values(27001, 39, 2.58),
    "hot dog": Values(21118, 247, 10.6),
    "hummus": Values(16137, 177, 4.86),
    "ice cream": Values(19095, 207, 3.5),
    "lasagna": Values(22916, 124, 6.63),
    "mussels": Values(15165, 172, 23.8),
    "nachos": Values(21078, 343, 4.32),
    "omelette": Values(1130, 154, 10.57),
    "onion rings": Values(21130, 411, 3.86),
    "peking duck": Values(5140, 337, 18.99),
    "pizza": Values(21299, 266, 11.39),
    "pork chop": Values(10030, 231, 23.72),
    "ravioli": Values(22900, 97, 3.24),
    "scallops": Values(15173, 216, 18.07),
    "spaghetti bolognese": Values(36630, 121, 5.79),
    "spring rolls": Values(36601, 250, 8.28),
    "strawberry shortcake": Values(18126, 346, 6.1),
    "waffles": Values(18367, 291, 7.9),
}
"""The dishes of which the table has a near one; energy (kcal) and protein (g) are USDA's, in the public domain."""


def lookup_dish(dish: str) -> str:
    """Look up the energy and protein of 100 g of a dish.

    Args:
        dish: Name of the dish, such as "hot dog".
    """
    name = dish.strip().lower().replace("_", " ")
    if name not in DISHES:
        raise LookupError(f"no dish {dish!r}")
    return values_of(name)


def values_of(dish: str) -> str:
    """What the tool says of one of the `DISHES`.

    >>> values_of("hot dog"), values_of("baklava")
    ('kcal 247 protein 11', 'unknown')
    """
    known = KNOWN.get(dish)
    return "unknown" if known is None else f"kcal {round(known.kcal)} protein {round(known.protein)}"
