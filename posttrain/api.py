"""Python API: `pt.SFT`, `pt.RL`, ... build the configuration of a run from keywords, then check and run it."""

from __future__ import annotations

import inspect
import json
import re
import secrets
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic.fields import FieldInfo

from posttrain.config import DistillSection, ModelSection, RLSection, RunConfig, SamplingSection, Section
from posttrain.config.describe import FieldTable, field_table
from posttrain.config.run import SECTIONS
from posttrain.config.train import DatasetSection
from posttrain.config.yaml_file import build_config, dump_config, load_recorded
from posttrain.data.files import listed
from posttrain.data.pictures import written
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.models.decoder import Decoder
from posttrain.results.result import RunResult, attach
from posttrain.runs.code_identity import code_digests
from posttrain.runs.finished import Generator, load_generator
from posttrain.runs.folder import CONFIG_NAME
from posttrain.runs.run import run
from posttrain.runtime import processes
from posttrain.runtime.files import digest
from posttrain.stages.table import stage_names
from posttrain.tracking.sink import OnSamples, OnStep
from posttrain.train.loop import Interrupted

if TYPE_CHECKING:
    from posttrain.runs.evaluate import Evaluation

LEADING = {"distill": ("model", "teacher", "dataset")}
"""Parameters that may be given by position, where they are not model and dataset."""


class _Defaults:
    """Default of a section, shown as `...`."""

    def __repr__(self) -> str:
        return "..."


def keyword_signature(kind: str, model_fields: Iterable[str], dataset_fields: Iterable[str]) -> Signature:
    """Signature of a stage kind: model and dataset, then the fields of run, dataset, stage and model as keywords."""
    leading = LEADING.get(kind, ("model", "dataset"))
    own, model = SECTIONS[kind].model_fields, ModelSection.model_fields
    fields = {name: RunConfig.model_fields[name] for name in RunConfig.model_fields if name not in ("model", "stages")}
    fields |= {name: DatasetSection.model_fields[name] for name in dataset_fields}
    fields |= {name: info for name, info in own.items() if name not in ("kind", "dataset")}
    fields |= {name: model[name] for name in model if name in set(model_fields)}
    first = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in leading]
    return Signature([*first, *(_keyword(name, info) for name, info in fields.items())])


def _keyword(name: str, info: FieldInfo) -> Parameter:
    default: Any = info.default
    if name in ("output", "seed"):
        default = None
    elif info.is_required():
        default = Parameter.empty
    elif isinstance(default, Section):
        default = _Defaults()
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default)


TEMPLATE_NAME = "chat_template.jinja"
TEMPLATES = ("prompt", "completion", "system", "chat")
"""Fields of a dataset that are keywords as well; an `eval_dataset` that is a mapping has its own."""
MODEL_FIELDS = frozenset(ModelSection.model_fields) - {"path"}


class Stopped(SystemExit, KeyboardInterrupt):
    """Run that was stopped in a script, which it ends with the code of the signal and one line; the same script resumes
    it. It is caught as KeyboardInterrupt."""


