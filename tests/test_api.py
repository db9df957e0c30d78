"""Runs from Python: three arguments suffice, the same settings find the same run, mistakes come before any work."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posttrain as pt
from posttrain.api import _model_fields, _rows
from posttrain.config import LoRA, SamplingSection
from posttrain.runs.prepare import prepare
from tests.stages.runs import INIT, ROWS, inside, posttrain

MODEL = {"init": INIT, "tokenizer": "bytes"}
SMALL = {"num_steps": 2, "row_tokens": 16, "tensorboard": False}
DATASET = {"path": "rows.jsonl", "chat": False}


def low(completion_tokens: Any, **_: Any) -> list[float]:
    return [sum(t < 128 for t in c) / len(c) for c in completion_tokens]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with inside(tmp_path):
        yield tmp_path


def sft(**changes: Any) -> pt.SFT:
    return pt.SFT(**{"model": MODEL, "dataset": DATASET, **SMALL, "batch_rows": 4, **changes})


def rl(**changes: Any) -> pt.RL:
    small = {"prompts_per_step": 2, "group_size": 4, "micro_batch_rows": 4, "sampling": {"max_tokens": 6}}
    return pt.RL(**{"model": MODEL, "dataset": DATASET, "rewards": [low], **SMALL, **small, **changes})


def half(rewards_PG: np.ndarray, share: float = 0.5) -> np.ndarray:
    return share * (rewards_PG - np.nanmean(rewards_PG, axis=1, keepdims=True))


@pytest.mark.thorough
def test_objects_and_functions_of_the_user(folder: Path) -> None:
    """The same call finds its run; the command line says that it cannot."""
    loss = dataclasses.replace(pt.losses.GRPO, clip_high=0.3, kl_coef=0.0)
    own = {"loss": loss, "advantage": {"fn": half, "share": 0.25}, "filter": lambda rewards_PG: rewards_PG[:, 0] < 9}
    first = rl(algorithm=pt.GRPO(**own)).fit()
    assert first.stages and not rl(algorithm={"kind": "grpo", **own}).fit().trained
    other = rl(algorithm=pt.GRPO(**{**own, "advantage": half}))
    assert other.config.output != str(first.output) == rl(algorithm=pt.GRPO(**own)).config.output
    refused = posttrain("run", f"{first.output}/config.yaml", "output=again")
    assert refused.code != 0 and "was made in Python, in a script or notebook" in refused.error


def test_sections_in_python_say_what_is_wrong() -> None:
    wrong: dict[str, Any] = {
        "GRPO: kl_coeff: unknown field; did you mean 'kl_coef'?": lambda: pt.GRPO(kl_coeff=0),  # type: ignore[call-arg]
        "GRPO: gae_lambda: unknown field; it has ": lambda: pt.GRPO(gae_lambda=1.0),  # type: ignore[call-arg]
        "GRPO: kl_coef: Input should be greater than or equal to 0; got -1": lambda: pt.GRPO(kl_coef=-1),
        "GRPO: clip_high without effect on a loss of your own": lambda: pt.GRPO(clip_high=0.3, loss="my.py:Loss"),
        "LoRA: rnk: unknown field; did you mean 'rank'?": lambda: LoRA(rnk=4),  # type: ignore[call-arg]
    }
    for message, make in wrong.items():
        with pytest.raises(pt.ConfigError) as caught:
            make()
        assert message in str(caught.value)


def test_sft_then_rl_in_a_running_loop(folder: Path) -> None:
    """As in a notebook, whose loop runs already; the second starts from what the first left."""

    async def cells() -> tuple[Any, Any]:
        first = sft(dataset=[{"text": f"{row['prompt']}{row['answer']}"} for row in ROWS]).fit()
        second = rl(model=first.model_path, eval_dataset={**DATASET, "limit": 3}).fit()
        return first, second

    first, second = asyncio.run(cells())
    assert first.output.parent == second.output.parent == Path("runs")
    assert list(first.stages) == ["0-sft"] and list(second.stages) == ["0-rl"]
    assert set(second.results[0]) == {"before", "after", "difference"}
    config = pt.load_model(second.model_path).config
    assert config.vocab_size == 261 and second.load_model().config == config
    tokenizer = pt.load_tokenizer(second.model_path)
    texts = pt.generate(second.load_model(), tokenizer, ["1+1=", "2"], max_new_tokens=6, temperature=0.0, chat=False)
    assert len(texts) == 2 and all(isinstance(text, str) for text in texts)
    assert texts == pt.generate(
        second.load_model(), tokenizer, ["1+1=", "2"], max_new_tokens=6, temperature=0.0, chat=False
    )


def test_seed_is_drawn_once_and_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = sft(dataset=[{"text": "1+1=2"}] * 8)
    result = run.fit()
    assert result.output == Path(run.config.output)
    again = sft(dataset=[{"text": "1+1=2"}] * 8)
    assert again.config == run.config
    written = (result.model_path / "model.safetensors").stat().st_mtime_ns
    handed_back = again.fit()
    assert handed_back.model_path == result.model_path
    assert list(result.trained) == ["0-sft"] and list(handed_back.trained) == []
    assert "NOTHING WAS TRAINED: runs/sft-" in capsys.readouterr().out
    assert (result.model_path / "model.safetensors").stat().st_mtime_ns == written
    assert f"seed: {run.config.seed}\n" in (result.output / "config.yaml").read_text()
    with pytest.raises(pt.ConfigError, match="holds a run with other rows of dataset"):
        sft(dataset=[{"text": "1+1=3"}] * 8, output=result.output).fit()


@pytest.mark.thorough
def test_equal_settings_have_one_folder() -> None:
    def other(completion_tokens: Any, **_: Any) -> list[float]:
        return [0.0 for _ in completion_tokens]

    def output(**changes: Any) -> str:
        return rl(**changes).config.output

    assert output() == output() == output(lora=None)
    assert output(lora=LoRA(rank=2)) == output(lora={"rank": 2})
    assert output(sampling=SamplingSection(max_tokens=6)) == output()
    outputs = [
        output(),
        output(lora=LoRA(rank=2)),
        output(num_steps=3),
        output(seed=0),
        output(rewards=[other]),
        output(dataset=ROWS),
        output(dataset=ROWS[:-1]),
        output(dataset=[*ROWS[:-1], {**ROWS[-1], "answer": "?"}]),
    ]
    assert len(set(outputs)) == len(outputs)


def test_edited_reward_is_another_run(folder: Path) -> None:
    """In a notebook a function keeps its name when its cell is run again with other content."""
    import linecache

    def define(text: str) -> Any:
        name = f"<cell {hash(text)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(text, name, "exec"), namespace)
        return namespace["score"]

    first = define("def score(completions):\n    return [1.0 for _ in completions]\n")
    second = define("def score(completions):\n    return [0.5 for _ in completions]\n")
    assert "0.5" in inspect.getsource(second)
    assert rl(rewards=[first]).config.output != rl(rewards=[second]).config.output


def test_edited_helper_is_another_run(folder: Path) -> None:
    """Of a function that is named; a comment is no edit."""

    def output(helper: str) -> str:
        (folder / "helpers.py").write_text(f"def share(c):\n    return {helper}\n")
        (folder / "task.py").write_text(
            "from helpers import share\ndef low(completions):\n    return share(completions)\n"
        )
        return rl(rewards=["task.py:low"]).config.output

    assert output("[0.0 for _ in c]") == output("[0.0 for _ in c]  # why") != output("[1.0 for _ in c]")


def test_three_arguments_on_a_real_model(shared: Path) -> None:
    run = pt.RL(shared / "models" / "stories260k", DATASET, rewards=low)
    assert prepare(run.config, offline_ok=True).config.stages[0].row_tokens == 512
    assert run.config.stages[0].optimizer.learning_rate == 1e-6
    adapted = pt.RL(shared / "models" / "stories260k", DATASET, rewards=low, lora=LoRA(rank=4))
    assert adapted.config.stages[0].optimizer.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_step": 3}, "pt.SFT: num_step: unknown field; did you mean 'num_steps'?"),
        (
            {"optimizer": {"learningrate": 1}},
            "pt.SFT: optimizer.learningrate: unknown field; did you mean 'learning_rate",
        ),
        ({"dataset": "row.jsonl"}, "dataset.path: no file"),
        ({"dataset": [{"text": object()}]}, "dataset: its rows must be JSON-serialisable"),
        ({"dataset": []}, "the dataset is empty"),
        ({"model": "./nowhere"}, "nowhere: no such file or folder"),
        ({"model": {"init": INIT}}, "init needs tokenizer"),
    ],
)
def test_mistakes(fields: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises(pt.ConfigError) as caught:
        sft(**fields).fit()
    assert words in str(caught.value)
    assert not list(folder.glob("runs/*/config.yaml"))


def test_rows_take_templates_and_a_chat_template(folder: Path) -> None:
    """Red if a template of the call replaced that of a dataset, or if the template's text were taken for a path."""
    run = pt.SFT(
        MODEL,
        [{"q": "1+1", "a": "2"}] * 4,
        prompt="{q}=",
        completion="{a}",
        system="Add.",
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
        eval_dataset={"path": "rows.jsonl", "prompt": "{prompt}", "completion": "{completion}"},
        output="templates",
        **SMALL,
    )
    dataset, held_out = run.config.stages[0].dataset, run.config.stages[0].eval_dataset
    assert (dataset.prompt, dataset.completion, dataset.system) == ("{q}=", "{a}", "Add.")
    assert held_out is not None and (held_out.prompt, held_out.system) == ("{prompt}", None)
    for file, text in run._files.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    prepared = prepare(run.config, offline_ok=True)
    assert prepared.tokenizer.chat_template is not None
    assert "{% for m in messages %}" in (folder / "templates" / "chat_template.jinja").read_text()
    other = pt.SFT(MODEL, [{"q": "1"}], chat_template="{{ messages }}", **SMALL)
    assert other.config.output != pt.SFT(MODEL, [{"q": "1"}], chat_template="{{ 1 }}", **SMALL).config.output


