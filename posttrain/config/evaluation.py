"""Evaluation on held-out prompts and records of trajectories in online stages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.base import Flag, ListOf, PositiveInt, Section, Text
from posttrain.config.train import DatasetSection

MAX_SAMPLES = 1000


class HeldOutSection(DatasetSection):
    """Further held-out dataset of an online stage."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """Name of the dataset in metrics: `eval/<name>/...`."""

    @model_validator(mode="after")
    def _alone(self) -> HeldOutSection:
        if self.weight != 1.0:
            raise ValueError(f"weight={self.weight} has no effect on held-out data; remove it")
        return self


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

    @model_validator(mode="after")
    def _answers(self) -> EvaluateSection:
        if above := [k for k in self.k if k > self.samples]:
            raise ValueError(f"k={above[0]} is more than samples={self.samples}; raise samples")
        if self.answer is not None and "majority" not in self.report:
            raise ValueError(f"answer={self.answer} is for maj@k; add majority to report")
        if self.keep_best and "avg" not in self.report:
            raise ValueError("keep_best compares avg@k; add avg to report")
        names = [one.name for one in self.sets]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"sets: the name {repeated[0]} is used twice; metrics need distinct names")
        return self


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
