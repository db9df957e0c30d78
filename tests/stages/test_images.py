"""Stages on pictures: what is learnt is seen, and what is wrong is said before anything compiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from numpy.testing import assert_allclose
from PIL import Image, ImageDraw

import posttrain as pt
from posttrain.data.tokenizer import load_tokenizer
from posttrain.weights.load import load_model
from posttrain.weights.save import save_model
from posttrain.weights.scalar_head import add_scalar_head
from tests.models.test_new_tower import INITS
from tests.runs.test_processes import TIMEOUT_S, launched
from tests.runs.test_resume import finish, kill_at
from tests.stages.runs import fork, lines, posttrain, weights, write_run

COLOURS = ("red", "blue", "green", "white")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Discs of four colours, of which one letter tells."""
    written = []
    for number in range(12):
        colour = COLOURS[number % 4]
        image = Image.new("RGB", (60 + number, 50), "black")
        ImageDraw.Draw(image).ellipse((10 + number, 10, 40, 40), fill=colour)
        image.save(tmp_path / f"{number}.png")
        written.append({"image": f"{number}.png", "prompt": "What colour?", "completion": colour[0].upper()})
    written.append({"image": None, "prompt": "Nothing?", "completion": "N"})
    (tmp_path / "discs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    return tmp_path / "discs.jsonl"


def run_file(folder: Path, shared: Path, rows: Path, model: dict[str, Any], **stage: Any) -> Path:
    checkpoint = shared / "goldens" / "vision" / "gemma3"
    dataset = {"path": str(rows)}
    sft = {"kind": "sft", "dataset": dataset, "num_steps": 40, "batch_rows": 4, "row_tokens": 128, **stage}
    sft["optimizer"] = {"learning_rate": 1e-2}
    return write_run(folder, sft, model={"path": str(checkpoint), "stop_tokens": ["<end_of_turn>"], **model})


@pytest.mark.thorough
def test_what_stands_in_a_picture_is_learnt(tmp_path: Path, shared: Path, rows: Path) -> None:
    """Prompts are the same, so without the pictures a letter costs log 4 = 1.39, half of it per token with the end."""
    outcome = posttrain("run", run_file(tmp_path, shared, rows, {"vision": "projector"}))
    assert outcome.code == 0, outcome.err
    assert "12 pictures in 12 of 13 sequences" in outcome.out + outcome.err
    assert lines(tmp_path / "out")[-1]["nll"] < 0.2
    saved = tmp_path / "out" / "0-sft" / "model"
    assert {"chat_template.jinja", "preprocessor_config.json"} <= {file.name for file in saved.iterdir()}
    result = pt.attach(tmp_path / "out")
    row = json.loads(rows.read_text().splitlines()[0])
    message = {"role": "user", "content": [{"type": "image", "image": str(rows.parent / row["image"])}]}
    message["content"].append({"type": "text", "text": row["prompt"]})
    answers = pt.generate(result.load_model(), result.load_tokenizer(), [[message]], max_new_tokens=1, temperature=0.0)
    assert answers == [row["completion"]]


@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_the_answer_that_fits_the_picture_is_preferred(tmp_path: Path, shared: Path, loss: str, rows: Path) -> None:
    """Prompts and answers are the same for all colours: only pictures tell the chosen one."""
    pairs = []
    for number, row in enumerate(json.loads(line) for line in rows.read_text().splitlines()):
        other = COLOURS[(number + 1) % 4][0].upper()
        pairs.append({"images": [row["image"]] * bool(row["image"]), "prompt": row["prompt"]})
        pairs[-1] |= {"chosen": row["completion"], "rejected": other}
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    stage = {"kind": "preference", "dataset": {"path": str(file)}, "eval_dataset": {"path": str(file)}, "loss": loss}
    model = {"vision": "frozen", "lora": {"rank": 8}}
    outcome = posttrain("run", run_file(tmp_path, shared, file, model, **stage))
    assert outcome.code == 0, outcome.err
    noted = "12 pictures in 12 of 13 pairs" if loss == "sigmoid" else "24 pictures in 24 of 26 answers"
    assert noted in outcome.out
    result = json.loads((tmp_path / "out" / "0-preference" / "result.json").read_text())
    metrics = result["after"]["metrics"]
    assert metrics["eval/rewards/chosen"] > 0 > metrics["eval/rewards/rejected"]
    assert loss == "kto" or metrics["eval/preferred_ratio"] > 0.9


@pytest.mark.thorough
def test_a_reward_model_that_sees_scores_samples(tmp_path: Path, shared: Path, rows: Path) -> None:
    """It learns which letter fits the picture, and scores samples of the policy by theirs, without any error."""
    pairs = []
    for number, row in enumerate(json.loads(line) for line in rows.read_text().splitlines()[:12]):
        other = COLOURS[(number + 1) % 4][0].upper()
        pairs.append({"image": row["image"], "prompt": row["prompt"], "chosen": row["completion"], "rejected": other})
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    stage = {"kind": "reward_model", "dataset": {"path": str(file)}, "eval_dataset": {"path": str(file)}}
    outcome = posttrain("run", run_file(tmp_path / "scores", shared, file, {"vision": "projector"}, **stage))
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "scores" / "out" / "0-reward_model"
    metrics = json.loads((folder / "result.json").read_text())["after"]["metrics"]
    assert metrics["eval/rewards/accuracies"] > 0.9, metrics
    exported = posttrain("export", tmp_path / "scores" / "out", tmp_path / "exported", "--to", "hf")
    assert exported.code == 0 and "scores differ by" in exported.out, exported
    (tmp_path / "rl").mkdir()
    rewards = [{"model": str(folder / "model")}]
    outcome = posttrain("run", sampled_run(tmp_path / "rl", shared, rows, {}, rewards=rewards))
    assert outcome.code == 0, outcome.err
    for line in lines(tmp_path / "rl" / "out"):
        assert line["rewards/errors"] == 0.0 and line["rewards/reward_model/mean"] != 0.0, line


def taught(folder: Path, shared: Path, rows: Path, *teachers: dict[str, Any], **stage: Any) -> Path:
    fields = {"kind": "distill", "num_steps": 2, "teachers": list(teachers), **stage}
    return run_file(folder, shared, rows, {"vision": "frozen"}, **fields)


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["step", "mesh", "cache"])
def test_a_teacher_sees_what_its_student_does(tmp_path: Path, shared: Path, rows: Path, where: str) -> None:
    """A teacher of the same weights teaches nothing: in the step, beside it with all its ids, and from a cache."""
    teacher: dict[str, Any] = {"path": str(shared / "goldens" / "vision" / "gemma3")}
    stage: dict[str, Any] = {} if where == "step" else {"top_k": 264}
    if where == "mesh":
        teacher |= {"mesh": {"fsdp": -1}, "devices": "shared"}
    if where == "cache":
        stage["cache"] = str(tmp_path / "cache")
    file = taught(tmp_path, shared, rows, teacher, **stage)
    if where == "cache":
        written = posttrain("distill", "--cache", file)
        assert written.code == 0, written.err
    outcome = posttrain("run", file)
    assert outcome.code == 0, outcome.err
    first = lines(tmp_path / "out")[0]
    assert abs(first["distill/kl"]) < 2e-3, first