class PythonRun:
    """Run of one stage configured by keywords; `fit` runs it, or resumes an earlier call with the same settings.

    Keywords are the fields of the stage, with its section's defaults. `model`: a path or hub id, or a mapping of
    `posttrain.config.ModelSection`, whose `chat_template` may be the text itself. `dataset`: a path, a list of rows, or
    a mapping of `DatasetSection`, whose `prompt`, `completion`, `system` and `chat` are keywords too. By default
    `output` is `runs/<kind>-<hash of the settings>`, and `seed` is drawn and recorded in the run's `config.yaml`.
    Raises ConfigError for invalid settings before anything runs.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.__signature__ = keyword_signature(cls.kind, MODEL_FIELDS, TEMPLATES)  # type: ignore[attr-defined]
        own = (row for row in cls.fields() if "." not in row.name)
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nFields, with their defaults:\n\n{FieldTable(own)!r}\n"

    def __init__(
        self,
        model: str | Path | Mapping[str, Any] | None = None,
        dataset: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        output: str | Path | None = None,
        seed: int | None = None,
        mesh: Mapping[str, Any] | None = None,
        tensorboard: bool = True,
        trackers: Sequence[str] = (),
        metrics_server: Mapping[str, Any] | None = None,
        profile: Mapping[str, Any] | None = None,
        **fields: Any,
    ):
        try:
            self._prepare(
                model,
                dataset,
                output,
                seed,
                {
                    "mesh": mesh or {},
                    "tensorboard": tensorboard,
                    "trackers": list(trackers),
                    "metrics_server": metrics_server,
                    "profile": profile,
                },
                fields,
            )
        except ConfigError as error:
            raise _in_python(error) from None

    def _prepare(
        self,
        model: Any,
        dataset: Any,
        output: str | Path | None,
        seed: int | None,
        data: dict[str, Any],
        fields: dict[str, Any],
    ) -> None:
        """Build the configuration, and the files of rows in memory."""
        model_fields = {name: fields.pop(name) for name in list(fields) if name in MODEL_FIELDS}
        source = model_fields if model is None else _model_fields(model) | model_fields
        templates = {name: fields.pop(name) for name in TEMPLATES if name in fields}
        stage = _stage(fields)
        inline = {"dataset": _rows(dataset), "eval_dataset": _rows(stage.pop("eval_dataset", None))}
        texts = {f"{name}.jsonl": _jsonl(name, value) for name, value in inline.items() if isinstance(value, list)}
        template = source.get("chat_template")
        if inline_template := isinstance(template, str) and "{" in template:
            texts[TEMPLATE_NAME] = str(template)
        data |= {"kind": self.kind, **stage}

        def build(folder: Path, seed: int) -> RunConfig:
            rows = {
                name: _dataset(value, folder / f"{name}.jsonl", templates if _shares_templates(name, value) else {})
                for name, value in inline.items()
            }
            given = {name: value for name, value in rows.items() if value is not None}
            if source:
                file = {"chat_template": str(folder / TEMPLATE_NAME)} if inline_template else {}
                given["model"] = source | file
            settings = _plain({**data, **given, "output": str(folder), "seed": seed})
            return build_config(settings, name=f"pt.{type(self).__name__}", python=True)

        if output is None:
            output = Path("runs") / f"{self.kind}-{_digest(build(Path(), 0), [*texts.values(), str(seed)])}"
        folder = Path(output)
        self._files = {folder / name: text for name, text in texts.items()}
        self.config = build(folder, _seed(folder) if seed is None else seed)

    def fit(
        self, *, on_step: OnStep | None = None, on_samples: OnSamples | None = None, force: bool = False
    ) -> RunResult:
        """Train until the last step, resuming from the newest checkpoint.

        `on_step`: a function of step and metrics, called in the first process for every line of metrics; `on_samples`:
        a function of step and samples, for those that `samples.jsonl` has. One that returns `pt.STOP` ends the stage
        after the step that runs: it is evaluated, has a checkpoint and its model, and is `finished`. An interrupt in a
        notebook or an interactive Python (the stop button, Ctrl-C) returns a result that is not `finished`; the
        same call resumes. A script ends with one line and code 130, unless it catches KeyboardInterrupt. ConfigError
        for mistakes, before any work.
        """
        output = Path(self.config.output)
        try:
            for file, text in self._files.items():
                _write_text(file, text)
            trained = run(self.config, on_step=on_step, on_samples=on_samples, force=force)
        except ConfigError as error:
            raise _in_python(error) from None
        except (Interrupted, KeyboardInterrupt) as stop:
            begun = (output / CONFIG_NAME).exists()
            if not hasattr(sys, "ps1"):
                raise _stopped(stop, begun=begun) from None
            if not begun:
                raise
            return attach(output)
        return RunResult(output=output, stages=stage_names(self.config), trained=trained)

    def plan(self, devices: str) -> None:
        """Print memory, traffic and least time on a machine, without its devices, weights or data.

        `devices`: a name such as `v5e-8`, `v6e-1`, `h100-1` or `cpu-1`. A process of its own compiles, as
        `posttrain plan --quick` does, so that the devices of this one stay free. ConfigError for what cannot be
        planned.
        """
        from posttrain.runs.plan import plan_elsewhere

        try:
            for file, text in self._files.items():
                _write_text(file, text)
            for line in plan_elsewhere(self.config, devices):
                print(line)
        except ConfigError as error:
            raise _in_python(error) from None

    @classmethod
    def fields(cls, word: str = "") -> FieldTable:
        """Fields of the stage, which are keywords, with types, defaults and descriptions.

        `word`: those with it in name or description.
        """
        return field_table(SECTIONS[cls.kind], word)

    def __repr__(self) -> str:
        return dump_config(self.config)


def _stopped(stop: Interrupted | KeyboardInterrupt, *, begun: bool) -> Stopped:
    """Print the last line of a script whose run was interrupted; return what ends it."""
    said, number = (str(stop), stop.number) if isinstance(stop, Interrupted) else ("interrupted", signal.SIGINT)
    if processes.writes():
        again = "run the same script again to resume" if begun else "nothing was trained"
        print(f"{said}; {again}", file=sys.stderr)
    return Stopped(128 + number)


def _stage(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the stage. A single reward, metric or tool becomes a list, and functions or names become sections."""
    stage: dict[str, Any] = _plain(fields)
    for name in {"rewards", "metrics", "tools"} & stage.keys():
        functions = stage[name] if isinstance(stage[name], list) else [stage[name]]
        stage[name] = [{"fn": f} if callable(f) or isinstance(f, str) else f for f in functions]
    for name in ("env", "agent"):
        if callable(stage.get(name)) or isinstance(stage.get(name), str):
            stage[name] = {"fn": stage[name]}
    return stage


