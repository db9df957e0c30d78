"""Runs from Python: the same configuration, check and recipes as the command line, built from keywords."""

from __future__ import annotations

import abc
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from posttrain.config import ModelSection, RunConfig, SampledSection, Section
from posttrain.config.yaml_file import build_config, dump_config, load_config
from posttrain.errors import ConfigError
from posttrain.runs.code_identity import source_of
from posttrain.runs.run import RunResult, run
from posttrain.weights.locate import read_model_config

NUM_STEPS = 100
MODEL_FIELDS = frozenset(ModelSection.model_fields) - {"path"}


class PythonRun(abc.ABC):
    """One stage described by keywords; `fit` runs it, resuming what an earlier call with the same settings left.

    `model`: a path or hub id, or a mapping of `posttrain.config.ModelSection`. `dataset`: a path, a list of rows, or a
    mapping of `DatasetSection`. Without `output` the run goes to `runs/<kind>-<hash of the settings>`; without `seed`
    it draws one and writes it into the run's `config.yaml`. ConfigError for what is wrong, before anything runs.
    """

    kind: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    """Fields of the stage beside `num_steps` and those of `lengths`."""
    lora_learning_rate: ClassVar[float]
    """In place of the one of `defaults`, which is for all weights."""

    def __init__(
        self,
        model: str | Path | Mapping[str, Any],
        dataset: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        output: str | Path | None = None,
        seed: int | None = None,
        mesh: Mapping[str, int] | None = None,
        tensorboard: bool = True,
        **fields: Any,
    ):
        model_fields = {name: fields.pop(name) for name in list(fields) if name in MODEL_FIELDS}
        source = _model_fields(model) | model_fields
        stage = self._stage(
            fields,
            lora=source.get("lora") is not None or source.get("adapter") is not None,
            max_positions=_max_positions(source),
        )
        inline = {"dataset": _rows(dataset), "eval_dataset": _rows(stage.pop("eval_dataset", None))}
        texts = {name: _jsonl(name, value) for name, value in inline.items() if isinstance(value, list)}
        data: dict[str, Any] = {"model": source, "mesh": mesh or {}, "tensorboard": tensorboard}
        data |= {"kind": self.kind, **stage}

        def build(folder: Path, seed: int) -> RunConfig:
            rows = {name: _dataset(value, folder / f"{name}.jsonl") for name, value in inline.items()}
            given = {name: value for name, value in rows.items() if value is not None}
            settings = _plain({**data, **given, "output": str(folder), "seed": seed})
            return build_config(settings, name=f"pt.{type(self).__name__}")

        if output is None:
            output = Path("runs") / f"{self.kind}-{_digest(build(Path(), 0), [*texts.values(), str(seed)])}"
        folder = Path(output)
        self._files = {folder / f"{name}.jsonl": text for name, text in texts.items()}
        self.config = build(folder, _seed(folder) if seed is None else seed)

    def fit(self) -> RunResult:
        """Train to the end."""
        for file, text in self._files.items():
            _write_rows(file, text)
        return run(self.config, Path.cwd())

    def __repr__(self) -> str:
        return dump_config(self.config)

    @classmethod
    @abc.abstractmethod
    def lengths(cls, given: Mapping[str, Any], max_positions: int | None) -> dict[str, Any]:
        """Defaults of the fields that the model's context bounds; `given` are the caller's fields."""

    def _stage(self, fields: Mapping[str, Any], *, lora: bool, max_positions: int | None) -> dict[str, Any]:
        """The given fields over the defaults; of nested sections only the given keys replace defaults."""
        given = _plain(fields)
        stage: dict[str, Any] = {"num_steps": NUM_STEPS, **self.defaults, **self.lengths(given, max_positions)}
        if lora:
            stage["optimizer"] = {**stage["optimizer"], "learning_rate": self.lora_learning_rate}
        for name, value in given.items():
            nested = isinstance(value, Mapping) and isinstance(stage.get(name), Mapping)
            stage[name] = {**stage[name], **value} if nested else value
        if "rewards" in stage:
            rewards = stage["rewards"] if isinstance(stage["rewards"], list) else [stage["rewards"]]
            stage["rewards"] = [{"fn": r} if callable(r) or isinstance(r, str) else r for r in rewards]
        return stage


