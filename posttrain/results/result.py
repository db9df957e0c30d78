"""Result of a run: its metrics, samples, curves, final model, whether it is finished, and its page in a notebook."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from posttrain.config import RunConfig
from posttrain.config.base import Vision
from posttrain.config.yaml_file import load_recorded
from posttrain.data.images import takes_images
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError, RunError, did_you_mean
from posttrain.export.export import Target, export
from posttrain.export.readers import Reader
from posttrain.models.decoder import Decoder
from posttrain.runs.finished import Generator, load_generator, tokenizer_of
from posttrain.runs.folder import CONFIG_NAME, describe_versions, versions_of
from posttrain.runtime.files import is_locked
from posttrain.stages.table import stage_names
from posttrain.tracking.console import cut
from posttrain.tracking.notebook import Curves
from posttrain.tracking.records import Records, points, read_metrics, read_samples
from posttrain.tracking.steps import LAYOUTS, means_of_functions, shown_number
from posttrain.weights.load import load_model
from posttrain.weights.locate import read_model_files

if TYPE_CHECKING:
    from posttrain.generation import Settings


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of a run, read from its folder whenever it is asked, so that it follows a run that still goes on.

    In a notebook it shows its curves and, with an `eval_dataset`, the held-out answers before and after.
    """

    output: Path
    stages: Sequence[str]
    trained: Sequence[str]
    """Stages trained by this call; empty if the run was already finished, or only attached."""

    @property
    def config(self) -> RunConfig:
        """Configuration of the run, with all defaults. ConfigError if a file that it names is gone."""
        return load_recorded(self.output / CONFIG_NAME)

    @property
    def finished(self) -> bool:
        """True once the last stage has saved its model; False of a run that was stopped or still goes on."""
        return self._model.is_dir()

    @property
    def running(self) -> bool:
        """True while a process trains in the folder."""
        return is_locked(self.output) is True

    @property
    def versions(self) -> Sequence[Mapping[str, str]]:
        """Versions of posttrain, Python, JAX and the libraries of each call that had others, the last at the end."""
        return versions_of(self.output)

    @property
    def results(self) -> Sequence[Mapping[str, Any]]:
        """Evaluations `before` and `after`, their `difference` and the `best` by finished stage, with an
        `eval_dataset`."""
        files = [self.output / name / "result.json" for name in self.stages]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]

    @property
    def metrics(self) -> Records:
        """Metrics as a list of dicts, one per stage and step; `.to_pandas()` is a DataFrame."""
        return read_metrics(self.output)

    @property
    def samples(self) -> Records:
        """Sample completions as a list of dicts with prompt, completion, reward, rewards and advantage."""
        return read_samples(self.output)

    def plot(self, *names: str, stage: str | None = None) -> Curves:
        """Curves of metrics, by default of the stage's main one, shown by a notebook; `.save("curves.html")`.

        `stage`: by default the last one with metrics. ConfigError for a metric that no step has.
        """
        rows = self.metrics
        begun = dict.fromkeys(row["stage"] for row in rows)
        stage = stage or next(reversed(begun), self.stages[-1])
        own = [row for row in rows if row["stage"] == stage]
        known = sorted({name for row in own for name in row} - {"step", "stage", "time"})
        for name in names:
            if own and name not in known:
                raise ConfigError(f"plot: {stage} has no metric {name!r}{did_you_mean(name, known)}")
        return Curves({name: points(own, name) for name in names or self._headline(stage, known)})

    @property
    def model_path(self) -> Path:
        """Folder of the final model in Hugging Face layout. RunError of a run that is not finished."""
        if not self.finished:
            raise RunError(
                f"{self.output} is not finished, so it has no final model; call fit() again to resume, or "
                'export(to="merged") for the newest checkpoint'
            )
        return self._model

    def load_model(self, *, vision: Vision | None = None) -> Decoder:
        """Final model. `vision`: what is trained of its vision tower, `none`: the text part alone; by default the tower
        is loaded, frozen, if the run's model had it."""
        kept: Vision = "frozen" if self._sees else "none"
        return load_model(self.model_path, vision=kept if vision is None else vision)

    def load_tokenizer(self) -> Tokenizer:
        """Tokenizer of the final model; with a vision tower, it prepares pictures as well."""
        if not self._sees:
            return load_tokenizer(self.model_path)
        return tokenizer_of(self.output, self.stages[-1], self.config)

    @property
    def _sees(self) -> bool:
        """True of a final model with a vision tower."""
        fields = read_model_files(str(self.model_path)).hf_json
        return fields is not None and takes_images(fields)

    def chat(
        self,
        message: str | Sequence[Mapping[str, Any]] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        **settings: Unpack[Settings],
    ) -> str:
        """Answer of the run's model, as `posttrain chat` gives it, to a message after the system message of the run's
        data, or to a conversation (list of messages with role and content) as it stands; without one a chat from the
        keyboard, until an empty line.

        The model is the final one, or that of the newest checkpoint. Without a chat template, or with the data's `chat`
        off, it continues the text. `tools`: functions, or their names `file.py:function`, that are called until a turn
        calls none; by default those of the run. Returns the last answer. ConfigError for a conversation that the model
        cannot be given.
        """
        from posttrain.chat import Chat, Terminal, tools_from
        from posttrain.generation import DEFAULT_NEW_TOKENS

        functions = None if tools is None else tools_from(tools)
        talk = Chat(
            self._generator,
            tools=functions,
            max_new_tokens=max_new_tokens or DEFAULT_NEW_TOKENS,
            temperature=temperature,
            **settings,
        )
        with closing(talk):
            if message is None:
                return Terminal(talk, until_empty=True).run()
            return talk.ask(message) if isinstance(message, str) else talk.complete(message)

    def export(self, to: Target = "hf", out: str | Path | None = None, *, reader: Reader | None = None) -> Path:
        """Write the newest checkpoint's model for other tools, read it back, and return the folder.

        `to`: `hf`, `merged` (adapter merged into its base) or `peft` (adapter alone). `reader`: `transformers` or
        `posttrain`, by default transformers if torch is installed. ConfigError if it cannot be exported; ProofError if
        the written model differs.
        """
        folder, proof = export(self.output, None if out is None else Path(out), to, reader=reader)
        print(f"{folder}: {proof}")
        return folder

    @property
    def _model(self) -> Path:
        return self.output / self.stages[-1] / "model"

    @property
    def _generator(self) -> Generator:
        """Model that answers; the final one is loaded once."""
        return self._final if self.finished else load_generator(str(self.output))

    @cached_property
    def _final(self) -> Generator:
        return load_generator(str(self.output))

    def _headline(self, stage: str, known: Sequence[str]) -> list[str]:
        """The stage's main metric, and its held-out value if there is one."""
        main = LAYOUTS[self.config.stages[list(self.stages).index(stage)].kind].headline
        main = main if main in known or "distill/kl" not in known else "distill/kl"
        return [main, *(name for name in (f"eval/{main}",) if name in known)]

    @property
    def state(self) -> str:
        """State of the run (`finished`, `running`, `stopped`) with its last step."""
        rows = self.metrics
        step = max((row["step"] for row in rows if row["stage"] == rows[-1]["stage"]), default=0)
        if self.finished:
            return f"finished, {step} steps"
        return f"{'running' if self.running else 'stopped'} after step {step}"

    @property
    def _shown_state(self) -> str:
        """State, and the versions that made the run."""
        made_by = describe_versions(self.versions)
        return f"{self.state}; {made_by}" if made_by else self.state

    def __repr__(self) -> str:
        return f"RunResult({self.output}: {', '.join(self.stages)}, {self._shown_state})\n{self.plot()}"

    def _repr_html_(self) -> str:
        return result_page(str(self.output), self._shown_state, self.plot(), self.results)


