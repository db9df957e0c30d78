"""The command line: what it accepts it describes or does, once."""

from __future__ import annotations

import errno
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from jax.errors import JaxRuntimeError

from posttrain import cli, load_tokenizer, save_model
from posttrain.errors import ConfigError, OutsideError, RunError
from posttrain.runs.run import _outside_failures
from tests.stages.runs import posttrain, rl_stage, sft_stage, write_run
from tests.tiny import tiny_model

GLOO = "UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]:4: Connection reset by peer"
TENSORSTORE = 'RESOURCE_EXHAUSTED: Error writing "x": [OS error 28: No space left on device]'


@pytest.mark.fast
@pytest.mark.parametrize(
    ("error", "several", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"), False, 74),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), False, 74),
        (ValueError(TENSORSTORE), False, 74),
        (ExceptionGroup("many", [KeyError("a"), ValueError(TENSORSTORE)]), False, 74),
        (ValueError(GLOO), True, 75),
        (
            JaxRuntimeError("UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats)"),
            True,
            75,
        ),
        (ValueError(GLOO), False, 1),
        (OSError(errno.EACCES, "Permission denied"), True, 1),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), True, 1),
        (ConfigError("output: No space left on device"), True, 2),
        (RunError("the reward has failed"), True, 1),
    ],
)
def test_failures_outside_of_the_program(
    tmp_path: Path, monkeypatch: Any, error: Exception, several: bool, code: int
) -> None:
    """One line, with where the same command resumes, and a code of their own; others are as they were."""
    (tmp_path / "0-sft" / "checkpoints" / "15").mkdir(parents=True)
    (tmp_path / "1-rl" / "checkpoints" / "5").mkdir(parents=True)
    monkeypatch.setattr("posttrain.runtime.processes.count", lambda: 1 + several)
    raised: BaseException = error
    try:
        with _outside_failures(tmp_path):
            if code > 2:
                raise RuntimeError("a later one") from error
            raise error
    except Exception as told:
        raised = told
    text, found = cli._failure(raised)
    assert found == code and isinstance(raised, OutsideError) == (code > 2)
    if code > 2:
        assert re.fullmatch(r"error: (the disk is full|process 1 of 2 has vanished) \(.*", text)
        assert text.endswith("; the same command resumes after step 5 of 1-rl")


