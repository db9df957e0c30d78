"""Check: what a machine must have, what the model takes, what the lines say."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from posttrain.config import DistillSection
from posttrain.config.yaml_file import load_config
from posttrain.data.tokenizer import load_tokenizer
from posttrain.losses.sft import SFTLoss
from posttrain.models.drafter import DrafterConfig
from posttrain.runs import check as check_module
from posttrain.runs.check import TrainingSize, model_outline, training_size
from posttrain.runs.finished import tokenizer_of
from posttrain.runs.prepare import keep_clock, prepare
from posttrain.stages.distill import describe
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.weights.drafter import attach_drafter, read_drafter, save_drafter
from posttrain.weights.load import init_model, load_model
from posttrain.weights.locate import trained_model_files
from posttrain.weights.lora import count_parameters
from posttrain.weights.save import save_model
from tests.stages.runs import INIT, posttrain, rl_stage, sft_stage, write_run

GOLDENS = Path(__file__).parent.parent / "goldens"
ONE = dict.fromkeys(("data", "fsdp", "expert", "context", "tensor"), 1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["output=gs://bucket/run"], "output: gs://bucket/run is a URL, and runs write to folders only; set a folder"),
        (
            ["mesh={data: 1, fsdp: 3}"],
            "fsdp=3, expert=1, context=1, tensor=1 must multiply to the number of devices, 8, of this machine",
        ),
        (["mesh={fsdp: 1, tensor: 8}"], "mesh.tensor=8 must divide num_kv_heads=1 of qwen3; use 1"),
        (["mesh={fsdp: 3}", "--devices", "3"], "mesh.fsdp=3 must divide hidden_size=16 of qwen3; use 1, 2, 4, 8 or 16"),
        (["mesh.context=3", "--devices", "3"], "mesh.context=3 must divide row_tokens=16; use a multiple of 3"),
        (["mesh={fsdp: 3}", "--devices", "4"], "must multiply to the number of devices, 4"),
    ],
)
def test_mistakes(tmp_path: Path, overrides: list[str], words: str) -> None:
    error = posttrain("check", write_run(tmp_path, sft_stage()), *overrides).error
    assert words in error and ("--devices N" in error) == (words.endswith("machine"))


def test_lines(tmp_path: Path) -> None:
    file = write_run(tmp_path, sft_stage(), rl_stage())
    out = posttrain("check", file, "--devices", "16").out
    assert "mesh: data=1, fsdp=16, expert=1, context=1, tensor=1 (16 devices)" in out
    assert (
        "parameters: 6,544, all trained\nmemory: 102.2 KiB = weights 25.6 KiB, gradient 25.6 KiB, optimiser 51.1 KiB"
        in out
    )
    assert "0-sft: 24 dataset rows, 4 steps of 4 x 16 tokens\n" in out
    served = {"teachers": [{"path": "big/one", "url": "http://host:8000/v1"}, {"path": "b"}], "teacher_column": "t"}
    section = DistillSection.model_validate({"dataset": {"path": "a"}, "num_steps": 3, **served})
    assert describe(section, None, 1) == (
        "3 steps of 8 x 1024 tokens; teachers big/one (served at http://host:8000/v1), b (in the training step)"
    )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "lora": {"rank": 2, "modules_to_save": ["q_norm"]}},
        {"path": str(GOLDENS / "models" / "llama"), "adapter": str(GOLDENS / "lora" / "lora")},
        {"path": str(GOLDENS / "models" / "llama"), "adapter": str(GOLDENS / "lora" / "modules_to_save")},
    ],
)
def test_bytes_are_those_of_the_trainer(tmp_path: Path, model: dict[str, Any]) -> None:
    source = {} if "path" in model else {"init": INIT}
    file = write_run(tmp_path, sft_stage(), model={"tokenizer": "bytes", **source, **model})
    config = load_config(file)
    fields = {**INIT, "vocab_size": 261}
    if config.model.path is None:
        made = init_model(fields, dtype=config.model.dtype, lora=config.model.lora, seed=0)
    else:
        made = load_model(config.model.path, dtype=config.model.dtype, adapter=config.model.adapter)
    outline = model_outline(config, trained_model_files(config.model, load_tokenizer("bytes")))
    size = training_size(config, outline, ONE)
    optimizer = make_optimizer(config.stages[0].optimizer, 4, seed=0, model=made)
    trainer = Trainer(made, SFTLoss(), optimizer, TrainSettings(temperature=1.0, max_grad_norm=1.0))
    state = trainer.state()
    count = count_parameters(made)
    assert (size.total, size.trained) == (count.total, count.trainable)
    held = [leaf for leaf in jax.tree.leaves(trainer._opt_state) if leaf.shape]
    assert size.optimizer == sum(leaf.nbytes for leaf in held)
    assert size.weights == sum(leaf.nbytes for leaf in trainer._weights.read().values())
    once = trainer._objective._used_once
    assert size.gradient == sum(x.nbytes if path in once else 4 * x.size for path, x in trainer.params.items())
    assert size.per_device == size.weights + size.gradient + size.optimizer and state
    split = training_size(config, outline, {**ONE, "fsdp": 2})
    assert isinstance(split, TrainingSize) and size.per_device / 2 <= split.per_device < size.per_device


def test_roles(tmp_path: Path) -> None:
    """Bytes of a critic beside those of the actor, whose adapter it does not have; and who has devices of their own."""
    stage = rl_stage(algorithm="ppo", placement={"rollout": {"devices": 2}, "critic": {"devices": 1}})
    model = {"tokenizer": "bytes", "init": INIT, "lora": {"rank": 2}}
    out = posttrain("check", write_run(tmp_path, stage, model=model), "--devices", "4").out
    assert "mesh: data=1, fsdp=1, expert=1, context=1, tensor=1 (4 devices)" in out
    assert "0-rl: devices of their own: rollout 2, critic 1\n" in out
    # One number of 16 parameters more than the model; 16 bytes for each.
    assert "0-rl: critic: 6,560 parameters, 102.5 KiB beside the actor's memory\n" in out


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of one head of keys and values, and its drafter."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model, tokenizer = init_model({**INIT, "vocab_size": 261}, dtype="float32", seed=0), load_tokenizer("bytes")
    save_model(model, folder / "model", tokenizer=tokenizer)
    attach_drafter(model, DrafterConfig(embed_dim=16, vocab_size=261, tokens=2, window=3, layers=1), seed=0)
    save_drafter(model, folder / "drafter")
    return folder / "model", folder / "drafter"


TWO_HEADS = {"tokenizer": "bytes", "init": {**INIT, "num_key_value_heads": 2}}


@pytest.mark.parametrize(
    ("rollout", "changes", "words"),
    [
        (
            {},
            {"mesh": {"data": 4, "tensor": 2}},
            "rollout.speculative: the draft model: mesh.tensor=2 must divide num_kv",
        ),
        (
            {"tensor": 2},
            {"mesh": {"fsdp": 8}},
            "rollout.tensor=2 must divide num_kv_heads=1 of qwen3, the draft model of",
        ),
        ({"tensor": 4, "speculative": None}, {}, "rollout.tensor=4 must divide num_kv_heads=2 of qwen3"),
        (
            {"merge_lora": True},
            {},
            "rollout.merge_lora: the model has no adapter to merge; set model.lora, or remove it",
        ),
        (
            {"merge_lora": True},
            {"model": {**TWO_HEADS, "lora": {"rank": 2}, "quantize": "int8"}},
            "rollout.merge_lora: no adapter is merged into matrices of model.quantize=int8; set rollout.quantize",
        ),
    ],
)
def test_mistakes_of_samplers(
    tmp_path: Path, checkpoints: tuple[Path, Path], rollout: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    drafts = {"kind": "draft", "path": str(checkpoints[0])}
    stage = rl_stage(rollout={"speculative": drafts, **rollout})
    assert words in posttrain("check", write_run(tmp_path, stage, **{"model": TWO_HEADS, **changes})).error


def test_a_drafter_beside_the_actor(tmp_path: Path, checkpoints: tuple[Path, Path]) -> None:
    """Its parameters, whose bytes are 16 for each; and mistakes of its optimiser, named as its own."""
    drafts = {"kind": "block", "path": str(checkpoints[1]), "optimizer": {}}
    file = write_run(tmp_path, rl_stage(rollout={"speculative": drafts}))
    out, count = posttrain("check", file).out, read_drafter(checkpoints[1]).config.num_parameters
    assert f"0-rl: drafter: {count:,} parameters, {16 * count / 2**10:.1f} KiB beside the actor's memory\n" in out
    name = "stages.0.rollout.speculative.optimizer"
    error = posttrain("check", file, f"{name}={{kind: muon, learning_rate: 0.1}}").error
    assert error.startswith("rollout.speculative.optimizer: muon takes the matrices") and "match: drafter." in error
    error = posttrain("check", file, f"{name}={{groups: [{{match: none, learning_rate: 0.1}}]}}").error
    assert error.startswith("rollout.speculative.optimizer.groups.0: 'none' matches no trained parameter")


@pytest.mark.parametrize(
    "stage",
    [
        sft_stage(row_tokens=64),
        rl_stage(row_tokens=64),
        sft_stage(kind="preference", loss="sigmoid", row_tokens=64),
    ],
)
def test_a_turn_that_no_stop_token_ends(tmp_path: Path, stage: dict[str, Any]) -> None:
    """ChatML on a tokenizer of a base model, whose end of sequence ends no turn."""
    load_tokenizer("bytes").save(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").unlink()
    row = {"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "3", "answer": "2"}
    del row["completion" if stage["kind"] == "preference" else "chosen"]
    stage = {**stage, "dataset": {"path": "talk.jsonl"}}
    ending = "ends an assistant turn with '<|im_end|>', so that the model does not learn to stop"
    said = ending + '; set model.stop_tokens: ["<|im_end|>"]'
    for stops, count in (([], 1), (["<|im_end|>"], 0)):
        model = {"init": INIT, "tokenizer": str(tmp_path / "base"), "stop_tokens": stops}
        file = write_run(tmp_path, stage, model=model)
        (tmp_path / "talk.jsonl").write_text(json.dumps(row) + "\n")
        assert posttrain("check", file).out.count(said) == count


def test_a_run_keeps_the_date_of_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a template writes of the date is the same on the next day, in the run and for those who read it."""
    template = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "dated.jinja").write_text(template)
    model = {"init": INIT, "tokenizer": "bytes", "chat_template": str(tmp_path / "dated.jinja")}
    stage = sft_stage(dataset={"path": "rows.jsonl"}, row_tokens=64)
    config, output = load_config(write_run(tmp_path, stage, model=model)), tmp_path / "out"

    def prompt_at(*date: int) -> str:
        clock = SimpleNamespace(time=datetime(*date).timestamp)
        monkeypatch.setattr("posttrain.runs.prepare.time", clock)
        prepared = prepare(config, offline_ok=False)
        keep_clock(output, prepared.tokenizer)
        assert tokenizer_of(output, "0-sft", config).clock == prepared.tokenizer.clock
        (stage,) = prepared.stages
        return prepared.tokenizer.decode(stage.renderer.prompt([{"role": "user", "content": "?"}]))  # type: ignore[attr-defined]

    (output / "0-sft").mkdir(parents=True)
    assert prompt_at(2026, 1, 31, 23) == prompt_at(2026, 2, 1) == "2026-01-31?"


