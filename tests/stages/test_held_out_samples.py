"""Samples of held-out prompts during SFT: the model's own, at the steps that were asked for, scored by functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from posttrain.config.yaml_file import load_config
from posttrain.runs.run import run
from tests.stages.runs import (
    INIT,
    few_devices,
    inside,
    lines,
    posttrain,
    rl_stage,
    sft_stage,
    steps,
    weights,
    write_run,
)

HELD_OUT = {"path": "rows.jsonl", "chat": False, "skip": 2, "limit": 9}
SCORES = """
def right(completions, answer, log_metric, log_extra):
    log_metric("characters", sum(map(len, completions)) / len(completions))
    log_extra("wanted", answer)
    return [float(text == wanted) for text, wanted in zip(completions, answer)]


def never(completions):
    raise RuntimeError("no judge")
"""


def sampled_stage(**changes: Any) -> dict[str, Any]:
    stage = sft_stage(
        num_steps=5,
        eval_dataset=HELD_OUT,
        samples_every=2,
        num_samples=3,
        eval_sampling={"max_tokens": 4},
        metrics=[{"fn": "scores.py:right"}],
    )
    return {**stage, **changes}


def written(folder: Path, *stages: dict[str, Any], **changes: Any) -> Path:
    file = write_run(folder, *stages, **changes)
    (folder / "scores.py").write_text(SCORES)
    return file


def samples(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


def of_samples(output: Path) -> list[dict[str, Any]]:
    return [line for line in lines(output) if "samples/completions/mean_length" in line]


def test_samples_are_those_of_the_model(tmp_path: Path) -> None:
    """After the last step they are what the saved model generates, and training is that of a stage without them."""
    file, plain = written(tmp_path / "a", sampled_stage()), written(tmp_path / "b", sft_stage(num_steps=5))
    done = posttrain("run", file)
    assert done.code == posttrain("run", plain).code == 0, done.err
    output = tmp_path / "a" / "out"
    notes = [line for line in posttrain("check", file).out.splitlines() if "not read" in line]
    assert notes == ["0-sft: rows.jsonl: columns that are not read: answer"], "those of the training dataset alone"
    assert weights(output, "0-sft") == weights(tmp_path / "b" / "out", "0-sft")
    found = samples(output)
    assert [row["step"] for row in found] == [step for step in (0, 2, 4, 5) for _ in range(3)]
    assert [row["prompt"] for row in found[-3:]] == ["2+1=", "3+1=", "4+1="]
    model = output / "0-sft" / "model"
    texts = pt.generate(
        pt.load_model(model), pt.load_tokenizer(model), ["2+1=", "3+1=", "4+1="], max_new_tokens=4, chat=False
    )
    assert [row["completion"] for row in found[-3:]] == texts
    measured = of_samples(output)
    assert [line["step"] for line in measured] == [0, 2, 4, 5] and steps(output, "0-sft") == [1, 2, 3, 4, 5]
    for line in measured:
        own = [row for row in found if row["step"] == line["step"]]
        assert line["samples/right/mean"] == sum(row["reward"] for row in own) / 3
        assert line["samples/right/characters"] == pytest.approx(sum(len(r["completion"]) for r in own) / 3)
        assert line["timing_s/samples"] > 0 and line["samples/completions/mean_length"] > 0
    assert found[0]["extra"] == {"wanted": "3"} and found[0]["rewards"] == {"right": found[0]["reward"]}
    assert "5/5  held-out samples: right " in done.out


def test_a_resumed_stage_has_them_once(tmp_path: Path) -> None:
    """Ended by a callback after the third step with a checkpoint, and gone on with."""
    file = written(tmp_path, sampled_stage(checkpoint_every=1))
    whole = written(tmp_path / "whole", sampled_stage(checkpoint_every=1))
    with few_devices(1):
        run(load_config(file), on_step=lambda step, _: pt.STOP if step == 3 else None)
    assert {row["step"] for row in samples(tmp_path / "out")} == {0, 2}
    grown = posttrain("run", file, "stages.0.num_steps=6")
    assert grown.code == 0, grown.err
    assert posttrain("run", whole, "stages.0.num_steps=6").code == 0
    shown = [[{**row, "time": 0} for row in samples(folder / "out")] for folder in (tmp_path, tmp_path / "whole")]
    assert shown[0] == shown[1] and {row["step"] for row in shown[0]} == {0, 2, 4, 6}


def test_a_function_that_fails_ends_no_training(tmp_path: Path) -> None:
    file = written(tmp_path, sampled_stage(metrics=[{"fn": "scores.py:never"}], num_steps=2))
    done = posttrain("run", file)
    assert done.code == 0, done.err
    assert "samples after step 2: reward never: no value for 3 of 3 samples" in done.out and "no judge" in done.out
    assert not any("samples/never/mean" in line for line in lines(tmp_path / "out"))
    assert all(row["reward"] is None for row in samples(tmp_path / "out"))


def test_chats_in_python(tmp_path: Path) -> None:
    """Rows with messages are sampled up to their last answer; without functions there are samples alone."""
    template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    rows = [
        {
            "messages": [
                {"role": "user", "content": "1"},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": f"{number}"},
                {"role": "assistant", "content": "9"},
            ]
        }
        for number in range(3, 7)
    ]
    with inside(tmp_path), few_devices(1):
        result = pt.SFT(
            {"init": INIT, "tokenizer": "bytes", "chat_template": template},
            rows,
            eval_dataset=rows[:2],
            output="out",
            num_steps=1,
            batch_rows=2,
            row_tokens=32,
            samples_every=1,
            eval_sampling={"max_tokens": 3, "temperature": 1.0},
            tensorboard=False,
            mesh={"fsdp": 1},
            metrics=[lambda completions: [float(len(one[0]["content"])) for one in completions]],
        ).fit()
        assert [row["prompt"] for row in result.samples][:2] == ["123", "124"]
        assert [
            line["samples/<lambda>/mean"] >= 0 for line in result.metrics if "samples/completions/mean_length" in line
        ] == [True, True]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"eval_dataset": None}, "samples_every=2 needs eval_dataset, whose prompts are sampled"),
        (
            {"samples_every": None},
            "num_samples is for samples of held-out prompts, and there are none; set samples_every",
        ),
        ({"eval_sampling": {"max_tokens": 16}}, "eval_sampling.max_tokens=16 must be less than row_tokens=16"),
        ({"eval_sampling": {"max_tokens": 13}}, "row_tokens=16 leaves 3 beside eval_sampling.max_tokens=13"),
        ({"eval_sampling": {"allowed_token_ids": [999]}}, "eval_sampling.allowed_token_ids"),
        ({"metrics": [{"fn": "scores.py:right", "weight": 2.0}]}, "metrics.weight has no effect"),
        ({"metrics": [{"model": "x"}]}, "metrics.model: reward models score in stages that train on samples"),
        ({"metrics": [{"fn": "scores.py:nothing"}]}, "nothing"),
        ({"metrics": [{"fn": "rewards_of_test.py:misnamed"}]}, "anser"),
        ({"eval_dataset": {"path": "texts.jsonl"}, "metrics": []}, "the row has no prompt before an answer"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    file = written(tmp_path, sampled_stage(**changes))
    (tmp_path / "texts.jsonl").write_text('{"text": "once"}\n')
    assert text in posttrain("check", file).error


def test_one_process_alone(tmp_path: Path) -> None:
    from posttrain.stages.table import check_processes

    config = load_config(written(tmp_path, sampled_stage(), rl_stage()))
    with pytest.raises(pt.ConfigError, match="stages.0: .*one process, not in 2: samples_every works in one process"):
        check_processes(config, 2, 1)


@pytest.mark.parametrize("model", [{"lora": {"rank": 2, "dropout": 0.5}}, {"quantize": "int8", "lora": {"rank": 2}}])
def test_with_adapters(tmp_path: Path, model: dict[str, Any]) -> None:
    """Without the dropout of training; evaluated by the average of the weights where there is one."""
    changes = {"model": {"init": INIT, "tokenizer": "bytes", **model}}
    optimizer = {"learning_rate": 1e-1, "schedule": "constant", "ema": {"decay": 0.5}}
    file = written(tmp_path, sampled_stage(optimizer=optimizer), **changes)
    done = posttrain("run", file)
    assert done.code == 0, done.err
    model_folder = tmp_path / "out" / "0-sft" / "model"
    texts = pt.generate(
        pt.load_model(model_folder),
        pt.load_tokenizer(model_folder),
        ["2+1=", "3+1=", "4+1="],
        max_new_tokens=4,
        chat=False,
    )
    if "quantize" not in model:
        assert [row["completion"] for row in samples(tmp_path / "out")[-3:]] == texts


def test_on_a_mesh(tmp_path: Path) -> None:
    one, eight = written(tmp_path / "one", sampled_stage()), written(tmp_path / "eight", sampled_stage(batch_rows=8))
    assert posttrain("run", one).code == 0
    done = posttrain("run", eight, devices=8)
    assert done.code == 0, done.err
    first = [[row["completion"] for row in samples(tmp_path / name / "out")[:3]] for name in ("one", "eight")]
    assert first[0] == first[1]


LOSSES = '''
import jax.numpy as jnp

import posttrain as pt
from posttrain.losses.pairs import pairs_of, sequences_of


class WithSure:
    """A share of tokens beside the loss."""

    def __call__(self, stats, batch):
        output = pt.losses.SFTLoss()(stats, batch)
        weight = jnp.asarray(batch.loss_weight)
        sure = jnp.where(weight > 0, stats.logps > -5.5, 0.0)
        return pt.LossOutput(
            loss=output.loss,
            metrics={**output.metrics, "sure": pt.Mean(total=(sure * weight).sum(), weight=weight.sum())},
        )


class OfPairs:
    """A number of each pair beside the loss."""

    needs = pt.Needs(rows="pairs", reference=False)

    def __call__(self, stats, batch):
        pairs = pairs_of(sequences_of(stats, batch))
        margins = pairs.chosen.logps - pairs.rejected.logps
        return pt.LossOutput(loss=pairs.total(-margins), metrics={"apart": pairs.total(jnp.abs(margins))})
'''


def test_metrics_of_losses_of_ones_own(tmp_path: Path) -> None:
    """At each step, and of held-out rows; of pairs with an interval."""
    sft = sft_stage(num_steps=2, loss="losses.py:WithSure", eval_dataset=HELD_OUT)
    pairs = {"path": "pairs.jsonl", "chat": False}
    preference = {**sft, "kind": "preference", "loss": "losses.py:OfPairs", "dataset": pairs, "row_tokens": 32}
    file = written(tmp_path, sft, {**preference, "eval_dataset": {**pairs, "limit": 5}})
    (tmp_path / "losses.py").write_text(LOSSES)
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(2 * n + 5)} for n in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = posttrain("run", file)
    assert done.code == 0, done.err
    for stage, name in (("0-sft", "sure"), ("1-preference", "apart")):
        found = lines(tmp_path / "out", stage)
        assert [line["step"] for line in found if line.get(name, -1) >= 0] == [1, 2]
        assert [line["step"] for line in found if line.get(f"eval/{name}", -1) >= 0] == [0, 2]
        assert any(f"eval/{name}_low" in line for line in found) == (stage == "1-preference")