SCHEDULES = ["constant", "linear", "cosine"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_run(folder, sft_stage(), rl_stage())
    return folder


def test_check_says_what_a_run_would_do(folder: Path) -> None:
    outcome = posttrain("check", folder / "run.yaml")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines()[1:] == [
        "model: qwen3, 1 layers, vocabulary 261",
        "parameters: 6,544, all trained",
        "memory: 102.2 KiB = weights 25.6 KiB, gradient 25.6 KiB, optimiser 51.1 KiB (13.0 KiB on each of 8 devices); "
        "activations and caches come on top",
        "mesh: data=1, fsdp=8, expert=1, context=1, tensor=1 (this machine; --devices N for another)",
        "0-sft: 24 dataset rows, 4 steps of 4 x 16 tokens",
        "1-rl: 24 prompts, 4 steps of 2 prompts x 4 samples = 8, up to 6 new tokens each",
        "0-sft: rows.jsonl: columns that are not read: answer",
        "1-rl: rows.jsonl: columns that are not read: completion, answer",
        "1-rl: micro_batch_rows=4 becomes 8, a multiple of mesh.data x mesh.fsdp x mesh.expert = 8",
        "ok",
    ]
    assert not (folder / "out").exists()


def test_check_says_what_is_not_as_written(folder: Path) -> None:
    """Rows of a forward pass that the devices do not divide, and rows of the dataset that do not fit."""
    mesh, micro = "mesh={data: 3, fsdp: 2}", "stages.sft.micro_batch_rows=3"
    rows = posttrain("check", folder / "run.yaml", "--devices", "6", mesh, micro)
    assert rows.code == 0 and "4 steps of 4 x 16 tokens\n" in rows.out, rows.err
    assert rows.out.splitlines()[-3:] == [
        "0-sft: micro_batch_rows=3 becomes 6, a multiple of mesh.data x mesh.fsdp x mesh.expert = 6",
        "1-rl: micro_batch_rows=4 becomes 6, a multiple of mesh.data x mesh.fsdp x mesh.expert = 6",
        "ok",
    ]
    fits = posttrain("check", folder / "run.yaml", "mesh={fsdp: 2}", "--devices", "2", "stages.sft.micro_batch_rows=2")
    assert "becomes" not in fits.out and "(2 micro-batches)" in fits.out
    left_out = posttrain("check", folder / "run.yaml", "stages.sft.overlong=drop", "stages.sft.row_tokens=7")
    note = "rows of rows.jsonl are dropped: longer than row_tokens=7 (overlong: drop)"
    assert f"0-sft: 15 of 24 {note}\n" in left_out.out
    none = posttrain("check", folder / "run.yaml", "stages.sft.overlong=drop", "stages.sft.row_tokens=3")
    assert "stages.0: every row of" in none.error and "is dropped as longer than row_tokens=3" in none.error


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("finished")
    held_out = {"path": "rows.jsonl", "chat": False, "limit": 5}
    file = write_run(folder, sft_stage(eval_dataset=held_out), rl_stage(eval_dataset=held_out))
    outcome = posttrain("run", file)
    assert outcome.code == 0, outcome.err
    return file, outcome.out


@pytest.mark.thorough
def test_finished_run_prints_its_summary_again(finished: tuple[Path, str]) -> None:
    file, first = finished
    before = {path: path.stat().st_mtime_ns for path in file.parent.glob("out/*/model/*")}
    again = posttrain("run", file)
    assert again.code == 0
    done, summary = again.out.split("0-sft: held-out perplexity", 1)
    output = file.parent / "out"
    assert done.count("done before") == 2 and f"NOTHING WAS TRAINED: {output} holds this run" in done
    assert f"finished on {time.strftime('%Y-')}" in done and f"output={output}-2" in done
    assert first.endswith("0-sft: held-out perplexity" + summary) and "mean reward" in summary
    assert before == {path: path.stat().st_mtime_ns for path in file.parent.glob("out/*/model/*")}


@pytest.mark.thorough
def test_other_settings_in_the_same_folder(finished: tuple[Path, str]) -> None:
    file, _ = finished
    error = posttrain("run", file, "seed=4", "stages.rl.algorithm.kl_coef=0.5").error
    assert "holds a run with other settings: seed, stages.1.algorithm.kl_coef" in error
    assert posttrain("run", file, "tensorboard=true").code == 0


@pytest.mark.thorough
def test_other_text_of_a_function_in_the_same_folder(finished: tuple[Path, str]) -> None:
    file, _ = finished
    rewards = file.parent / "rewards_of_test.py"
    text = rewards.read_text()
    rewards.write_text(text.replace("t < 128", "t < 64"))
    error = posttrain("run", file).error
    assert f"{file.parent / 'out'} was started with other code of stages.1.rewards.0.fn=" in error
    assert f"({rewards.name}); give another output to run with the new code" in error
    rewards.write_text(text + "\n\n# Small tokens are letters.\n")
    assert posttrain("run", file).code == 0


LOSING = """
def fragile(completion_tokens, **_):
    return [1 / (0 if c[0] % 2 else 1 + i) for i, c in enumerate(completion_tokens)]
def never(completions):
    return [None] * len(completions)
"""


def test_lost_rewards_are_seen(tmp_path: Path) -> None:
    file = write_run(tmp_path, rl_stage(num_steps=2))
    (tmp_path / "losing.py").write_text(LOSING)
    some = posttrain("run", file, "stages.rl.rewards.0.fn=losing.py:fragile", f"output={tmp_path / 'some'}")
    assert some.code == 0, some.err
    assert "step 1: reward fragile: no value for " in some.out and "losing.py:3); sample" in some.out
    assert "  rewards failed " in some.out and "  no reward " in some.out
    none = posttrain("run", file, "stages.rl.rewards.0.fn=losing.py:never", f"output={tmp_path / 'none'}")
    assert none.code == 1 and "Traceback" not in none.err
    assert none.err.splitlines()[-1].startswith("error: step 2: no sample has a reward for 2 consecutive steps")
    assert "no reward 100.00%  update skipped" in none.out


def model_of(finished: tuple[Path, str]) -> Path:
    return finished[0].parent / "out" / "1-rl" / "model"


@pytest.mark.thorough
def test_generate(finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    model = model_of(finished)
    plain = posttrain("generate", model, "1+1=", "2+1=", "--max-tokens", "6", "--no-chat")
    assert plain.code == 0, plain.err
    first, *_ = plain.out.split("2+1=")
    assert first.startswith("1+1=") and len(first) > len("1+1=\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n2+1=\n"))
    assert posttrain("generate", model, "--max-tokens", "6", "--no-chat").out == plain.out
    chat = posttrain("generate", model, "1+1=", "--max-tokens", "6").out
    assert chat == posttrain("generate", model, "1+1=", "--max-tokens", "6", "--chat").out
    assert not chat.startswith("1+1=")
    turns = json.dumps([{"role": "user", "content": "1+1="}])
    assert chat == posttrain("generate", model, turns, "--messages", "--max-tokens", "6").out
    assert "--messages: '1+1=' is not JSON" in posttrain("generate", model, "1+1=", "--messages").error


@pytest.mark.thorough
def test_generate_hands_its_options_on(finished: tuple[Path, str]) -> None:
    import posttrain as pt

    model = model_of(finished)
    options = (
        "--max-tokens 9 --temperature 1 --seed 3 --repetition-penalty 1.5 --presence-penalty 0.5 -n 2 --ignore-eos"
    )
    printed = posttrain("generate", model, "1+1=", "--no-chat", *options.split(), "--frequency-penalty", "-1").out
    texts = pt.generate(
        pt.load_model(model),
        pt.load_tokenizer(model),
        ["1+1="],
        max_new_tokens=9,
        temperature=1.0,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-1.0,
        ignore_eos=True,
        n=2,
        seed=3,
        chat=False,
    )
    assert printed == "".join(f"1+1={text}\n" for text in texts)


@pytest.mark.thorough
def test_generate_says_how_likely_and_draws_from_what_may_come(finished: tuple[Path, str]) -> None:
    options = (
        "--max-tokens 5 --no-chat --ignore-eos --logprobs 2 --prompt-logprobs --allowed-token 49 --allowed-token 50"
    )
    more = ("--allowed-token", "51", "--logit-bias", "51=-inf", "--stop-token", "49")
    line = json.loads(posttrain("generate", model_of(finished), "1+1=", *options.split(), *more).out)
    assert {token["text"] for token in line["tokens"]} <= {"1", "2"} and len(line["tokens"][0]["top"]) == 2
    assert line["stop"] == ("stop" if line["tokens"][-1]["id"] == 49 else "length")
    assert "".join(token["text"] for token in line["prompt_tokens"]) == "1+1="
    chosen = posttrain(
        "generate", model_of(finished), "1+1=", "--grammar", "choice=10", "--grammar=choice=21", "--no-chat"
    ).out
    assert chosen in ("1+1=10\n", "1+1=21\n")
    mistake = posttrain("generate", model_of(finished), "1+1=", "--grammar", "regex=a", "--grammar", "choice=b").error
    assert "--grammar: regex=a, choice=b: use one of them" in mistake
    mistake = posttrain("generate", model_of(finished), "1+1=", "--grammar", 'json_schema={"not": {}}').error
    assert '--grammar: json_schema: keywords that are not supported: ["not"]' in mistake
    mistake = posttrain("generate", model_of(finished), "1+1=", "--logit-bias", "13")
    assert "--logit-bias" in mistake.error and "write it as TOKEN=NUMBER" in mistake.error


@pytest.mark.thorough
def test_generate_seed_and_stop(finished: tuple[Path, str]) -> None:
    model = model_of(finished)

    def sampled(*options: str) -> str:
        return posttrain("generate", model, "1+1=", "--max-tokens", "12", "--no-chat", *options).out

    warm = ["--temperature", "1", "--seed", "7"]
    text = sampled(*warm)
    assert text == sampled(*warm) != sampled("--temperature", "1", "--seed", "8")
    end = text.removeprefix("1+1=").strip("\n\ufffd")[2]
    assert sampled(*warm, "--stop", end) == "1+1=" + text.removeprefix("1+1=").split(end)[0] + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-tokens", "100"], "more than the model's max_position_embeddings=64"),
        (["--max-tokens", "4", "--top-p", "0"], "top_p=0.0: must be above 0"),
        (["--max-tokens", "4", "--min-p", "1"], "min_p=1.0: must be"),
        (["--max-tokens", "4", "--stop", ""], "stop="),
        (["--max-tokens", "4", "--repetition-penalty", "0"], "repetition_penalty=0.0: must be"),
    ],
)
def test_generate_mistakes(tmp_path: Path, arguments: list[str], words: str) -> None:
    model = tiny_model(num_layers=1, windows=(None,), vocab_size=261, max_positions=64)
    save_model(model, tmp_path, tokenizer=load_tokenizer("bytes"))
    assert words in posttrain("generate", tmp_path, "1+1=", *arguments).error