class GivenPythonRun(PythonRun):
    """Of the stages that train on answers as they are given."""

    defaults: ClassVar[Mapping[str, Any]] = {"batch_rows": 8, "overlong": "truncate"}
    row_tokens: ClassVar[int]
    """Of a row, or the model's context where that is less."""

    @classmethod
    def lengths(cls, given: Mapping[str, Any], max_positions: int | None) -> dict[str, Any]:
        return {"row_tokens": min(cls.row_tokens, max_positions or cls.row_tokens)}


class SampledPythonRun(PythonRun):
    """Of the stages that sample answers to prompts."""

    defaults: ClassVar[Mapping[str, Any]] = {"prompts_per_step": 8, "optimizer": {"learning_rate": 1e-6}}
    lora_learning_rate = 1e-5
    sequences: ClassVar[int]
    """Prompts, each with its answer, that a row must hold."""

    @classmethod
    def lengths(cls, given: Mapping[str, Any], max_positions: int | None) -> dict[str, Any]:
        """512 tokens for each prompt and each answer, or equal parts of the row where the model's context is less."""
        sampling = given.get("sampling")
        answer = sampling.get("max_tokens", 512) if isinstance(sampling, Mapping) else 512
        row = given.get("row_tokens", cls.sequences * (512 + answer if isinstance(answer, int) else 1024))
        if "row_tokens" not in given and max_positions is not None:
            row = min(row, max_positions)
        longest = min(512, row // (2 * cls.sequences)) if isinstance(row, int) else 512
        return {"row_tokens": row, "sampling": {"max_tokens": longest}}


class SFT(GivenPythonRun):
    """Supervised fine-tuning from Python: `pt.SFT(model="path", dataset="data.jsonl").fit()`.

    Every field of `posttrain.config.SFTSection` is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "sft"
    defaults: ClassVar[Mapping[str, Any]] = {
        **GivenPythonRun.defaults,
        "optimizer": {"learning_rate": 2e-5, "schedule": "cosine"},
    }
    lora_learning_rate = 2e-4
    row_tokens = 1024


class Distill(GivenPythonRun):
    """Distillation from Python: `pt.Distill(model="student", teacher="teacher", dataset="data.jsonl").fit()`.

    Every field of `posttrain.config.DistillSection` is a keyword, as are `output`, `seed` and `mesh`. `teacher`: a path
    or hub id, or a mapping of `TeacherSection`; for several give `teachers`.
    """

    kind = "distill"
    defaults: ClassVar[Mapping[str, Any]] = {
        **GivenPythonRun.defaults,
        "optimizer": {"learning_rate": 5e-5, "schedule": "cosine"},
    }
    lora_learning_rate = 2e-4
    row_tokens = 1024

    def __init__(self, model: Any, teacher: Any = None, dataset: Any = None, **fields: Any):
        if teacher is not None:
            if "teachers" in fields:
                raise ConfigError("pt.Distill: give teacher, or several as teachers")
            fields["teachers"] = [{"path": str(teacher)} if isinstance(teacher, str | Path) else teacher]
        super().__init__(model, dataset, **fields)


class Preference(GivenPythonRun):
    """Preference optimisation from Python: `pt.Preference(model="path", dataset="pairs.jsonl").fit()`.

    Every field of `posttrain.config.PreferenceSection` is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "preference"
    defaults: ClassVar[Mapping[str, Any]] = {
        **GivenPythonRun.defaults,
        "optimizer": {"learning_rate": 1e-6, "schedule": "linear"},
    }
    lora_learning_rate = 1e-5
    row_tokens = 2048
    """For both answers."""


class RewardModel(Preference):
    """A reward model from Python: `pt.RewardModel(model="path", dataset="pairs.jsonl").fit()`.

    Every field of `posttrain.config.RewardModelSection` is a keyword, as are `output`, `seed` and `mesh`. The result is
    a sequence classifier, which transformers loads.
    """

    kind = "reward_model"
    defaults: ClassVar[Mapping[str, Any]] = {
        **Preference.defaults,
        "optimizer": {"learning_rate": 1e-5, "schedule": "linear"},
    }
    lora_learning_rate = 1e-4


class RL(SampledPythonRun):
    """Reinforcement learning from Python: `pt.RL(model="path", dataset="data.jsonl", rewards=[correct]).fit()`.

    Every field of `posttrain.config.RLSection` is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "rl"
    defaults: ClassVar[Mapping[str, Any]] = {**SampledPythonRun.defaults, "group_size": 8}
    sequences = 1


class OnlinePreference(SampledPythonRun):
    """Online DPO from Python: `pt.OnlinePreference(model="path", dataset="data.jsonl", rewards=[correct]).fit()`.

    Every field of `posttrain.config.OnlinePreferenceSection` is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "online_preference"
    defaults: ClassVar[Mapping[str, Any]] = {**SampledPythonRun.defaults, "group_size": 4}
    sequences = 2


def _model_fields(model: Any) -> dict[str, Any]:
    plain = _plain(model)
    if isinstance(plain, Mapping):
        return dict(plain)
    if isinstance(plain, str | Path):
        return {"path": str(plain)}
    raise ConfigError(
        f"model: must be a folder, a hub id or a mapping of model fields; got a {type(model).__name__} "
        "(a Decoder in memory is saved with pt.save_model, or trained with pt.Trainer)"
    )


def _max_positions(source: Mapping[str, Any]) -> int | None:
    """The model's context, to choose defaults by; None where it is not known yet or the settings are wrong."""
    try:
        section = ModelSection.model_validate(_plain(source))
    except ValidationError:
        return None  # `build_config` says what is wrong
    vocab_size = 1 if section.init is not None else None
    config = read_model_config(section, Path.cwd(), vocab_size=vocab_size)
    return None if config is None else config.max_positions


def _rows(value: Any) -> Any:
    """A dataset in memory as a list of its rows; everything else as it is."""
    if value is None or isinstance(value, str | Path | Mapping | Section):
        return value
    rows = list(value)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"dataset: row {index} is a {type(row).__name__}; give a list of dicts, or a path")
    return [dict(row) for row in rows]


