"""Samples as Markdown."""

from __future__ import annotations

from posttrain.metrics import Sample


def markdown_of(row: Sample) -> str:
    """Format a sample with its texts as indented code, so that nothing in them is parsed as Markdown."""
    numbers = {"reward": row.reward, **row.rewards, "advantage": row.advantage, **row.extra, "stop": row.stop}
    facts = "\n".join(f"{name} = {value}" for name, value in numbers.items())
    parts = (("Prompt", row.prompt), ("Completion", row.completion), ("Scores", facts))
    return "\n\n".join(
        f"**{title}**\n\n" + "\n".join("    " + line for line in text.splitlines() or [""]) for title, text in parts
    )
