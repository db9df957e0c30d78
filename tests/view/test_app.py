"""Browser over HTTP: who may ask, and what rollouts, prompts, steps and curves are answered."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
import transformers

from posttrain.config.yaml_file import dump_config, load_config
from posttrain.data.tokenizer import load_tokenizer
from posttrain.diagnosis.causes import Cause
from posttrain.diagnosis.live import write_warnings
from posttrain.errors import ConfigError
from posttrain.rollout.records import file_of
from posttrain.runtime.files import LOCK_NAME, locked
from posttrain.serve.app import listen
from posttrain.view.folder import RunFolder, find_runs
from posttrain.view.indexer import Indexer, index_all
from posttrain.view.queries import connection, make_index, token_texts
from posttrain.view.serve import Viewed, named, viewed
from tests.view.helpers import GROUP, PROMPTS, STAGE, UNSAFE, indexed, make_run, make_sft_run, record, served

pytestmark = pytest.mark.fast

STEPS = range(1, 5)
TOTAL = PROMPTS * GROUP * len(STEPS) + 2
"""Rollouts of a run: with the two from the table of samples, whose step has no record."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Viewed]]:
    folder = tmp_path_factory.mktemp("view")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        made = [make_run(folder / name, STEPS, completion=text) for name, text in (("a", "is 4"), ("b", UNSAFE))]
        yield indexed(*made)


@pytest.fixture(scope="module")
def address(runs: list[Viewed]) -> Iterator[str]:
    with served(runs) as found:
        yield found


def ask(address: str, name: str, /, **parameters: Any) -> Any:
    response = httpx.get(f"{address}api/{name}", params={"run": 0, "stage": STAGE, **parameters})
    assert response.status_code == 200, response.text
    return response.json()


def test_only_the_token_on_loopback_is_answered(address: str) -> None:
    """Red without the comparison of the token, or of the host: another site's name that leads to 127.0.0.1."""
    root = address.removesuffix("secret/")
    for path in ("api/runs", "", "app.js"):
        assert httpx.get(address + path).status_code == 200
        assert httpx.get(f"{root}other/{path}").status_code == 404
        assert httpx.get(address + path, headers={"Host": "example.org"}).status_code == 403
    assert httpx.get(f"{address}%2e%2e/app.py").status_code == 404
    assert httpx.post(f"{address}api/rollouts").status_code == 404


def test_a_page_may_run_its_own_scripts_only(address: str) -> None:
    headers = httpx.get(address).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'self'" in policy and "unsafe" not in policy
    assert headers["Referrer-Policy"] == "no-referrer"


def test_runs(address: str) -> None:
    first, second = ask(address, "runs")
    assert [first["name"], second["name"], first["state"]] == ["a", "b", "live"]
    (stage,) = first["stages"]
    assert (stage["kind"], stage["num_steps"], stage["indexed"]["rollouts"]) == ("rl", 4, TOTAL)
    assert stage["indexed"]["rewards"] == ["low", "strict"] and stage["indexed"]["steps"] == [4, 3, 2, 1, 0]
    assert first["progress"] == {"records": 4, "indexed": 4, "texts": 4, "error": None}
    assert [call["posttrain"] for call in first["versions"]] == ["0.0.9", "0.1.0"]


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({}, TOTAL),
        ({"step_min": 3}, 12),
        ({"step_min": 2, "step_max": 2, "stop": "length"}, PROMPTS),
        ({"reward_min": 0.5}, 7),
        ({"row": 1}, 8),
        ({"text": "IS 4 3"}, 6),
        ({"text": "4 3"}, 6),
        ({"text": "tool"}, 12),
        ({"text": "2+"}, 8),
        ({"text": "i% 4"}, 0),
        ({"text": "i_ 4"}, 0),
    ],
)
def test_rollouts_are_filtered(address: str, given: dict[str, Any], count: int) -> None:
    found = ask(address, "rollouts", **given)
    assert found["total"] == len(found["rows"]) == count


