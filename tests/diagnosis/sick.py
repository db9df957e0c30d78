"""Sick and healthy runs of the smallest model, each from a seed in seconds, and the little that is kept of them.

A run begins from a model that is trained once per seed (`WARM`), and differs from a healthy run of its kind in what its
name says. `make` trains, `keep` writes what `posttrain why` reads of it into a few kilobytes.
"""

from __future__ import annotations

import copy
import io
import json
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as parquet
import yaml

from tests.stages.runs import posttrain

TASKS = "tests/diagnosis/tasks.py"
KEPT_RUNS = Path(__file__).parent / "runs"
KEPT_MODELS = Path("tests/diagnosis/models")
"""Tokenizers of the models that runs begin with, below the repository's root."""
HEALTHY = "healthy"
INIT: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
Fields = Mapping[str, Any]


def rows(function: str, *, chat: bool | None = False, **args: Any) -> dict[str, Any]:
    """A dataset of `tasks.py`. Its seed is that of the run, unless given."""
    return {"path": f"{TASKS}:{function}", "args": args, "chat": chat}


def reward(function: str) -> list[dict[str, Any]]:
    return [{"fn": f"{TASKS}:{function}"}]


def sums(count: int = 4000, **args: Any) -> dict[str, Any]:
    return rows("problems", count=count, **{"held_out": False, **args})


HELD_OUT = rows("problems", count=200, held_out=True, seed=999)
SFT: dict[str, Any] = {
    "kind": "sft",
    "dataset": sums(),
    "eval_dataset": HELD_OUT,
    "num_steps": 60,
    "batch_rows": 16,
    "row_tokens": 64,
    "optimizer": {"learning_rate": 1e-3, "schedule": "linear"},
}
RL: dict[str, Any] = {
    "kind": "rl",
    "algorithm": "grpo",
    "dataset": sums(),
    "eval_dataset": HELD_OUT,
    "rewards": reward("correct"),
    "num_steps": 30,
    "prompts_per_step": 32,
    "group_size": 8,
    "row_tokens": 16,
    "micro_batch_rows": 64,
    "sampling": {"max_tokens": 6, "temperature": 1.0},
    "optimizer": {"learning_rate": 5e-4},
}
PREFERENCE: dict[str, Any] = {
    "kind": "preference",
    "dataset": rows("pairs", count=2000, held_out=False),
    "eval_dataset": rows("pairs", count=200, held_out=True, seed=999),
    "num_steps": 60,
    "batch_rows": 16,
    "row_tokens": 32,
    "optimizer": {"learning_rate": 2e-4, "schedule": "linear"},
}
REWARD_MODEL: dict[str, Any] = PREFERENCE | {
    "kind": "reward_model",
    "num_steps": 80,
    "optimizer": {"learning_rate": 1e-3, "schedule": "linear"},
}
DISTILL: dict[str, Any] = SFT | {"kind": "distill", "teachers": [{"path": "{warm}/teacher"}]}

WARM: dict[str, dict[str, Any]] = {
    # Pupils know sums, and forget most carries; they answer without a chat template.
    "pupil": SFT | {"dataset": sums(20000, forgotten=0.65), "num_steps": 400, "batch_rows": 32},
    "teacher": SFT | {"dataset": sums(20000), "num_steps": 400, "batch_rows": 32},
    "chatter": SFT | {"dataset": rows("chatter", count=8000, chat=None), "num_steps": 400, "batch_rows": 32},
    "babbler": SFT | {"dataset": rows("babble", count=20000), "num_steps": 400, "batch_rows": 32},
    "worker": SFT | {"dataset": rows("worked", count=20000, held_out=False), "num_steps": 300, "batch_rows": 32},
    "chat": SFT | {"dataset": sums(20000, forgotten=0.65) | {"chat": True}, "num_steps": 400, "batch_rows": 32},
}
WARM_RATE = {"learning_rate": 4e-3, "schedule": "linear", "warmup_steps": 20, "beta2": 0.98}