def test_every_name_of_a_mistaken_call_is_answered() -> None:
    """Red if a missing dataset ended the call before its misspelt name was looked at, or `stages` came up."""
    with pytest.raises(pt.ConfigError) as caught:
        pt.RL(model="m", train_dataset="d", num_generations=8, rewards=low, eval_every=2)
    assert str(caught.value).splitlines() == [
        "pt.RL: train_dataset: unknown field; did you mean 'dataset'?",
        "pt.RL: num_generations: unknown field; did you mean 'group_size'?",
    ]
    assert caught.value._render_traceback_()[0] == f"ConfigError: {str(caught.value).splitlines()[0]}"
    assert caught.value.__suppress_context__
    with pytest.raises(pt.ConfigError, match="^pt.SFT: model: required, but missing"):
        pt.SFT()


@pytest.mark.thorough
def test_a_mistake_in_a_notebook_is_one_line() -> None:
    """Red if IPython printed a traceback of the package in its place."""
    code = "import posttrain as pt; pt.RL(model='m', dataset='d', num_generations=3)"
    command = [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(pt.__file__).parent.parent)
    assert done.stdout.splitlines() == [
        "ConfigError: pt.RL: num_generations: unknown field; did you mean 'group_size'?"
    ], done.stdout + done.stderr


def test_help_has_the_fields() -> None:
    for cls in (pt.SFT, pt.Distill, pt.Preference, pt.RewardModel, pt.RL, pt.OnlinePreference):
        names = list(inspect.signature(cls).parameters)
        own = {row.name for row in cls.fields() if "." not in row.name}
        assert names[0] == "model" and own | {"output", "seed", "lora"} <= set(names)
        assert "checkpoint_every: integer >= 1 = 25" in (cls.__doc__ or "")
    assert inspect.signature(pt.RL).parameters["group_size"].default == 8
    assert [row.name for row in pt.RL.fields("samples_every")] == ["samples_every"]
    assert "<td" in pt.RL.fields("reward")._repr_html_()


def test_wrong_types_are_named() -> None:
    with pytest.raises(pt.ConfigError, match="dataset: row 0 is a str; give a list of dicts"):
        _rows(["1+1=2"])
    with pytest.raises(
        pt.ConfigError, match="model: must be a folder, a hub id or a mapping of model fields; got a int"
    ):
        _model_fields(3)
