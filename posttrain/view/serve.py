"""Run browser: the page and JSON on loopback, below an address with a random token, with an indexer beside it."""

from __future__ import annotations

import base64
import json
import secrets
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from posttrain.diagnosis.evidence import read_warnings
from posttrain.diagnosis.report import why
from posttrain.errors import ConfigError
from posttrain.rollout.records import Sequence as TokenSequence
from posttrain.rollout.records import read_pictures, read_sample
from posttrain.serve.app import check_installed, listen, server_of
from posttrain.serve.body import Refused
from posttrain.serve.middleware import AllowedHosts, RequestGuard
from posttrain.view import queries
from posttrain.view.folder import CONFIG, CurveReader, RunFolder, Stage, find_runs, runs_in
from posttrain.view.microscope import Microscope
from posttrain.view.queries import cache_of, connection, make_index
from posttrain.view.settings import settings, warnings

STATIC = Path(__file__).resolve().parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Viewed:
    """Run with what is read of it."""

    name: str
    folder: RunFolder
    index: Path
    curves: CurveReader
    microscope: Microscope

    def stage(self, name: str) -> Stage:
        """Stage of a name; ConfigError if there is none."""
        for stage in self.folder.stages():
            if stage.name == name:
                return stage
        raise ConfigError(f"stage={name}: the run {self.name} has none of this name")


class Roster:
    """Runs of the page in an order that does not change: those that were found, then those that begin in `places`."""

    def __init__(
        self, runs: Sequence[Viewed], places: Sequence[Path] = (), begun: Callable[[Viewed], None] | None = None
    ):
        self._runs, self._places, self._begun = list(runs), places, begun
        self._lock = threading.Lock()

    @property
    def runs(self) -> Sequence[Viewed]:
        return self._runs

    def update(self) -> None:
        """Add the runs that have begun since, with names that tell all of them apart."""
        with self._lock:
            known = {run.folder.path for run in self._runs}
            there = dict.fromkeys(path for place in self._places for path in runs_in(place))
            new = [path for path in there if path not in known]
            if not new:
                return
            folders = [run.folder for run in self._runs] + [RunFolder(path) for path in new]
            names = [name for name, _ in named(folders)]
            before = [replace(run, name=name) for run, name in zip(self._runs, names, strict=False)]
            added = [viewed(name, folder) for name, folder in [*zip(names, folders, strict=True)][len(before) :]]
            self._runs = before + added
        for run in added:
            if self._begun is not None:
                self._begun(run)


@runtime_checkable
class Site(Protocol):
    """Page with its requests by name, whose answers are JSON values."""

    page: str

    @property
    def answers(self) -> Mapping[str, Callable[[Mapping[str, str]], Any]]:
        """Answers to GET, of the parameters of the address."""

    @property
    def changes(self) -> Mapping[str, Callable[[Mapping[str, str], bytes], Any]]:
        """Answers to POST, of the parameters and the body."""