def test_teachers_that_see_other_pictures_are_refused(tmp_path: Path, shared: Path, rows: Path) -> None:
    """A text teacher, and one of other tokens, before anything compiles."""
    checkpoint = shared / "goldens" / "vision" / "gemma3"
    blind = load_model(checkpoint, vision="none")
    save_model(blind, tmp_path / "text", tokenizer=load_tokenizer(str(checkpoint)))
    cases = [
        ({"path": str(tmp_path / "text")}, {}, "it has no vision tower"),
        ({"path": str(checkpoint), "tokenizer": "align"}, {}, "tokenizer: align aligns texts alone"),
        ({"path": str(checkpoint), "url": "http://127.0.0.1:9"}, {"top_k": 4}, "a server is sent tokens alone"),
    ]
    for teacher, stage, reason in cases:
        outcome = posttrain("check", taught(tmp_path, shared, rows, teacher, **stage))
        assert outcome.code != 0 and "row 0: the row has pictures, and teacher" in outcome.err, outcome.err
        assert reason in outcome.err


REWARDS = '''
def seen(completions, images, letter, log_metric):
    """Share of the letters of the answer that name the colour in the middle of the picture."""
    log_metric("pictures", sum(map(len, images)) / len(images))
    middles = [pictures[0].getpixel((24, 24)) for pictures in images]
    names = {(255, 0, 0): "R", (0, 0, 255): "B", (0, 128, 0): "G", (255, 255, 255): "W"}
    assert [names[middle] for middle in middles] == list(letter), (middles, letter)
    return [c.count(x) / max(len(c), 1) for c, x in zip(completions, letter)]
'''