def test_version_environment_and_completion(tmp_path: Path) -> None:
    """Red if the environment showed a variable that may hold a secret."""
    import posttrain as pt

    assert posttrain("--version").out == f"posttrain {pt.__version__}\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "secret")
        patch.setenv("POSTTRAIN_PROJECT", "mine")
        told = posttrain("env")
    assert told.code == 0, told.err
    lines = told.out.splitlines()
    words = [line.split(":")[0].split(" ")[0] for line in lines]
    assert words[:6] == ["posttrain", "packages", "devices", "host", "kernels", "compile"]
    assert "POSTTRAIN_PROJECT=mine" in lines and "secret" not in "".join(lines)
    assert "attention" in lines[4] and "jax " in lines[1]
    assert "--show-completion" in posttrain("--help").out
    listed = posttrain("fields", "rl", "samples_every").out
    assert listed.startswith("samples_every: integer >= 1 = nothing\n") and "stages" not in listed
    # A word is looked for in the run's own fields as well, or in those of all stages.
    assert posttrain("fields", "sft", "zzz").code == 2
    assert posttrain("fields", "sft", "lora").out.startswith("model.lora: section = nothing\n")
    assert "[rl] " in posttrain("fields", "group_size").out and "[run] " in posttrain("fields", "chat_template").out
    assert "did you mean 'sft'" in posttrain("fields", "sfft").err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["run", "run.y"], ["run.yaml"]),
        (["check", "configs/rl/ppo."], ["configs/rl/ppo.yaml"]),
        (["run", "run.yaml", "stages.rl.num_st"], ["stages.rl.num_steps=4"]),
        (["run", "run.yaml", "stages.sft.optimizer.sch"], [f"stages.sft.optimizer.schedule={n}" for n in SCHEDULES]),
        (["run", "run.yaml", "stages.rl.optimizer.schedule", "=", "co"], ["constant", "cosine"]),
        (["run", "run.yaml", "stages.rl.optimizer.schedule", "="], SCHEDULES),
        (["run", "configs/grpo_stories.yaml", "seed=1", "prompts_per"], ["prompts_per_step=8"]),
        (["run", "run.yaml", "stages.rl.algorithm", "=", "gs"], ["gspo", "gspo_token"]),
        (["run", "run.yaml", "stages.rl.algorithm.kl_c"], ["stages.rl.algorithm.kl_coef=0.04"]),
        (["run", "run.yaml", "stages.rl.nothing"], []),
        (["run", "wrong.yaml", "stages.rl.num_st"], []),
    ],
)
def test_bash_completes_files_keys_and_values(
    folder: Path, words: list[str], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words as Bash splits them: at `=` too. A file with mistakes completes nothing, and prints nothing."""
    (folder / "wrong.yaml").write_text("stages: [{kind: rl, num_stepz: 3}]\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("_POSTTRAIN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["posttrain", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    told = posttrain("completion")
    assert (told.err, told.out.split()) == ("", wanted)
