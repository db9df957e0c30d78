"""Teachers with tokens of their own: the ordinary path where the tokens are equal, what is refused, what is learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.data.tokenizer import load_tokenizer
from posttrain.weights.save import save_model
from posttrain.weights.scalar_head import add_scalar_head
from tests.distill.test_outside_teachers import Server, serving
from tests.stages.runs import INIT, ROWS, lines, posttrain, rl_stage, start, write_run
from tests.tiny import model_of_fields

STORIES = "models/stories260k"
TEXT = "data/text/tinystories_v2gpt4_train_head.jsonl"
SAME = ("loss", "grad_norm", "distill/", "eval/")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "big"
    fields = {**INIT, "vocab_size": 261, "hidden_size": 32, "initializer_range": 0.5}
    save_model(model_of_fields(fields), folder, tokenizer=load_tokenizer("bytes"))
    return folder


def stage(teacher: Path, **changes: Any) -> dict[str, Any]:
    fields = {
        "kind": "distill",
        "dataset": {"path": "rows.jsonl", "chat": False},
        "eval_dataset": {"path": "rows.jsonl", "chat": False, "limit": 5},
        "teachers": [{"path": str(teacher), "tokenizer": "align"}],
        "top_k": 20,
        "num_steps": 3,
        "batch_rows": 4,
        "row_tokens": 16,
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    }
    return {**fields, **changes}


@pytest.mark.thorough
@pytest.mark.parametrize("cached", [False, True])
def test_equal_tokens_are_the_ordinary_path(tmp_path: Path, teacher: Path, cached: bool) -> None:
    """Bit for bit the run whose teacher gives its `top_k` from devices of its own, live and from a cache."""
    apart = {"path": str(teacher), "mesh": {"fsdp": 1}}
    found = {}
    for name, changes in {"ordinary": {}, "aligned": {"tokenizer": "align"}}.items():
        cache = {"cache": str(tmp_path / name / "cache")} if cached else {}
        file = write_run(tmp_path / name, stage(teacher, teachers=[{**apart, **changes}], num_steps=2, **cache))
        if cached:
            written = posttrain("distill", "--cache", file, devices=2)
            assert written.code == 0, written.err
        done = posttrain("run", file, devices=2)
        assert done.code == 0, done.err
        found[name] = lines(tmp_path / name / "out")
    for one, two in zip(found["aligned"], found["ordinary"], strict=True):
        for key in two:
            if key.startswith(SAME):
                assert one[key] == two[key], (one["step"], key)
    assert [line["distill/covered_tokens"] for line in found["aligned"] if "distill/covered_tokens" in line] == [
        1.0
    ] * 2


@pytest.mark.thorough
def test_merged_groups_of_equal_tokens_are_the_ordinary_run(tmp_path: Path, teacher: Path) -> None:
    """Each token is a group and every id is known: the run whose teacher is in the step. A cache says nearly the
    same."""
    gold = [{"path": str(teacher), "tokenizer": "gold"}]
    cache = {"cache": str(tmp_path / "cache")}
    stages = {
        "ordinary": stage(teacher, teachers=[{"path": str(teacher)}], top_k=None),
        "gold": stage(teacher, teachers=gold, top_k=261),
        "cached": stage(teacher, teachers=gold, top_k=261, **cache),
    }
    found = {}
    for name, made in stages.items():
        file = write_run(tmp_path / name, {**made, "num_steps": 2, "beta": 0.5})
        if name == "cached":
            written = posttrain("distill", "--cache", file)
            assert written.code == 0, written.err
        done = posttrain("run", file)
        assert done.code == 0, done.err
        found[name] = lines(tmp_path / name / "out")
    for one, two, kept in zip(found["ordinary"], found["gold"], found["cached"], strict=True):
        for key in one:
            if key.startswith(("loss", "grad_norm", "distill/", "eval/distill/")):
                assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), (one["step"], key)
                assert kept[key] == pytest.approx(one[key], rel=0.03, abs=0.01), (one["step"], key)
        if "distill/covered_tokens" in two:
            assert (
                two["distill/covered_tokens"] == 1
                and two["distill/sorted_l1"] == 0 <= kept["distill/sorted_l1"] < 1e-10
            )


@pytest.mark.thorough
def test_samples_in_groups_of_equal_tokens_are_the_ordinary_run(tmp_path: Path, teacher: Path) -> None:
    """The teacher reads the text of the student's own samples, here of letters, which are its tokens as well: in losses
    and in the reverse KL on held-out prompts it is the run whose teacher sees the student's tokens."""
    letters = {"max_tokens": 6, "temperature": 0.8, "allowed_token_ids": [*range(97, 123)]}
    found = {}
    for name, changes in {"ordinary": {}, "gold": {"tokenizer": "gold"}}.items():
        made = stage(teacher, teachers=[{"path": str(teacher), **changes}], top_k=261 if changes else None)
        file = write_run(tmp_path / name, {**made, "on_policy": 1.0, "sampling": letters, "num_steps": 2, "beta": 1.0})
        done = posttrain("run", file)
        assert done.code == 0, done.err
        found[name] = lines(tmp_path / name / "out")
    for one, two in zip(found["ordinary"], found["gold"], strict=True):
        for key in one:
            if key.startswith(("loss", "grad_norm", "distill/", "eval/distill/", "sampling/")):
                assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), (one["step"], key)
    assert [line["distill/covered_tokens"] for line in found["gold"] if "distill/covered_tokens" in line] == [1.0] * 2
    assert sum("eval/distill/reverse_kl" in line for line in found["gold"]) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", ["align", "gold"])