def _dataset(value: Any, file: Path) -> Any:
    """A dataset section; rows in memory are read from a file in the run's folder, so that the run can be resumed."""
    if isinstance(value, str | Path):
        return {"path": str(value)}
    return {"path": str(file)} if isinstance(value, list) else value


def _jsonl(name: str, rows: list[Any]) -> str:
    try:
        return "".join(json.dumps(row) + "\n" for row in rows)
    except TypeError as error:
        raise ConfigError(f"{name}: its rows must hold what JSON can: {error}") from error


def _write_rows(file: Path, text: str) -> None:
    if file.exists() and file.read_text(encoding="utf-8") == text:
        return
    if (file.parent / "config.yaml").exists():
        raise ConfigError(
            f"output: {file.parent} holds a run with other rows of {file.stem}; "
            "give another output, or delete the folder to start over"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _plain(value: Any) -> Any:
    """Sections as mappings, so that one validation sees everything."""
    if isinstance(value, Section):
        return {name: _plain(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _digest(config: RunConfig, more: Sequence[str]) -> str:
    """The same for the same settings; a function counts with its source, so that an edited reward is another run."""
    parts = [dump_config(config), *more]
    for stage in config.stages:
        if isinstance(stage, SampledSection):
            parts += [source_of(reward.fn) for reward in stage.rewards]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _seed(folder: Path) -> int:
    file = folder / "config.yaml"
    return load_config(file).config.seed if file.exists() else secrets.randbits(31)
