"""Tiny runs for the browser: folders as a run leaves them, with made-up records, served on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np

from posttrain.reward.types import Rewards
from posttrain.rl.store import Recorded, write_record
from posttrain.rollout.records import file_of
from posttrain.rollout.trajectory import Example, Trajectory, Turn
from posttrain.serve.app import listen, server_of
from posttrain.view.folder import RunFolder
from posttrain.view.indexer import Indexer, index_all
from posttrain.view.serve import Api, Roster, Site, Viewed, application, viewed
from tests.stages.runs import rl_stage, sft_stage, write_run

STAGE, TOKEN = "0-rl", "secret"
PROMPTS, GROUP = 3, 2
UNSAFE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"


def make_run(folder: Path, steps: Sequence[int], *, completion: str = "is 4") -> RunFolder:
    """Output folder of a run with records of `steps`, whose samples are right from the second half on."""
    write_run(folder, rl_stage(num_steps=max(steps)))
    out = folder / "out"
    (out / STAGE / "trajectories").mkdir(parents=True)
    (out / "config.yaml").write_text((folder / "run.yaml").read_text())
    calls = [{"posttrain": "0.0.9", "jax": "0.10.1"}, {"posttrain": "0.1.0", "jax": "0.10.2", "numpy": "2.4.0"}]
    (out / "versions.json").write_text(json.dumps(calls))
    lines = []
    for step in steps:
        record(out, step, completion, right=step > max(steps) // 2)
        own = {"reward": step / 10, "rewards/low/mean": 1e-5, "loss": None, "grad_norm": 1.0}
        lines.append({"step": step, "stage": STAGE, "time": 0.0, **own})
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sample = {"prompt": "1+1=", "completion": "2", "reward": 1.0, "rewards": {"low": 1.0}, "advantage": None}
    other = sample | {"prompt": "9*9=", "completion": "82", "reward": 0.25, "rewards": {"low": 0.25}}
    table = [
        {"step": step, "stage": STAGE, "time": 0.0, **chosen, "stop": "stop", "extra": {}}
        for step, chosen in ((0, sample), (0, other), (steps[0], sample))
    ]
    (out / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in table))
    return RunFolder(out)


def make_sft_run(folder: Path) -> RunFolder:
    """Output folder of a run without rollouts, whose loss falls from 8 to 0."""
    write_run(folder, sft_stage())
    out = folder / "out"
    (out / "0-sft").mkdir(parents=True)
    (out / "config.yaml").write_text((folder / "run.yaml").read_text())
    lines = [{"step": step, "stage": "0-sft", "time": 0.0, "loss": 8.0 - step} for step in range(9)]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunFolder(out)


def record(out: Path, step: int, completion: str, *, right: bool) -> None:
    """Write the record of a step: sample 1 of each group has a turn of its environment, and old tokens."""
    groups = [[_sample(step, p, g, f"{completion} {step}") for g in range(GROUP)] for p in range(PROMPTS)]
    total = np.tile(np.float32([right, np.nan]), (PROMPTS, 1))
    recorded = Recorded(
        before=step - 1,
        step=step,
        version=step - 1,
        groups_P=groups,
        rewards=Rewards(total_PG=total, parts_PG={"low": total, "strict": total * 0}, errors=[], metrics={}, extras={}),
        advantages_PG=np.tile(np.float32([0.5, np.nan]), (PROMPTS, 1)) * (np.arange(PROMPTS)[:, None] + 1),
        roles_PG=None,
    )
    write_record(recorded, file_of(out / STAGE / "trajectories", step))


def _sample(step: int, p: int, g: int, completion: str) -> Trajectory:
    pieces = [(f"{p}+1=", False), (completion, True), *([("tool", False), ("ok", True)] if g else [])]
    tokens = [token for text, _ in pieces for token in text.encode()]
    sampled = [own for text, own in pieces for _ in text.encode()]
    prompt = tokens[: sampled.index(True)]
    start = len(tokens) - 2
    return Trajectory(
        group=10 * step + p,
        example=Example(index=p, row={}, messages=(), prompt_tokens=prompt, plain=True),
        sample=g,
        messages=[],
        text=completion,
        tokens=tokens,
        sampled=sampled,
        logps=[-0.5 if own else 0.0 for own in sampled],
        kept_logps=[-0.25 if own else 0.0 for own in sampled],
        truncation_logps=[-0.25 if own else 0.0 for own in sampled],
        stop="length" if g else "stop",
        versions=[max(step - 1 - g, 0) if own else -1 for own in sampled],
        turns=[Turn(start, len(tokens), 1.0)] if g else (),
    )


def indexed(*folders: RunFolder) -> list[Viewed]:
    """Runs with an index of everything that is there now; the cache must be that of a test."""
    runs = [viewed(folder.path.parent.name, folder) for folder in folders]
    index_all([Indexer(run.folder, run.index) for run in runs])
    return runs


def served(runs: Sequence[Viewed], places: Sequence[Path] = ()) -> AbstractContextManager[str]:
    """Address of the page of runs, with its token."""
    return served_site(Api(Roster(runs, places)))


@contextmanager
def served_site(site: Site) -> Iterator[str]:
    """Address of a page, with its token."""
    listener = listen("127.0.0.1", 0, "view")
    server = server_of(application(site, TOKEN))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/{TOKEN}/"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        listener.close()
