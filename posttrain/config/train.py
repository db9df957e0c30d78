"""Fields of all stages, datasets, optimizer; of stages that train on given sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from posttrain.config.base import Flag, FunctionArguments, ListOf, NonNegativeInt, PositiveInt, Section, Text
from posttrain.config.locator import Locator
from posttrain.config.optimizer import ANY_KIND, AdamW, AnyOptimizer, OtherOptimizer, Schedule

ADAPTER_RATE_FACTOR = 10
"""Ratio of the default learning rates of adapters and of full training."""
IMAGE_CACHE_MIB = 1024
"""Default host memory for patches and features of images."""
MAX_NEW_TOKENS = 512
"""Default length of prompts and of completions."""


class DatasetSection(Section):
    """Dataset: source, templates, chat rendering, selection of rows."""

    path: Locator
    """Dataset source: a .jsonl, .json, .csv, .tsv (also compressed), .parquet or .arrow file, a folder, a hub id, or
    `file.py:function` that returns rows."""
    split: str = "train"
    """Split of a folder or hub id, by the rules of `datasets`."""
    args: FunctionArguments = {}
    """Keyword arguments of the function in `path`, or of `datasets.load_dataset` for a hub id: `{name: main}`; of a
    folder only `name`, a configuration of its README.md.
    Parameters annotated as `Path` are resolved like paths of the configuration. `NAME_env: VARIABLE` gives `NAME`, a
    secret, from the environment."""
    prompt: str | None = None
    """Template of the user turn over columns, such as `"{question}"`; by default the column `prompt`."""
    completion: str | None = None
    """Template of the answer, for SFT and for answers with a `label`; by default the column `completion`."""
    system: str | None = None
    """System message, put before every prompt."""
    image_marker: Text | None = None
    """Text in the contents of messages, such as `<image>`, in whose place a picture of the columns `images` or `image`
    stands; by default such texts are text."""
    chat: Flag | None = None
    """Render with the tokenizer's chat template; by default as the model was trained, if that is known, else if there
    is a template, and the row is not plain `text`."""
    skip: NonNegativeInt = 0
    limit: PositiveInt | None = None
    """Number of rows used after `skip`, before shuffling."""
    shuffle: Flag = True
    """Shuffle training rows every epoch. Unshuffled rows keep their order: packing then looks ahead by only about a
    step, and fills rows less."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Sampling weight of the dataset in a mix of several (`mix`)."""


def _of_path(value: Any) -> Any:
    """Fields of a dataset of which the path alone is given."""
    return {"path": value} if isinstance(value, str) else value


Dataset: TypeAlias = Annotated[
    DatasetSection,
    BeforeValidator(_of_path, json_schema_input_type=Annotated[str, Field(min_length=1)] | DatasetSection),
]
"""Dataset, or its path alone: `dataset: chats.jsonl`."""


class SequenceOptimizer(AdamW):
    """AdamW settings of SFT and distillation."""

    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    schedule: Schedule = "cosine"


class RouterSection(Section):
    """Load balancing of MoE models. All fields are 0 by default, regardless of the checkpoint's
    `router_aux_loss_coef`."""

    balance_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the load-balancing loss, which is 1 for uniform expert usage; 0.01 is usual in pretraining."""
    z_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the z-loss, the mean squared log-partition of the router logits; 0.001 is usual in pretraining."""
    correction_rate: Annotated[float, Field(ge=0)] = 0.0
    """Update rate of the expert selection bias, for models that have one (DeepSeek-V3: 0.001)."""


