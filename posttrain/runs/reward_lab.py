"""Reward lab: `posttrain reward` examines reward functions on rows of a dataset, and on samples of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from posttrain.config import DatasetSection, Locator, OnlineSection, RewardSection
from posttrain.config.secrets import check_urls, from_environment, without_secrets
from posttrain.config.yaml_file import load_config
from posttrain.data.columns import fill
from posttrain.data.format import prompt_is_text, prompt_messages
from posttrain.data.sources import load_rows, with_all_columns
from posttrain.errors import ConfigError
from posttrain.generation import complete
from posttrain.reward.function import Reward, missing_arguments, rewards_of
from posttrain.reward.keywords import accepted
from posttrain.reward.lab.cases import Case, Kind, LabRow, answer_of, cases_of, sample_of
from posttrain.reward.lab.findings import Finding, findings_of, sample_findings
from posttrain.reward.lab.measure import Measured, measure
from posttrain.reward.lab.report import describe_samples, finding_lines, report
from posttrain.reward.lab.score import write_tests
from posttrain.reward.model import ModelReward
from posttrain.reward.rubric import Rubric
from posttrain.rollout.trajectory import Group
from posttrain.runs.finished import load_generator
from posttrain.runtime.event_loop import run_async

SAMPLED_PROMPTS, GROUP_SIZE, SAMPLED_TOKENS = 8, 8, 256
"""Prompts and samples of each with a model, and their maximum length."""


@dataclass(frozen=True, kw_only=True)
class LabSettings:
    """Rows and limits of an examination."""

    num_rows: int = 16
    timeout_s: float = 5.0
    """Time-out of scoring all completions once."""
    answer: str | None = None
    """Column with the right answer; None: the first that is there, see `ANSWER_COLUMNS`."""
    golden: str | None = None
    """Template of the golden answer over columns and `answer`; None: the answer itself."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the functions, each for those that take it."""
    model: str | None = None
    """Folder or hub id of a model, or folder of a run, whose samples are scored too."""
    write: Path | None = None
    """Test file to write."""


@dataclass(frozen=True, kw_only=True)
class LabReport:
    """Report of an examination."""

    lines: Sequence[str]
    findings: Mapping[str, Sequence[Finding]]
    """Findings by function; `samples` are those of the model's samples."""

    @property
    def passed(self) -> bool:
        return not any(self.findings.values())


def examine(
    functions: Sequence[str], dataset: DatasetSection | None, config: str | None, settings: LabSettings
) -> LabReport:
    """Examine functions, `file.py:name` or `module:name`. `config`: a run whose first stage with rewards gives the
    dataset, and the functions where none are named.

    ConfigError without functions or rows, and for parameters that nothing provides.
    """
    section = None if config is None else _section(config)
    dataset = dataset or (None if section is None else section.dataset)
    if dataset is None:
        raise ConfigError("reward: give --data PATH, or --config CONFIG")
    rewards = _rewards(functions, section, settings)
    rows = _rows(dataset, settings)
    for reward in rewards:
        if lines := missing_arguments(reward, list(rows[0].row)):
            raise ConfigError("\n".join(f"{line}; set a keyword with --set NAME=VALUE" for line in lines))
    cases = cases_of(rows)
    measured = [run_async(measure(reward, rows, cases, _bytes)) for reward in rewards]
    findings = {one.name: findings_of(one) for one in measured}
    lines = list(report(measured, list(findings.values())))
    if settings.model is not None:
        skips = section is None or section.sampling.skip_special_tokens
        more = list(_sampled(_groups(settings.model, rows[:SAMPLED_PROMPTS], skips), rewards, findings))
        lines += ["", *more]
    if settings.write is not None:
        lines.append(_write(settings.write, rewards, measured))
    return LabReport(lines=lines, findings=findings)


def dataset_of(path: str | None, prompt: str | None) -> DatasetSection | None:
    """Dataset section of the command's options; None without a path."""
    return None if path is None else DatasetSection(path=Locator(path), prompt=prompt, shuffle=False)


def _section(config: str) -> OnlineSection:
    stages = [stage for stage in load_config(config).stages if isinstance(stage, OnlineSection) and stage.rewards]
    if not stages:
        raise ConfigError(f"--config {config}: no stage has rewards")
    return stages[0]


