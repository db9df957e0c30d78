"""What all stages have, and supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from posttrain.config.base import Flag, ListOf, NonNegativeInt, PositiveInt, Section, Text

ADAPTER_RATE_FACTOR = 10
"""Default learning rate of an adapter over that of all weights."""
MAX_NEW_TOKENS = 512
"""Default length of prompts and of completions."""
Schedule = Literal["constant", "linear", "cosine"]


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
    """Peak step size; the default is for all weights, an adapter (`model.lora`, `model.adapter`) has 10 times as
    much."""
    schedule: Schedule = "constant"
    """From the peak after `warmup_steps` down to 0 at the last step."""
    warmup_steps: NonNegativeInt = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class SequenceOptimizer(OptimizerSection):
    """AdamW of stages that train on given sequences."""

    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    schedule: Schedule = "cosine"


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
    num_steps: PositiveInt | None = None
    """Optimiser steps of the stage. A later call may raise it: the stage goes on from its last checkpoint."""
    row_tokens: PositiveInt = 1024
    """Length of a row; sequences are packed into rows, longer ones are refused or cut as `overlong` says. By default
    the model's context where that is shorter."""
    micro_batch_rows: PositiveInt | None = None
    """Rows per forward pass; any split gives the same gradient. Default: all rows; an eighth of those of samples."""
    optimizer: OptimizerSection
    """AdamW."""
    router: RouterSection = RouterSection()
    """Of a mixture of experts: how its experts are kept in use."""
    checkpoint_every: PositiveInt = 25
    """Steps between checkpoints; the end is always saved."""

    @property
    def steps(self) -> int:
        """`num_steps`, which is known once the data has been counted."""
        assert self.num_steps is not None
        return self.num_steps

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
        self.check_warmup(self.num_steps)
        return self

    def check_warmup(self, num_steps: int | None) -> None:
        """ValueError where the warm-up does not end before the stage; None: the number of steps is not known yet."""
        if num_steps is not None and self.optimizer.warmup_steps >= num_steps:
            raise ValueError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} must be less than num_steps={num_steps}"
            )


class OfflineSection(TrainSection):
    """Fields of stages whose data is given: sequences or preferences."""

    num_epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the sequences (or pairs) in place of `num_steps`; 1 where neither is given. It becomes the least
    `num_steps` whose packed rows hold so many passes; the last step is filled from the next pass. In a mix a pass is as
    many sequences as all datasets have together. The run's `config.yaml` holds the steps."""
    batch_rows: PositiveInt = 8
    """Rows of `row_tokens` in one optimiser step."""
    packing: Flag = True
    """Several sequences (or pairs) per row, kept apart by segment ids."""

    @model_validator(mode="after")
    def _one_length(self) -> OfflineSection:
        if self.num_steps is not None and self.num_epochs is not None:
            raise ValueError(
                f"num_steps={self.num_steps} and num_epochs={self.num_epochs:g} both say how long the stage is; "
                "remove one"
            )
        return self


class SequenceSection(OfflineSection):
    """Fields of stages that train on given sequences."""

    optimizer: SequenceOptimizer = SequenceOptimizer()
    """AdamW."""

    mix: ListOf[DatasetSection] = ()
    """More datasets to train on beside `dataset`; how much of each is drawn, their `weight` says."""
    train_on_prompt: Flag = False
    """Put loss on prompts as well; by default only on completions and assistant turns."""
    last_turn_only: Flag = False
    """Of messages only the last turn of the assistant has loss."""
    overlong: Literal["truncate", "drop", "error"] = "error"
    """What becomes of a sequence that is longer than a row."""

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