@dataclass(frozen=True)
class Case:
    """One kind of run: the cause that is to be named first (`healthy`: none), and its stage."""

    cause: str
    stage: Fields
    changes: Fields = field(default_factory=dict)
    """Fields of the stage that differ, merged into those of sections."""
    start: str = "pupil"
    """Model of `WARM` to begin from."""
    model: Fields = field(default_factory=dict)
    breaks_off: bool = False
    """True if the run ends with an error by itself."""


def case(
    cause: str,
    stage: Fields,
    /,
    *,
    start: str = "pupil",
    model: Fields | None = None,
    breaks_off: bool = False,
    **changes: Any,
) -> Case:
    return Case(cause, stage, changes, start, model or {}, breaks_off)


CASES: dict[str, Case] = {
    # --- reinforcement learning ---
    "rl_too_hard": case("too_hard", RL, dataset=rows("products", count=2000), eval_dataset=None),
    "rl_format": case("format_never_asked", RL, rewards=reward("tagged"), row_tokens=32, sampling={"max_tokens": 22}),
    "rl_cut": case("answers_cut", RL, sampling={"max_tokens": 2}),
    "rl_cold": case("sampling_too_cold", RL, sampling={"temperature": 0.01}, optimizer={"learning_rate": 1e-5}),
    "rl_rate_small": case("rate_too_small", RL, optimizer={"learning_rate": 1e-7}),
    "rl_rate_large": case("rate_too_large", RL, optimizer={"learning_rate": 3e-2}),
    "rl_template": case("wrong_template", RL, dataset={"chat": True}, eval_dataset={"chat": True}, row_tokens=48),
    "rl_never_stops": case("never_stops", RL, start="chatter", sampling={"max_tokens": 16}, row_tokens=32),
    "rl_length": case(
        "pays_for_length",
        RL,
        rewards=reward("paid_by_length"),
        sampling={"max_tokens": 16},
        row_tokens=32,
        num_steps=50,
        optimizer={"learning_rate": 1e-3},
    ),
    "rl_repetition": case(
        "pays_for_repetition",
        RL,
        start="babbler",
        rewards=reward("paid_by_repetition"),
        sampling={"max_tokens": 10},
        row_tokens=32,
        num_steps=50,
        optimizer={"learning_rate": 1e-3},
    ),
    "rl_constant": case(
        "pays_for_constant",
        RL,
        rewards=reward("near_the_middle"),
        num_steps=60,
        optimizer={"learning_rate": 2e-3},
    ),
    "rl_kl": case("kl_outweighs", RL, algorithm={"kind": "grpo", "kl_coef": 30.0}),
    "rl_entropy": case("entropy_outweighs", RL, algorithm={"kind": "grpo", "entropy_coef": 0.5}),
    "rl_noisy": case("noisy_data", RL, dataset=rows("wrong_rows", count=200, share=0.3), num_steps=40),
    "rl_stale": case(
        "stale",
        RL,
        breaks_off=True,
        asynchronous={"max_staleness": 8},
        optimizer={"learning_rate": 1e-3},
        algorithm={"kind": "grpo", "importance_sampling": {"apply": "never"}},
    ),
    "rl_small_eval": case("evaluation_too_small", RL, eval_dataset={"args": {"count": 4}}, num_steps=40),
    "rl_overfit": case(
        "overfitting",
        RL,
        dataset=rows("whims", count=12, held_out=False),
        eval_dataset=rows("whims", count=150, held_out=True, seed=999),
        prompts_per_step=12,
        group_size=16,
        num_steps=60,
        optimizer={"learning_rate": 2e-3},
        algorithm={"kind": "grpo", "kl_coef": 0.0},
    ),
    # --- supervised fine-tuning ---
    "sft_mask_empty": case(
        "mask_empty",
        SFT,
        dataset=rows("wordy", count=2000, least=0, most=18),
        overlong="truncate",
        row_tokens=32,
    ),
    "sft_mask_full": case("mask_full", SFT, dataset=rows("wordy", count=2000, least=6, most=6), train_on_prompt=True),
    "sft_no_end": case(
        "end_never_trained",
        SFT,
        dataset={"chat": True},
        eval_dataset={"chat": True},
        model={"chat_template": "tests/diagnosis/no_end.jinja"},
    ),
    "sft_cut": case(
        "rows_cut", SFT, dataset=rows("worked", count=2000, held_out=False), overlong="truncate", row_tokens=24
    ),
    "sft_duplicates": case(
        "duplicates", SFT, dataset=rows("copies", count=60, times=60), num_steps=120, optimizer={"learning_rate": 2e-3}
    ),
    "sft_leak": case("held_out_leaks", SFT, dataset=sums(300, seed=5), eval_dataset=sums(300, seed=5)),
    "sft_rate_small": case("rate_too_small", SFT, optimizer={"learning_rate": 1e-7}),
    "sft_rate_large": case("rate_too_large", SFT, optimizer={"learning_rate": 0.3}),
    "sft_template": case("wrong_template", SFT, start="chat"),
    # --- preferences ---
    "dpo_equal": case("pairs_equal", PREFERENCE, dataset={"args": {"equal": 0.7}}),
    "dpo_saturated": case(
        "pairs_saturated",
        PREFERENCE,
        dataset=rows("easy_pairs", count=2000, held_out=False),
        eval_dataset=rows("easy_pairs", count=100, held_out=True, seed=999),
    ),
    "dpo_falling": case(
        "likelihood_falls", PREFERENCE, optimizer={"learning_rate": 3e-3}, loss={"kind": "sigmoid", "beta": 0.02}
    ),
    "dpo_rate_small": case("rate_too_small", PREFERENCE, optimizer={"learning_rate": 1e-7}),
    "dpo_rate_large": case("rate_too_large", PREFERENCE, optimizer={"learning_rate": 0.1}),
    "dpo_template": case("wrong_template", PREFERENCE, start="chat"),
    # --- reward models ---
    "rm_equal": case("pairs_equal", REWARD_MODEL, dataset={"args": {"equal": 0.7}}),
    "rm_noisy": case("noisy_data", REWARD_MODEL, dataset={"args": {"swapped": 0.5}}),
    "rm_rate_small": case("rate_too_small", REWARD_MODEL, optimizer={"learning_rate": 1e-7}),
    "rm_rate_large": case("rate_too_large", REWARD_MODEL, optimizer={"learning_rate": 0.3}),
    # --- distillation ---
    "distill_other_text": case("teacher_of_other_text", DISTILL, teachers=[{"path": "{warm}/chat"}], start="teacher"),
    "distill_rate_small": case("rate_too_small", DISTILL, optimizer={"learning_rate": 1e-7}),
    "distill_rate_large": case("rate_too_large", DISTILL, optimizer={"learning_rate": 0.3}),
    # --- healthy runs ---
    "ok_grpo": case(HEALTHY, RL),
    "ok_dapo": case(HEALTHY, RL, algorithm="dapo"),
    "ok_ppo": case(HEALTHY, RL, algorithm="ppo"),
    "ok_async": case(HEALTHY, RL, asynchronous={"max_staleness": 1}),
    "ok_near": case(HEALTHY, RL, rewards=reward("near")),
    "ok_chat_rl": case(HEALTHY, RL, start="chat", dataset={"chat": True}, eval_dataset={"chat": True}, row_tokens=48),
    "ok_sft": case(HEALTHY, SFT),
    "ok_sft_chat": case(HEALTHY, SFT, start="chat", dataset={"chat": True}, eval_dataset={"chat": True}),
    "ok_sft_text": case(
        HEALTHY,
        SFT,
        start="pupil",
        dataset=rows("worked", count=4000, held_out=False),
        eval_dataset=rows("worked", count=100, held_out=True, seed=999),
    ),
    "ok_dpo": case(HEALTHY, PREFERENCE),
    "ok_reward_model": case(HEALTHY, REWARD_MODEL),
    "ok_distill": case(HEALTHY, DISTILL),
}