def test_all_ways_to_a_teacher_of_other_tokens_are_alike(
    tmp_path: Path, shared: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pieces of words, where the student's tokens are bytes: on the devices of training and on others, at a server,
    and in caches that one in this process and the server filled, up to the rounding of a cache."""
    folder, cache = tmp_path / "big", {"cache": str(tmp_path / "cache")}
    pieces = load_tokenizer(str(shared / STORIES))
    model = model_of_fields({**INIT, "vocab_size": pieces.num_ids, "initializer_range": 0.5})
    save_model(model, folder, tokenizer=pieces)
    here = {"path": str(folder), "tokenizer": tokenizer}
    rows = [{"prompt": f"Say {n}.", "completion": f"Once upon a time there were {n} girls."} for n in range(24)]
    losses: dict[str, list[list[float]]] = {}
    with serving(Server(model, row=64), monkeypatch) as server:
        there = {**here, "model": "big", "url": f"{server.url}/v1", "api_key_env": "KEY_OF_TEST"}
        ways: dict[str, dict[str, Any]] = {
            "here": {"teachers": [here]},
            "apart": {"teachers": [{**here, "mesh": {"fsdp": 4}}]},
            "served": {"teachers": [there]},
            "cached": {"teachers": [here], **cache},
            "cached from a server": {"teachers": [there], "cache": f"{cache['cache']} of a server"},
        }
        for name, changes in ways.items():
            made = stage(folder, **changes, row_tokens=64, num_steps=2, top_k=40)
            file = write_run(tmp_path / name, made)
            (tmp_path / name / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            if name.startswith("cached"):
                assert posttrain("distill", "--cache", file).code == 0
            done = posttrain("run", file, devices=8 if name == "apart" else 1)
            assert done.code == 0, done.err
            told = lines(tmp_path / name / "out")
            losses[name] = [
                [line[f"{when}loss"], line[f"{when}distill/kl"], line[f"{when}distill/teacher_nll"]]
                for line in told
                for when in ("eval/", "")
                if f"{when}loss" in line
            ]
        assert len(server.bodies) > 20
    assert len(losses["here"]) == 4 and losses["here"][1] != losses["here"][2]
    for name in ("apart", "served", "cached", "cached from a server"):
        near = 0.02 if name.startswith("cached") else 1e-3
        np.testing.assert_allclose(losses[name], losses["here"], rtol=near, err_msg=name)


@pytest.mark.thorough
def test_samples_that_the_teacher_never_reads_end_the_run(tmp_path: Path, teacher: Path) -> None:
    """Bytes that are no text, so the teacher has nothing of the same text: no loss of 0 for ever."""
    broken = {"max_tokens": 4, "allowed_token_ids": [*range(128, 160)]}
    gold = [{"path": str(teacher), "tokenizer": "gold"}]
    made = stage(teacher, teachers=gold, on_policy=1.0, sampling=broken, num_steps=6, eval_dataset=None)
    done = posttrain("run", write_run(tmp_path, made))
    assert done.code != 0 and "step 3: no token of any sample aligns with the teacher's" in done.err, done.err


def test_a_reward_model_is_no_teacher(tmp_path: Path) -> None:
    model = model_of_fields({**INIT, "vocab_size": 261})
    add_scalar_head(model, seed=0)
    save_model(model, tmp_path / "judge", tokenizer=load_tokenizer("bytes"))
    for tokenizer in ("same", "gold"):
        made = stage(tmp_path, teachers=[{"path": str(tmp_path / "judge"), "tokenizer": tokenizer}], top_k=None)
        error = posttrain("check", write_run(tmp_path, made)).error
        assert "judge is a reward model, which cannot generate" in error


@pytest.mark.thorough
def test_one_file_through_two_templates_is_scored_twice(tmp_path: Path, teacher: Path) -> None:
    other = {"path": "rows.jsonl", "chat": False, "completion": "{completion}!"}
    made = stage(
        teacher,
        teachers=[{"path": str(teacher)}],
        cache=str(tmp_path / "cache"),
        mix=[other],
        eval_dataset={**other, "limit": 5},
        num_steps=2,
    )
    file = write_run(tmp_path, made)
    for command in (("distill", "--cache"), ("run",)):
        done = posttrain(*command, file)
        assert done.code == 0, done.err
    keys = [
        key.tobytes() for file in (tmp_path / "cache").glob("*/*/shard-*/index.npz") for key in np.load(file)["keys"]
    ]
    # The held-out rows are the first of those with another template, and are scored with them.
    assert len(keys) == len({*keys}) == 2 * len(ROWS)


def test_samples_need_a_teacher_that_reads_them(tmp_path: Path, shared: Path) -> None:
    """In reinforcement learning the teacher gives the log-probability of each sampled token."""
    for tokenizer in ("align", "gold"):
        teachers = [{"path": str(shared / STORIES), "tokenizer": tokenizer}]
        error = posttrain("check", write_run(tmp_path, rl_stage(teachers=teachers))).error
        assert f"tokenizer: {tokenizer} is for the dataset's text, not for samples" in error


def test_what_check_says_and_refuses(tmp_path: Path, teacher: Path, shared: Path) -> None:
    stories = {"path": str(shared / STORIES)}
    refused = posttrain("check", write_run(tmp_path, stage(teacher, teachers=[stories], top_k=None))).error
    assert "tokens are others in" in refused and "tokenizer: align" in refused
    file = write_run(tmp_path, stage(teacher, teachers=[{**stories, "tokenizer": "align"}]))
    checked = posttrain("check", file)
    assert checked.code == 0, checked.err
    said = " ".join(checked.out.split())
    assert "teacher stories260k: its own tokens, in rows of" in said and "0.0% is not aligned" in said
    gold = {**stories, "tokenizer": "gold"}
    merged = posttrain("check", write_run(tmp_path, stage(teacher, teachers=[gold], uld_weight=0.5)))
    said = " ".join(merged.out.split())
    assert "it teaches 100.0% of the student's tokens, in groups of" in said and "are not its own" in said, merged.err
    sampled = {"on_policy": 0.5, "sampling": {"max_tokens": 4}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"train_on_prompt": True}, "(or gold) is for completions; set train_on_prompt to false"),
        (sampled, "take gold, or a teacher with the same tokens"),
        ({"uld_weight": 0.5}, "uld_weight=0.5 needs a teacher with tokenizer: gold"),
        ({"teachers": [gold], "temperature": 2.0}, "of a group (tokenizer: gold) are summed at temperature 1"),
        (
            {"teachers": [gold, {**stories, "name": "other"}], "teacher_column": "who"},
            "gold is for one teacher, and there are 2",
        ),
    ]
    for changes, text in cases:
        assert text in posttrain("check", write_run(tmp_path, stage(teacher, **changes))).error, text
    bare = tmp_path / "bare"
    save_model(model_of_fields({**INIT, "vocab_size": 261}), bare)
    nameless = write_run(tmp_path, stage(bare))
    assert "align needs the teacher's own tokenizer" in posttrain("check", nameless).error


def test_a_template_that_changes_the_text_is_refused(tmp_path: Path, teacher: Path) -> None:
    """The teacher's replaces each answer, so there is nothing of the student's text that it could speak of."""
    own = tmp_path / "own"
    tokenizer = load_tokenizer("bytes")
    save_model(model_of_fields({**INIT, "vocab_size": 261}), own, tokenizer=tokenizer)
    changed = str(tokenizer.chat_template).replace(
        "message['content'] + '<|im_end|>' }}\n        {%- endgen", "'No.<|im_end|>' }}\n        {%- endgen"
    )
    assert changed != tokenizer.chat_template
    (own / "chat_template.jinja").write_text(changed)
    talk = {"dataset": {"path": "rows.jsonl", "chat": True}, "eval_dataset": None, "row_tokens": 64}
    error = posttrain("check", write_run(tmp_path, stage(own, **talk))).error
    assert f"chat template of {own} leaves out the content '1' of an assistant turn" in error


def test_a_teacher_of_shorter_tokens_is_refused(tmp_path: Path, teacher: Path, shared: Path) -> None:
    """Of single bytes, where the student's tokens are pieces of words."""
    model = {"model": {"init": INIT, "tokenizer": str(shared / STORIES)}}
    file = write_run(tmp_path, stage(teacher, eval_dataset=None, row_tokens=32), **model)
    row = {"prompt": "Tell me.", "completion": "Once upon a time there was a girl."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    error = posttrain("check", file).error
    assert "that of teacher big is another than the student's at" in error and "(at most 30% may be)" in error


@pytest.mark.thorough
@pytest.mark.optimized
@pytest.mark.parametrize("tokenizer", ["align", "gold"])
def test_a_student_of_other_tokens_learns_from_an_aligned_teacher(tmp_path: Path, shared: Path, tokenizer: str) -> None:
    """Of bytes, from a real model of pieces of words and from nothing else: on held-out stories it comes near what the
    teacher says, and finds the text itself more probable where it is taught."""
    text = str(shared / TEXT)
    made = stage(
        shared / STORIES,
        teachers=[{"path": str(shared / STORIES), "tokenizer": tokenizer}],
        dataset={"path": text, "limit": 120},
        eval_dataset={"path": text, "skip": 1600, "limit": 8},
        top_k=64,
        overlong="truncate",
        num_steps=40,
        row_tokens=256,
        checkpoint_every=100,
    )
    student = {**INIT, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 256}
    process = start("run", write_run(tmp_path, made, model={"init": student, "tokenizer": "bytes"}))
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    steps = lines(tmp_path / "out")
    before, after = steps[0], steps[-1]
    print({name: (before[name], after[name]) for name in before if "distill" in name})
    assert (
        (0.2 if tokenizer == "align" else 0.95)
        < steps[1]["distill/covered_tokens"]
        < (0.9 if tokenizer == "align" else 1)
    )
    assert after["eval/distill/kl"] < 0.6 * before["eval/distill/kl"]
    assert after["eval/distill/student_nll"] < 0.8 * before["eval/distill/student_nll"]
    assert after["eval/distill/student_nll"] > after["eval/distill/teacher_nll"]