def test_rollouts_are_sorted_and_paged(address: str) -> None:
    """Red if pages are sorted each for itself, or if samples without a number come first."""
    pages = [ask(address, "rollouts", sort="advantage", limit=5, offset=at)["rows"] for at in range(0, TOTAL, 5)]
    values = [row["advantage"] for page in pages for row in page]
    numbers = [value for value in values if value is not None]
    assert len(values) == TOTAL and numbers == sorted(numbers, reverse=True) and values[: len(numbers)] == numbers
    low = ask(address, "rollouts", sort="rewards/low", order="asc", limit=1)["rows"][0]
    assert low["rewards"] == {"low": 0.0, "strict": 0.0}


def test_a_rollout_with_its_tokens(address: str) -> None:
    row = ask(address, "rollouts", step=4, row=1, sample=1)["rows"][0]
    assert (row["staleness"], row["prompt_tokens"], row["sampled_tokens"], row["reward"]) == (1, 4, 8, None)
    found = ask(address, "rollout", id=row["id"])
    assert found["pieces"] == [["prompt", "1+1="], ["sampled", "is 4 4"], ["given", "tool"], ["sampled", "ok"]]
    assert [one["sample"] for one in found["group"]] == [0, 1]
    tokens = ask(address, "tokens", id=row["id"])
    (part,) = tokens["parts"]
    assert "".join(part["texts"]) == "1+1=is 4 4toolok" and part["sampled"].count(True) == 8
    assert part["versions"][4] == 2 and part["turns"][0]["reward"] == 1.0 and tokens["losses"] == []
    assert ask(address, "microscope", step=4) == {"state": "absent"}


def test_prompts_by_pass_rate(address: str) -> None:
    found = ask(address, "prompts", sort="row")
    assert found["bins"] == [1, 2, 3, 4] and [row["row"] for row in found["rows"]] == [0, 1, 2]
    first = found["rows"][0]
    assert (first["count"], first["rate"], first["change"], first["bins"]) == (4, 0.5, 1.0, [0.0, 0.0, 1.0, 1.0])
    assert first["prompt"] == "0+1="


def test_two_steps(address: str) -> None:
    """Means are those that the run logged; else of the record."""
    left, right = ask(address, "compare", step=1, run2=1, stage2=STAGE, step2=4)
    assert (left["means"]["reward"], right["means"]["reward"]) == (0.1, 0.4)
    assert left["means"]["rewards/strict"] == 0.0 and left["whole"] and len(right["samples"]) == PROMPTS * GROUP
    assert UNSAFE in right["samples"][0]["completion"]


def test_a_choice_of_samples_is_not_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if the samples of `samples.jsonl` make the mean of their step, or are all shown under the first one's
    prompt."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_run(tmp_path / "run", [1])
    with served(indexed(folder)) as address:

        def step_0() -> Any:
            return ask(address, "compare", step=0, run2=0, stage2=STAGE, step2=1)[0]

        unknown = step_0()
        assert not unknown["whole"] and set(unknown["means"].values()) == {None}
        assert [one["row"] for one in unknown["samples"]] == ["1+1=", "9*9="]
        assert [len(ask(address, "rollout", id=one["id"])["group"]) for one in unknown["samples"]] == [1, 1]
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 0, "stage": STAGE, "time": 0.0, "reward": 0.62}) + "\n")
        assert step_0()["means"]["reward"] == 0.62


