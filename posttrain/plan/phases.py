"""Phases of a stage as programs of shapes: update, statistics, layout, prefill and decode, with their work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from posttrain.batch import Batch, ScoreLoss, TokenLoss
from posttrain.config import PreferenceSection, RLSection, SamplerTensor, SFTSection, TrainSection
from posttrain.errors import ConfigError
from posttrain.kernels.logits.chunk_stats import PLAIN
from posttrain.kernels.logits.layout import VocabSharding, chunk_length
from posttrain.models import hf
from posttrain.models.activations import recomputed_flops
from posttrain.models.config import AttentionConfig, Compute, ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.rl.algorithms import loss_of
from posttrain.rollout.decode_weights import DecodeLayout, DecodeWeights, Loaded, choose_placement
from posttrain.rollout.programs import DecodeRows, Expected, PromptPieces
from posttrain.rollout.runner import Runner
from posttrain.rollout.types import SamplingParams
from posttrain.stages.preference import pair_loss
from posttrain.stages.sft import sft_loss, train_settings
from posttrain.train.objective import TrainSettings
from posttrain.train.optimizers import make_optimizer
from posttrain.train.programs import TrainPrograms, placed_shapes
from posttrain.tree import replace
from posttrain.weights.load import outline_of
from posttrain.weights.state import ModelWeights


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One program of a stage, and its work in a step on one device."""

    role: str
    name: str
    lower: Callable[[], jax.stages.Lowered]
    runs: int
    """Runs of the program in one step; of a decode dispatch, tokens per row."""
    trips: tuple[int, ...]
    """Trips of its loops that only the run knows, outermost first, at most."""
    flops: float
    """Operations of one run: 2 per parameter and token, 6 with the backward pass, and those of recomputation."""
    read: float
    """Bytes that one run reads at least: weights, and the cache in decoding."""
    parameters: frozenset[tuple[int, ...]]
    """Sizes of parameters, whole and on one device, without those of 1."""
    beside: int
    """Bytes of what else is in memory: optimizer state and cache, as far as they are not among its arguments."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Phases of one stage, the tokens that a step trains on, and the arrays that lie on a device."""

    phases: Sequence[Phase]
    tokens: int
    unit: str
    state: int
    """Bytes of what a checkpoint holds: trained parameters and optimizer state."""
    largest: int
    """Bytes of the largest array among them."""
    saves_between: bool
    """True if a checkpoint is written while training goes on."""
    rounds_at_once: bool
    """True if the optimizer gets all gradients at once, and rounds its state so."""
    made: int = 0
    """Bytes of weights that are made anew for sampling."""
    cache: int = 0
    """Bytes of a cache that is given up while the trainer is at work."""
    sampler_programs: int = 0
    """Number of programs that the rollout engine compiles; 0: no engine."""


