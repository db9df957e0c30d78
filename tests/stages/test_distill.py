"""Stages of distillation: a teacher in the step, a cache in its place, several teachers, and pairs that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posttrain
from posttrain.data.tokenizer import load_tokenizer
from posttrain.distill.cache import RecordFormat
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.kernels.logits.divergence import Divergence
from posttrain.kernels.logits.token_stats import Teacher, token_stats, top_k
from posttrain.runs.environment import versions
from posttrain.runs.folder import versions_of
from posttrain.weights.load import init_model, load_model
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights
from tests.stages.runs import INIT, ROWS, check_data_wait, few_devices, inside, lines, write_run
from tests.stages.runs import posttrain as command

STORIES = "models/stories260k"
TEXT = "data/text/tinystories_v2gpt4_train_head.jsonl"


def distill_stage(**changes: Any) -> dict[str, Any]:
    stage = {
        "kind": "distill",
        "dataset": {"path": "rows.jsonl", "chat": False},
        "eval_dataset": {"path": "rows.jsonl", "chat": False, "limit": 5},
        "teachers": [{"path": "teacher"}],
        "num_steps": 3,
        "batch_rows": 4,
        "row_tokens": 16,
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    }
    return {**stage, **changes}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two teachers of random weights, large enough to be sure of what they say; one has surplus rows."""
    folder = tmp_path_factory.mktemp("teachers")
    for seed, (name, vocab) in enumerate({"teacher": 261, "other": 264}.items()):
        fields = {**INIT, "vocab_size": vocab, "hidden_size": 32, "initializer_range": 0.5}
        save_model(init_model(fields, dtype=jnp.float32, seed=seed), folder / name, tokenizer=load_tokenizer("bytes"))
    return folder


@pytest.fixture
def folder(tmp_path: Path, teachers: Path) -> Path:
    for name in ("teacher", "other"):
        shutil.copytree(teachers / name, tmp_path / name)
    return tmp_path


def test_with_a_teacher_in_the_step_and_from_its_cache(folder: Path) -> None:
    """The same steps, but for what the cache leaves out; with the cache the teacher may be gone."""
    live = write_run(folder, distill_stage(), name="live.yaml", output=str(folder / "live"))
    cache = {"cache": str(folder / "cache"), "top_k": 261}
    cached = write_run(folder, distill_stage(**cache), name="cached.yaml")
    assert "teacher teacher (in the training step)" in command("check", live).out
    with inside(folder):
        missing = command("run", cached)
        assert "write it with posttrain distill --cache" in missing.error
        written = command("distill", "--cache", cached)
        assert written.code == 0, written.err
        again = command("distill", "--cache", cached)
        assert again.code == 0 and "its cache is whole" in again.out
        assert {json.dumps(versions_of(kept)) for kept in Path("cache", "teacher").iterdir()} == {
            json.dumps([versions()])
        }
        assert command("run", live).code == 0
        shutil.rmtree(folder / "teacher")
        outcome = command("run", cached)
    assert outcome.code == 0, outcome.err
    assert "its cache alone is used" in outcome.out or "no network: the teacher" in outcome.out
    steps = [list(lines(folder / name)) for name in ("live", "out")]
    assert len(steps[0]) == len(steps[1]) == 5
    for name in ("live", "out"):
        check_data_wait(folder / name)
    for one, other in zip(*steps, strict=True):
        for name in one.keys() & other.keys():
            if name.startswith(("loss", "distill/", "grad_norm", "eval/")):
                assert other[name] == pytest.approx(one[name], rel=0.01, abs=1e-3), (one["step"], name)
    for line in steps[0][1:-1]:
        assert line["distill/student_perplexity"] == pytest.approx(np.exp(line["nll"]), rel=1e-4)
        assert line["distill/student_nll"] == pytest.approx(line["nll"], rel=1e-5)
        assert line["distill/teacher_perplexity"] == pytest.approx(np.exp(line["distill/teacher_nll"]), rel=1e-4)
    first, last = steps[0][0], steps[0][-1]
    assert last["eval/distill/kl"] < first["eval/distill/kl"]
    result = json.loads((folder / "live/0-distill/result.json").read_text())
    said = [f"eval/distill/{what}" for what in ("kl", "divergence", "student_perplexity", "teacher_perplexity")]
    for name in ("eval/nll", *said):
        assert last[f"{name}_low"] < last[name] < last[f"{name}_high"]
        if not name.endswith("perplexity"):
            assert result["difference"][name]["mean"] == pytest.approx(last[name] - first[name], rel=1e-3)
            assert result["difference"][name]["n"] == 5
    for end in ("", "_low"):
        assert last[f"eval/perplexity{end}"] == pytest.approx(np.exp(last[f"eval/nll{end}"]))