def _rewards(functions: Sequence[str], section: OnlineSection | None, settings: LabSettings) -> list[Reward]:
    if functions:
        given = tuple(RewardSection(fn=Locator(name), name=_name(name, functions)) for name in functions)
    elif section is not None:
        given = tuple(reward for reward in section.rewards)
    else:
        raise ConfigError("reward: name a function, such as rewards/gsm8k.py:correct, or give --config CONFIG")
    rewards = [one for one in rewards_of(given) if not isinstance(one.function, ModelReward)]
    return [replace(one, timeout_s=settings.timeout_s, args=_args(one, settings.args)) for one in rewards]


def _name(spec: str, functions: Sequence[str]) -> str:
    """Name of a function, with its file or module where another one has the same."""
    source, _, name = spec.rpartition(":")
    alone = [one.rpartition(":")[2] for one in functions].count(name) == 1
    return name if alone else f"{Path(source.removesuffix('.py').replace('.', '/')).name}.{name}"


def _args(reward: Reward, given: Mapping[str, Any]) -> dict[str, Any]:
    names = accepted(reward.function)
    return {
        **reward.args,
        **{name: value for name, value in given.items() if names is None or (from_environment(name) or name) in names},
    }


def read_args(texts: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE; values are YAML. ConfigError for another form, and for a secret."""
    found = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ConfigError(f"--set {text}: write it as NAME=VALUE")
        found[name] = yaml.safe_load(value)
    try:
        check_urls(found)
        return without_secrets(found)
    except ValueError as error:
        raise ConfigError(f"--set {error}") from error


def _rows(dataset: DatasetSection, settings: LabSettings) -> list[LabRow]:
    rows = load_rows(dataset)
    found = []
    for index in range(min(len(rows), settings.num_rows)):
        with rows.named(index) as row:
            answer = answer_of(row, settings.answer)
            golden = answer if settings.golden is None else fill(settings.golden, {**row, "answer": answer})
            messages, plain = prompt_messages(row, dataset), prompt_is_text(row, dataset)
            found.append(LabRow(row=row, messages=messages, plain=plain, golden=golden, answer=answer.strip()))
    return [replace(one, row=row) for one, row in zip(found, with_all_columns([one.row for one in found]), strict=True)]


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", "replace"))


def _sampled(groups: Sequence[Group], rewards: Sequence[Reward], findings: dict[str, list[Finding]]) -> Iterator[str]:
    """Score groups of a model's samples, and describe them; findings are added as `samples`."""
    rubric = Rubric([replace(reward, timeout_s=60.0) for reward in rewards])
    with rubric.running():
        scored = run_async(rubric.score(groups))
    yield from describe_samples(groups, scored)
    findings["samples"] = sample_findings(groups, scored)
    yield from finding_lines("samples", findings["samples"])


def _groups(model: str, rows: Sequence[LabRow], skip_special_tokens: bool) -> list[Group]:
    loaded = load_generator(model)
    tokenizer = loaded.tokenizer
    prompts: list[Any] = [row.messages if tokenizer.chats else row.prompt for row in rows]
    done = complete(
        loaded.model,
        tokenizer,
        prompts,
        chat=tokenizer.chats,
        n=GROUP_SIZE,
        temperature=1.0,
        seed=0,
        max_new_tokens=SAMPLED_TOKENS,
        skip_special_tokens=skip_special_tokens,
    )
    encode: Callable[[str], Sequence[int]] = tokenizer.encode
    groups: list[Group] = []
    for number, row in enumerate(rows):
        samples = done[number * GROUP_SIZE : (number + 1) * GROUP_SIZE]
        cases = [Case(row=number, kind=Kind.GOLDEN, text=sample.text) for sample in samples]
        groups.append(
            [
                replace(sample_of(row, case, index, encode), stop=sample.completion.stop)
                for index, (case, sample) in enumerate(zip(cases, samples, strict=True))
            ]
        )
    return groups


def _write(path: Path, rewards: Sequence[Reward], measured: Sequence[Measured]) -> str:
    """Write the tests of the only function. ConfigError for several, or for a file that exists."""
    if len(rewards) != 1:
        raise ConfigError(f"--write {path}: name one function; there are {len(rewards)}")
    if path.exists():
        raise ConfigError(f"--write {path}: the file exists; delete it, or give another name")
    reward = rewards[0]
    if reward.isolated is None:
        raise ConfigError(f"--write {path}: name the function as file.py:function")
    count = write_tests(path, reward.isolated[0], dict(reward.args), measured[0])
    return f"{path}: {count} checks; run them with pytest {path}"