def sampled_run(folder: Path, shared: Path, rows: Path, model: dict[str, Any], **stage: Any) -> Path:
    """A stage that samples; a reward gets the pictures, and fails where they are others."""
    file = folder / "prompts.jsonl"
    discs = [json.loads(line) for line in rows.read_text().splitlines()][:12]
    asked = [{"image": one["image"], "prompt": one["prompt"], "letter": one["completion"]} for one in discs]
    file.write_text("".join(json.dumps({**one, "image": str(rows.parent / one["image"])}) + "\n" for one in asked))
    (folder / "seen.py").write_text(REWARDS)
    fields = {"kind": "rl", "rewards": [{"fn": f"{folder / 'seen.py'}:seen"}], "prompts_per_step": 4, "group_size": 4}
    fields |= {"num_steps": 2, "sampling": {"max_tokens": 6}, "micro_batch_rows": 4, **stage}
    made = run_file(folder, shared, file, {"vision": "frozen", **model}, **fields)
    config = yaml.safe_load(made.read_text())
    del config["stages"][0]["batch_rows"]
    made.write_text(yaml.safe_dump(config))
    return made


def test_models_that_would_read_placeholders_are_refused(tmp_path: Path, shared: Path, rows: Path) -> None:
    """A draft model and a reward model, before anything compiles."""
    checkpoint = shared / "goldens" / "vision" / "gemma3"
    text = load_model(checkpoint, vision="none")
    add_scalar_head(text, seed=0)
    save_model(text, tmp_path / "scores", tokenizer=load_tokenizer(str(checkpoint)))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rollout": {"speculative": {"kind": "draft", "path": str(checkpoint)}}}, "a draft model sees no pictures"),
        ({"rewards": [{"model": str(tmp_path / "scores")}]}, "reads text alone"),
    ]
    for stage, reason in cases:
        outcome = posttrain("check", sampled_run(tmp_path, shared, rows, {}, **stage))
        assert outcome.code != 0 and reason in outcome.err and "row 0 has" in " ".join(outcome.err.split()), outcome.err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "stage"),
    [
        ({}, {}),
        ({"vision": "tower"}, {"algorithm": "ppo"}),
        (
            {"lora": {"rank": 2, "targets": ["attention", "tower"]}},
            {"algorithm": {"kind": "grpo", "kl_coef": 0.1}, "updates": 2},
        ),
        ({}, {"kind": "online_preference"}),
        ({}, {"asynchronous": {}}),
    ],
    ids=["grpo", "ppo", "reference", "online", "ahead"],
)
def test_samples_are_of_their_pictures(
    tmp_path: Path, shared: Path, rows: Path, model: dict[str, Any], stage: dict[str, Any]
) -> None:
    """The trainer scores what the engine has sampled, and rewards get the pictures of the row."""
    outcome = posttrain("run", sampled_run(tmp_path, shared, rows, model, **stage))
    assert outcome.code == 0, outcome.err
    for line in lines(tmp_path / "out"):
        assert line["images/mean_count"] == 1.0 and line["images/mean_tokens"] == 9.0
        assert line["sampling/logp_difference/max"] < 2e-3 and line["rewards/errors"] == 0.0, line