def test_sequences_of_turns_are_told(tmp_path: Path) -> None:
    """A conversation whose template changes earlier turns, and what is left of it in short rows."""
    template = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '-' }}<|im_end|>{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    model = {"init": INIT, "tokenizer": "bytes", "chat_template": str(tmp_path / "t.jinja")}
    talk = [{"role": ("user", "assistant")[n % 2], "content": "a" * 3} for n in range(4)]
    stage = sft_stage(dataset={"path": "talk.jsonl"}, overlong="drop")
    said = "1 of 1 rows of talk.jsonl are trained as a sequence for each assistant turn, in all 2 with"
    for row_tokens, dropped in ((64, 0), (10, 1)):
        file = write_run(tmp_path, {**stage, "row_tokens": row_tokens}, model=model)
        (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
        out = posttrain("check", file).out
        assert said in out and out.count("1 of 2 sequences of talk.jsonl are dropped") == dropped


def test_a_quick_check_reads_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kind of stage, spread evenly, and says which it has left out; a run reads them all."""
    counted = "def counted(count):\n    return [{'prompt': str(i), 'completion': str(i)} for i in range(count)]\n"
    made = {"path": "made.py:counted", "args": {"count": 3000}, "chat": False}
    file = write_run(tmp_path, sft_stage(eval_dataset=made), rl_stage(), sft_stage(num_steps=None, dataset=made))
    (tmp_path / "made.py").write_text(counted)
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1), "answer": str(n + 1)} for n in range(1200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = posttrain("check", file, "--quick").out.splitlines()
    assert [line for line in out if line.startswith("quick: ")] == [
        "quick: rows.jsonl: 240 of 1,200 rows were read",
        "quick: rows.jsonl: 240 of 1,200 prompts were read",
        "quick: made.py:counted: 250 of 3,000 rows were read",
        "quick: made.py:counted: called with count=256 in place of 3,000",
    ]
    assert any("estimated from 250 of 3,000 sequences" in line for line in out) and out[-1] == "ok"
    assert "quick:" not in posttrain("check", file).out
    # A row that is read is still refused by its number, and one row of each dataset is read whatever the time.
    monkeypatch.setattr(check_module, "QUICK_S", -1.0)
    out = posttrain("check", file, "--quick").out
    assert "quick: rows.jsonl: 1 of 1,200 prompts were read" in out and "quick: reading was ended after 0 s" in out
    (tmp_path / "rows.jsonl").write_text('{"prompt": 3, "completion": "4"}\n')
    assert "row 0" in posttrain("check", file, "--quick").error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quick", "--probe"], "--quick reads few rows of CONFIG"),
        (["--quick", "--devices", "v5e-8"], "--quick compiles nothing; give --devices a number, or v5e-8 without"),
    ],
)
def test_quick_with_others(tmp_path: Path, arguments: list[str], words: str) -> None:
    assert words in posttrain("check", write_run(tmp_path, sft_stage()), *arguments).error


def test_a_note_is_said_once(tmp_path: Path) -> None:
    """Red if rows of one file that are trained on and held out are told of twice."""
    held_out = {"path": "rows.jsonl", "chat": False, "limit": 3}
    out = posttrain("check", write_run(tmp_path, sft_stage(eval_dataset=held_out))).out.splitlines()
    assert out.count("0-sft: rows.jsonl: columns that are not read: answer") == 1
