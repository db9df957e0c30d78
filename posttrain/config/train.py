"""What all stages have, and supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from posttrain.config.base import Flag, ListOf, NonNegativeInt, PositiveInt, Section, Text


class DatasetSection(Section):
    path: Text
    """A .jsonl, .json, .csv or .parquet file, a folder, a hub id, or `file.py:function` that returns rows."""
    split: str = "train"
    args: dict[str, Any] = {}
    """Keyword arguments of the function that `path` names, which finds files like this configuration where it declares
    a parameter as `Path`; of a hub id, of `datasets.load_dataset`: `{name: main}`."""
    prompt: str | None = None
    """Template of the user's turn over the columns, such as `"{question}"`; by default the column `prompt`."""
    completion: str | None = None
    """Template of the answer, of SFT and of answers with a `label`; by default the column `completion`."""
    system: str | None = None
    """A system message put before every prompt."""
    chat: Flag | None = None
    """Render with the tokenizer's chat template; by default: if it has one and the row is not plain `text`."""
    skip: NonNegativeInt = 0
    limit: PositiveInt | None = None
    """Rows used after `skip`, before shuffling."""
    shuffle: Flag = True
    """Draw training rows in a new random order each epoch. Without it they keep theirs: packing then looks ahead by
    about a step only, and fills less of the rows."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the sequences that come from here, where a stage mixes several datasets (`mix`)."""


class OptimizerSection(Section):
    """AdamW (arXiv:1711.05101); biases and norms are not decayed."""

    learning_rate: Annotated[float, Field(gt=0)]
    """Peak step size."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From the peak after `warmup_steps` down to 0 at the last step."""
    warmup_steps: NonNegativeInt = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class RouterSection(Section):
    """Balance of a mixture of experts. All are 0 by default, whatever the checkpoint's `router_aux_loss_coef` says."""

    balance_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the load-balancing loss, which is 1 where all experts are used alike; 0.01 is usual in pretraining."""
    z_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean squared log-partition of the router's logits; 0.001 is usual in pretraining."""
    correction_rate: Annotated[float, Field(ge=0)] = 0.0
    """Step of the bias by which idle experts are chosen more often, of models that have one (DeepSeek-V3: 0.001)."""


class TrainSection(Section):
    """Fields that every stage has."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    """Folder of the stage below `output`; by default its number and kind."""
    dataset: DatasetSection
    """Rows to train on."""
    eval_dataset: DatasetSection | None = None
    eval_every: PositiveInt | None = None
    """Steps between evaluations; the start and the end are always evaluated where `eval_dataset` is given."""
    num_steps: PositiveInt
    """Optimiser steps of the stage."""
    row_tokens: PositiveInt
    """Length of a row; sequences are packed into rows, longer ones are refused or cut as `overlong` says."""
    micro_batch_rows: PositiveInt | None = None
    """Rows per forward pass; any split gives the same gradient. Default: all rows; an eighth of those of samples."""
    optimizer: OptimizerSection
    """AdamW; `learning_rate` at least."""
    router: RouterSection = RouterSection()
    """Of a mixture of experts: how its experts are kept in use."""
    checkpoint_every: PositiveInt = 25
    """Steps between checkpoints; the end is always saved."""

    @property
    def datasets(self) -> tuple[DatasetSection, ...]:
        """Those that are trained on."""
        return (self.dataset,)

    @property
    def all_datasets(self) -> tuple[DatasetSection, ...]:
        """Those that are trained on, and last the one that is held out, if there is one."""
        return self.datasets if self.eval_dataset is None else (*self.datasets, self.eval_dataset)

    @model_validator(mode="after")
    def _evaluation(self) -> TrainSection:
        if self.eval_every is not None and self.eval_dataset is None:
            raise ValueError("eval_every needs eval_dataset")
        alone = {"eval_dataset": self.eval_dataset} | ({"dataset": self.dataset} if len(self.datasets) == 1 else {})
        for name, dataset in alone.items():
            if dataset is not None and dataset.weight != 1.0:
                raise ValueError(
                    f"{name}.weight={dataset.weight} has no effect: it is of datasets that are mixed (mix)"
                )
        if self.optimizer.warmup_steps >= self.num_steps:
            raise ValueError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} must be less than num_steps={self.num_steps}"
            )
        return self


class SequenceSection(TrainSection):
    """Fields of stages that train on given sequences."""

    mix: ListOf[DatasetSection] = ()
    """More datasets to train on beside `dataset`; how much of each is drawn, their `weight` says."""
    batch_rows: PositiveInt
    """Rows of `row_tokens` in one optimiser step."""
    packing: Flag = True
    """Several sequences per row, kept apart by segment ids."""
    train_on_prompt: Flag = False
    """Put loss on prompts as well; by default only on completions and assistant turns."""
    last_turn_only: Flag = False
    """Of messages only the last turn of the assistant has loss."""
    overlong: Literal["truncate", "drop", "error"] = "error"

    @model_validator(mode="after")
    def _turns(self) -> SequenceSection:
        if self.last_turn_only and self.train_on_prompt:
            raise ValueError("last_turn_only: with train_on_prompt every turn has loss; set one of both to false")
        return self

    @property
    def step_rows(self) -> int:
        return self.batch_rows

    @property
    def datasets(self) -> tuple[DatasetSection, ...]:
        return (self.dataset, *self.mix)


class SFTSection(SequenceSection):
    kind: Literal["sft"] = "sft"
    loss: str = "nll"
    """`nll`, `dft`, or `module:Class` of a token loss."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target that is spread over the whole vocabulary; of the loss `nll`."""
    noise_alpha: Annotated[float, Field(ge=0)] = 0.0
    """NEFTune: noise on the embeddings in training, arXiv:2310.05914; 5 is usual."""

    @model_validator(mode="after")
    def _smoothed(self) -> SFTSection:
        if self.label_smoothing and self.loss != "nll":
            raise ValueError(f"label_smoothing={self.label_smoothing} is of the loss nll, not of {self.loss!r}")
        return self
