"""Short stories made on the spot from a grammar, and rewards that a reader can see working: no download. What a model
can learn beyond sentences is to keep child, thing, place and animal apart. `configs/stories` is their tokenizer."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.rollout.trajectory import Trajectory

TERMINAL = re.compile(r"[.!?][\"”']?\s*$")
SPEECH = re.compile(r"[\"“]([^\"“”]{2,}?)[\"”]")

GIRLS = ["Lily", "Anna", "Mia", "Sara", "Lucy", "Emma", "Zoe", "Nora", "Ella", "Ruby", "Jane", "Amy"]
BOYS = ["Tom", "Ben", "Max", "Sam", "Tim", "Leo", "Jack", "Finn", "Noah", "Adam", "Paul", "Theo"]
THINGS = ["ball", "kite", "book", "hat", "drum", "boat", "doll", "cup", "flower", "shell", "bell", "lamp", "basket",
          "coin", "scarf", "spoon"]  # fmt: skip
LOOKS = ["red", "blue", "big", "small", "bright", "new", "shiny", "green", "yellow", "soft"]
PLACES = ["park", "garden", "forest", "beach", "farm", "lake", "hill", "school", "market", "river", "barn", "meadow"]
ANIMALS = ["dog", "cat", "bird", "frog", "rabbit", "duck", "mouse", "bear", "fox", "horse", "turtle", "hen"]
HIDING_PLACES = ("under a tree", "behind a rock", "in the tall grass", "near the gate", "on a bench", "in a deep hole")
WEATHERS = ("The sun was warm", "The wind was cold", "It began to rain", "The sky was blue", "A cloud came")
GAMES = ("ran in circles", "sang a song", "played hide and seek", "counted the stones", "jumped up and down")

SPOKEN_SHARE = 0.3
"""Share of the stories in which somebody speaks."""
HAPPY_SHARE = 0.5
"""Share of the stories that end well."""
MORE_SHARE = 0.75
"""Chance that one more thing happens before the end, which makes some stories much longer than others."""
MAX_EVENTS = 8
"""Maximum number of such things; the longest story has fewer than 256 tokens."""


@dataclass(frozen=True)
class Cast:
    """Whom and what a story is about."""

    child: str
    thing: str
    look: str
    place: str
    animal: str

    @property
    def she(self) -> str:
        return "she" if self.child in GIRLS else "he"

    @property
    def her(self) -> str:
        return "her" if self.child in GIRLS else "his"

    @property
    def girl(self) -> str:
        return "girl" if self.child in GIRLS else "boy"

    @property
    def held_out(self) -> bool:
        """Return True for a fourth of the children, things and places that come together: those of evaluations."""
        return random.Random(f"{self.child} {self.thing} {self.place}").random() < 0.25


def stories(*, count: int, seed: int, held_out: bool) -> list[dict[str, str]]:
    """Rows with a whole story as `text`.

    Which stories are held out depends on their words alone, so no seed and no count can mix the two sets.
    """
    return [{"text": " ".join(parts)} for _, *parts in _made(count, seed, held_out)]


def openings(*, count: int, seed: int, held_out: bool) -> list[dict[str, str]]:
    """Rows with the first sentence of a story as `prompt`, and the rest as `completion`."""
    made = _made(count, seed, held_out)
    return [{"prompt": opening, "completion": f" {middle} {end}"} for _, opening, middle, end in made]


def pairs(*, count: int, seed: int, held_out: bool) -> list[dict[str, str]]:
    """Rows with a story without its end as `prompt`, a good end as `chosen`, and a bad one as `rejected`."""
    draw = random.Random(f"ends {seed}")
    rows: list[dict[str, str]] = []
    for cast, opening, middle, _ in _made(count, seed, held_out):
        good, bad = _end(draw, cast, happy=True), _end(draw, cast, happy=False)
        rows.append({"prompt": f"{opening} {middle}", "chosen": f" {good}", "rejected": f" {bad}"})
    return rows


def questions(*, count: int, seed: int, held_out: bool) -> list[dict[str, str]]:
    """Rows with a story and a question about it as `prompt`, and the answer as `completion`."""
    draw = random.Random(f"questions {seed}")
    rows: list[dict[str, str]] = []
    for cast, *parts in _made(count, seed, held_out):
        question, answer = draw.choice(
            (
                ("Who is the story about?", f"{cast.child}."),
                (f"Where did {cast.child} go?", f"To the {cast.place}."),
                (f"What did {cast.child} have?", f"A {cast.look} {cast.thing}."),
                (f"Whom did {cast.child} meet?", f"The {cast.animal}."),
            )
        )
        rows.append({"prompt": f"{' '.join(parts)} {question}", "completion": f" {answer}"})
    return rows


def ends_properly(completions: Sequence[str], trajectories: Sequence[Trajectory], **_: object) -> list[float]:
    """1 where the story comes to its own end, with a closed sentence, before the tokens run out."""
    return [
        float(t.stop == "stop" and TERMINAL.search(text) is not None)
        for text, t in zip(completions, trajectories, strict=True)
    ]


def has_dialogue(completions: Sequence[str], **_: object) -> list[float]:
    """1 where somebody says something in closed quotation marks."""
    return [float(SPEECH.search(text) is not None) for text in completions]


def _made(count: int, seed: int, held_out: bool) -> list[tuple[Cast, str, str, str]]:
    """So many stories: each its cast, its first sentence, what happens, and its end."""
    draw = random.Random(seed)
    made: list[tuple[Cast, str, str, str]] = []
    while len(made) < count:
        cast = Cast(*map(draw.choice, (GIRLS + BOYS, THINGS, LOOKS, PLACES, ANIMALS)))
        if cast.held_out == held_out:
            end = _end(draw, cast, happy=draw.random() < HAPPY_SHARE)
            made.append((cast, _opening(draw, cast), _middle(draw, cast), end))
    return made


def _opening(draw: random.Random, cast: Cast) -> str:
    return draw.choice(
        (
            f"Once upon a time, there was a little {cast.girl} named {cast.child} who had a {cast.look} {cast.thing}.",
            f"One day, {cast.child} took {cast.her} {cast.look} {cast.thing} to the {cast.place}.",
            f"{cast.child} was a kind {cast.girl} who loved {cast.her} {cast.look} {cast.thing}.",
            f"There was a {cast.girl} named {cast.child} who lived near the {cast.place} "
            f"with a {cast.look} {cast.thing}.",
        )
    )


def _middle(draw: random.Random, cast: Cast) -> str:
    """Events of a story: a meeting on the way, a number of small things, and a loss."""
    spoken = draw.random() < SPOKEN_SHARE
    sentences = [
        draw.choice(
            (
                f"{cast.child} went to the {cast.place} and met a {cast.animal}.",
                f"At the {cast.place}, {cast.she} met a {cast.animal}.",
                f"In the morning {cast.child} saw a {cast.animal} in the {cast.place}.",
            )
        ),
        f"The {cast.animal} wanted to see the {cast.thing}."
        if not spoken
        else f'"May I see your {cast.thing}?" asked the {cast.animal}. "Yes," said {cast.child}.',
    ]
    while len(sentences) < 2 + MAX_EVENTS and draw.random() < MORE_SHARE:
        sentences.append(_event(draw, cast, spoken))
    sentences.append(f"Then the {cast.thing} was gone. It lay {draw.choice(HIDING_PLACES)}.")
    return " ".join(sentences)


def _event(draw: random.Random, cast: Cast, spoken: bool) -> str:
    if spoken and draw.random() < 0.3:
        return draw.choice(
            (
                f'"Look at me!" said the {cast.animal}.',
                f'"I like your {cast.thing}," said the {cast.animal}.',
                f'"We must go home soon," said {cast.child}.',
            )
        )
    return draw.choice(
        (
            f"{cast.child} and the {cast.animal} {draw.choice(GAMES)}.",
            f"The {cast.animal} {draw.choice(GAMES)} in the {cast.place}.",
            f"{cast.child} showed the {cast.animal} how the {cast.thing} looked in the light.",
            f"{draw.choice(WEATHERS)}, and they had a rest.",
            f"The {cast.look} {cast.thing} fell down, and {cast.child} picked it up.",
        )
    )


def _end(draw: random.Random, cast: Cast, *, happy: bool) -> str:
    if happy:
        return draw.choice(
            (
                f"But the {cast.animal} found the {cast.thing}, and {cast.child} was very happy.",
                f"{cast.child} found {cast.her} {cast.thing}, and the {cast.animal} became {cast.her} best friend.",
                f"The {cast.animal} brought it back, and they laughed all the way home.",
                f"In the end {cast.she} had the {cast.look} {cast.thing} again, and everyone smiled.",
            )
        )
    return draw.choice(
        (
            f"But nobody found the {cast.thing}, and {cast.child} cried all night.",
            f"{cast.child} never saw {cast.her} {cast.thing} again, and the {cast.animal} ran away.",
            f"The {cast.animal} broke it, and they were angry all the way home.",
            f"In the end the {cast.look} {cast.thing} was lost, and everyone was sad.",
        )
    )