def merged(base: Fields, changes: Fields) -> dict[str, Any]:
    """`base` with `changes`; sections are merged field by field, but for datasets of another function."""
    result = dict(copy.deepcopy(dict(base)))
    for name, value in changes.items():
        old = result.get(name)
        whole = isinstance(value, Mapping) and ("path" in value or "kind" in value)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and not whole:
            result[name] = merged(old, value)
        elif value is None:
            result.pop(name, None)
        else:
            result[name] = copy.deepcopy(value)
    return result


def configuration(case: Case, seed: int, folder: Path, output: Path) -> dict[str, Any]:
    """The run's configuration. `folder`: that of all runs, which holds the models to begin from."""
    stage = merged(case.stage, case.changes)
    for name in ("dataset", "eval_dataset"):
        if name in stage:
            stage[name]["args"].setdefault("seed", seed)
    warm = f"{folder}/warm-{seed}"
    stage = json.loads(json.dumps(stage).replace("{warm}", warm))
    return {
        "output": str(output),
        "seed": seed,
        "tensorboard": False,
        "model": {"path": f"{warm}/{case.start}", **case.model},
        "stages": [stage],
    }


def run(config: Fields, file: Path, *, breaks_off: bool = False) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(dict(config), sort_keys=False))
    done = posttrain("run", file)
    if (done.code != 0) != breaks_off:
        raise RuntimeError(f"{file.stem}: {done.err[-2000:]}\n{done.out[-500:]}")