class Api:
    """Page over runs."""

    page = "index.html"

    def __init__(self, roster: Roster):
        self._roster = roster
        self.answers = {
            "runs": self.runs,
            "metrics": self.metrics,
            "curves": self.curves,
            "rollouts": self.rollouts,
            "rollout": self.rollout,
            "tokens": self.tokens,
            "microscope": self.microscope,
            "prompts": self.prompts,
            "compare": self.compare,
            "settings": self.settings,
            "why": self.why,
        }
        self.changes = {"microscope": self.replay}

    def runs(self, given: Mapping[str, str]) -> Any:
        """Runs with their stages, state, versions, and progress of the index."""
        self._roster.update()
        found = []
        for number, run in enumerate(self._roster.runs):
            with connection(run.index) as index:
                indexed, progress = {one["stage"]: one for one in queries.stages(index)}, queries.progress(index)
            stages = [
                {"name": s.name, "kind": s.kind, "num_steps": s.num_steps, "pass_above": s.pass_above}
                | {"indexed": indexed.get(s.name)}
                for s in run.folder.stages()
            ]
            about = {"run": number, "name": run.name, "path": str(run.folder.path), "state": run.folder.state()}
            found.append({**about, "versions": run.folder.versions(), "stages": stages, "progress": progress})
        return found

    def metrics(self, given: Mapping[str, str]) -> Any:
        """Names of metrics of every run by stage."""
        return [run.curves.names() for run in self._roster.runs]

    def curves(self, given: Mapping[str, str]) -> Any:
        """Curves of a metric (`name`) of the stages called `stage`, one for each run that has it."""
        found = []
        for number, run in enumerate(self._roster.runs):
            curve = run.curves.curve(given.get("stage", ""), given.get("name", ""))
            if curve["steps"]:
                found.append({"run": number, **curve})
        return found

    def rollouts(self, given: Mapping[str, str]) -> Any:
        with connection(self._run(given).index) as index:
            return queries.rollouts(index, given)

    def rollout(self, given: Mapping[str, str]) -> Any:
        with connection(self._run(given).index) as index:
            found = queries.rollout(index, queries.whole(given, "id"))
        if found is None:
            raise Refused(404, "not_found", "there is no such rollout; the run may have removed its record")
        return found | {"pictures": self._pictures(given, found) if found["source"] == queries.RECORD else []}

    def _pictures(self, given: Mapping[str, str], found: Mapping[str, Any]) -> list[str]:
        """Pictures of a rollout as `data:` URLs."""
        record = _record(self._run(given).folder.path / found["stage"], found["step"])
        try:
            files = read_pictures(record, found["grp"], found["sample"])
            return [f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}" for file in files]
        except FileNotFoundError:  # the run has removed the record
            return []

    def tokens(self, given: Mapping[str, str]) -> Any:
        """Tokens of a rollout as recorded, and their losses in each update once the step is replayed."""
        run = self._run(given)
        with connection(run.index) as index:
            found = queries.rollout(index, queries.whole(given, "id"))
            if found is None or found["source"] != queries.RECORD:
                raise Refused(404, "not_found", "there is no record of this rollout, only its text")
            stage, step = run.folder.path / found["stage"], found["step"]
            try:
                parts = read_sample(_record(stage, step), found["grp"], found["sample"])
            except FileNotFoundError:
                raise Refused(404, "not_found", "the run has removed this record") from None
            texts = queries.token_texts(index, [int(token) for part in parts for token in part.tokens])
        losses = run.microscope.tokens(stage, step, found["grp"], found["sample"])
        return {"parts": [_part(part, texts) for part in parts], "losses": losses}

    def microscope(self, given: Mapping[str, str]) -> Any:
        """State of the replay of a step."""
        run = self._run(given)
        stage, step = self._place(run, given)
        return run.microscope.state(stage, step)

    def replay(self, given: Mapping[str, str], body: bytes) -> Any:
        """Start the replay of a step."""
        run = self._run(given)
        stage, step = self._place(run, given)
        if not _record(stage, step).is_file():
            raise Refused(404, "not_found", f"step {step} has no record of trajectories")
        return run.microscope.start(stage, step)

    def prompts(self, given: Mapping[str, str]) -> Any:
        run = self._run(given)
        with connection(run.index) as index:
            return queries.prompts(index, given, run.stage(given.get("stage", "")).pass_above)

    def compare(self, given: Mapping[str, str]) -> Any:
        """Two steps, given as `run`, `stage`, `step` and `run2`, `stage2`, `step2`. Means that the run has logged are
        those of its metrics."""
        found = []
        for suffix in ("", "2"):
            one = {name: given.get(f"{name}{suffix}", "") for name in ("run", "stage", "step")}
            run, step = self._run(one), queries.whole(one, "step")
            with connection(run.index) as index:
                summary = queries.step_summary(index, one["stage"], step)
            for name in summary["means"]:
                logged = run.curves.value(one["stage"], _metric(name), step)
                if logged is not None:
                    summary["means"][name] = logged
            found.append(summary)
        return found

    def settings(self, given: Mapping[str, str]) -> Any:
        """Settings of a run beside their defaults, and its warnings."""
        folder = self._run(given).folder.path
        return {"settings": settings(folder / CONFIG), "warnings": warnings(folder)}

    def why(self, given: Mapping[str, str]) -> Any:
        """Causes for which a run did not learn, and those that it told while it trained."""
        folder = self._run(given).folder.path
        return {"stages": why(folder).record(), "told": read_warnings(folder)}

    def _run(self, given: Mapping[str, str]) -> Viewed:
        number, runs = given.get("run", ""), self._roster.runs
        if not number.isdecimal() or len(number) > 9 or int(number) >= len(runs):
            raise Refused(404, "not_found", f"run={number[:9]}: there are runs 0 to {len(runs) - 1}")
        return runs[int(number)]

    def _place(self, run: Viewed, given: Mapping[str, str]) -> tuple[Path, int]:
        return run.folder.path / run.stage(given.get("stage", "")).name, queries.whole(given, "step")


