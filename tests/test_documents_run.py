"""Pages that spell out configurations: their commands run, in order, with fewer rows and two steps each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.yaml_file import load_config
from tests.documents import DOCUMENTS, ROOT, SHELL, YAML, blocks_of, dump, is_whole, parse, write_folder
from tests.stages.runs import posttrain
from tests.test_readme import commands

PAGES = [page for page in DOCUMENTS if any(block.title for block in blocks_of(page, *YAML))]
METRICS = ROOT / "docs" / "reference" / "metrics.md"
PHASES = ROOT / "docs" / "reference" / "profile.md"
SMALLER = {
    "num_steps": 2,
    "count": 80,
    "batch_rows": 4,
    "micro_batch_rows": 4,
    "prompts_per_step": 2,
    "warmup_steps": 0,
    "steps": 1,
}
PACKAGE = ROOT / "posttrain"
NAME = re.compile(r'"((?:eval/)?[a-z_0-9]+(?:/[a-z_0-9]+)+)"(\s*[:\]])?')
"""A literal such as "reward/mean", and whether it is the key of a dictionary."""
RATIO = "sampling/importance_sampling_ratio"
ENV = {f"env/{name}" for name in ("errors", "timeouts", "max_turns_ratio", "rows", "close_errors")}
COMPOSED = ENV | {f"{RATIO}/{name}" for name in ("mean", "max", "out_of_bounds", "chi_square", "effective_sample_size")}
COMPOSED |= {f"{role}/{name}" for role in ("critic", "drafter") for name in ("grad_norm", "update_skipped")}
COMPOSED |= {f"samples/completions/{name}" for name in ("mean_length", "clipped_ratio")}
COMPOSED |= {"distill/hidden", "distill/attention", "clip_ratio/dual_mean", "grad_clipped"}
"""Names that the code puts together, and that no page's run has."""


def smaller(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: min(SMALLER[name], item) if name in SMALLER else smaller(item) for name, item in value.items()}
    return [smaller(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all pages were followed; each command must succeed.

    Runs of shipped configurations take minutes each, and are only checked, by `test_readme.py`; so what reads their
    outputs is left out too.
    """
    folder, outputs = write_folder(tmp_path_factory.mktemp("pages")), set[str]()
    for file in folder.glob("*.yaml"):
        data = parse(file.read_text())
        file.write_text(dump(smaller(data)) if is_whole(data) else file.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for page in PAGES:
            for words in (words for block in blocks_of(page, *SHELL) for words in commands(block.text)):
                if words[:2] == ["posttrain", "run"] and (ROOT / words[2]).is_file():
                    outputs.add(load_config(words[2], words[3:]).output)
                elif words[0] == "posttrain" and not outputs & set(words):
                    outcome = posttrain(*words[1:])
                    assert outcome.code == 0, (page.name, words, outcome.err)
    return folder


def documented() -> list[str]:
    """Names in the tables of the page: `eval/...` stands for the held-out form of any."""
    rows = [line for line in METRICS.read_text().splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def phases() -> set[str]:
    """Spans of a profile, which are no metrics, though the code names them alike."""
    return set(re.findall(r"`([^`]+)`", next(line for line in PHASES.read_text().splitlines() if "| phase |" in line)))


def is_documented(name: str) -> bool:
    """Under its own name or that without `eval/` and the ends of an interval; `<x>` stands for any word."""
    bare = re.sub(r"_(low|high)$", "", name.removeprefix("eval/"))
    patterns = [
        re.sub(r"<\w+>", r"[^/]+", re.escape(known).replace(r"\<", "<").replace(r"\>", ">")) for known in documented()
    ]
    return any(re.fullmatch(pattern, candidate) for pattern in patterns for candidate in (name, bare))


def in_code() -> set[str]:
    """Names of metrics that stand in the package as they are: keys, and other literals with the first word of one."""
    texts = [path.read_text() for path in PACKAGE.rglob("*.py") if "config" not in path.parts]
    found = [match for text in texts for match in NAME.findall(text)]
    words = {name.split("/")[0] for name, key in found if key}
    names = {name for name, _ in found if name.split("/")[0] in words}
    # A name that the code lengthens stands for the longer ones.
    return names - {name for name in names if any(known.startswith(f"{name}/") for known in documented())}


def test_metrics_in_the_code_are_documented() -> None:
    assert sorted(name for name in in_code() - phases() if not is_documented(name)) == []


@pytest.mark.thorough
def test_pages_run_and_their_metrics_are_documented(ran: Path) -> None:
    lines = [json.loads(line) for file in ran.glob("runs/*/metrics.jsonl") for line in file.read_text().splitlines()]
    seen = {name for line in lines for name in line} - {"step", "stage", "time"}
    assert sorted(name for name in seen if not is_documented(name)) == []
    known = {name.removeprefix("eval/") for name in seen | in_code()} | COMPOSED
    gone = [name for name in documented() if "<" not in name and name not in known]
    assert gone == [], "documented, but neither in the code nor in a run"