def make_warm(name: str, seed: int, folder: Path) -> None:
    """Train a model of `WARM`, once."""
    target = folder / f"warm-{seed}" / name
    if target.exists():
        return
    stage = merged(WARM[name], {"optimizer": WARM_RATE})
    stage.pop("eval_dataset")
    stage["dataset"]["args"].setdefault("seed", 1000 + seed)
    output = folder / "warming" / f"{name}-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    config = {
        "output": str(output),
        "seed": seed,
        "tensorboard": False,
        "model": {"tokenizer": "bytes", "init": INIT},
        "stages": [stage],
    }
    run(config, folder / "warming" / f"{name}-{seed}.yaml")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(output / "0-sft" / "model", target)
    shutil.rmtree(output)


def is_made(name: str, seed: int, folder: Path) -> bool:
    return (folder / "raw" / f"{name}-{seed}" / "done").exists()


def make(name: str, seed: int, folder: Path) -> Path:
    """Train the run `name` of `CASES` and return its folder, which is kept between calls."""
    output = folder / "raw" / f"{name}-{seed}"
    if is_made(name, seed, folder):
        return output
    case = CASES[name]
    teachers = {Path(teacher["path"]).name for teacher in merged(case.stage, case.changes).get("teachers", ())}
    for start in {case.start, *teachers}:
        make_warm(start, seed, folder)
    shutil.rmtree(output, ignore_errors=True)
    file = folder / "raw" / f"{name}-{seed}.yaml"
    run(configuration(case, seed, folder, output), file, breaks_off=case.breaks_off)
    for found in [*output.glob("*/checkpoints")]:
        shutil.rmtree(found)
    for found in [*output.glob("*/model/*.safetensors")]:
        found.unlink()
    (output / "done").touch()
    return output


# --- what is kept -----------------------------------------------------------------------------------------------------

