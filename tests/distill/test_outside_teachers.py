"""Teachers that are not in the training step: at a server, and on devices of their own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from posttrain.batch import Batch, TopK
from posttrain.cluster import http_teacher as served
from posttrain.cluster.http_teacher import ServedTeacher, ServedTeacherError
from posttrain.cluster.reference import FrozenModel
from posttrain.config import DistillSection, ModelSection, TeacherSection
from posttrain.config.yaml_file import load_config
from posttrain.data.tokenizer import load_tokenizer
from posttrain.distill.teachers import TeacherSource, outside_teacher
from posttrain.errors import ConfigError
from posttrain.mesh import make_mesh, single_device_mesh
from posttrain.stages.context import training_devices
from posttrain.stages.distill import describe
from posttrain.weights.locate import read_model_files
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights
from tests.stages.runs import INIT, lines, write_run
from tests.stages.runs import posttrain as command
from tests.tiny import model_of_fields

VOCAB, ROW = 261, 16


class Server(ThreadingHTTPServer):
    """Answers as vLLM and SGLang do, from a real model; the first requests of a test may fail."""

    def __init__(self, model: Any, row: int = ROW):
        super().__init__(("127.0.0.1", 0), Handler)
        weights = ModelWeights(model)

        @jax.jit
        def said(arrays: Any, tokens: jax.Array) -> jax.Array:
            bound = weights.bind(arrays)
            ones = jnp.ones_like(tokens)
            return jax.nn.log_softmax(bound.logits(bound(tokens, jnp.arange(row)[None], ones)[0])[0])

        self.logps = lambda tokens: np.asarray(
            said(weights.read(), jnp.asarray([tokens + [0] * (row - len(tokens))], jnp.int32))
        )
        self.failures: list[int] = []
        self.bodies: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.failures:
            self.send_error(self.server.failures.pop(0))
            return
        reply = {"/v1/completions": self._vllm, "/generate": self._sglang}[self.path](body)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def _best(self, tokens: list[int], k: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
        logps = self.server.logps(tokens)
        return [(row, np.argsort(-row)[:k], token) for row, token in zip(logps, tokens[1:], strict=False)]

    def _vllm(self, body: dict[str, Any]) -> Any:
        assert body["model"] == "big" and self.headers["Authorization"] == "Bearer secret"
        entries = [
            {str(i): {"logprob": float(row[i]), "rank": 1, "decoded_token": "?"} for i in {*map(int, best), token}}
            for row, best, token in self._best(body["prompt"], body["prompt_logprobs"])
        ]
        return {"choices": [{"text": "?", "prompt_logprobs": [None, *entries]}]}

    def _sglang(self, body: dict[str, Any]) -> Any:
        found = self._best(body["input_ids"], body["top_logprobs_num"])
        own = [[float(row[token]), token, None] for row, _, token in found]
        best = [[[float(row[i]), int(i), None] for i in ids] for row, ids, _ in found]
        first = [None, body["input_ids"][0], None]
        return {"meta_info": {"input_token_logprobs": [first, *own], "input_top_logprobs": [None, *best]}}

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "big"
    fields = {**INIT, "vocab_size": VOCAB, "hidden_size": 32, "initializer_range": 0.5}
    save_model(model_of_fields(fields), folder, tokenizer=load_tokenizer("bytes"))
    return folder


@pytest.fixture(scope="module")
def model() -> Any:
    fields = {**INIT, "vocab_size": VOCAB, "hidden_size": 32, "initializer_range": 0.5}
    return model_of_fields(fields)


@pytest.fixture
def server(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(served, "FIRST_WAIT_S", 0.01)
    with serving(Server(model), monkeypatch) as made:
        yield made


@contextmanager
def serving(made: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("KEY_OF_TEST", "secret")
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def section(at: Server, **changes: Any) -> TeacherSection:
    fields = {"path": "big", "url": f"{at.url}/v1", "api_key_env": "KEY_OF_TEST", "concurrency": 3}
    return TeacherSection(**{**fields, **changes})


def rows() -> Batch:
    """Sequences of 7 and 9 tokens in a row, and one of 5; the last ones of each have loss."""
    segments = np.zeros((2, ROW), np.int32)
    segments[0, :7], segments[0, 7:], segments[1, :5] = 1, 2, 1
    positions = np.concatenate([np.arange(7), np.arange(9), np.arange(5), np.zeros(11)]).reshape(2, ROW)
    return Batch(
        tokens=np.random.default_rng(0).integers(0, VOCAB, (2, ROW)).astype(np.int32),
        positions=positions.astype(np.int32),
        segments=segments,
        loss_weight=((positions > 1) & (segments > 0)).astype(np.float32),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_a_server_says_what_its_model_says(server: Server, model: Any, api: str) -> None:
    """After two failures that pass."""
    there = section(server) if api == "vllm" else section(server, url=server.url, server="sglang")
    server.failures = [503, 429]
    batch, k = rows(), 5
    here = FrozenModel(model, single_device_mesh(), temperature=1.0, k=k)
    found = ServedTeacher(there, num_ids=VOCAB, k=k).top_k(batch)
    assert len(server.bodies) == 3 + 2
    counts = batch.loss_weight > 0
    expected = here.top_k(batch)
    assert isinstance(found, TopK)
    np.testing.assert_array_equal(found.ids[counts], expected.ids[counts])
    for name in ("logps", "tail", "scaled_tail", "token_logps"):
        np.testing.assert_allclose(getattr(found, name)[counts], getattr(expected, name)[counts], atol=1e-4)
    logps = ServedTeacher(there, num_ids=VOCAB, k=1).logps(batch)
    np.testing.assert_allclose(logps[counts], here.logps(batch)[counts], atol=1e-4)
    fewer = ServedTeacher(there, num_ids=50, k=k).top_k(batch)
    assert (fewer.ids[counts] >= 50).any() and (fewer.logps[fewer.ids >= 50] < -1e29).all()


def test_a_server_that_fails_is_no_zero(server: Server, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(**changes: Any) -> Any:
        return ServedTeacher(section(server, **changes), num_ids=VOCAB, k=5).top_k(rows())

    server.failures = [500] * 50
    with pytest.raises(ServedTeacherError, match="failed 5 times; the last: HTTP 500"):
        ask()
    server.failures = [400] * 50
    with pytest.raises(ConfigError, match=r"refused the request \(HTTP 400.*max-logprobs"):
        ask()
    server.failures = []
    server.logps = lambda tokens: np.full((ROW, VOCAB), np.nan)  # type: ignore[method-assign]
    with pytest.raises(ServedTeacherError, match="nan is no log-probability"):
        ask()
    monkeypatch.delenv("KEY_OF_TEST")
    with pytest.raises(ConfigError, match="api_key_env=KEY_OF_TEST"):
        ask()


def distill(teacher: Path, **changes: Any) -> dict[str, Any]:
    stage = {
        "kind": "distill",
        "dataset": {"path": "rows.jsonl", "chat": False},
        "teachers": [{"path": str(teacher)}],
        "top_k": VOCAB,
        "num_steps": 3,
        "batch_rows": 4,
        "row_tokens": ROW,
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    }
    return {**stage, **changes}


@pytest.mark.thorough
def test_all_ways_to_a_teacher_give_the_same_losses(tmp_path: Path, teacher: Path, server: Server) -> None:
    """In the step, at a server, from a cache that the server filled, and on four of the eight devices."""
    at_server = {"path": str(teacher), "model": "big", "url": f"{server.url}/v1", "api_key_env": "KEY_OF_TEST"}
    ways = {
        "inside": {"top_k": None},
        "served": {"teachers": [at_server]},
        "cached": {"teachers": [at_server], "cache": str(tmp_path / "cache")},
        "apart": {"teachers": [{"path": str(teacher), "mesh": {"fsdp": 4}}]},
    }
    losses = {}
    for name, changes in ways.items():
        file = write_run(tmp_path / name, distill(teacher, **changes))
        if name == "cached":
            assert command("distill", "--cache", file).code == 0
            asked = len(server.bodies)
        done = command("run", file, devices=8 if name == "apart" else 1)
        assert done.code == 0, done.err
        losses[name] = [line["loss"] for line in lines(tmp_path / name / "out")]
    assert len(server.bodies) == asked, "a cache asks nobody"
    for name in ("served", "cached", "apart"):
        np.testing.assert_allclose(losses[name], losses["inside"], rtol=5e-3, err_msg=name)


def test_an_aligned_teacher_at_a_server_says_what_a_plain_one_does(
    tmp_path: Path, teacher: Path, server: Server
) -> None:
    """Where the tokens are equal: bit for bit in their caches."""
    at_server = {"path": str(teacher), "model": "big", "url": f"{server.url}/v1", "api_key_env": "KEY_OF_TEST"}
    records = {}
    for tokens in ("same", "align"):
        cache = tmp_path / tokens / "cache"
        stage = distill(teacher, teachers=[{**at_server, "tokenizer": tokens}], cache=str(cache), top_k=5)
        asked = len(server.bodies)
        written = command("distill", "--cache", write_run(tmp_path / tokens, stage))
        assert written.code == 0 and len(server.bodies) > asked, written.err
        records[tokens] = [np.load(file) for file in sorted(cache.rglob("*.npy"))]
    assert len(records["same"]) > 0 and max(one.size for one in records["same"]) > 100
    for one, other in zip(records["align"], records["same"], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_teacher_on_other_devices_leaves_nothing_on_those_of_training(tmp_path: Path, teacher: Path) -> None:
    two = [{"path": str(teacher), "mesh": {"fsdp": 2}}, {"path": str(teacher), "name": "b", "mesh": {"fsdp": 2}}]
    file = write_run(tmp_path, distill(teacher, teachers=two, teacher_column="who"))
    config = load_config(file)
    training, stage = set(training_devices(config)), config.stages[0]
    assert isinstance(stage, DistillSection) and len(training) == 4
    used: list[set[jax.Device]] = []
    for one in stage.teachers:
        source = TeacherSource(section=one, files=read_model_files(str(teacher)))
        made = outside_teacher(source, ModelSection(path=str(teacher)), load_tokenizer("bytes"), stage, 1.0)
        assert isinstance(made, FrozenModel)
        used.append({device for array in made.weights.values() for device in array.devices()})
    assert [len(devices) for devices in used] == [2, 2]
    assert not used[0] & used[1] and not (used[0] | used[1]) & training
    full = load_config(file, ["stages.0.teachers.0.mesh.fsdp=6"])
    with pytest.raises(ConfigError, match="their meshes take 8 devices, and there are 8"):
        training_devices(full)


@pytest.mark.thorough
def test_a_teacher_on_the_devices_of_training_in_a_mesh_of_its_own(tmp_path: Path, teacher: Path) -> None:
    shared = {"path": str(teacher), "mesh": {"data": 2, "fsdp": 4}, "devices": "shared"}
    file = write_run(tmp_path, distill(teacher, teachers=[shared], top_k=4))
    config = load_config(file)
    stage, mesh = config.stages[0], make_mesh(config.mesh, training_devices(config))
    assert isinstance(stage, DistillSection) and mesh.shape["fsdp"] == 8
    source = TeacherSource(section=stage.teachers[0], files=read_model_files(str(teacher)))
    plain = TeacherSource(section=TeacherSection(path=str(teacher)), files=source.files)
    own, same = (
        outside_teacher(one, ModelSection(path=str(teacher)), load_tokenizer("bytes"), stage, 1.0, 4, mesh)
        for one in (source, plain)
    )
    assert isinstance(own, FrozenModel) and isinstance(same, FrozenModel)
    placed = next(iter(own.weights.values())).sharding
    assert isinstance(placed, NamedSharding) and placed.mesh.shape["fsdp"] == 4
    assert placed.device_set == {*mesh.devices.flat}
    tokens = np.arange(1, 65, dtype=np.int32).reshape(8, 8)
    ones = np.ones_like(tokens)
    places, weight = np.tile(np.arange(8, dtype=np.int32), (8, 1)), ones.astype(np.float32)
    batch = Batch(tokens=tokens, positions=places, segments=ones, loss_weight=weight)
    for one, other in zip(jax.tree.leaves(own.top_k(batch)), jax.tree.leaves(same.top_k(batch)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)
    assert "on the student's devices in a mesh of its own, before each step" in describe(stage, None, 8)
    with pytest.raises(ConfigError, match="teachers: big: mesh: .* must multiply to the number of devices, 8"):
        training_devices(load_config(file, ["stages.0.teachers.0.mesh={fsdp: 3}"]))


def test_settings_of_outside_teachers(tmp_path: Path, teacher: Path) -> None:
    file = write_run(tmp_path, distill(teacher, teachers=[{"path": str(teacher), "url": "http://127.0.0.1:1/v1"}]))
    said = command("check", file).out
    assert "(served at http://127.0.0.1:1/v1)" in said
    assert f"its vLLM server needs --max-logprobs {VOCAB}, for {VOCAB} log-probabilities" in " ".join(said.split())
    for override, told in (("top_k=20", False), ("top_k=21", True), ("teachers.0.server=sglang", False)):
        assert ("--max-logprobs" in command("check", file, f"stages.0.{override}").out) == told, override
    cases = {
        "stages.0.temperature=2": "returns its distribution at temperature 1, not at 2.0",
        "stages.0.teachers.0.dtype=bfloat16": "dtype is for a teacher without url",
        "stages.0.teachers.0.mesh={fsdp: 4}": "and no url",
        "stages.0.teachers=[{path: x, model: y}]": "model is for a teacher with url",
        "stages.0.teachers=[{path: x, mesh: {data: 2}}]": "give the number of devices on each axis",
        "stages.0.teachers=[{path: x, devices: shared}]": "devices=shared has no effect without mesh",
    }
    for override, text in cases.items():
        assert text in command("check", file, override).error, override