def attach(run: str | Path) -> RunResult:
    """Result of a run from its folder, live or finished, such as after a restart of the kernel.

    `run`: the output folder. ConfigError if it holds no run.
    """
    output = Path(run).expanduser()
    if not (output / CONFIG_NAME).is_file():
        near = did_you_mean(output.name, [p.parent.name for p in output.parent.glob(f"*/{CONFIG_NAME}")])
        raise ConfigError(f"attach: {output} is not the output folder of a run (with {CONFIG_NAME}){near}")
    return RunResult(output=output, stages=stage_names(load_recorded(output / CONFIG_NAME)), trained=())


NUM_ANSWERS = 6
TEXT_CELLS = 240
CELL = 'style="text-align:left;vertical-align:top;white-space:pre-wrap;max-width:24em"'


def result_page(output: str, state: str, curves: Curves, results: Sequence[Mapping[str, Any]]) -> str:
    """Format a run: one line, its curves, a table per stage with held-out answers."""
    tables = [_answers(result) for result in results if "samples" in result.get("after", {})]
    return "".join([f"<p><b>{escape(output)}</b>: {escape(state)}</p>", curves._repr_html_(), *tables])


def _answers(result: Mapping[str, Any]) -> str:
    before, after = result["before"], result["after"]
    measure = after["measure"]
    pairs = sorted(
        zip(before["samples"], after["samples"], strict=True), key=lambda pair: pair[0][measure] == pair[1][measure]
    )
    heads = ("prompt", "before", measure, "after", measure)
    rows = [
        (old["prompt"], old["completion"], shown_number(old[measure]), new["completion"], shown_number(new[measure]))
        for old, new in pairs[:NUM_ANSWERS]
    ]
    rows.append((f"mean {measure}, 95 % interval", _interval(before), "", _interval(after), ""))
    rows += [(f"mean {name}", old, "", new, "") for name, old, new in means_of_functions(before, after)]
    head = "".join(f"<th {CELL}>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td {CELL}>{escape(cut(str(text), TEXT_CELLS))}</td>" for text in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _interval(evaluation: Mapping[str, Any]) -> str:
    return f"{evaluation['mean']:.3f} ({evaluation['low']:.3f} to {evaluation['high']:.3f})"