@pytest.mark.thorough
def test_sampling_resumes_with_its_pictures(tmp_path: Path, shared: Path, rows: Path) -> None:
    """Bit for bit; and not with another picture under the same name."""
    ends = []
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        file = sampled_run(folder, shared, rows, {}, num_steps=6, checkpoint_every=2)
        if name == "killed":
            kill_at(file, folder / "out", "0-rl", 3)
            before = (tmp_path / "1.png").read_bytes()
            Image.new("RGB", (61, 50), "red").save(tmp_path / "1.png")
            outcome = posttrain("run", file)
            assert outcome.code != 0 and "cannot resume: pictures of dataset was" in outcome.err
            (tmp_path / "1.png").write_bytes(before)
        finish(file)
        ends.append(weights(folder / "out", "0-rl"))
    assert ends[0] == ends[1]


def finish_alone(file: Path) -> str:
    """Finish in a process of one device, as the killed run is: how many share the cores decides in what order a tower's
    matrices are summed."""
    process = fork("run", file)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return said


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["loaded", "new", "adapted", "kept"])
def test_killed_and_resumed_is_never_stopped(tmp_path: Path, shared: Path, rows: Path, kind: str) -> None:
    """With a tower that is trained, whose patches come anew from the files, or has an adapter; with one of random
    weights; and with features that are kept, of which a resumed run has none."""
    model: dict[str, Any] = {"vision": "tower"}
    if kind == "adapted":
        model = {"vision": "frozen", "lora": {"rank": 2, "targets": ["attention", "tower"]}}
    if kind == "kept":
        model = {"vision": "frozen", "path": str(shared / "goldens" / "vision" / "qwen3_vl"), "stop_tokens": []}
    if kind == "new":
        model |= {"path": None, "tokenizer": "bytes", "stop_tokens": [], "image": {"max_pixels": 2304}}
        model["init"] = {"model_type": "qwen3_vl", **INITS["qwen3_vl"]}
    ends = []
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        stage = {"num_steps": 16, "checkpoint_every": 2}
        file, output = run_file(folder, shared, rows, model, **stage), folder / "out"
        if name == "killed":
            kill_at(file, output, "0-sft", 5)
        said = finish_alone(file)
        assert ("resuming after step" in said) == (name == "killed")
        ends.append(weights(output, "0-sft"))
    assert ends[0] == ends[1]
    if kind == "kept":
        steps = [line for line in lines(tmp_path / "whole" / "out") if "images/encoded" in line]
        assert sum(line["images/encoded"] for line in steps) <= 12 and steps[-1]["images/hit_rate"] == 1
    exported = tmp_path / "exported"
    outcome = posttrain("export", tmp_path / "whole" / "out", exported, "--to", "merged" if "lora" in model else "hf")
    assert outcome.code == 0, outcome.err
    saved = tmp_path / "whole" / "out" / "0-sft" / "model"
    assert (exported / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("model", "stage", "reason"),
    [
        ({}, {}, "row 0: the row has pictures, and model.vision=none loads no tower; set it to frozen"),
        ({"image": {"max_pixels": 9}}, {}, "image has no effect without a vision tower; set vision: frozen"),
        (
            {"vision": "frozen", "image": {"max_pixels": 9}},
            {},
            "model.image.max_pixels: images of a gemma3 have one size",
        ),
        ({"vision": "frozen"}, {"overlong": "drop", "row_tokens": 16}, "every row"),
        ({}, {"on_bad_image": "drop"}, "on_bad_image=drop has no effect without a vision tower"),
        (
            {"vision": "frozen"},
            {"on_bad_image": "drop", "kind": "distill", "teachers": [{"path": "teacher"}], "cache": "cache"},
            "on_bad_image=drop cannot be with cache",
        ),
        ({"vision": "tower"}, {"image_cache_mib": 7}, "image_cache_mib=7 has no effect with model.vision=tower"),
    ],
)
def test_mistakes_are_said_by_check(
    model: dict[str, Any], stage: dict[str, Any], reason: str, tmp_path: Path, shared: Path, rows: Path
) -> None:
    outcome = posttrain("check", run_file(tmp_path, shared, rows, model, **stage))
    assert outcome.code != 0 and reason in outcome.err


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sft", "preference"])
def test_rows_with_bad_pictures_are_left_out(tmp_path: Path, shared: Path, rows: Path, kind: str) -> None:
    """One is gone, one ends in the middle: both are counted and named, and the run goes on, here past its reference."""
    (tmp_path / "5.png").unlink()
    content = (tmp_path / "7.png").read_bytes()
    (tmp_path / "7.png").write_bytes(content[:-30])
    if kind == "preference":
        pairs = [json.loads(line) for line in rows.read_text().splitlines()]
        pairs = [{**row, "chosen": row.pop("completion"), "rejected": "X"} for row in pairs]
        rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    stage = {"kind": kind, "num_steps": 6, "on_bad_image": "drop"}
    outcome = posttrain("run", run_file(tmp_path, shared, rows, {"vision": "frozen"}, **stage))
    assert outcome.code == 0, outcome.err
    said = " ".join((outcome.out + outcome.err).split())
    assert "row 5: image (5.png): no file" in said and "row 7: image (7.png) cannot be decoded" in said
    assert "1 of 13 rows of" in said and "discs.jsonl have a picture that cannot be read, and are left out" in said
    assert lines(tmp_path / "out")[-1]["data/bad_images"] == 2