def test_a_cache_is_read_by_content(folder: Path) -> None:
    """One corrected row is scored alone. What another text, another temperature or another teacher would say is
    refused by name, and never read."""

    def cached(**changes: Any) -> Path:
        dataset = {"path": "texts.jsonl", "chat": False, **changes.pop("dataset", {})}
        made = distill_stage(cache=str(folder / "cache"), top_k=261, dataset=dataset, eval_dataset=None, num_steps=1)
        number = len(list(folder.glob("*.yaml")))
        return write_run(folder, {**made, **changes}, name=f"{number}.yaml", output=str(folder / f"out-{number}"))

    def write(rows: Sequence[Any]) -> None:
        (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def kl(file: Path) -> float:
        outcome = command("run", file)
        assert outcome.code == 0, outcome.err
        return float(
            next(line["distill/kl"] for line in lines(file.parent / f"out-{file.stem}") if "distill/kl" in line)
        )

    with inside(folder):
        write(ROWS)
        written = command("distill", "--cache", cached())
        assert written.code == 0 and f"{len(ROWS)} of {len(ROWS)} rows scored" in written.out, written.err
        write([*ROWS[:5], {**ROWS[5], "completion": "other"}, *ROWS[6:]])
        refused = command("run", cached())
        assert refused.code == 2 and f"of {len(ROWS)} rows of texts.jsonl, 1 (row 5 is the first)" in refused.error
        written = command("distill", "--cache", cached())
        assert written.code == 0 and f"1 of {len(ROWS)} rows scored" in written.out, written.err
        again = command("distill", "--cache", cached())
        assert again.code == 0 and "rows scored" not in again.out
        live = kl(cached(cache=None, top_k=None))
        assert kl(cached()) == pytest.approx(live, rel=1e-3)
        # The same dataset behind another text: no row is known.
        refused = command("run", cached(dataset={"prompt": "Q: {prompt}"}))
        assert refused.code == 2 and f"{len(ROWS)} (row 0 is the first)" in refused.error, refused.error
        for change, name in ({"temperature": 2.0}, "temperature=1.0, and now it is 2.0"), ({"top_k": 5}, "top_k=261"):
            refused = command("run", cached(**change))
            assert refused.code == 2 and f"was written with {name}" in refused.error
        # Another teacher behind the same name, of the same sizes and shapes.
        fields = {**INIT, "vocab_size": 261, "hidden_size": 32, "initializer_range": 0.5}
        save_model(init_model(fields, dtype=jnp.float32, seed=9), folder / "teacher", tokenizer=load_tokenizer("bytes"))
        refused = command("run", cached())
        assert refused.code == 2 and "was written with teacher=" in refused.error
        written = command("distill", "--cache", cached())
        assert written.code == 0 and f"{len(ROWS)} of {len(ROWS)} rows scored" in written.out, written.err
        other = kl(cached(cache=None, top_k=None))
        assert other != pytest.approx(live, rel=5e-3) and kl(cached()) == pytest.approx(other, rel=1e-3)
        shutil.rmtree(folder / "teacher")
        refused = command("run", cached())
        assert refused.code == 2 and "has records of 2 states of teacher" in refused.error


@pytest.mark.thorough
def test_several_teachers(folder: Path) -> None:
    """One of them, or shares of both, in the step; one has more rows in its vocabulary than there are tokens.

    Which row of the dataset says so: `test_whose_a_row_is`, `test_arrays_of_a_row`.
    """
    names = ("teacher", "other")

    def stage(listed: Sequence[str], **changes: Any) -> dict[str, Any]:
        sections = [{"path": name} for name in listed]
        return distill_stage(teachers=sections, eval_dataset=None, num_steps=1, **changes)

    def give(of_row: Any) -> None:
        rows = [{**row, "who": of_row} for row in ROWS]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def first_kl(of_row: Any, listed: Sequence[str]) -> float:
        """Of the untrained student, before the first update; `of_row`: the column."""
        column = {"teacher_column": "who"} if len(listed) > 1 else {}
        output = folder / f"out-{len(list(folder.iterdir()))}"
        file = write_run(folder, stage(listed, **column), output=str(output))
        give(of_row)
        outcome = command("run", file)
        assert outcome.code == 0, outcome.err
        return next(line["distill/kl"] for line in lines(output) if "distill/kl" in line)

    alone = {name: first_kl(name, [name]) for name in names}
    assert alone["teacher"] != pytest.approx(alone["other"], rel=0.01)
    assert first_kl("other", names[::-1]) == pytest.approx(alone["other"], rel=1e-5)
    both = first_kl({"teacher": 1, "other": 3}, names)
    assert both == pytest.approx(0.25 * alone["teacher"] + 0.75 * alone["other"], rel=1e-5)

    refused = write_run(folder, stage(names))
    assert "several teachers need teacher_column" in command("check", refused).error
    file = write_run(folder, stage(names, teacher_column="who"))
    give("other")
    checked = command("check", file)
    assert checked.code == 0, checked.err
    assert "teacher other: 3 rows of its vocabulary stand for no token of the student" in checked.out


def test_pairs_that_do_not_fit(folder: Path, shared: Path) -> None:
    cases = [
        ({"path": str(shared / STORIES)}, "tokens are others in"),
        ({"path": "./absent"}, "absent"),
    ]
    for teacher, text in cases:
        error = command("check", write_run(folder, distill_stage(teachers=[teacher]))).error
        assert text in error
    small = write_run(folder, distill_stage(row_tokens=128))
    assert "row_tokens=128 must be at most max_position_embeddings=64" in command("check", small).error


def test_from_python(folder: Path) -> None:
    with inside(folder):
        run = posttrain.Distill(
            {"init": INIT, "tokenizer": "bytes"},
            "teacher",
            {"path": "rows.jsonl", "chat": False},
            output="python",
            seed=1,
            row_tokens=16,
            beta=0.5,
        )
        section = run.config.stages[0]
        assert section.kind == "distill" and section.teachers[0].path == "teacher" and section.beta == 0.5
        with pytest.raises(ValueError, match="set teacher, or teachers for several"):
            posttrain.Distill({"init": INIT}, "teacher", "rows.jsonl", teachers=[{"path": "x"}])


def test_a_cache_from_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in memory too; a run reads it and loads no teacher."""
    rows = [{"prompt": f"{number}+2=", "completion": str(number + 2)} for number in range(6)]

    def run(**more: Any) -> posttrain.Distill:
        return posttrain.Distill(
            {"init": INIT, "tokenizer": "bytes"},
            "teacher",
            rows,
            chat=False,
            output="python-cached",
            row_tokens=16,
            batch_rows=4,
            num_steps=2,
            tensorboard=False,
            mesh={"fsdp": 1},
            **more,
        )

    with inside(folder), few_devices(1):
        with pytest.raises(ValueError, match=r"^pt\.Distill: write_cache needs .*; give cache=FOLDER$"):
            run().write_cache()
        cached = run(cache="cache-python")
        with pytest.raises(ValueError, match=r"is empty; .* or write_cache\(\) in Python"):
            cached.fit()
        assert cached.write_cache() == Path("cache-python")
        scored = {file: file.stat().st_mtime_ns for file in Path("cache-python").rglob("*.npy")}
        assert scored and run(cache="cache-python").write_cache() == Path("cache-python")
        assert {file: file.stat().st_mtime_ns for file in Path("cache-python").rglob("*.npy")} == scored
        monkeypatch.setattr("posttrain.stages.distill.load_teacher", None)
        result = cached.fit()
        assert result.finished and result.metrics[-1]["distill/kl"] > 0


def test_a_stopped_cache_from_python_ends_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(config: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("posttrain.runs.write_teacher_cache.write_caches", stop)
    run = posttrain.Distill("student", "teacher", "rows.jsonl", output=tmp_path, row_tokens=16, cache=str(tmp_path))
    with pytest.raises(KeyboardInterrupt) as stopped:
        run.write_cache()
    assert stopped.value.code == 130  # type: ignore[attr-defined]
    assert capsys.readouterr().err == "interrupted; run the same script again to resume\n"
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    with pytest.raises(ValueError, match="write_cache runs in one process"):
        run.write_cache()


@pytest.mark.thorough
def test_runs_from_a_cache_of_64_ids_are_those_with_the_teacher(shared: Path, tmp_path: Path) -> None:
    """On real stories, through training: losses and held-out KL within 1 %, that of the same student within 0.01 nat;
    a reverse KL is a lower bound."""
    student = {**INIT, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 256}
    text = str(shared / TEXT)
    stage = distill_stage(
        teachers=[{"path": str(shared / STORIES)}],
        dataset={"path": text, "limit": 60},
        eval_dataset={"path": text, "skip": 1600, "limit": 8},
        overlong="truncate",
        num_steps=12,
        row_tokens=192,
        # Far below what makes steps jump, so that what the cache leaves out is not multiplied.
        optimizer={"learning_rate": 3e-3},
    )
    model = {"model": {"init": student, "tokenizer": str(shared / STORIES)}}
    found: dict[str, list[dict[str, Any]]] = {}
    for name, changes in {
        "live": {},
        "cached": {"cache": str(tmp_path / "cache")},
        "live-reverse": {"beta": 1.0, "num_steps": 2},
        "cached-reverse": {"beta": 1.0, "num_steps": 2, "cache": str(tmp_path / "cache")},
    }.items():
        file = write_run(tmp_path, {**stage, **changes}, name=f"{name}.yaml", output=str(tmp_path / name), **model)
        if name == "cached":
            done = command("distill", "--cache", file)
            assert "182 bytes for each token" in done.out, done.err
        if name == "cached-reverse":
            assert "beta=1 from a cache is a lower bound" in command("check", file).out
        outcome = command("run", file)
        assert outcome.code == 0, outcome.err
        found[name] = lines(tmp_path / name)
    pairs = list(zip(found["live"], found["cached"], strict=True))
    assert all(one.keys() == other.keys() for one, other in pairs)
    losses = [(one["loss"], other["loss"]) for one, other in pairs if "loss" in one]
    held_out = [(one["eval/distill/kl"], other["eval/distill/kl"]) for one, other in pairs if "eval/distill/kl" in one]
    print(f"losses {losses}; held-out KL {held_out}")
    # At first of the same weights; later of students that learned from the one and from the other.
    for live, cached in (*losses, *held_out):
        assert cached == pytest.approx(live, rel=0.01)
    assert held_out[0][1] == pytest.approx(held_out[0][0], abs=0.01)
    assert losses[-1][0] < 0.95 * losses[0][0]
    live, cached = (found[f"{name}-reverse"][0]["eval/distill/divergence"] for name in ("live", "cached"))
    print(f"reverse KL of a student of random weights: {live:.3f} nat, from the cache {cached:.3f}")
    assert 0.3 * live < cached < live


@pytest.mark.thorough
def test_best_ids_of_a_real_model(shared: Path) -> None:
    """64 ids in 182 bytes: the KL of a near and of a far student on held-out text within 0.01 nat and 1 %."""
    path = shared / STORIES
    tokenizer, teacher = load_tokenizer(path), load_model(path, dtype=jnp.float32)
    rows = (shared / TEXT).read_text().splitlines()[1500:1504]
    ids = np.zeros((4, 192), np.int32)
    for row, text in zip(ids, rows, strict=True):
        row[:] = [*tokenizer.prefix_ids, *tokenizer.encode(json.loads(text)["text"])][:192]
    ones, positions = np.ones_like(ids), np.broadcast_to(np.arange(192, dtype=np.int32), ids.shape)
    inputs = tuple(map(jnp.asarray, (ids, positions, ones)))
    weights = ModelWeights(teacher)

    @jax.jit
    def said(arrays: Any) -> Any:
        bound = weights.bind(arrays)
        return top_k(bound.logits, bound(*inputs)[0], inputs[0], k=64, temperature=1.0, vocab_size=512)

    form = RecordFormat(512, 64)
    flat = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), said(weights.read()))
    records = form.encode(flat)
    assert records.shape[1] == 182
    kept = jax.tree.map(lambda x: jnp.asarray(x).reshape(4, 192, *x.shape[1:]), form.decode(records))

    @jax.jit
    def kl(arrays: Any, taught: Any) -> Any:
        student, bound = weights.bind(arrays), weights.bind(taught)
        hidden = student(*inputs)[0]
        kind = Terms(divergence=Divergence(beta=0.0, temperature=1.0))
        return [
            jnp.sum(token_stats(student.logits, hidden, inputs[0], inputs[2], temperature=1.0, vocab_size=512,
                                terms=kind, teachers=[teacher]).divergence) / (4 * 191)
            for teacher in (Teacher(bound.logits, bound(*inputs)[0]), kept)
        ]  # fmt: skip

    for noise, least in ((0.05, 0.02), (0.2, 1.0)):
        keys = jax.random.split(jax.random.key(0), len(weights.read()))
        student = {
            path: w + noise * jnp.std(w) * jax.random.normal(key, w.shape)
            for key, (path, w) in zip(keys, sorted(weights.read().items()), strict=True)
        }
        exact, short = map(float, kl(student, weights.read()))
        assert exact > least
        assert abs(exact - short) < min(0.01, 0.01 * exact), (exact, short)