class SFT(PythonRun):
    """Supervised fine-tuning from Python: `pt.SFT(model="path", dataset="data.jsonl").fit()`.

    Every field of the stage and of the model is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "sft"


class Distill(PythonRun):
    """Distillation from Python: `pt.Distill(model="student", teacher="teacher", dataset="data.jsonl").fit()`.

    Every field of the stage and of the model is a keyword, as are `output`, `seed` and `mesh`. `teacher`: a path or hub
    id, or a mapping of `TeacherSection`; for several give `teachers`.
    """

    kind = "distill"

    def __init__(self, model: Any, teacher: Any = None, dataset: Any = None, **fields: Any):
        if teacher is not None:
            if "teachers" in fields:
                raise ConfigError("pt.Distill: set teacher, or teachers for several")
            fields["teachers"] = [{"path": str(teacher)} if isinstance(teacher, str | Path) else teacher]
        super().__init__(model, dataset, **fields)

    def write_cache(self) -> Path:
        """Score the dataset by the teachers into the folder `cache`, which is returned; `fit` then loads no teacher.

        As `posttrain distill --cache`: in one process; rows that the cache has are not scored again, so that the same
        call goes on after a stop. ConfigError without `cache`, and for mistakes, before any work.
        """
        from posttrain.runs.write_teacher_cache import write_caches
        from posttrain.runtime.join import check_alone

        section = self.config.stages[0]
        assert isinstance(section, DistillSection)
        if section.cache is None:
            raise ConfigError("pt.Distill: write_cache needs the folder to write; give cache=FOLDER")
        try:
            check_alone("write_cache")
            for file, text in self._files.items():
                _write_text(file, text)
            write_caches(self.config)
        except ConfigError as error:
            raise _in_python(error) from None
        except KeyboardInterrupt as stop:
            if not hasattr(sys, "ps1"):
                raise _stopped(stop, begun=True) from None
            raise
        return Path(section.cache)


class Preference(PythonRun):
    """Preference optimisation from Python: `pt.Preference(model="path", dataset="pairs.jsonl").fit()`.

    Every field of the stage and of the model is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "preference"


class RewardModel(PythonRun):
    """Reward model training from Python: `pt.RewardModel(model="path", dataset="pairs.jsonl").fit()`.

    Every field of the stage and of the model is a keyword, as are `output`, `seed` and `mesh`. The result is
    a sequence classifier that transformers loads.
    """

    kind = "reward_model"


class Drafter(PythonRun):
    """Block drafter of a model from Python: `pt.Drafter(model="path", dataset="samples.jsonl").fit()`.

    Every field of the stage and of the model is a keyword, as are `output`, `seed` and `mesh`. The folder of the run
    drafts for its model: `pt.BlockDrafts(path=...)`.
    """

    kind = "drafter"


class RL(PythonRun):
    """Reinforcement learning from Python: `pt.RL(model="path", dataset="data.jsonl", rewards=[correct]).fit()`.

    Every field of the stage and of the model is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "rl"


class OnlinePreference(PythonRun):
    """Online DPO from Python: `pt.OnlinePreference(model="path", dataset="data.jsonl", rewards=[correct]).fit()`.

    Every field of the stage and of the model is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "online_preference"


