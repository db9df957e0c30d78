"""Short stories: openings cut from real ones, and rewards that a reader can see working."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from posttrain.rollout.trajectory import Trajectory

TERMINAL = re.compile(r"[.!?][\"”']?\s*$")
SPEECH = re.compile(r"[\"“]([^\"“”]{2,}?)[\"”]")


def openings(*, path: Path, skip: int, limit: int) -> list[dict[str, str]]:
    """The first sentence of each story as `prompt`, the rest as `completion`."""
    rows = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            text = json.loads(line)["text"].strip()
            sentence = re.match(r".{20,160}?[.!?](?=\s)", text, re.DOTALL)
            if sentence is not None:
                rows.append({"prompt": sentence.group(0), "completion": text[sentence.end() :]})
    return rows[skip : skip + limit]


def ends_properly(completions: Sequence[str], trajectories: Sequence[Trajectory], **_: object) -> list[float]:
    """1 where the story comes to its own end, with a closed sentence, before the tokens run out."""
    return [
        float(t.stop == "stop" and TERMINAL.search(text) is not None)
        for text, t in zip(completions, trajectories, strict=True)
    ]


def has_dialogue(completions: Sequence[str], **_: object) -> list[float]:
    """1 where somebody says something in closed quotation marks."""
    return [float(SPEECH.search(text) is not None) for text in completions]
