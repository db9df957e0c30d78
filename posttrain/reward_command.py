"""Command `posttrain reward`: reward functions on answers whose right order is known."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer


def print_lines(lines: Sequence[str]) -> None:
    """Print lines with samples of models, as far as the terminal can show them."""
    from posttrain.tracking.console import printable

    for line in lines:
        print(printable(line, sys.stdout.encoding or "utf-8"))


def reward(
    functions: Annotated[
        list[str] | None, typer.Argument(metavar="FILE:FUNCTION...", help="Such as rewards/gsm8k.py:correct.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="A dataset, as dataset.path.")] = None,
    config: Annotated[
        str | None, typer.Option(help="A YAML file whose first stage with rewards gives the dataset and functions.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Template of the prompt, as dataset.prompt.")] = None,
    answer: Annotated[str | None, typer.Option(help="Column with the right answer; by default found by name.")] = None,
    golden: Annotated[
        str | None, typer.Option(help="Template of a golden answer, such as '<answer>{answer}</answer>'.")
    ] = None,
    rows: Annotated[int, typer.Option(min=2, help="Number of rows.")] = 16,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to score all completions once.")] = 5.0,
    keywords: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Keyword of the functions; repeatable.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Score samples of this model too: a folder or a hub id.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the values as a pytest file, to keep.")] = None,
) -> None:
    """Examine reward functions before training: right, wrong, empty and absurd answers. Exit code 1 with findings."""
    from posttrain.runs import reward_lab as lab

    settings = lab.LabSettings(
        num_rows=rows,
        timeout_s=timeout,
        answer=answer,
        golden=golden,
        args=lab.read_args(keywords or []),
        model=model,
        write=write,
    )
    found = lab.examine(functions or [], lab.dataset_of(data, prompt), config, settings)
    print_lines(found.lines)
    if not found.passed:
        raise typer.Exit(1)