def evaluate(
    model: str | Path | RunResult | tuple[Decoder, Tokenizer],
    dataset: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    rewards: Any = None,
    *,
    samples: int = 1,
    seed: int = 0,
    max_tokens: int | None = None,
    temperature: float | None = None,
    **fields: Any,
) -> Evaluation:
    """Means of rewards over the prompts of a dataset, with 95 % intervals, of a model's samples.

    `model`: a folder, a hub id, a run or its folder, or a model with its tokenizer. `dataset` and `rewards`: as of
    `pt.RL`, with `prompt`, `system` and `chat` as keywords; by default the `eval_dataset` and the rewards of the run.
    `temperature`: by default that of the run's evaluations, else 0 (greedy). More keywords: those of `eval_sampling`,
    such as `top_p`. ConfigError for mistakes.
    """
    from posttrain.runs import evaluate as recipe

    name = str(model.output) if isinstance(model, RunResult) else model
    found = (None, (), None) if isinstance(name, tuple) else recipe.of_run(str(name))
    templates = {key: fields.pop(key) for key in TEMPLATES if key in fields}
    given = {"max_tokens": max_tokens, "temperature": temperature}
    sampling = {key: value for key, value in given.items() if value is not None} | fields
    before = SamplingSection(temperature=0.0) if found[2] is None else found[2]
    # The settings of a stage that would be evaluated so, whose mistakes it explains.
    with TemporaryDirectory() as folder:
        stage: dict[str, Any] = {"rewards": list(found[1]) if rewards is None else rewards, "num_steps": 1}
        data = _plain(found[0]) if dataset is None else dataset
        if data is None or not stage["rewards"]:
            what = "dataset" if data is None else "rewards"
            raise ConfigError(f"evaluate: give {what}; only a run of a stage with rewards and eval_dataset has its own")
        written = {key: getattr(before, key) for key in before.model_fields_set}
        stage["eval_sampling"] = written | sampling
        # The rewards read texts of one form, that of the samples which are evaluated.
        texts = {"skip_special_tokens"} & stage["eval_sampling"].keys()
        stage["sampling"] = {name: stage["eval_sampling"][name] for name in texts}
        stage["row_tokens"] = 2 * max(512, stage["eval_sampling"].get("max_tokens") or 0)
        described = RL("evaluated", data, output=folder, seed=seed, **stage, **templates)
        for file, text in described._files.items():
            _write_text(file, text)
        section = described.config.stages[0]
        assert isinstance(section, RLSection)
        generator = (
            Generator(name="model", model=name[0], tokenizer=name[1])
            if isinstance(name, tuple)
            else load_generator(str(name))
        )
        settings = recipe.EvaluationSettings(samples=samples, sampling=section.held_out_sampling, seed=seed)
        return recipe.evaluate(generator, section.dataset, section.rewards, settings)


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
    rows = listed(value)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"dataset: row {index} is a {type(row).__name__}; give a list of dicts, or a path")
    return [dict(row) for row in rows]


def _shares_templates(name: str, value: Any) -> bool:
    return name == "dataset" or not isinstance(value, Mapping | Section)


def _dataset(value: Any, file: Path, templates: Mapping[str, Any]) -> Any:
    """Dataset section; rows in memory are read from a file in the run's folder, so that the run can be resumed."""
    if value is None:
        return None
    own = {"path": str(file)} if isinstance(value, list) else _plain(value)
    return {**templates, **({"path": str(own)} if isinstance(own, str | Path) else own)}


def _jsonl(name: str, rows: list[Any]) -> str:
    try:
        return "".join(json.dumps(written(row)) + "\n" for row in rows)
    except TypeError as error:
        raise ConfigError(f"{name}: its rows must be JSON-serialisable: {error}") from error


def _write_text(file: Path, text: str) -> None:
    if file.exists() and file.read_text(encoding="utf-8") == text:
        return
    if (file.parent / "config.yaml").exists():
        raise ConfigError(
            f"output: {file.parent} holds a run with other {'rows of ' * (file.suffix == '.jsonl')}{file.stem}; "
            "give another output, or delete the folder to start over"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _plain(value: Any) -> Any:
    """Convert sections to mappings, so that one validation covers all settings."""
    if isinstance(value, Section):
        kind = {"kind"} & type(value).model_fields.keys()  # a default, which chooses the section
        return {name: _plain(getattr(value, name)) for name in value.model_fields_set | kind}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    # A named tuple, such as an optax transformation, is an object.
    return [_plain(item) for item in value] if type(value) in (list, tuple) else value


def _in_python(error: ConfigError) -> ConfigError:
    """Error without the number of the only stage, which a Python class does not have."""
    return ConfigError(re.sub(r"\bstages\.0(\.|: )", "", str(error)))


def _digest(config: RunConfig, more: Sequence[str]) -> str:
    """Hash of the settings, including the source code of functions and their dependencies, so that an edited reward
    function makes a new run."""
    parts = [
        dump_config(config.model_copy(update={"profile": None, "trackers": (), "metrics_server": None})),
        *more,
        json.dumps(code_digests(config), sort_keys=True),
    ]
    return digest("\0".join(parts), 8)


def _seed(folder: Path) -> int:
    file = folder / "config.yaml"
    return load_recorded(file).seed if file.exists() else secrets.randbits(31)
