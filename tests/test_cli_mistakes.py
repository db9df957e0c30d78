"""The command line: each mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path

import pytest

from tests.stages.runs import inside, posttrain, rl_stage, sft_stage, write_run

pytestmark = pytest.mark.fast

GOLDEN = Path(__file__).parent / "goldens" / "models" / "llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_run(folder, sft_stage(), rl_stage())
    (folder / "broken.py").write_text("import no_such_module\n")
    (folder / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    (folder / "wrong.py").write_text(
        "def two(rewards_PG, other): ...\ndef flat(rewards_PG):\n    return rewards_PG[0]\n"
        "class Loss:\n    def __init__(self, scale): ...\n"
    )
    (folder / "lacking.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n')
    (folder / "no_config").mkdir()
    shutil.copytree(GOLDEN, folder / "damaged")
    fields = json.loads((GOLDEN / "config.json").read_text())
    (folder / "damaged" / "config.json").write_text(json.dumps({**fields, "vocab_size": 261}))
    shutil.copytree(folder / "damaged", folder / "other_sizes")
    (folder / "damaged" / "model.safetensors").write_bytes((GOLDEN / "model.safetensors").read_bytes()[:1000])
    for name, file, size in (("empty", "model.safetensors", 0), ("pickled", "pytorch_model.bin", 8), ("bare", "x", 0)):
        shutil.copytree(folder / "damaged", folder / name)
        (folder / name / "model.safetensors").unlink()
        (folder / name / file).write_bytes(bytes(size))
    return folder


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.rl.num_step=3", ["stages.1.num_step: unknown field", "'num_steps'"]),
        ("model.init.hidden_sizes=3", ["model.init: hidden_sizes: unknown field", "'hidden_size'"]),
        ("stages.rl.rewards=['rw.py:f']", ["stages.1.rewards.0: must be a section", "did you mean {fn: rw.py:f}?"]),
        ("stages.rl.async={}", ["stages.1.async: unknown field", "did you mean 'asynchronous'?"]),
        ("stages.rl.num_steps=null", ["stages.1.num_steps", "got nothing"]),
        ("stages.sft.batch_rows=-4", ["stages.0.batch_rows: must be at least 1; got -4"]),
        ("stages.rl.sampling.temperature=-1", ["stages.1.sampling.temperature: must be at least 0; got -1"]),
        ("stages.rl.eval_every=2", ["eval_every needs eval_dataset"]),
        ("stages.rl.sampling.max_tokens=16", ["sampling.max_tokens=16 must be less than row_tokens=16"]),
        ("stages.rl.row_tokens=65", ["stages.1: row_tokens=65", "max_position_embeddings=64"]),
        ("stages.rl.max_prompt_tokens=11", ["max_prompt_tokens=11 + sampling.max_tokens=6", "row_tokens=16"]),
        ("stages.rl.max_prompt_tokens=4", ["24 of 24 prompts of", "max_prompt_tokens=4", "row 0: 5; the longest: 6"]),
        ("stages.rl.dataset.path=row.jsonl", ["stages.1: dataset.path: no file", "did you mean 'rows.jsonl'?"]),
        ("stages.sft.dataset.skip=24", ["stages.0: dataset.skip=24 leaves none of the 24 rows"]),
        ("stages.rl.dataset.prompt='{promt}'", ["stages.1", "no column 'promt'", "did you mean 'prompt'?"]),
        (
            "stages.rl.dataset.completion='{answer}'",
            ["stages.1: dataset.completion='{answer}': this stage samples", "remove"],
        ),
        (
            "stages.rl.eval_dataset={path: rows.jsonl, completion: '{answer}'}",
            ["stages.1: eval_dataset.completion='{answer}': this stage samples its completions"],
        ),
        ("stages.rl.rewards.0.fn=rewards_of_test.py:lo", ["has no 'lo'; did you mean 'low'?"]),
        ("stages.rl.rewards.0.fn=reward_of_test.py:low", ["no file", "did you mean 'rewards_of_test.py'?"]),
        ("stages.rl.rewards.0.fn=broken.py:low", ["fails to import: ModuleNotFoundError: No module", "broken.py:1"]),
        ("stages.rl.rewards.0.fn=rewards_of_test.py:misnamed", ["no column 'anser'", "did you mean 'answer'?"]),
        (
            "stages.rl.rewards.0={fn: 'rewards_of_test.py:strict', args: {x: 1}}",
            ["reward strict: it takes no argument 'x'"],
        ),
        ("stages.rl.algorithm=grop", ["algorithm: 'grop' is unknown; did you mean 'grpo'?"]),
        ("stages.rl.algorithm.advantage=rewards_of_test.py:lows", ["has no 'lows'; did you mean 'low'?"]),
        ("seed=-1", ["seed: must be at least 0; got -1"]),
        ("seed=4294967296", ["seed: must be less than 4294967296; got 4294967296"]),
        ("seed=true", ["seed: must be a whole number; got true"]),
        ("tensorboard=1", ["tensorboard: must be true or false; got 1"]),
        (
            "mesh.fsdp=0",
            ["mesh: data=1, fsdp=0, expert=1, context=1, tensor=1: sizes are positive, and at most one is -1"],
        ),
        ("stages.rl.dataset.path=''", ["stages.1.dataset.path: must not be empty"]),
        ("stages.rl.sampling.stop=['']", ["stages.1.sampling.stop.0: must not be empty"]),
        ("stages.rl.optimizer.learning_rate=.inf", ["stages.1.optimizer.learning_rate: must be a finite number"]),
        ("stages.rl.rewards.0.weight=.nan", ["stages.1.rewards.0.weight: must be a finite number"]),
        ("stages.rl.rewards.0.weight=0", ["rewards: every weight is 0"]),
        (
            "stages.rl.rewards.0.fn=leaving.py:low",
            ["fails to import: SystemExit: sys.exit(0) is called", "leaving.py:2"],
        ),
        (
            "stages.rl.algorithm.advantage=wrong.py:two",
            ["advantage: wrong.py:two has the parameters other, which nothing provides"],
        ),
        (
            "stages.rl.algorithm.advantage=wrong.py:flat",
            ["must return an advantage for each of the rewards [P, G] = (3, 4)"],
        ),
        ("stages.sft.loss=wrong.py:two", ["loss: two returned a NoneType; return pt.LossOutput"]),
        ("stages.sft.loss=wrong.py:Loss", ["loss: wrong.py:Loss needs"]),
        ("model.init.num_attention_heads=0", ["model.init: num_attention_heads: must be above 0 and finite, got 0"]),
        ("model.init.hidden_size=-8", ["model.init: hidden_size: must be above 0 and finite, got -8"]),
        ("model.init.rope_theta=0", ["model.init: rope_theta: must be above 0 and finite, got 0"]),
        (
            "stages.sft.optimizer.stochastic_rounding=true",
            ["optimizer.stochastic_rounding is for bfloat16 parameters, and model.dtype is float32; set model.dtype="],
        ),
        ("model.attention=cudnn", ["model.attention=cudnn: ", "runs on GPU, got cpu; use auto, reference, blockwise"]),
        (
            "model={tokenizer: bytes, decode_attention: ragged, init: {model_type: qwen3, vocab_size: 261, "
            "head_dim: 192, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, "
            "num_key_value_heads: 2, max_position_embeddings: 64}}",
            ["model.decode_attention: 'ragged' reads heads of more than 128 in 16 bits only, got 192 in 32"],
        ),
        ("stages.sft.loss=nl", ["loss: 'nl' is unknown; did you mean 'nll'?"]),
        ("model={path: no_config, tokenizer: bytes}", ["no_config/config.json: no such file"]),
        ("model={path: ./no_confi}", ["no_confi: no such file or folder; did you mean", "no_config"]),
        ("model={path: damaged, tokenizer: bytes}", ["model.path: ", "model.safetensors: damaged or incomplete"]),
        ("model={path: empty, tokenizer: bytes}", ["model.path: ", "model.safetensors: damaged or incomplete"]),
        ("model={path: pickled, tokenizer: bytes}", ["has neither", "pytorch_model.bin is not read, convert it"]),
        ("model={path: bare, tokenizer: bytes}", ["model.path: ", "has neither model.safetensors nor"]),
        ("model={path: other_sizes, tokenizer: bytes}", ["do not match config.json", "config.json says (261, "]),
        (
            "model={path: damged, tokenizer: bytes}",
            ["model.path: damged is not a local file or folder", "mean 'damaged'?"],
        ),
        ("model={path: damged}", ["model.path: damged is not a local file or folder", "did you mean 'damaged'?"]),
        ("model={path: damaged/mine, tokenizer: bytes}", ["model.path: damaged/mine is not a local file or folder"]),
        (
            "stages.rl.dataset.path=rows",
            ["dataset.path: rows is not a local file or folder", "did you mean 'rows.jsonl'?"],
        ),
        ("model.init.vocab_size=100", ["bytes has 261 tokens, the model only 100", "raise model.init.vocab_size"]),
        ("model.stop_tokens=['<none>']", ["<none>"]),
        ("stages.dpo.num_steps=1", ["override stages.dpo.num_steps=1", "no item is called 'dpo'"]),
        ("nonsense", ["override nonsense: must be KEY=VALUE"]),
    ],
)
def test_mistakes(folder: Path, override: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with inside(folder):
        error = posttrain("check", "run.yaml", override).error
        assert posttrain("run", "run.yaml", override, "output=refused").error == error
    for word in words:
        assert word in error, error
    assert not (folder / "refused").exists()


def test_every_row_has_what_rewards_want(folder: Path) -> None:
    overrides = "stages.rl.dataset.path=lacking.jsonl", "stages.rl.rewards.0.fn=rewards_of_test.py:strict"
    with inside(folder):
        error = posttrain("check", "run.yaml", *overrides).error
    assert error.startswith("stages.1: ") and "lacking.jsonl row 1: reward strict: no column 'answer'" in error


def test_a_kernel_of_another_machine(folder: Path) -> None:
    overrides = "model.attention=cudnn", "model.dtype=bfloat16", f"output={folder / 'cudnn'}"
    checked = posttrain("check", folder / "run.yaml", *overrides)
    why = "attention: kernel 'cudnn' runs on GPU, got cpu; use auto, reference, blockwise, splash"
    assert checked.code == 0 and f"model.attention=cudnn: not on this machine: {why}\n" in checked.out
    assert posttrain("run", folder / "run.yaml", *overrides).error == f"model.attention=cudnn: {why}"


def test_every_mistake_of_a_file_has_its_line(folder: Path) -> None:
    outcome = posttrain("check", folder / "run.yaml", "sead=1", "stages.sft.num_steps=0", "stages.rl.group_size=0")
    lines = outcome.err.splitlines()
    assert outcome.code == 2 and len(lines) == 3 and all(line.startswith("error: ") for line in lines), outcome.err
    assert "output: must not be empty; got ''" in posttrain("run", folder / "run.yaml", "output=''").error


def test_yaml_mistakes_name_the_line(folder: Path) -> None:
    (folder / "syntax.yaml").write_text("output: x\nseed: [1\nmodel: {}\n")
    assert "syntax.yaml:3: not YAML" in posttrain("check", folder / "syntax.yaml").error
    assert "no such file" in posttrain("run", folder / "rum.yaml").error
    (folder / "list.yaml").write_text("- 1\n")
    assert "a configuration is a mapping" in posttrain("run", folder / "list.yaml").error


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("mesh={data: 1, fsdp: 3}", ["fsdp=3", "must multiply to the number of devices, 8"]),
        ("mesh={data: 1, fsdp: 1, tensor: 8}", ["mesh.tensor=8 must divide num_kv_heads=1 of qwen3"]),
        (
            "output=rows.jsonl/out",
            ["output: rows.jsonl/out: cannot be written: ", "rows.jsonl is a file; give another output"],
        ),
        ("output=rows.jsonl", ["output: rows.jsonl: cannot be written: ", "rows.jsonl is a file; give another output"]),
    ],
)
def test_mistakes_that_only_a_run_can_see(folder: Path, override: str, words: list[str]) -> None:
    with inside(folder):
        output = [] if override.startswith("output") else [f"output=run-{abs(hash(override))}"]
        error = posttrain("run", "run.yaml", override, *output, devices=8).error
    for word in words:
        assert word in error, error


def test_mistake_while_loading_does_not_occupy_the_output(folder: Path) -> None:
    with inside(folder):
        posttrain("run", "run.yaml", "mesh={data: 1, fsdp: 3}", "output=again", devices=8).error  # noqa: B018
        again = posttrain("run", "run.yaml", "mesh={fsdp: 1, tensor: 8}", "output=again", devices=8)
        assert "other settings" not in again.error


def test_check_without_network_says_what_it_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_model = posttrain("check", folder / "run.yaml", "model={path: someone/some-model}")
    assert hub_model.code == 0, hub_model.err
    notes = [line for line in hub_model.out.splitlines() if line.startswith("not checked")]
    assert any("someone/some-model" in note for note in notes) and hub_model.out.endswith("ok\n")
    hub_data = posttrain("check", folder / "run.yaml", "stages.rl.dataset.path=someone/some-data")
    assert hub_data.code == 0
    assert "stages.1: not checked, no network: dataset someone/some-data, if it is on the hub" in hub_data.out
    wrong = posttrain("check", folder / "run.yaml", "stages.rl.dataset.path=someone/some-data", "stages.rl.algorithm=x")
    assert "algorithm: 'x' is unknown" in wrong.error


def test_second_process_is_refused(folder: Path) -> None:
    output = folder / "claimed"
    output.mkdir()
    with (output / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is running" in posttrain("run", folder / "run.yaml", f"output={output}").error


def test_generate_wants_a_model(folder: Path) -> None:
    assert "no such folder" in posttrain("generate", folder / "nothing", "a").error
    assert posttrain("generate", folder / "damagd", "a").error.endswith("damaged'?")
    assert "tokenizer" in posttrain("generate", folder / "no_config", "a").error
