"""Typed run configurations: what a YAML file or a Python call may say. Reading and errors: `posttrain.config_file`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]

AttentionKernel = Literal["auto", "reference", "blockwise", "splash", "tokamax", "cudnn"]
GroupedKernel = Literal["auto", "reference", "ragged_dot", "buckets", "megablox", "tokamax"]
Remat = Literal["none", "full", "dots", "offload"]
Quantize = Literal["none", "int8", "fp8", "int4", "nf4"]
RolloutQuantize = Literal["none", "int8", "fp8"]


MESH_AXES = ("data", "fsdp", "expert", "tensor")
"""Of devices, the closest last."""
ROW_AXES = ("data", "fsdp", "expert")
"""The mesh axes that split the rows of a batch."""


class ConfigError(ValueError):
    """A mistake that the user can mend: one line that says where, the rule, what was given, what to do."""


class Section(BaseModel):
    """A part of a configuration: unknown keys are errors, values are checked, instances are frozen."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


class LoRA(Section):
    """Low-rank adapter, arXiv:2106.09685: W + scale A B on every matrix that `targets` names; the rest is frozen.

    Patterns are regular expressions searched in our paths, such as `attention.q`, `mlp`, `experts`, `head`, `embed`, or
    names of modules in checkpoints, such as `q_proj`, `lm_head`, `layers.3.mlp.down_proj`.
    """

    rank: PositiveInt
    """Columns of A and rows of B, such as 16."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The scale is alpha / rank, with `rslora` alpha / sqrt(rank); by default it is 2."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("attention", "mlp")
    """Patterns of the matrices that get an adapter; `all-linear`: all but embeddings and head."""
    layers: tuple[NonNegativeInt, ...] | None = None
    """The only layers that get an adapter, from 0; embeddings and head belong to none."""
    rank_pattern: dict[str, PositiveInt] = {}
    """Pattern -> another rank."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Pattern -> another alpha."""
    rslora: bool = False
    """Divide alpha by the root of the rank, arXiv:2312.03732: high ranks learn as fast as low ones."""
    dora: bool = False
    """Train the norms of the columns of W apart from their directions, arXiv:2402.09353."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is set to 0 in training. Not for experts, embeddings, head, or in RL."""
    modules_to_save: tuple[str, ...] = ()
    """Patterns of modules trained in full beside the adapter, such as `lm_head` or `norm`."""


class ModelSection(Section):
    path: str | None = None
    """A folder in Hugging Face layout or a hub id. Give `path` or `init`."""
    init: dict[str, Any] | None = None
    """Random weights: the fields of a Hugging Face `config.json`, with `model_type`."""
    tokenizer: str | None = None
    """A folder, a hub id or `bytes` (the built-in byte tokenizer); by default `path`."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens that end a reply beside those that the tokenizer names, such as `<s>`; they are saved with the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage of the parameters. The optimiser keeps float32 masters of bfloat16 parameters."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of activations and matrix products; by default `dtype`."""
    lora: LoRA | None = None
    quantize: Quantize = "none"
    """Hold the layers' matrices in 8 or 4 bits while `lora` is trained (QLoRA, arXiv:2305.14314); those of routers,
    embeddings and head stay as they are. Loading prints how far the weights are from what they were; the saved model
    is again in `dtype`."""
    remat: Remat = "none"
    """What the backward pass computes again to save memory: `full` each block (about a third more time), `dots` all but
    its matrix products, `offload` each block from inputs kept in the host's memory."""
    attention: AttentionKernel = "auto"
    """Implementation of attention; by default the fastest for platform and shape."""
    grouped_matmul: GroupedKernel = "auto"
    """Implementation of the experts' matrix products; by default the fastest for platform and shape."""
    long_context: bool = False
    """Use the factors for long sequences of a model that has two sets (LongRoPE, as in phi3)."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.init is None):
            raise ValueError("give either path (a checkpoint) or init (random weights)")
        if self.path is None and self.tokenizer is None:
            raise ValueError("init needs tokenizer: a folder, a hub id or bytes")
        if self.quantize != "none" and self.lora is None:
            raise ValueError(f"quantize={self.quantize} needs lora: quantized weights cannot be trained")
        return self


class MeshSection(Section):
    """Devices per axis; -1 takes what is left."""

    data: int = 1
    """Copies of the weights, each with its own rows of a batch."""
    fsdp: int = -1
    """Parts of every weight; rows are split as well."""
    expert: int = 1
    """Groups of experts of a mixture; rows are split as well."""
    tensor: int = 1
    """Parts of every matrix product; no rows are split."""

    @property
    def row_shards(self) -> int | None:
        """Devices that share the rows of a batch; None where the configuration leaves that to the machine."""
        sizes = (self.data, self.fsdp, self.expert)
        return None if -1 in sizes else math.prod(sizes)


class DatasetSection(Section):
    path: str
    """A .jsonl, .json, .csv or .parquet file, a folder, a hub id, or `file.py:function` that returns rows."""
    split: str = "train"
    args: dict[str, Any] = {}
    """Keyword arguments of the function that `path` names; of a hub id, of `datasets.load_dataset`: `{name: main}`."""
    prompt: str | None = None
    """Template of the user's turn over the columns, such as `"{question}"`; by default the column `prompt`."""
    completion: str | None = None
    """Template of the answer, for SFT; by default the column `completion`."""
    system: str | None = None
    """A system message put before every prompt."""
    chat: bool | None = None
    """Render with the tokenizer's chat template; by default: if it has one and the row is not plain `text`."""
    skip: NonNegativeInt = 0
    limit: PositiveInt | None = None
    """Rows used after `skip`, before shuffling."""
    shuffle: bool = True
    """Draw training rows in a new random order each epoch; evaluation keeps the order."""
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
    """Rows per forward pass; any split gives the same gradient. Default: all rows of SFT, an eighth of RL's samples."""
    optimizer: OptimizerSection
    """AdamW; `learning_rate` at least."""
    router: RouterSection = RouterSection()
    """Of a mixture of experts: how its experts are kept in use."""
    checkpoint_every: PositiveInt = 25
    """Steps between checkpoints; the end is always saved."""

    @model_validator(mode="after")
    def _evaluation(self) -> TrainSection:
        if self.eval_every is not None and self.eval_dataset is None:
            raise ValueError("eval_every needs eval_dataset")
        if self.optimizer.warmup_steps >= self.num_steps:
            raise ValueError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} must be less than num_steps={self.num_steps}"
            )
        return self


