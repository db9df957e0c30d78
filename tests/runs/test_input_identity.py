"""What a run reads beside its settings and its code: each change is refused by name where it resumes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from posttrain.config.yaml_file import load_config
from posttrain.data import sources
from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import ConfigError
from posttrain.models.drafter import DrafterConfig
from posttrain.runs.finished import load_generator
from posttrain.runs.input_identity import input_digests
from posttrain.runs.prepare import prepare
from posttrain.weights.drafter import attach_drafter, save_drafter
from posttrain.weights.load import init_model
from posttrain.weights.save import save_model
from posttrain.weights.scalar_head import add_scalar_head
from tests.stages.runs import INIT, ROWS, inside, posttrain, rl_stage, sft_stage, write_run

HELD_OUT = {"path": "held_out.jsonl", "chat": False}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def write_model(folder: Path, seed: int, *, scores: bool = False) -> None:
    model = init_model({**INIT, "vocab_size": 261}, dtype=jnp.float32, seed=seed)
    if scores:
        add_scalar_head(model, seed=seed)
    save_model(model, folder, tokenizer=load_tokenizer("bytes"))


def write_drafter(folder: Path, seed: int) -> None:
    model = init_model({**INIT, "vocab_size": 261}, dtype=jnp.float32, seed=0)
    sizes = DrafterConfig(embed_dim=INIT["hidden_size"], vocab_size=261, tokens=2, window=3, layers=1)
    attach_drafter(model, sizes, seed=seed)
    save_drafter(model, folder)


def write_rows(file: Path, changed: int | None = None) -> None:
    """Rows with all columns that a kind of stage reads; of the changed one another answer."""
    rows = []
    for number, row in enumerate(ROWS):
        answer = "!" if number == changed else row["completion"]
        rows.append({"prompt": row["prompt"], "completion": answer, "chosen": answer, "rejected": f"no{number}"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("own", "teacher", "reference", "critic", "small")):
        write_model(folder / name, seed)
    write_model(folder / "judge", 7, scores=True)
    write_drafter(folder / "drafter", 0)
    return folder


@pytest.fixture
def folder(tmp_path: Path, models: Path) -> Path:
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    for name in ("rows", "held_out", "more"):
        write_rows(tmp_path / f"{name}.jsonl")
    return tmp_path


def edit_template(folder: Path, model: str = "own") -> None:
    config = json.loads((folder / model / "tokenizer_config.json").read_text())
    (folder / model / "chat_template.jinja").unlink(missing_ok=True)
    (folder / model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))


def edit_tokenizer(folder: Path) -> None:
    """The same ids, of texts that are normalised first."""
    file = folder / "own/tokenizer.json"
    tokenizer = json.loads(file.read_text())
    file.write_text(json.dumps({**tokenizer, "normalizer": {"type": "Lowercase"}}))


def edit_stop(folder: Path) -> None:
    (folder / "own/generation_config.json").write_text(json.dumps({"eos_token_id": [258, 10]}))


Change = Callable[[Path], object]
OF_ALL: dict[str, Change] = {
    "chat template of tokenizer": edit_template,
    "stop tokens of tokenizer": edit_stop,
    "dataset": lambda folder: write_rows(folder / "rows.jsonl", changed=20),
    "eval_dataset": lambda folder: write_rows(folder / "held_out.jsonl", changed=20),
}
PREFERENCE = {"chat": False, "path": "rows.jsonl"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Change]]] = {
    "sft": (
        sft_stage(mix=[{"path": "more.jsonl", "chat": False}]),
        {"dataset of mix.0": lambda folder: write_rows(folder / "more.jsonl", changed=20)},
    ),
    "preference": (sft_stage(kind="preference"), {}),
    "kto": (sft_stage(kind="preference", loss="kto"), {}),
    "reward_model": (sft_stage(kind="reward_model"), {}),
    "drafter": (sft_stage(kind="drafter", tokens=2, window=3, layers=1), {}),
    "distill": (
        sft_stage(kind="distill", teachers=[{"path": "teacher"}]),
        {"model.safetensors of teachers.0": lambda folder: write_model(folder / "teacher", 99)},
    ),
    "rl": (
        rl_stage(
            rewards=[{"model": "judge"}],
            reference={"path": "reference"},
            rollout={"speculative": {"kind": "draft", "path": "small"}},
            algorithm={"kind": "ppo", "critic": {"path": "critic"}, "kl_coef": 0.1},
        ),
        {
            "model.safetensors of rewards.0.model": lambda folder: write_model(folder / "judge", 99, scores=True),
            "model.safetensors of reference.path": lambda folder: write_model(folder / "reference", 99),
            "model.safetensors of rollout.speculative.path": lambda folder: write_model(folder / "small", 99),
            "model.safetensors of algorithm.critic.path": lambda folder: write_model(folder / "critic", 99),
        },
    ),
    "distill by other tokens": (
        sft_stage(kind="distill", teachers=[{"path": "teacher", "tokenizer": "gold"}]),
        {
            "model.safetensors of teachers.0": lambda folder: write_model(folder / "teacher", 99),
            "chat template of tokenizer of teacher teacher": lambda folder: edit_template(folder, "teacher"),
        },
    ),
    "rl with a teacher": (
        rl_stage(teachers=[{"path": "teacher"}]),
        {"model.safetensors of teachers.0": lambda folder: write_model(folder / "teacher", 99)},
    ),
    "online_preference": (
        {
            **rl_stage(kind="online_preference", row_tokens=32, rewards=[{"model": "judge"}]),
            "rollout": {"speculative": {"kind": "block", "path": "drafter"}},
        },
        {
            "model.safetensors of rewards.0.model": lambda folder: write_model(folder / "judge", 99, scores=True),
            "drafter.safetensors of rollout.speculative.path": lambda folder: write_drafter(folder / "drafter", 99),
        },
    ),
}


def named(old: dict[str, dict[str, str]], new: dict[str, dict[str, str]]) -> set[str]:
    """Parts that differ, in the words of the refusal without the values of places."""
    return {
        place if place.endswith(part) else f"{part} of {place.partition('=')[0]}"
        for place in {**old, **new}
        for part in {**old.get(place, {}), **new.get(place, {})}
        if old.get(place, {}).get(part) != new.get(place, {}).get(part)
    }


@pytest.mark.parametrize("kind", CASES)
def test_each_input_of_each_kind_counts(folder: Path, kind: str) -> None:
    """Red without: rows beyond the training data, models beside the run's own, and templates of models' folders."""
    stage, changes = CASES[kind]
    own = {"path": "own"}
    file = write_run(folder, {**stage, "eval_dataset": HELD_OUT}, model=own)
    write_rows(folder / "rows.jsonl")

    def digests() -> dict[str, dict[str, str]]:
        with inside(folder):
            return input_digests(prepare(load_config(file), offline_ok=False))

    before = digests()
    assert digests() == before
    for place, change in {**OF_ALL, **changes}.items():
        kept = folder.parent / f"{folder.name}-kept"
        shutil.copytree(folder, kept)
        change(folder)
        assert named(before, digests()) == {place}
        shutil.rmtree(folder)
        kept.rename(folder)
    assert digests() == before


def test_another_normalizer_is_another_vocabulary(folder: Path) -> None:
    """Also where no row tells of it: those here have no capital letter."""
    before = load_tokenizer(folder / "own").identity
    edit_tokenizer(folder)
    after = load_tokenizer(folder / "own").identity
    assert {name for name in before if before[name] != after[name]} == {"vocabulary"}


def test_an_unfinished_run_generates_only_over_its_own_base(folder: Path) -> None:
    """Red without: chat, export and evaluations take an adapter over whatever lies at the base's place today."""
    model = {"path": "own", "lora": {"rank": 2}}
    file, out = write_run(folder, sft_stage(num_steps=1), model=model), folder / "out"
    with inside(folder):
        assert posttrain("run", file).code == 0
        (out / "0-sft/model").rename(folder / "saved")  # as before the end of a stage
        assert load_generator(str(out)).tokenizer.stop_ids
        shutil.copytree(folder / "own", folder / "kept")
        edit_stop(folder)
        with pytest.raises(ConfigError, match="has another stop tokens than when the run began"):
            load_generator(str(out))
        shutil.rmtree(folder / "own")
        shutil.copytree(folder / "kept", folder / "own")
        write_model(folder / "own", 99)
        with pytest.raises(ConfigError, match="the initial model differs: in .*own.* model.safetensors has changed"):
            load_generator(str(out))