KEPT_METRICS = (
    *("step", "stage", "loss", "nll", "entropy", "grad_norm", "learning_rate", "update_skipped"),
    *(
        "reward",
        "reward_stderr",
        "rewards/",
        "pass_rate",
        "frac_mixed",
        "frac_all_bad",
        "kl",
        "hacking/",
        "logps/",
        "eval/",
    ),
    *("completions/clipped_ratio", "completions/mean_length", "clip_ratio/region_mean", "sampling/staleness/"),
    *("sampling/logp_difference/mean", "sampling/logp_difference/limit", "sampling/logp_difference/outliers"),
)
"""Names of metrics, or their beginnings."""
KEPT_COLUMNS = ("group", "sample", "row", "stop", "reward", "tokens", "versions")
KEPT_RECORDS = 5
KEPT_GROUPS = 16
KEPT_SAMPLES = 40


def keep(name: str, seed: int, run: Path, folder: Path = KEPT_RUNS) -> Path:
    """Write what the diagnosis reads of a run to an archive: settings, metrics, the result's numbers, some recorded
    groups of some steps."""
    folder.mkdir(parents=True, exist_ok=True)
    case, archive = CASES[name], folder / f"{name}-{seed}.zip"
    config = configuration(case, seed, KEPT_MODELS, Path("runs") / f"{name}-{seed}")
    config["model"]["path"] = f"{KEPT_MODELS}/{'chat' if case.start == 'chat' else 'plain'}"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    stage = next(path for path in run.iterdir() if path.is_dir() and path.name[0].isdecimal())
    files = {
        "config.yaml": yaml.safe_dump(config, sort_keys=False).encode(),
        "metrics.jsonl": "".join(f"{json.dumps(_short(line))}\n" for line in lines).encode(),
    }
    for file in stage.glob("result.json"):
        files[f"{stage.name}/{file.name}"] = json.dumps(_numbers(json.loads(file.read_text()))).encode()
    if case.model:
        files |= {f"{stage.name}/model/{file.name}": file.read_bytes() for file in stage.glob("model/tokenizer*.json")}
    records = sorted(stage.glob("trajectories/*.parquet"))
    places = (
        {round(place * (len(records) - 1) / (KEPT_RECORDS - 1)) for place in range(KEPT_RECORDS)} if records else ()
    )
    for place in sorted(places):
        files[f"{stage.name}/trajectories/{records[place].name}"] = _short_record(records[place])
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        for path, content in sorted(files.items()):
            # Without the time, so that the same run is the same file.
            target.writestr(zipfile.ZipInfo(path), content, zipfile.ZIP_DEFLATED, 9)
    return archive


def unpack(archive: Path, folder: Path) -> Path:
    """The run's folder, unpacked below `folder`."""
    target = folder / archive.stem
    with zipfile.ZipFile(archive) as source:
        source.extractall(target)
    return target


def _short(line: Fields) -> dict[str, Any]:
    """Metrics of a step that are kept, to four digits."""
    kept: dict[str, Any] = {}
    for name, value in line.items():
        if any(name == known or (known.endswith("/") and name.startswith(known)) for known in KEPT_METRICS):
            kept[name] = float(f"{value:.4g}") if isinstance(value, float) else value
    return kept


def _numbers(result: Any) -> Any:
    """The result without its lists, but for the first samples."""
    if not isinstance(result, dict):
        return result
    kept = {name: _numbers(value) for name, value in result.items() if not isinstance(value, list)}
    samples = result.get("samples", ())
    # Without rewards of their own and times: the texts tell whether answers have changed.
    return kept | (
        {"samples": [{"completion": one["completion"]} for one in samples[:KEPT_SAMPLES]]} if samples else {}
    )


def _short_record(file: Path) -> bytes:
    """Record of a step with its first groups, without what is known of each token besides its version."""
    table = parquet.read_table(file)
    names = [name for name in table.column_names if name in KEPT_COLUMNS]
    groups = pc.unique(table.column("group")).sort()[:KEPT_GROUPS]
    kept = table.filter(pc.field("group").isin(groups)).select(names)
    target = io.BytesIO()
    parquet.write_table(kept, target, compression="none", write_statistics=False)
    return target.getvalue()