class SequenceSection(TrainSection):
    """Fields of stages that train on given sequences."""

    mix: tuple[DatasetSection, ...] = ()
    """More datasets to train on beside `dataset`; how much of each is drawn, their `weight` says."""
    batch_rows: PositiveInt
    """Rows of `row_tokens` in one optimiser step."""
    packing: bool = True
    """Several sequences per row, kept apart by segment ids."""
    train_on_prompt: bool = False
    """Put loss on prompts as well; by default only on completions and assistant turns."""
    overlong: Literal["truncate", "drop", "error"] = "error"

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


class SamplingSection(Section):
    max_tokens: PositiveInt
    """Longest completion, the end-of-sequence token included."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: NonNegativeInt = 0
    """0: off."""
    top_p: Fraction = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Above 1: tokens of prompt and sample are less likely, arXiv:1909.05858; the trainer scores without it."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample; the text ends before them."""


class RewardSection(Section):
    fn: Any
    """`rewards/gsm8k.py:correct`, `package.module:function`, or in Python the function itself."""
    weight: float = 1.0
    args: dict[str, Any] = {}
    """More keyword arguments for the function."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for one call; after that samples are scored one by one, and who takes as long again has no reward."""


class RolloutSection(Section):
    slots: PositiveInt | None = None
    """Sequences decoded at once; by default all samples of a step."""
    decode_steps: PositiveInt = 32
    """Tokens decoded per dispatch at most."""
    record_routing: bool = False
    """Keep which experts of a mixture the sampler used, and use the same ones in training, arXiv:2510.11370."""
    quantize: RolloutQuantize = "none"
    """Sample, in evaluations too, from a copy of the weights in 8 bits, adapters merged, made anew after every update.
    How far it is from the trainer: `sampling/logp_difference/mean`."""
    merge_lora: bool = False
    """Sample from a copy with the adapter merged, made anew after every update: faster tokens for more memory."""
    cache_tokens: PositiveInt | None = None
    """Keys and values that the sampler holds; by default those of `slots` sequences of `row_tokens`. With fewer it
    interrupts the youngest samples and reads them again later; with more it keeps more shared prefixes."""
    warm_up: bool = False
    """Compile all programs of the sampler before the first step; by default each when it is first needed."""


class RLSection(TrainSection):
    kind: Literal["rl"] = "rl"
    algorithm: str = "grpo"
    """`grpo`, `dr_grpo`, `dapo`, `gspo`, `rloo`."""
    advantage: str | None = None
    """`module:function` of rewards_PG in place of the algorithm's own."""
    rewards: Annotated[tuple[RewardSection, ...], Field(min_length=1)]
    """Functions that score a completion; their weighted sum is the reward."""
    prompts_per_step: PositiveInt
    """Different prompts in one optimiser step."""
    group_size: Annotated[int, Field(ge=2)]
    """Samples of one prompt, which the advantage compares."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are an error that names the row; by default `row_tokens - sampling.max_tokens`."""
    sampling: SamplingSection
    """How completions are drawn; `max_tokens` at least."""
    eval_sampling: SamplingSection | None = None
    """By default greedy, with the other settings of `sampling`."""
    rollout: RolloutSection = RolloutSection()
    kl_coef: Annotated[float, Field(ge=0)] | None = None
    clip_low: Annotated[float, Field(gt=0)] | None = None
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """Each overrides the algorithm's own value."""
    recompute_old_logps: bool = False
    """Score the samples with the trainer before the update instead of trusting the sampler's log-probabilities."""
    samples_every: PositiveInt = 10
    """Steps between tables of sample completions."""

    @model_validator(mode="after")
    def _fits(self) -> RLSection:
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature=0 gives equal samples, from which nothing can be learned; use 1.0")
        if self.rollout.quantize != "none" and not self.recompute_old_logps:
            raise ValueError(
                f"rollout.quantize={self.rollout.quantize} needs recompute_old_logps: true: the log-probabilities of "
                "a quantized sampler are not the trainer's, and the first update's ratio would not be 1"
            )
        cache_tokens = self.rollout.cache_tokens
        if cache_tokens is not None and cache_tokens < self.row_tokens:
            raise ValueError(f"rollout.cache_tokens={cache_tokens} must be at least row_tokens={self.row_tokens}")
        if self.sampling.max_tokens >= self.row_tokens:
            raise ValueError(
                f"sampling.max_tokens={self.sampling.max_tokens} must be less than row_tokens={self.row_tokens}, "
                "which holds prompt and completion"
            )
        return self


