"""Runs from Python: the same configuration, check and recipes as the command line, built from keywords."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.config import ModelSection, RunConfig, Section
from posttrain.config_file import build_config, dump_config, load_config

if TYPE_CHECKING:
    from posttrain.recipes.run import RunResult

MODEL_FIELDS = frozenset(ModelSection.model_fields) - {"path"}


class PythonRun:
    """One stage described by keywords; `fit` runs it, resuming what an earlier call with the same settings left.

    `model`: a path or hub id, or a mapping of `posttrain.config.ModelSection`. `dataset`: a path, a list of rows, or a
    mapping of `DatasetSection`. Without `output` the run goes to `runs/<kind>-<hash of the settings>`; without `seed`
    it draws one and writes it into the run's `config.yaml`. ConfigError for what is wrong, before anything runs.
    """

    kind: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    lora_learning_rate: ClassVar[float]

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
        source = dict(model) if isinstance(model, Mapping) else {"path": str(model)}
        stage = self._stage(fields, lora="lora" in model_fields or "lora" in source)
        inline = {"dataset": dataset, "eval_dataset": stage.pop("eval_dataset", None)}
        data: dict[str, Any] = {"model": source | model_fields, "mesh": dict(mesh or {}), "tensorboard": tensorboard}
        data["stages"] = [{**stage, "kind": self.kind}]
        folder = Path(output) if output is not None else Path("runs") / f"{self.kind}-{_digest(data, inline)}"
        rows = {name: _dataset(value, folder / f"{name}.jsonl") for name, value in inline.items() if value is not None}
        data["stages"][0] |= rows
        seed = _seed(folder) if seed is None else seed
        settings = _plain({**data, "output": str(folder), "seed": seed})
        self.config: RunConfig = build_config(settings, name=f"pt.{type(self).__name__}")

    def fit(self) -> RunResult:
        """Train to the end."""
        from posttrain.recipes.run import run

        return run(self.config, Path.cwd())

    def __repr__(self) -> str:
        return dump_config(self.config)

    def _stage(self, fields: Mapping[str, Any], *, lora: bool) -> dict[str, Any]:
        """The given fields over the defaults; of nested sections only the given keys replace defaults."""
        stage: dict[str, Any] = dict(self.defaults)
        if lora:
            stage["optimizer"] = {**stage["optimizer"], "learning_rate": self.lora_learning_rate}
        for name, value in fields.items():
            nested = isinstance(value, Mapping) and isinstance(stage.get(name), Mapping)
            stage[name] = {**stage[name], **value} if nested else value
        if "rewards" in stage:
            stage["rewards"] = [{"fn": r} if callable(r) or isinstance(r, str) else r for r in stage["rewards"]]
        return stage


def _dataset(value: Any, file: Path) -> Any:
    """A dataset section; rows given in memory are written into the run's folder, so that the run can be resumed."""
    if isinstance(value, Mapping | Section):
        return value
    if isinstance(value, str | Path):
        return {"path": str(value)}
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(dict(row)) + "\n" for row in value)
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")
    return {"path": str(file)}


def _plain(value: Any) -> Any:
    """Sections as mappings, so that one validation sees everything."""
    if isinstance(value, Section):
        return {name: _plain(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _digest(*parts: Any) -> str:
    def text(value: Any) -> str:
        return f"{value.__module__}:{value.__qualname__}" if callable(value) else str(value)

    return hashlib.sha256(json.dumps(_plain(parts), default=text, sort_keys=True).encode()).hexdigest()[:8]


def _seed(folder: Path) -> int:
    file = folder / "config.yaml"
    return load_config(file).config.seed if file.exists() else secrets.randbits(31)