def bytes_on_device(tree: object) -> int:
    """Bytes of shapes on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize if x.sharding else x.size * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def stage_plan(section: TrainSection, model: Decoder, mesh: Mesh, memory: int) -> StagePlan:
    """Phases of an SFT, preference or RL stage on devices with `memory` bytes each. Raises ConfigError for one that it
    cannot plan."""
    if isinstance(section, SFTSection):
        return _sft(section, model, mesh)
    if isinstance(section, PreferenceSection):
        return _preference(section, model, mesh)
    if isinstance(section, RLSection):
        return _rl(section, model, mesh, memory)
    kind = type(section).__name__.removesuffix("Section")
    raise ConfigError(f"plan: a stage of the kind {kind} cannot be planned yet; SFT, preference and RL can")


def _sft(section: SFTSection, model: Decoder, mesh: Mesh) -> StagePlan:
    settings = train_settings(section, model.config.vocab_size, dropout_seed=0)
    programs = _programs(section, model, sft_loss(section), settings, mesh)
    batch = batch_of(section.batch_rows, section.row_tokens)
    phases = [_update(programs, batch, 0)]
    if section.eval_dataset is not None:
        beside = bytes_on_device(programs.opt_state)
        phases.append(_forward(programs, batch, "evaluation", programs.lower_evaluation, 0, beside))
    tokens = section.batch_rows * section.row_tokens
    return StagePlan(phases=phases, tokens=tokens, unit="tokens of rows", **_saved(section, programs))


def _preference(section: PreferenceSection, model: Decoder, mesh: Mesh) -> StagePlan:
    loss = pair_loss(section)
    if loss.needs.squares or loss.needs.margins:
        raise ConfigError(f"plan: the loss {section.loss} cannot be planned yet; plan with loss=sigmoid")
    settings = TrainSettings.of(section, temperature=1.0, dropout_seed=0, terms=PLAIN)
    programs = _programs(section, model, loss, settings, mesh)
    scored = batch_of(section.batch_rows, section.row_tokens)
    scored = replace(scored, roles=scored.segments)
    batch = replace(scored, ref_logps=scored.loss_weight) if loss.needs.reference else scored
    live = loss.needs.reference and section.reference == "live"
    kept = bytes_on_device(programs.params) * int(live)
    state = bytes_on_device(programs.opt_state)
    phases = [_update(programs, batch, kept)]
    if loss.needs.reference:
        phases.append(_forward(programs, scored, "statistics", programs.lower_stats, 1, state + kept))
    if section.eval_dataset is not None:
        phases.append(_forward(programs, batch, "evaluation", programs.lower_evaluation, 0, state + kept))
    tokens = section.batch_rows * section.row_tokens
    return StagePlan(phases=phases, tokens=tokens, unit="tokens of rows", **_saved(section, programs))


def _rl(section: RLSection, model: Decoder, mesh: Mesh, memory: int) -> StagePlan:
    refusals = {
        "teachers": bool(section.teachers),
        "rollout.engine": section.rollout.engine is not None,
        "rollout.quantize": section.rollout.quantize != "none",
        "rollout.merge_lora": section.rollout.merge_lora,
        "rollout.record_routing": section.rollout.record_routing,
    }
    if refused := [name for name, is_set in refusals.items() if is_set]:
        raise ConfigError(f"plan: cannot plan an RL stage with {', '.join(refused)} yet; remove it for the plan")
    loss = loss_of(section)
    rows = section.step_rows
    settings = TrainSettings.of(section, temperature=section.sampling.temperature, dropout_seed=None, terms=PLAIN)
    programs = _programs(section, model, loss, settings, mesh)
    reference = section.algorithm.kl_in == "reward" or loss.kl_coef > 0
    arrays = ["sampler_logps", "behaviour_logps", "advantages", "sample_shares"]
    arrays += ["old_logps"] * (section.proximal_logps != "self") + ["ref_logps"] * reference
    batch = batch_of(rows, section.row_tokens, arrays=tuple(arrays))
    rollout = RolloutShapes(
        model,
        mesh,
        slots=section.rollout.slots or section.samples_in_flight,
        max_length=section.sequence_tokens,
        steps=section.rollout.decode_steps,
        max_tokens=section.sampling.max_tokens,
        memory=memory,
        tensor=section.rollout.tensor,
        cache_tokens=section.rollout.cache_tokens,
    )
    pool = bytes_on_device(rollout.runner.pool_shapes(rollout.loaded))
    # Of what is trained: the reference, and the weights of a sampler that goes on during updates.
    kept = bytes_on_device(programs.params) * (int(reference) + int(section.samples_while_updating))
    state = bytes_on_device(programs.opt_state)
    # What the sampler has elsewhere lies beside the trainer's.
    unread = bytes_on_device(rollout.loaded.arrays) - bytes_on_device(rollout.weights.own)
    phases = [_layout(rollout, state + kept + pool)] if rollout.weights.derived else []
    phases += _sampling(section, model, mesh, rollout, state + kept + unread)
    # A step that samples and then learns gives up the cache in between.
    held = pool * int(section.asynchronous is not None)
    scored = int(reference) + int(section.proximal_logps == "trainer")
    if scored:
        phases.append(_forward(programs, batch, "statistics", programs.lower_stats, scored, state + kept + held))
    phases.append(_update(programs, batch, kept + held))
    return StagePlan(
        phases=phases,
        tokens=rows * section.sampling.max_tokens,
        unit="sampled tokens",
        made=bytes_on_device(rollout.weights.derived),
        cache=pool - held,
        sampler_programs=rollout.num_programs,
        **_saved(section, programs),
    )


def _programs(
    section: TrainSection, model: Decoder, loss: TokenLoss | ScoreLoss, settings: TrainSettings, mesh: Mesh
) -> TrainPrograms:
    optimizer = make_optimizer(section.optimizer, section.num_steps or 1000, seed=0)
    return TrainPrograms(model, loss, optimizer, settings, mesh=mesh)


def _saved(section: TrainSection, programs: TrainPrograms) -> dict[str, Any]:
    """Fields of a plan on checkpoints."""
    saved = jax.tree.leaves((programs.params, programs.opt_state))
    return {
        "state": bytes_on_device(saved),
        "largest": max(map(bytes_on_device, saved)),
        "saves_between": section.checkpoint_every < (section.num_steps or math.inf),
        "rounds_at_once": programs.optimizer.rounds and not programs.optimizer.elementwise,
    }


def _update(programs: TrainPrograms, batch: Batch, beside: int) -> Phase:
    rows, length = batch.shape
    model = programs.structure.model
    active = active_parameters(model)
    trained = sum(x.size for x in programs.params.values())
    # Frozen parameters need no gradient of their own.
    factor = 4 + 2 * min(1.0, trained / sum(x.size for x in programs.weights.values()))
    micro = programs.micro_rows(rows)
    passes = -(-rows // micro)
    flops = factor * active * rows * length + 3.5 * attention_flops(model.config, rows, length)
    flops += recomputed_flops(model.config, model.compute.remat, rows, length)
    weights = bytes_on_device(programs.weights)
    state = bytes_on_device(programs.opt_state)
    chunks = vocabulary_trips(programs.mesh, micro, length, model.config.vocab_size)
    return Phase(
        role="trainer",
        name="update",
        lower=lambda: programs.lower_update(batch),
        runs=1,
        trips=(chunks,) if passes == 1 else (passes, chunks),
        flops=flops / programs.mesh.size,
        read=float(3 * passes * weights + 2 * state),
        parameters=sizes_of(programs.weights),
        beside=beside,
    )


def _forward(
    programs: TrainPrograms,
    batch: Batch,
    name: str,
    lower: Callable[[Batch], jax.stages.Lowered],
    runs: int,
    beside: int,
) -> Phase:
    rows, length = batch.shape
    model = programs.structure.model
    micro = programs.micro_rows(rows)
    flops = 2 * active_parameters(model) * rows * length + attention_flops(model.config, rows, length)
    chunks = vocabulary_trips(programs.mesh, micro, length, model.config.vocab_size)
    return Phase(
        role="trainer",
        name=name,
        lower=lambda: lower(batch),
        runs=runs,
        trips=(-(-rows // micro), chunks),
        flops=flops / programs.mesh.size,
        read=float(-(-rows // micro) * bytes_on_device(programs.weights)),
        parameters=sizes_of(programs.weights),
        beside=beside,
    )


def _layout(rollout: RolloutShapes, beside: int) -> Phase:
    """Laying weights out for sampling, once a step."""
    arrays, derived = rollout.loaded.arrays, dict(enumerate(rollout.weights.derived))
    return Phase(
        role="sampler",
        name="layout",
        lower=lambda: rollout.layout.lowered,
        runs=1,
        trips=(),
        flops=0.0,
        read=float(bytes_on_device(arrays) + bytes_on_device(derived)),
        parameters=sizes_of(arrays) | sizes_of(derived),
        beside=beside,
    )


def _sampling(section: RLSection, model: Decoder, mesh: Mesh, rollout: RolloutShapes, beside: int) -> Iterator[Phase]:
    config, devices = model.config, mesh.size
    active = active_parameters(model)
    weights = bytes_on_device(rollout.weights)
    prompt_tokens = section.sequence_tokens - section.sampling.max_tokens
    per_call = rollout.prompts.tokens.size
    yield Phase(
        role="sampler",
        name="prefill",
        lower=rollout.lower_prefill,
        # Samples of a group share their prompt's blocks.
        runs=math.ceil(section.prompts_per_step * prompt_tokens / per_call),
        trips=(),
        flops=(2 * active * per_call + attention_flops(config, *rollout.prompts.tokens.shape)) / devices,
        read=float(weights),
        parameters=sizes_of(rollout.loaded.arrays) | sizes_of(dict(enumerate(rollout.weights.derived))),
        beside=beside,
    )
    slots = rollout.rows.tokens.shape[0]
    pool = bytes_on_device(rollout.runner.pool_shapes(rollout.loaded))
    mean_length = prompt_tokens + section.sampling.max_tokens / 2
    held = min(1.0, mean_length * slots / max(1, rollout.runner.blocks * rollout.runner.shapes.lanes * 16))
    yield Phase(
        role="sampler",
        name="decode",
        lower=rollout.lower_decode,
        runs=section.max_sampled_tokens * math.ceil(section.samples_per_step / slots),
        trips=(1,),
        flops=2 * active * slots / devices,
        read=weights * active / total_parameters(model) + pool * held,
        parameters=sizes_of(rollout.loaded.arrays) | sizes_of(dict(enumerate(rollout.weights.derived))),
        beside=beside,
    )


def sizes_of(weights: Mapping[Any, Any]) -> frozenset[tuple[int, ...]]:
    """Sizes of arrays and of single layers of them, whole and on one device, without those of 1."""
    whole = [x.shape for x in weights.values()]
    parts = [x.sharding.shard_shape(x.shape) for x in weights.values()]
    found = {tuple(size for size in shape if size > 1) for shape in [*whole, *parts]}
    return frozenset(found | {shape[1:] for shape in found if len(shape) > 2})


def total_parameters(model: Decoder) -> int:
    return sum(math.prod(shape) for _, _, shape in ModelWeights(model).shapes())


def active_parameters(model: Decoder) -> float:
    """Parameters that a token meets: of the experts of an MoE layer as many as it is routed to; no lookup table."""
    total = 0.0
    mixtures = model.config.mixtures
    share = mixtures[0].top_k / mixtures[0].num_experts if mixtures else 1.0
    for path, dims, shape in ModelWeights(model).shapes():
        if path.startswith("embed.") and not model.config.tie_embeddings:
            continue
        total += math.prod(shape) * (share if "expert" in dims else 1.0)
    return total


def attention_flops(config: ModelConfig, rows: int, length: int) -> float:
    """Operations of causal attention in a forward pass: 2 (N H + N Hv) per visible pair of tokens."""
    total = 0.0
    for block in config.blocks:
        c = block.attention
        heads = c.num_heads * (2 * c.head_dim if isinstance(c, AttentionConfig) else 320)
        window = c.window if isinstance(c, AttentionConfig) and c.window else length
        total += 2.0 * heads * rows * length * min(window, length / 2)
    return total


def vocabulary_trips(mesh: Mesh, rows: int, length: int, vocab_size: int) -> int:
    """Chunks of the loss over the vocabulary if every token of the fullest row counts."""
    return -(-(length - 1) // chunk_length(rows, length, vocab_size, VocabSharding.of(mesh)))


POLICY_ARRAYS = ("old_logps", "sampler_logps", "behaviour_logps", "ref_logps", "advantages", "sample_shares")
"""Float arrays of a batch of samples."""


def model_of(fields: Mapping[str, Any], compute: Compute, dtype: np.dtype) -> Decoder:
    """Model as shapes from the fields of a `config.json`."""
    return outline_of(hf.config_from_hf(dict(fields)), compute, dtype)


def batch_of(rows: int, length: int, *, arrays: tuple[str, ...] = ()) -> Batch:
    """Batch [rows, length] for its shapes, without memory for them; `arrays`: optional float arrays that it has."""

    def blank(dtype: type) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), (rows, length))

    batch = Batch(
        tokens=blank(np.int32), positions=blank(np.int32), segments=blank(np.int32), loss_weight=blank(np.float32)
    )
    more: dict[str, Any] = {name: blank(np.float32) for name in arrays}
    return dataclasses.replace(batch, **more)


class RolloutShapes:
    """Rollout engine as shapes: its largest prefill call and its largest decode call."""

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        *,
        slots: int,
        max_length: int,
        steps: int,
        max_tokens: int,
        memory: int,
        tensor: SamplerTensor = "auto",
        cache_tokens: int | None = None,
    ):
        """`memory`: bytes of a device; `tensor`: see `NativeEngine`."""
        source = ModelWeights(model)
        arrays = placed_shapes(source, mesh)
        self.loaded = Loaded.of(source, arrays, 0, choose_placement(tensor, source, arrays, memory, slots=slots))
        self.runner = Runner.of(
            self.loaded, slots=slots, max_length=max_length, steps=steps, record=False, cache_tokens=cache_tokens
        )
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, stop_token_ids=(), key=(0, 0))
        longest = max_length - max_tokens
        calls = self.runner.examples([Expected(params=params, shortest=longest, longest=longest)], rereads=False)
        self.num_programs = len(calls)
        prompts = [call for call in calls if isinstance(call, PromptPieces) and call.context is None]
        rows = [call for call in calls if isinstance(call, DecodeRows)]
        self.prompts = max(prompts, key=lambda call: call.tokens.size)
        """Inputs of the largest prefill call of whole prompts."""
        self.rows = max(rows, key=lambda call: call.context.size)
        """Inputs of the decode call with all slots and the widest table."""

    @property
    def layout(self) -> DecodeLayout:
        return self.runner.programs.layout_of(self.loaded)

    @cached_property
    def weights(self) -> DecodeWeights:
        """Shapes of the weights that both programs read: the trainer's own, and those made for sampling."""
        return self.layout.shapes(self.loaded)

    def lower_prefill(self) -> jax.stages.Lowered:
        return self.runner.lower(self.loaded, self.prompts)

    def lower_decode(self) -> jax.stages.Lowered:
        return self.runner.lower(self.loaded, self.rows)