def test_a_dataset_that_moves_on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with both commits, and goes on with the one with which the run began."""
    import datasets

    commits = {"a" * 40: ROWS, "b" * 40: [*ROWS[:20], {**ROWS[20], "completion": "!"}, *ROWS[21:]]}
    for commit, rows in commits.items():
        datasets.Dataset.from_list(rows).save_to_disk(str(folder / "owner___name/default/0.0.0" / commit))
    newest = ["a" * 40]

    def load_dataset(path: str, *, split: str, revision: str | None = None) -> Any:
        return datasets.load_from_disk(str(folder / "owner___name/default/0.0.0" / (revision or newest[0])))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "hub_is_reachable", lambda: True)

    def call(steps: int, **args: str) -> Any:
        dataset = {"path": "owner/name", "chat": False, **({"args": args} if args else {})}
        return posttrain("run", write_run(folder, sft_stage(dataset=dataset, num_steps=steps)))

    with inside(folder):
        assert call(1).code == 0
        newest[0] = "b" * 40
        refused = call(2)
        assert refused.code == 2 and f"revision {'a' * 40}' and is 'name, 24 rows" in refused.error
        assert f"revision {'b' * 40}' now" in refused.error
        assert call(2, revision="b" * 40).code == 2
        pinned = call(2, revision="a" * 40)
        assert pinned.code == 0, pinned.err


def test_a_changed_input_is_refused_by_name(folder: Path) -> None:
    """Whether the run has ended or goes on; brought back, it goes on as if nothing had been."""
    own = {"path": "own"}
    file = write_run(folder, sft_stage(num_steps=2, eval_dataset=HELD_OUT), model=own)
    write_rows(folder / "rows.jsonl")
    with inside(folder):
        assert posttrain("run", file).code == 0
        for name, change in OF_ALL.items():
            kept = folder.parent / f"{folder.name}-kept"
            shutil.copytree(folder, kept)
            change(folder)
            for overrides in [], ["stages.0.num_steps=3"]:
                refused = posttrain("run", file, *overrides)
                assert refused.code == 2 and f"cannot resume: {name} was '" in refused.error, name
            for changed in ("own", "rows.jsonl", "held_out.jsonl"):
                source, target = kept / changed, folder / changed
                if source.is_dir():
                    shutil.rmtree(target)
                    shutil.copytree(source, target)
                else:
                    shutil.copy(source, target)
            shutil.rmtree(kept)
        grown = posttrain("run", file, "stages.0.num_steps=3")
    assert grown.code == 0, grown.err