def spoiled_run(folder: Path, shared: Path, rows: Path, **model: Any) -> Path:
    """A mix, either dataset of which has a picture that is gone and one that ends in the middle."""
    folder.mkdir()
    others = []
    for number, row in enumerate(json.loads(line) for line in rows.read_text().splitlines()[:12]):
        content = (rows.parent / row["image"]).read_bytes()
        for start in ("", folder.name) if number != 5 else ():
            (folder / f"{start}{number}.png").write_bytes(content[: -30 if number == 7 else None])
        others.append({**row, "image": f"{folder.name}{number}.png", "prompt": "And this?"})
    (folder / "discs.jsonl").write_text(rows.read_text())
    (folder / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    stage = {"mix": [{"path": str(folder / "others.jsonl"), "weight": 2.0}], "num_steps": 12, "checkpoint_every": 2}
    return run_file(folder, shared, folder / "discs.jsonl", {"vision": "frozen", **model}, on_bad_image="drop", **stage)


@pytest.mark.thorough
def test_rows_are_left_out_of_a_mix_wherever_it_runs(tmp_path: Path, shared: Path, rows: Path) -> None:
    """Killed and resumed in the second pass as never stopped, bit for bit; and in two processes as in one."""
    whole = spoiled_run(tmp_path / "whole", shared, rows)
    assert "row 5: image (5.png): no file" in " ".join(finish_alone(whole).split())
    killed = spoiled_run(tmp_path / "killed", shared, rows)
    kill_at(killed, tmp_path / "killed" / "out", "0-sft", 7)
    assert "resuming after step" in finish_alone(killed)
    ends = [weights(tmp_path / name / "out", "0-sft") for name in ("whole", "killed")]
    assert ends[0] == ends[1]
    counts = [
        {line["step"]: line["data/bad_images"] for line in lines(tmp_path / name / "out") if "data/bad_images" in line}
        for name in ("whole", "killed")
    ]
    assert counts[0] == counts[1] and len(counts[0]) == 12
    split = spoiled_run(tmp_path / "split", shared, rows)
    split.write_text(yaml.safe_dump(yaml.safe_load(split.read_text()) | {"mesh": {"fsdp": 2, "data": -1}}))
    with launched(split) as launcher:
        told, _ = launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == 0, told
    logged = [lines(tmp_path / name / "out") for name in ("whole", "split")]
    found = [[line["loss"] for line in one if "loss" in line] for one in logged]
    assert len(found[0]) == 12 and [one[-1]["data/bad_images"] for one in logged] == [4, 4]
    assert_allclose(found[1], found[0], atol=2e-3)


def test_a_picture_that_is_gone_is_named(tmp_path: Path, shared: Path, rows: Path) -> None:
    """Of held-out rows also where those to train on are left out."""
    (tmp_path / "5.png").unlink()
    for stage in ({}, {"on_bad_image": "drop", "eval_dataset": {"path": str(rows)}}):
        outcome = posttrain("check", run_file(tmp_path, shared, rows, {"vision": "frozen"}, **stage))
        assert outcome.code != 0 and "row 5: image (5.png): no file" in outcome.err