def application(site: Site, token: str) -> Any:
    """ASGI application. Everything but the right token in the path is answered with 404."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    files = {str(path.relative_to(STATIC)): path for path in STATIC.rglob("*") if path.suffix in TYPES}

    def allowed(request: Request) -> bool:
        return secrets.compare_digest(request.path_params["token"].encode(), token.encode())

    async def page(request: Request) -> Any:
        name = request.path_params.get("file") or site.page
        if not allowed(request) or name not in files:
            return Response("not found", status_code=404, headers=HEADERS)
        file = files[name]
        return Response(file.read_bytes(), media_type=TYPES[file.suffix], headers=HEADERS)

    async def answer(request: Request) -> Any:
        reads, name = request.method in ("GET", "HEAD"), request.path_params["name"]
        if not allowed(request) or name not in (site.answers if reads else site.changes):
            return JSONResponse({"error": "not found"}, status_code=404, headers=HEADERS)
        try:
            if reads:
                found = await run_in_threadpool(site.answers[name], request.query_params)
            else:
                found = await run_in_threadpool(site.changes[name], request.query_params, await request.body())
        except Refused as refused:
            return JSONResponse({"error": str(refused)}, status_code=refused.status, headers=HEADERS)
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, status_code=400, headers=HEADERS)
        return JSONResponse(_finite(found), headers=HEADERS)

    app = Starlette(
        routes=[
            Route("/{token}/api/{name}", answer, methods=["GET", "POST"]),
            Route("/{token}/{file:path}", page, methods=["GET"]),
        ]
    )
    return RequestGuard(app, hosts=AllowedHosts(HOST), form=lambda refused: {"error": str(refused)}, headers=HEADERS)


def _metric(mean: str) -> str:
    """Metric of a mean of `queries.step_summary`."""
    if mean.startswith("rewards/"):
        return f"{mean}/mean"
    named = {"sampled tokens": "completions/mean_length", "cut at the maximum length": "completions/clipped_ratio"}
    return named.get(mean, mean)


def _record(stage: Path, step: int) -> Path:
    return stage / "trajectories" / f"{step:08d}.parquet"


def _part(part: TokenSequence, texts: Mapping[int, str]) -> dict[str, Any]:
    return {
        "ids": part.tokens.tolist(),
        "texts": [texts.get(int(token)) for token in part.tokens],
        "sampled": part.sampled.tolist(),
        **{name: values.tolist() for name, values in part.values.items()},
        "turns": part.turns,
    }


def _finite(value: Any) -> Any:
    """Value with null for numbers that JSON cannot represent."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value


HOST = "127.0.0.1"


def view(paths: Sequence[str], *, port: int) -> None:
    """Serve runs until interrupted; prints the address. `port` 0: any free one. ConfigError without a run or the extra
    `view`."""
    check_installed("view", "view")
    runs = [viewed(name, folder) for name, folder in named(find_runs(paths))]
    listener = listen(HOST, port, "view")
    with following() as follow:
        for run in runs:
            follow(run)
        roster = Roster(runs, [Path(path).expanduser().resolve() for path in paths], follow)
        try:
            serve(Api(roster), listener)
        finally:
            for run in roster.runs:
                run.microscope.close()


def serve(site: Site, listener: socket.socket) -> None:
    """Serve a page until interrupted; prints its address, with a token of its own."""
    token = secrets.token_urlsafe(16)
    print(f"http://{HOST}:{listener.getsockname()[1]}/{token}/", flush=True)
    server_of(application(site, token)).run(sockets=[listener])


def named(folders: Sequence[RunFolder]) -> Iterator[tuple[str, RunFolder]]:
    """Runs with the shortest names that tell them apart: the folder's, else with its parents'."""
    depth = 1
    while True:
        names = ["/".join(folder.path.parts[-depth:]) for folder in folders]
        if max(Counter(names).values()) == 1:
            return zip(names, folders, strict=True)
        depth += 1


def viewed(name: str, folder: RunFolder) -> Viewed:
    """Run with its index and replays in the cache."""
    cache = cache_of(folder.key)
    make_index(cache / "index.sqlite")
    curves = CurveReader(folder.path / "metrics.jsonl")
    return Viewed(name, folder, cache / "index.sqlite", curves, Microscope(cache / "tokens"))


@contextmanager
def following() -> Iterator[Callable[[Viewed], None]]:
    """Child process that indexes runs during the block; yields the function that gives it another one."""
    command = [sys.executable, "-m", "posttrain.view.indexer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as indexer:

        def follow(run: Viewed) -> None:
            assert indexer.stdin is not None
            with suppress(BrokenPipeError):  # it has ended with an error, which the page shows
                indexer.stdin.write(json.dumps([str(run.folder.path), str(run.index)]).encode() + b"\n")
                indexer.stdin.flush()

        try:
            yield follow
        finally:
            indexer.kill()