def test_curves(address: str, runs: list[Viewed]) -> None:
    assert ask(address, "metrics")[0] == {STAGE: ["grad_norm", "reward", "rewards/low/mean"]}
    assert [one["values"] for one in ask(address, "curves", name="reward")] == [[0.1, 0.2, 0.3, 0.4]] * 2
    with (runs[0].folder.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "stage": STAGE, "time": 0.0, "reward": 0.5}) + '\n{"step": 6, ')
    assert ask(address, "curves", name="reward")[0]["steps"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "given", "status", "words"),
    [
        ("rollouts", {"run": 7}, 404, "there are runs 0 to 1"),
        ("rollouts", {"sort": "id; DROP TABLE rollouts"}, 400, "unknown column; use one of step"),
        ("rollouts", {"reward_min": "much"}, 400, "reward_min='much' is not a number"),
        ("rollouts", {"reward_min": "nan"}, 400, "reward_min='nan' is not a number"),
        ("rollouts", {"limit": "1e400"}, 400, "limit='1e400' is not a number"),
        ("rollouts", {"limit": "-1"}, 400, "limit='-1' must be a whole number from 1 on"),
        ("rollouts", {"offset": "0.5"}, 400, "offset='0.5' must be a whole number from 0 on"),
        ("rollout", {"id": "nan"}, 400, "id='nan' is not a number"),
        ("rollout", {"id": "99999999999999999999"}, 400, "must be a whole number"),
        ("rollout", {"run": "9" * 5000, "id": "1"}, 404, "run=999999999: there are runs 0 to"),
        ("rollout", {"id": 10**6}, 404, "no such rollout"),
        ("prompts", {"stage": "9-rl"}, 400, "has none of this name"),
        ("microscope", {"stage": "../..", "step": 1}, 400, "has none of this name"),
    ],
)
def test_mistakes_are_said(address: str, name: str, given: dict[str, Any], status: int, words: str) -> None:
    response = httpx.get(f"{address}api/{name}", params={"run": 0, "stage": STAGE, **given})
    assert response.status_code == status and words in response.json()["error"]


def test_the_index_follows_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New, rewritten and removed records; red if a record is known by its step alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_run(tmp_path / "run", [1, 2])
    (run,) = indexed(folder)
    file_of(folder.path / STAGE / "trajectories", 1).unlink()
    for step in (2, 3):
        record(folder.path, step, "was 5", right=True)
    index_all([Indexer(folder, run.index)])
    with served([run]) as address:
        assert ask(address, "rollouts", text="was 5")["total"] == 2 * PROMPTS * GROUP
        assert ask(address, "rollouts", text="is 4")["total"] == 0
        assert ask(address, "runs")[0]["stages"][0]["indexed"]["steps"] == [3, 2, 1, 0]


def test_folders_of_runs(tmp_path: Path) -> None:
    for name in ("x/out", "y/out"):
        (tmp_path / name / STAGE).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("stages: []\n")
    found = find_runs([tmp_path / "x" / "out" / STAGE, tmp_path / "y", tmp_path / "x" / "out"])
    assert [name for name, _ in named(found)] == ["x/out", "y/out"]
    with pytest.raises(ConfigError, match=r"no run: it has no config\.yaml; give the output folder"):
        find_runs([tmp_path])
    with (
        listen("127.0.0.1", 0, "view") as taken,
        pytest.raises(ConfigError, match="cannot be opened .*; give another port"),
    ):
        listen("127.0.0.1", taken.getsockname()[1], "view")


def test_runs_that_begin_end_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if only the runs of the start are shown, if numbers move, or if a stopped run counts as live for a while."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = make_sft_run(tmp_path / "x")
    run = viewed("out", first)
    with served([run], [tmp_path / "x", tmp_path / "a"]) as address:
        with locked(first.path):
            assert [one["state"] for one in ask(address, "runs")] == ["live"]
        assert [one["state"] for one in ask(address, "runs")] == ["stopped"]
        make_run(tmp_path / "a", [1])
        assert [(one["name"], one["run"]) for one in ask(address, "runs")] == [("x/out", 0), ("a/out", 1)]
        assert ask(address, "curves", name="reward", run=1)[0]["values"] == [0.1]
        (first.path / LOCK_NAME).write_text("token another-host")
        assert ask(address, "runs")[0]["state"] == "live"
        os.utime(first.path / "metrics.jsonl", (0, 0))
        assert ask(address, "runs")[0]["state"] == "stopped"
        shutil.rmtree(first.path)
        assert [one["state"] for one in ask(address, "runs")] == ["deleted", "live"]