class TrainSection(Section):
    """Fields of every stage."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    """Folder of the stage below `output`; by default its number and kind."""
    dataset: Dataset
    """Training dataset, or its path alone."""
    eval_dataset: Dataset | None = None
    eval_every: PositiveInt | None = None
    """Steps between evaluations; with `eval_dataset`, start and end are always evaluated."""
    num_steps: PositiveInt | None = None
    """Optimiser steps of the stage. When raised in a later call, the stage resumes from its last checkpoint."""
    row_tokens: PositiveInt = 1024
    """Row length in tokens. Sequences are packed into rows; longer ones are handled as in `overlong`. By default at
    most the model's context."""
    micro_batch_rows: PositiveInt | None = None
    """Rows per forward pass (gradient accumulation); any split gives the same gradient. Default: all rows; in online
    stages an eighth of them."""
    optimizer: AnyOptimizer
    """Optimiser: `adamw`, `lion`, `adafactor`, `muon`, or an optax transformation (`fn`)."""
    router: RouterSection = RouterSection()
    """Load balancing of MoE models."""
    checkpoint_every: PositiveInt = 25
    """Steps between checkpoints; the last step is always saved."""

    @property
    def sequence_tokens(self) -> int:
        """Maximum length of a sequence, or of a prompt with its completion."""
        return self.row_tokens

    @property
    def records_routing(self) -> bool:
        """True if the sampler's MoE routing is replayed in training."""
        return False

    def default_lengths(self, max_positions: int) -> dict[str, Any]:
        """Fields with default lengths for rows of the model's context."""
        return {"row_tokens": max_positions}

    @property
    def kept_images_mib(self) -> int:
        """Host memory for features of pictures by frozen towers, which training programs read; 0: they run in them."""
        raise NotImplementedError

    @property
    def step_rows(self) -> int:
        """Rows of one step."""
        raise NotImplementedError

    @property
    def pass_rows(self) -> int | None:
        """Rows per forward pass, with the default resolved; None: all."""
        return self.micro_batch_rows

    @property
    def epochs(self) -> float | None:
        """Passes over the data from which `num_steps` is still to be counted; None if `num_steps` is known."""
        return None

    @property
    def steps(self) -> int:
        """Resolved `num_steps`, known once the data has been counted."""
        assert self.num_steps is not None
        return self.num_steps

    @property
    def datasets(self) -> tuple[DatasetSection, ...]:
        """Training datasets."""
        return (self.dataset,)

    @property
    def all_datasets(self) -> tuple[DatasetSection, ...]:
        """Training datasets, then the held-out one if there is one."""
        return self.datasets if self.eval_dataset is None else (*self.datasets, self.eval_dataset)

    def _mistakes(self) -> Iterator[str]:
        if self.eval_every is not None and self.eval_dataset is None:
            yield "eval_every needs eval_dataset"
        alone = {"eval_dataset": self.eval_dataset} | ({"dataset": self.dataset} if len(self.datasets) == 1 else {})
        for name, dataset in alone.items():
            if dataset is not None and dataset.weight != 1.0:
                yield f"{name}.weight={dataset.weight} has no effect without other datasets (mix)"
        self.check_warmup(self.num_steps)

    def check_warmup(self, num_steps: int | None) -> None:
        """Check that warm-up ends before the stage. None: number of steps not known yet."""
        if num_steps is None:
            return
        fixed = self.optimizer.fixed_steps(num_steps)
        if fixed > num_steps:
            raise ValueError(
                f"optimizer: warmup_steps and the phases of schedule take {fixed} steps at least, and "
                f"num_steps={num_steps}"
            )
        if self.optimizer.num_warmup_steps(num_steps) >= num_steps:
            raise ValueError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} must be less than num_steps={num_steps}"
            )


class OfflineSection(TrainSection):
    """Fields of offline stages: training on given sequences or pairs."""

    num_epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the sequences (or pairs) in place of `num_steps`; 1 if neither is set. Converted to the smallest
    `num_steps` whose packed rows hold these passes; the last step is filled from the next pass. In a mix, a pass is as
    many sequences as all datasets have together. The run's `config.yaml` has the steps."""
    batch_rows: PositiveInt = 8
    """Rows of `row_tokens` per optimiser step (batch size)."""
    row_patches: PositiveInt | None = None
    """Most image patches beside each row, for models with images; by default as many as a row full of image
    tokens has. A batch has one of four sizes of them, and none without pictures."""
    image_cache_mib: NonNegativeInt = IMAGE_CACHE_MIB
    """Host memory in MiB for features of pictures by frozen vision towers, of the model and of teachers in the step,
    which encode a picture once and keep its features by its content; those used least recently are forgotten first. 0:
    each step encodes its pictures itself, as where the tower or an adapter of it is trained."""
    on_bad_image: Literal["error", "drop"] = "error"
    """Sequences or pairs of `dataset` and `mix` with a picture that cannot be read, is damaged, or is larger than any
    limit: raise an error, or drop them, of which `data/bad_images` is the number and the first are named. In
    `eval_dataset` they are errors."""
    packing: Flag = True
    """Pack several sequences (or pairs) per row, separated by segment ids."""

    @property
    def kept_images_mib(self) -> int:
        return self.image_cache_mib

    @property
    def epochs(self) -> float | None:
        if self.num_steps is not None:
            return None
        return 1.0 if self.num_epochs is None else self.num_epochs

    def _mistakes(self) -> Iterator[str]:
        if self.num_steps is not None and self.num_epochs is not None:
            yield (
                f"num_steps={self.num_steps} and num_epochs={self.num_epochs:g} both set the length of the stage; "
                "remove one"
            )


class SequenceSection(OfflineSection):
    """Fields of stages that train on given sequences."""

    optimizer: Annotated[SequenceOptimizer | OtherOptimizer, Field(discriminator="kind"), ANY_KIND] = (
        SequenceOptimizer()
    )
    """Optimiser: `adamw`, `lion`, `adafactor`, `muon`, or an optax transformation (`fn`)."""

    mix: ListOf[Dataset] = ()
    """Additional training datasets besides `dataset`, sampled in proportion to `weight`."""
    train_on_prompt: Flag = False
    """Compute loss on prompts too; by default only on completions and assistant turns."""
    last_turn_only: Flag = False
    """Compute loss only on the last assistant turn."""
    overlong: Literal["truncate", "drop", "split", "error"] = "error"
    """Sequences longer than a row: truncate, drop, or raise an error; `split` cuts plain texts into rows, so that each
    token has loss once."""

    def _mistakes(self) -> Iterator[str]:
        if self.last_turn_only and self.train_on_prompt:
            yield "last_turn_only: with train_on_prompt every turn has loss; set one of both to false"

    @property
    def step_rows(self) -> int:
        return self.batch_rows

    @property
    def datasets(self) -> tuple[DatasetSection, ...]:
        return (self.dataset, *self.mix)
