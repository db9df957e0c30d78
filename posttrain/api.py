"""Python API: `pt.SFT`, `pt.RL`, ... build the configuration of a run from keywords, then check and run it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from posttrain.config import ModelSection, RunConfig, Section
from posttrain.config.yaml_file import build_config, dump_config, load_config
from posttrain.errors import ConfigError
from posttrain.runs.code_identity import code_texts
from posttrain.runs.run import RunResult, run
from posttrain.runtime.files import digest

MODEL_FIELDS = frozenset(ModelSection.model_fields) - {"path"}


class PythonRun:
    """Run of one stage configured by keywords; `fit` runs it, or resumes an earlier call with the same settings.

    Keywords are the fields of the stage, with its section's defaults. `model`: a path or hub id, or a mapping of
    `posttrain.config.ModelSection`. `dataset`: a path, a list of rows, or a mapping of `DatasetSection`. By default
    `output` is `runs/<kind>-<hash of the settings>`, and `seed` is drawn and recorded in the run's `config.yaml`.
    Raises ConfigError for invalid settings before anything runs.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        model: str | Path | Mapping[str, Any],
        dataset: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        output: str | Path | None = None,
        seed: int | None = None,
        mesh: Mapping[str, int] | None = None,
        tensorboard: bool = True,
        profile: Mapping[str, Any] | None = None,
        **fields: Any,
    ):
        model_fields = {name: fields.pop(name) for name in list(fields) if name in MODEL_FIELDS}
        source = _model_fields(model) | model_fields
        stage = _stage(fields)
        inline = {"dataset": _rows(dataset), "eval_dataset": _rows(stage.pop("eval_dataset", None))}
        texts = {name: _jsonl(name, value) for name, value in inline.items() if isinstance(value, list)}
        data: dict[str, Any] = {"model": source, "mesh": mesh or {}, "tensorboard": tensorboard, "profile": profile}
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
        """Train until the last step, resuming from the newest checkpoint."""
        for file, text in self._files.items():
            _write_rows(file, text)
        return run(self.config)

    def __repr__(self) -> str:
        return dump_config(self.config)


def _stage(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the stage. A single reward becomes a list, and functions or names become reward sections."""
    stage: dict[str, Any] = _plain(fields)
    if "rewards" in stage:
        rewards = stage["rewards"] if isinstance(stage["rewards"], list) else [stage["rewards"]]
        stage["rewards"] = [{"fn": r} if callable(r) or isinstance(r, str) else r for r in rewards]
    return stage


class SFT(PythonRun):
    """Supervised fine-tuning from Python: `pt.SFT(model="path", dataset="data.jsonl").fit()`.

    Every field of `posttrain.config.SFTSection` is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "sft"


class Distill(PythonRun):
    """Distillation from Python: `pt.Distill(model="student", teacher="teacher", dataset="data.jsonl").fit()`.

    Every field of `posttrain.config.DistillSection` is a keyword, as are `output`, `seed` and `mesh`. `teacher`: a path
    or hub id, or a mapping of `TeacherSection`; for several give `teachers`.
    """

    kind = "distill"

    def __init__(self, model: Any, teacher: Any = None, dataset: Any = None, **fields: Any):
        if teacher is not None:
            if "teachers" in fields:
                raise ConfigError("pt.Distill: set teacher, or teachers for several")
            fields["teachers"] = [{"path": str(teacher)} if isinstance(teacher, str | Path) else teacher]
        super().__init__(model, dataset, **fields)


class Preference(PythonRun):
    """Preference optimisation from Python: `pt.Preference(model="path", dataset="pairs.jsonl").fit()`.

    Every field of `posttrain.config.PreferenceSection` is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "preference"


class RewardModel(PythonRun):
    """Reward model training from Python: `pt.RewardModel(model="path", dataset="pairs.jsonl").fit()`.

    Every field of `posttrain.config.RewardModelSection` is a keyword, as are `output`, `seed` and `mesh`. The result is
    a sequence classifier that transformers loads.
    """

    kind = "reward_model"


class RL(PythonRun):
    """Reinforcement learning from Python: `pt.RL(model="path", dataset="data.jsonl", rewards=[correct]).fit()`.

    Every field of `posttrain.config.RLSection` is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "rl"


class OnlinePreference(PythonRun):
    """Online DPO from Python: `pt.OnlinePreference(model="path", dataset="data.jsonl", rewards=[correct]).fit()`.

    Every field of `posttrain.config.OnlinePreferenceSection` is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "online_preference"


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


def _rows(value: Any) -> Any:
    """Convert a dataset in memory to a list of rows; other values are returned unchanged."""
    if value is None or isinstance(value, str | Path | Mapping | Section):
        return value
    rows = list(value)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"dataset: row {index} is a {type(row).__name__}; give a list of dicts, or a path")
    return [dict(row) for row in rows]


def _dataset(value: Any, file: Path) -> Any:
    """Dataset section; rows in memory are read from a file in the run's folder, so that the run can be resumed."""
    if isinstance(value, str | Path):
        return {"path": str(value)}
    return {"path": str(file)} if isinstance(value, list) else value


def _jsonl(name: str, rows: list[Any]) -> str:
    try:
        return "".join(json.dumps(row) + "\n" for row in rows)
    except TypeError as error:
        raise ConfigError(f"{name}: its rows must be JSON-serialisable: {error}") from error


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
    """Convert sections to mappings, so that one validation covers all settings."""
    if isinstance(value, Section):
        return {name: _plain(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _digest(config: RunConfig, more: Sequence[str]) -> str:
    """Hash of the settings, including the source code of functions and their dependencies, so that an edited reward
    function makes a new run."""
    parts = [dump_config(config.model_copy(update={"profile": None})), *more, *code_texts(config).values()]
    return digest("\0".join(parts), 8)


def _seed(folder: Path) -> int:
    file = folder / "config.yaml"
    return load_config(file).seed if file.exists() else secrets.randbits(31)
