"""Score of a single completion by a reward function of any calling convention, for tests of rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.data.messages import Message
from posttrain.errors import RunError
from posttrain.reward.function import Reward
from posttrain.reward.lab.cases import Case, Kind, LabRow, sample_of
from posttrain.reward.rubric import Rubric
from posttrain.runtime.event_loop import run_async
from posttrain.user_code import import_object


def score_text(spec: str, row: Mapping[str, Any], completion: str, args: Mapping[str, Any] | None = None) -> Any:
    """Value of a completion; None: not applicable. RunError if the function fails.

    `spec`: `file.py:function` or `module:function`. `row`: columns of the dataset with a `prompt`, a string or a list
    of messages. `args`: further keywords of the function.
    """
    function: Any = import_object(spec, Path.cwd())
    prompt = row.get("prompt", "")
    plain = isinstance(prompt, str)
    messages: list[Message] = [{"role": "user", "content": prompt}] if plain else list(prompt)
    given = LabRow(row=row, messages=messages, plain=plain, golden="", answer="")
    case = Case(row=0, kind=Kind.GOLDEN, text=completion)
    reward = Reward(function=function, weight=1.0, args=args or {}, timeout_s=60.0)
    found = run_async(Rubric([reward]).score([[sample_of(given, case, 0, lambda text: list(text.encode()))]]))
    if found.errors:
        raise RunError(f"reward {reward.name}: {found.errors[0].error}")
    value = float(found.total_PG[0, 0])
    return None if math.isnan(value) else value