def test_words_of_a_token_keep_their_space(tmp_path: Path) -> None:
    """Red if tokens are decoded alone, of which SentencePiece's decoder takes the first space."""
    pieces = [("<unk>", 0.0), ("\u2581How", -1.0), ("\u2581many", -1.0), (".", -1.0), ("\u2581", -3.0)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    backend.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    backend.decoder = tokenizers.decoders.Metaspace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "tokenizer")
    make_index(tmp_path / "index.sqlite")
    indexer = Indexer(RunFolder(tmp_path), tmp_path / "index.sqlite")
    indexer._tokenizer = load_tokenizer(tmp_path / "tokenizer")
    with connection(tmp_path / "index.sqlite") as index:
        indexer._add_tokens(index, np.asarray([1, 2, 3, 4]))
        assert token_texts(index, [1, 2, 3, 4]) == {1: " How", 2: " many", 3: ".", 4: " "}


def test_an_index_of_another_version_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_run(tmp_path / "run", [1])
    run = viewed("run", folder)
    before = run.index.read_bytes()
    run.index.write_bytes(before[:60] + b"\0\0\0\x63" + before[64:])
    index_all([Indexer(folder, viewed("run", folder).index)])
    with served([run]) as address:
        assert ask(address, "rollouts")["total"] == PROMPTS * GROUP + 2


def test_settings_beside_their_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run writes them: what was given differs, nothing else; secrets are not shown."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = make_run(tmp_path / "a", STEPS)
    file = run.path / "config.yaml"
    config = load_config(
        tmp_path / "a" / "run.yaml", ["stages.0.optimizer.learning_rate=1e-6", "stages.0.rollout.slots=7"]
    )
    file.write_text(dump_config(config))
    with served([viewed("a", run)]) as address:
        found = {row["name"]: row for row in ask(address, "settings")["settings"]}
        differing = {name: (row["value"], row["default"]) for name, row in found.items() if row["differs"]}
        assert differing == {
            "tensorboard": ("false", "true"),
            "model.tokenizer": ("bytes", "null"),
            "stages.0.rewards.0.fn": ("rewards_of_test.py:low", "null"),
            "stages.0.num_steps": ("4", "100"),
            "stages.0.prompts_per_step": ("2", "8"),
            "stages.0.group_size": ("4", "8"),
            "stages.0.micro_batch_rows": ("4", "null"),
            "stages.0.row_tokens": ("16", "1024"),
            "stages.0.dataset.chat": ("false", "null"),
            "stages.0.sampling.max_tokens": ("6", "512"),
            "stages.0.eval_sampling.max_tokens": ("6", "512"),
            "stages.0.rollout.slots": ("7", "null"),
        } | {name: pair for name, pair in differing.items() if name.startswith("stages.0.eval_sampling.")}
        assert found["stages.0.optimizer.learning_rate"]["value"] in ("1e-06", "1.0e-06", "1.0e-6")
        assert found["stages.0.dataset.path"]["default"] is None, "it had to be given"
        # A file that was written by hand, or by a version without the refusal of secrets.
        text = file.read_text() + "judge: {api_key: sesame, api_key_env: JUDGE, url: 'https://me:sesame@host/x'}\n"
        file.write_text(text)
        answer = ask(address, "settings")
        assert "sesame" not in json.dumps(answer)
        shown = {row["name"]: row for row in answer["settings"]}
        assert shown["judge.api_key_env"]["value"] == "JUDGE" and shown["judge.api_key"]["value"].startswith(
            "(not shown"
        )
        assert not any(row["differs"] for row in answer["settings"]), "of another version"
        file.unlink()
        assert ask(address, "settings")["settings"] == []


def test_warnings_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a run writes, as far as they are written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = make_run(tmp_path / "a", STEPS)
    cause = Cause(name="no_signal", summary=UNSAFE, evidence=["1 of 2"], advice="another reward")
    with served([viewed("a", run)]) as address:
        assert ask(address, "settings")["warnings"] == []
        write_warnings(run.path, STAGE, 3, [cause])
        with (run.path / "warnings.jsonl").open("a") as file:
            file.write('{"stage": "0')
        assert ask(address, "settings")["warnings"] == [
            {"stage": STAGE, "step": 3, "name": "no_signal", "text": f"{UNSAFE}; try: another reward"}
        ]


def test_why(address: str) -> None:
    found = ask(address, "why", run=0)
    assert [stage["stage"] for stage in found["stages"]] == [STAGE] and found["told"] == []
    assert found["stages"][0]["head"].startswith(f"{STAGE}: ")