class ComparedSection(TrainSection):
    """Fields of the stages that learn from judged answers."""

    batch_rows: PositiveInt
    """Rows of `row_tokens` in one optimiser step; a row holds both answers of a pair, each behind its prompt."""
    packing: bool = True
    """Several pairs per row."""
    overlong: Literal["truncate", "drop", "error"] = "error"
    """What becomes of a pair that no row holds."""


class PreferenceSection(ComparedSection):
    kind: Literal["preference"] = "preference"
    loss: str | dict[str, Any] = "sigmoid"
    """A kind of DPO (`sigmoid`, `ipo`, ...), `kto`, `apo_zero_unpaired`, `orpo`, `cpo`, `cpo_hinge`, `cpo_ipo`,
    `simpo`, or `module:Class`; with settings `{kind: sigmoid, beta: 0.1}`, of several kinds of DPO also
    `{kind: [sigmoid, sft], weights: [1, 0.1]}`."""
    reference: Literal["cached", "live"] = "cached"
    """The model at the start of the stage: scores every row once, kept on disk, or the rows of each step anew."""


class RewardModelSection(ComparedSection):
    kind: Literal["reward_model"] = "reward_model"
    loss: str | dict[str, Any] = "bradley_terry"
    """`bradley_terry` on pairs, `process` on the steps of completions, or `module:Class`; with settings
    `{kind: bradley_terry, center_coef: 0.01}`."""


class TeacherSection(Section):
    path: str
    """A folder in Hugging Face layout or a hub id."""
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    """What `teacher_column` calls it; by default the last part of `path`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Storage of its parameters; by default that of the student."""
    quantize: Quantize = "none"
    """Hold the matrices of its layers in 8 or 4 bits."""

    @property
    def title(self) -> str:
        return self.name or self.path.rstrip("/").rpartition("/")[2]


class DistillSection(SequenceSection):
    """The student learns the distribution of its teachers, GKD (arXiv:2306.13649)."""

    kind: Literal["distill"] = "distill"
    teachers: Annotated[tuple[TeacherSection, ...], Field(min_length=1)]
    """Models with the student's tokens; several need `teacher_column`."""
    teacher_column: str | None = None
    """Column that names a row's teacher, or maps names to weights."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.0
    """0: forward KL, from teacher to student. 1: reverse KL. Between: generalised Jensen-Shannon divergence."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of both distributions in the divergence."""
    cross_entropy: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the loss that is the log-likelihood of the text itself."""
    cache: str | None = None
    """Folder of what the teachers said, which `posttrain distill --cache` writes: training then needs no teacher."""
    top_k: PositiveInt = 64
    """Most probable tokens in the cache, of each token; the others are there by their sum."""

    @model_validator(mode="after")
    def _which_teacher(self) -> DistillSection:
        if len(self.teachers) > 1 and self.teacher_column is None:
            raise ValueError("several teachers need teacher_column, which says whose rows they are")
        titles = [teacher.title for teacher in self.teachers]
        if len({*titles}) < len(titles):
            raise ValueError(f"teachers must have different names; got {', '.join(titles)}")
        return self


Stage = Annotated[
    SFTSection | DistillSection | RLSection | PreferenceSection | RewardModelSection, Field(discriminator="kind")
]


class RunConfig(Section):
    """A whole run: one model through one or more stages."""

    output: str
    """Folder of the run: resolved config, metrics, samples, checkpoints, final model."""
    seed: int
    """Start of every random key: data order, sampling, initial weights."""
    model: ModelSection
    """What is trained: `path` or `init`, tokenizer, dtype, adapter."""
    mesh: MeshSection = MeshSection()
    tensorboard: bool = True
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    """Run in order; each starts from the weights of the one before."""

    @model_validator(mode="after")
    def _reward_model_last(self) -> RunConfig:
        if any(isinstance(stage, RewardModelSection) for stage in self.stages[:-1]):
            raise ValueError("a reward_model stage must be the last: what it leaves scores answers and writes none")
        return self

    @model_validator(mode="after")
    def _dropout(self) -> RunConfig:
        lora = self.model.lora
        if lora is not None and lora.dropout and any(isinstance(stage, RLSection) for stage in self.stages):
            raise ValueError(
                f"model.lora.dropout={lora.dropout}: RL has none, the trainer would be another model than the sampler "
                "and the first update's ratio not 1; set it to 0"
            )
        return self
