"""Rewards of online stages: functions and models, the monitor of reward hacking, and evaluation on held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from posttrain.config.base import Flag, FunctionArguments, ListOf, PositiveInt, Section, Text
from posttrain.config.locator import Locator, located
from posttrain.config.train import DatasetSection

LIMITS = ("memory_mib", "file_mib", "cpu_s")
"""Fields that bound child processes."""


class RewardSection(Section):
    """Reward function or reward model of an online stage."""

    fn: Annotated[Any, AfterValidator(located)] = None
    """Reward function: `rewards/gsm8k.py:correct`, `package.module:function`, or in Python the function itself."""
    model: Locator | None = None
    """Reward model in place of `fn`: folder or hub id of a sequence classifier with one label, as saved by
    `reward_model` stages."""
    reduce: Literal["last", "min", "mean"] = "last"
    """Score of a sequence from `model`: the last token's, or of a process reward model the minimum or mean over its
    steps (lines)."""
    weight: float = 1.0
    args: FunctionArguments = {}
    """Additional keyword arguments of the function. A secret is `NAME_env: VARIABLE`: `{api_key_env: JUDGE_KEY}` is the
    argument `api_key` with the value of that environment variable, which is written nowhere."""
    name: Text | None = None
    """Name in metrics and messages; by default the function's name. Using a function twice requires two names."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Timeout per step in seconds. If the call on all samples fails or takes more than half of it, samples are retried
    one by one, so that only failing samples have no reward; calls still running at the timeout are killed."""
    on_error: Literal["drop"] | float = "drop"
    """Value of a sample on which the function raises, crashes, times out or returns no finite number. `drop`: the
    sample has no reward and is excluded from its group. A number, such as 0, also penalises a policy that provokes
    errors."""
    isolate: Literal["auto", "process", "thread"] = "auto"
    """Isolation of the function. `process`: a child process without access to the devices and with its own module
    state, so that hangs and crashes do no harm; requires `file.py:function` or `module:function`. `thread`: a thread of
    this process, which cannot be killed. `auto`: a process for functions given by name, else a thread."""

    text: bool | None = None
    """Pass prompts and completions as strings also where the dataset has message lists, as Tunix does; false: as
    message lists also where its prompts are strings, with the calls and results of tools. By default in the form of
    the dataset, and as strings to functions that annotate `completions` as a list or sequence of `str`."""
    cache: bool = False
    """Keep the values in memory, and reuse them for samples with the same arguments. For functions whose value depends
    on nothing but the arguments that they name; with `log_metric`, `trajectories` or `**kwargs` that is unknown."""
    memory_mib: Annotated[int, Field(gt=0)] = 4096
    """Maximum memory in MiB of a child process, with the modules that it imports; more raises MemoryError there."""
    file_mib: Annotated[int, Field(gt=0)] = 1024
    """Maximum size in MiB of a file that a child process writes."""
    cpu_s: Annotated[int, Field(gt=0)] | None = None
    """CPU seconds after which the child process of a call is killed. By default only `timeout_s` bounds it."""

    def _mistakes(self) -> Iterator[str]:
        if (self.fn is None) == (self.model is None):
            yield "a reward is a function (fn) or a reward model (model); set one of them"
            return
        if self.model is None and self.reduce != "last":
            yield f"reduce={self.reduce} has no effect on a function; it needs a reward model (model)"
        if self.model is not None and self.args:
            yield "args are for functions; a reward model (model) takes none"
        if self.model is not None and (self.timeout_s != 60.0 or self.isolate != "auto"):
            yield "timeout_s and isolate are for functions; a reward model (model) runs on the devices"
        if self.model is not None and (self.cache or self.text is not None):
            yield "cache and text are for functions; a reward model (model) reads tokens"
        set_limits = [name for name in LIMITS if getattr(self, name) != type(self).model_fields[name].default]
        if set_limits and (self.isolate == "thread" or not isinstance(self.fn, str)):
            yield f"{set_limits[0]} bounds a child process; name the function as file.py:function"
        if self.isolate == "process" and not isinstance(self.fn, str):
            yield "isolate: process needs a function that a child can import; name it as file.py:function"


class MonitorSection(Section):
    """Monitor of reward hacking: metrics `hacking/*`, by which the diagnosis tells where the reward grows by length,
    repetition, copies of the prompt, form or told answers, or apart from a verifier."""

    verifier: Text | None = None
    """Name of a reward with weight 0 that training does not follow, such as a stricter check; by default the first such
    reward."""
    on_alarm: Literal["warn", "stop"] = "warn"
    """`stop`: abort the run when one is told, to be resumed from the last checkpoint with another reward in a new
    output."""


MAX_SAMPLES = 1000


class HeldOutSection(DatasetSection):
    """Further held-out dataset of an online stage."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """Name of the dataset in metrics: `eval/<name>/...`."""

    def _mistakes(self) -> Iterator[str]:
        if self.weight != 1.0:
            yield f"weight={self.weight} has no effect on held-out data; remove it"


class EvaluateSection(Section):
    """Evaluation with several samples per held-out prompt, on several datasets, and choice of the best model."""

    samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    """Samples per held-out prompt. Several need `eval_sampling` with a temperature above 0."""
    reward: Text | None = None
    """Name of the reward that `report` is about; by default the weighted sum of all."""
    report: Annotated[ListOf[Literal["avg", "pass", "majority"]], Field(min_length=1)] = ("avg", "pass")
    """Metrics of k samples, each with a 95 % interval over prompts. `avg`: mean reward (avg@k, over all samples).
    `pass`: probability that at least one of k samples passes (pass@k, unbiased, arXiv:2107.03374), with a reward above
    the stage's `pass_above`. `majority`: probability that the most frequent answer of k samples passes (maj@k)."""
    k: ListOf[PositiveInt] = ()
    """Values of k in pass@k and maj@k; by default 1, 2, 4, ... and `samples`."""
    answer: Text | None = None
    """Answer that a sample votes for in maj@k: the values that a reward function gives to `log_extra` under this name,
    where None does not vote; by default the text of the completion without the spaces around it."""
    sets: ListOf[HeldOutSection] = ()
    """Further held-out datasets beside `eval_dataset`, each with metrics of its own."""
    keep_best: Flag = False
    """Save the model of the best evaluation as `best/` in the stage's folder, if avg@k on `eval_dataset` is above that
    at the start, and above that of the model saved before, by paired tests over prompts with p < 0.05 / number of
    evaluations. Otherwise `result.json` says that there is no evidence."""

    @property
    def ks(self) -> tuple[int, ...]:
        """Values of k, with the default resolved."""
        powers = (2**power for power in range(self.samples.bit_length()))
        return self.k or tuple(sorted({*powers, self.samples}))

    def _mistakes(self) -> Iterator[str]:
        if above := [k for k in self.k if k > self.samples]:
            yield f"k={above[0]} is more than samples={self.samples}; raise samples"
        if self.answer is not None and "majority" not in self.report:
            yield f"answer={self.answer} is for maj@k; add majority to report"
        if self.keep_best and "avg" not in self.report:
            yield "keep_best compares avg@k; add avg to report"
        names = [one.name for one in self.sets]
        if repeated := [name for name in names if names.count(name) > 1]:
            yield f"sets: the name {repeated[0]} is used twice; metrics need distinct names"


def check_evaluation(
    section: EvaluateSection | None, dataset: DatasetSection | None, scored: bool, temperature: float
) -> None:
    """Check an evaluation against its stage. ValueError without held-out data or rewards, and for equal samples."""
    if section is not None and (dataset is None or not scored):
        raise ValueError("evaluate needs eval_dataset and rewards")
    if section is not None and section.samples > 1 and temperature == 0:
        raise ValueError(
            f"evaluate.samples={section.samples} of a prompt would be equal at temperature 0; set "
            "eval_sampling: {temperature: 1.0}"
        )


class RecordSection(Section):
    """Record of all trajectories of online steps, from which `posttrain replay` repeats a step."""

    every: PositiveInt = 1
    """Steps between records."""
    keep: PositiveInt = 50
    """Number of the newest recorded steps that are kept."""
