"""Rollout: sampling, the engine that does it, and the devices and memory of roles beside the actor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeGuard

from pydantic import Field, ValidationError

from posttrain.config.base import (
    CacheDtype,
    Flag,
    Fraction,
    ListOf,
    NonNegativeInt,
    PlainMapping,
    PositiveInt,
    RolloutQuantize,
    SamplerTensor,
    Section,
    Text,
)
from posttrain.config.locator import Locator
from posttrain.config.optimizer import ANY_KIND, AdamW, AnyOptimizer, OtherOptimizer
from posttrain.config.train import IMAGE_CACHE_MIB, MAX_NEW_TOKENS
from posttrain.errors import ConfigError


class LookupDrafts(Section):
    """Tokens drafted from the sample's own prompt and tokens (prompt lookup)."""

    kind: Literal["ngram"] = "ngram"
    tokens: Annotated[int, Field(ge=1, le=16)] = 4
    """Number of tokens drafted for each forward pass of the model."""


class ModelDrafts(Section):
    """Tokens drafted by a smaller model."""

    kind: Literal["draft"] = "draft"
    path: Locator
    """Folder or hub id of the draft model, which must have the model's tokenizer. It is not trained: as the model
    changes, fewer of its tokens are accepted."""
    tokens: Annotated[int, Field(ge=1, le=16)] = 4
    """Number of tokens drafted for each forward pass of the model."""


class OnlineDrafterOptimizer(AdamW):
    """AdamW settings of a block drafter that is trained beside the model."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3


class BlockDrafts(Section):
    """Tokens of a block drafted at once from the model's hidden states, as in DFlash, arXiv:2602.06036."""

    kind: Literal["block"] = "block"
    path: Locator
    """Folder of the drafter, or of the run that trained it for this model. Without `optimizer` it is not trained
    further: as the model changes, fewer of its tokens are accepted."""
    tokens: Annotated[int, Field(ge=1, le=16)] | None = None
    """Number of tokens drafted for each forward pass of the model; by default all of a block."""
    optimizer: Annotated[OnlineDrafterOptimizer | OtherOptimizer, Field(discriminator="kind"), ANY_KIND] | None = None
    """Train the drafter in a stage of kind `rl`, an update on the samples of each of the model's: `{}`, or an optimiser
    of the kinds of the stage's; its schedule has the stage's steps. Samples stay the same up to rounding. It is saved
    as `drafter` beside the stage's model."""

    def _mistakes(self) -> Iterator[str]:
        if self.optimizer is not None and self.optimizer.ema is not None:
            yield "optimizer.ema: a drafter drafts with its last weights; remove it"
        if self.optimizer is not None and self.optimizer.qk_clip is not None:
            yield "optimizer.qk_clip: a drafter's update changes no attention of the model; remove it"


Drafts: TypeAlias = LookupDrafts | ModelDrafts | BlockDrafts
"""Source of drafted tokens."""


def drafts_of(text: str) -> Drafts:
    """Read drafts in one word, `ngram`, `draft=MODEL` or `block=DRAFTER`, with `:TOKENS` behind it or without.
    ConfigError for others.

    >>> drafts_of("ngram:8"), drafts_of("draft=org/small").path
    (LookupDrafts(kind='ngram', tokens=8), 'org/small')
    """
    source, _, count = text.rpartition(":")
    given = bool(source) and count.isdecimal()
    source, count = (source, count) if given else (text, "4")
    kind, _, path = source.partition("=")
    if not 1 <= int(count) <= 16:
        raise ConfigError(f"{text}: {count} tokens; draft from 1 to 16")
    if source == "ngram":
        return LookupDrafts(tokens=int(count))
    if kind == "draft" and path:
        return ModelDrafts(path=Locator(path), tokens=int(count))
    if kind == "block" and path:
        return BlockDrafts(path=Locator(path), tokens=int(count) if given else None)
    raise ConfigError(f"{text}: write ngram, draft=MODEL or block=DRAFTER, with :TOKENS behind it where wanted")


class RolloutSection(Section):
    """Rollout engine."""

    slots: PositiveInt | None = None
    """Maximum number of sequences decoded concurrently; by default all samples of a step."""
    decode_steps: PositiveInt = 32
    """Maximum number of tokens decoded per dispatch."""
    record_routing: Flag = False
    """Record the sampler's MoE routing and replay it in training (R3), arXiv:2510.11370."""
    quantize: RolloutQuantize = "none"
    """Sample from a copy of the weights in 8 bits (adapters merged), remade after every update; also in evaluations.
    Its error: `sampling/logp_difference/mean`. The copy (`rollout/copy_mib`) needs memory in addition to the trainer's
    weights; with `none` there is no copy. It is smaller than that of `merge_lora`, and faster only if decoding is
    limited by memory bandwidth: matrices are dequantized layer by layer to `compute_dtype`, also from fp8, which most
    platforms emulate (the run reports it)."""
    merge_lora: Flag = False
    """Sample from a copy of the weights with the LoRA adapter merged, remade after every update: faster decoding for
    more memory."""
    tensor: SamplerTensor = "auto"
    """Number of devices that each weight is split over while samples run; the other devices hold copies and sample rows
    of their own. A trainer's `mesh.fsdp` and `mesh.context` would gather every weight at every token: where one is
    above 1 the weights are laid out anew once after each update, which takes memory until the samples are done. `auto`:
    of the numbers from `mesh.tensor` to all devices of a replica with which the copy takes at most a quarter of a
    device's memory, on TPU that with the fastest token by the chip's bandwidth, links and latency, elsewhere the
    smallest; `trained`, no copy, if none does and where both are 1."""
    cache_tokens: PositiveInt | None = None
    """KV cache size in tokens; by default `slots` sequences of `row_tokens`. A smaller cache preempts the youngest
    samples and recomputes them later; a larger one keeps more shared prefixes. Layers with a sliding window keep that
    of each slot, where it is less."""
    image_cache_mib: NonNegativeInt = IMAGE_CACHE_MIB
    """Host memory for images in MiB: their pixels until they are encoded, then their features, which later prompts with
    the same picture use. Those used least recently are forgotten first; 0 keeps none. Features of a trained tower are
    forgotten at each update. In RL and online preferences as much again for features of a frozen tower in training:
    log-probabilities and updates read them; 0: the tower runs in each."""
    speculative: Annotated[Drafts, Field(discriminator="kind")] | None = None
    """Speculative decoding: draft several tokens, and judge all of them in one forward pass. Samples are the same token
    for token, up to rounding, with every field of `sampling`; calls for which drafts do not pay, by the speeds that are
    measured, go without. `{kind: ngram}` drafts from what prompt and sample have repeated, `{kind: draft, path: ...}`
    by a smaller model, whose weights and cache need memory, `{kind: block, path: ...}` by a block drafter that a stage
    of kind `drafter` has trained."""
    warm_up: Flag = True
    """Compile all programs that the dataset's prompts can need before the first step; otherwise each when first used,
    as are those for images."""
    cache_dtype: CacheDtype = "compute"
    """Type of the KV cache: `compute`, that of activations, or `int8` or `fp8`, 8 bits of each number and 32 bits for
    each key and value of a head. Samples are then of rounded keys and values, as if of other weights, with the error
    measure and the corrections of `quantize`. On CPU a dispatch works on rows in `compute` beside it. Not for latent
    attention, and not for TPU's kernels, which read `compute` only: there `model.decode_attention: gather`, which is
    slower."""
    engine: Locator | None = None
    """Custom rollout engine: `module:Engine` or `file.py:Engine`, called with (model, tokenizer, this section), with
    the methods of `posttrain.rollout.types.RolloutEngine`. The fields above apply to the built-in engine only."""

    @property
    def drafter_optimizer(self) -> AnyOptimizer | None:
        """Optimiser of a block drafter that is trained beside the model; None: none is."""
        return self.speculative.optimizer if isinstance(self.speculative, BlockDrafts) else None

    @property
    def rounds(self) -> str | None:
        """Option by which the sampler computes with other numbers than the trainer; None without any."""
        if self.quantize != "none":
            return f"rollout.quantize={self.quantize}"
        return f"rollout.cache_dtype={self.cache_dtype}" if self.cache_dtype != "compute" else None

    def _mistakes(self) -> Iterator[str]:
        plain = RolloutSection.model_construct()
        others = [name for name in RolloutSection.model_fields if getattr(self, name) != getattr(plain, name)]
        if self.engine is not None and (others := [name for name in others if name != "engine"]):
            yield f"{', '.join(others)}: supported by the built-in engine, not by {self.engine}; remove it"


class GrammarSection(Section):
    """Structured output: the language of a completion's content, one of these; needs `pip install posttrain[grammar]`.
    A thought may stand before it, unless the chat template's arguments switch thinking off."""

    json_object: Flag = False
    """Any JSON object."""
    json_schema: PlainMapping | None = None
    """JSON that fits this schema, its properties in the schema's order. A keyword that is not supported is an error."""
    regex: Text | None = None
    """Text that a regular expression matches as a whole."""
    choice: ListOf[Text] = ()
    """One of these texts."""

    def _mistakes(self) -> Iterator[str]:
        given = [name for name in GrammarSection.model_fields if getattr(self, name) not in (False, None, ())]
        if len(given) != 1:
            yield f"set one of {', '.join(GrammarSection.model_fields)}; got {' and '.join(given) or 'none of them'}"


class SamplingSection(Section):
    """Sampling of completions."""

    max_tokens: PositiveInt = MAX_NEW_TOKENS
    """Maximum number of tokens of a completion, including end-of-sequence; by default 512, or half of the row's space
    for a prompt and its completion if that is less."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: NonNegativeInt = 0
    """Sample from the k most probable tokens. 0: off."""
    top_p: Fraction = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Repetition penalty, arXiv:1909.05858: above 1, tokens of prompt and sample become less likely. The trainer's
    log-probabilities exclude it."""
    presence_penalty: float = 0.0
    """Presence penalty, subtracted from the logits of tokens in the sample."""
    frequency_penalty: float = 0.0
    """Frequency penalty, subtracted from the logits of tokens once per occurrence in the sample."""
    logit_bias: dict[int, Annotated[float, Field(allow_inf_nan=True)]] = {}
    """Numbers added to logits, by token id; `-.inf` forbids the token."""
    allowed_token_ids: ListOf[int] | None = None
    """Token ids that may be sampled; by default all."""
    grammar: GrammarSection | None = None
    """Structured output: each token is sampled among those that go on in a grammar, and end-of-sequence where it may
    end; each turn by itself. A dispatch draws one token of such a sample, whatever `rollout.decode_steps` says."""
    stop: ListOf[Text] = ()
    """Stop strings; they are not part of the text. One that is a special token stops at that token."""
    stop_token_ids: ListOf[int] = ()
    """Stop token ids in addition to the tokenizer's. They end a completion whatever their text: a `grammar` has no
    other use for them."""
    ignore_eos: Flag = False
    """Continue after the tokenizer's end-of-sequence tokens."""
    skip_special_tokens: Flag = True
    """Leave special tokens out of the texts that rewards, environments and tables get. `false` keeps them, such as the
    channels of gpt-oss; the stop token is never part of the text."""

    def at_most(self, max_tokens: int) -> SamplingSection:
        """Copy with this `max_tokens` if it has the default one."""
        given = "max_tokens" in self.model_fields_set
        return self if given else self.model_copy(update={"max_tokens": max_tokens})

    @property
    def changes_distribution(self) -> bool:
        """True if tokens are not sampled from the model's full distribution at `temperature`, but from a truncated one
        or from logits with penalties or bias."""
        names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        plain = SamplingSection.model_construct(max_tokens=self.max_tokens)
        changed = any(getattr(self, name) != getattr(plain, name) for name in names)
        return changed or bool(self.logit_bias) or self.allowed_token_ids is not None or self.grammar is not None


def check_sampling(
    sampling: SamplingSection, row_tokens: int, rollout: RolloutSection, evaluation: SamplingSection | None = None
) -> None:
    """Check the sampling of training samples. ValueError if they would be equal, or too long for a row, and for what
    the engine cannot do, in evaluations too."""
    if rollout.engine is not None and any(s is not None and s.grammar is not None for s in (sampling, evaluation)):
        raise ValueError(f"sampling.grammar: supported by the built-in engine, not by {rollout.engine}; remove it")
    if sampling.temperature == 0:
        raise ValueError("sampling.temperature=0 gives equal samples, without a training signal; use 1.0")
    if sampling.max_tokens >= row_tokens:
        raise ValueError(
            f"sampling.max_tokens={sampling.max_tokens} must be less than row_tokens={row_tokens}, "
            "which holds prompt and completion"
        )


def check_drafter_stays(rollout: RolloutSection) -> None:
    """ValueError for a drafter that is to be trained in a stage without that."""
    if rollout.drafter_optimizer is not None:
        raise ValueError(
            "rollout.speculative.optimizer: drafters are trained in stages of kind rl and drafter; remove it"
        )


def answer_tokens(row_tokens: int, prompts_in_row: int) -> int:
    """Default length of completions: half of a row's space for a prompt and its completion, at most 512."""
    return max(1, min(MAX_NEW_TOKENS, row_tokens // (2 * prompts_in_row)))


def with_lengths(
    data: Any, build: Callable[[Any], Any], *, default_row: int, prompts_in_row: int, fills_row: bool
) -> Any:
    """Build a stage with the default of `row_tokens` or `sampling.max_tokens` that fits the value of the other.

    Defaults are not in `model_fields_set`: `fit_lengths` lowers them to the model's context.
    """
    sampling = data.get("sampling", {} if fills_row else None) if isinstance(data, Mapping) else None
    if not isinstance(sampling, Mapping):
        return build(data)
    filled, answer = {**data, "sampling": dict(sampling)}, sampling.get("max_tokens")
    row_is_default = fills_row and "row_tokens" not in data
    if row_is_default and _is_length(answer):
        filled["row_tokens"] = prompts_in_row * (MAX_NEW_TOKENS + answer)
    if "max_tokens" not in sampling:
        row = data.get("row_tokens", default_row)
        filled["sampling"]["max_tokens"] = answer_tokens(row if _is_length(row) else default_row, prompts_in_row)
    made = build(filled)
    if "sampling" not in data:
        made.model_fields_set.discard("sampling")
    if row_is_default:
        made.model_fields_set.discard("row_tokens")
    if "max_tokens" not in sampling:
        made.sampling.model_fields_set.discard("max_tokens")
    return made


def with_evaluation(data: Any, build: Callable[[Any], Any], *, greedy: bool) -> Any:
    """Build a stage whose `eval_sampling` is complete: the fields that are given, over those of `sampling`, which are
    greedy by default where evaluations are. What a mistaken section has is left to the validation of its fields."""
    if not isinstance(data, Mapping):
        return build(data)
    sampling, patch = (_given(data.get(name)) for name in ("sampling", "eval_sampling"))
    try:
        default = SamplingSection.model_validate(sampling)
    except ValidationError:
        return build(data)
    if not isinstance(patch, Mapping):
        return build(data)
    # Nested sections are values here: a grammar is one of its kinds, a bias a whole table.
    whole = {name: getattr(default, name) for name in SamplingSection.model_fields}
    made = build({**data, "eval_sampling": {**whole, **(GREEDY if greedy else {}), **patch}})
    if data.get("eval_sampling") is None:
        made.model_fields_set.discard("eval_sampling")
    # What is not given stays a default: `fit_lengths` lowers a length to the model's context.
    made.eval_sampling.model_fields_set.intersection_update(patch)
    return made


GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Fields of greedy decoding."""


def _given(section: Any) -> Any:
    """Fields that are given of a section; none without one."""
    if isinstance(section, Section):
        return {name: getattr(section, name) for name in section.model_fields_set}
    return {} if section is None else section


def _is_length(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class RolloutPlacement(Section):
    """Devices of the rollout engine."""

    devices: PositiveInt | None = None
    """Devices of its own, the last of all; None: the actor's. `rollout.tensor` of them split each weight, the others
    hold copies."""


class ReferencePlacement(Section):
    """Devices of the reference policy."""

    devices: PositiveInt | None = None
    """Devices of its own, before those of the rollout engine, which split the weights (`fsdp`); None: the actor's."""
    offload: Flag = False
    """Keep its weights in the host's memory between uses."""


class OptimizerPlacement(Section):
    """Memory of the optimizer state."""

    offload: Flag = False
    """Keep the optimizer state in the host's memory between the updates of a step, to make room for sampling."""


class CriticPlacement(Section):
    """Devices of the critic."""

    devices: PositiveInt | None = None
    """Devices of its own, before those of the reference, which split its weights (`fsdp`); None: the actor's."""
    offload: Flag = False
    """Keep its optimizer state in the host's memory between the updates of a step."""


class PlacementSection(Section):
    """Placement of roles on the devices. Roles without devices of their own share those of the actor, which has all
    that are left; `mesh` is the actor's."""

    rollout: RolloutPlacement = RolloutPlacement()
    """Devices of the rollout engine."""
    reference: ReferencePlacement = ReferencePlacement()
    """Devices of the reference policy."""
    critic: CriticPlacement = CriticPlacement()
    """Devices of the critic."""
    optimizer: OptimizerPlacement = OptimizerPlacement()
    """Memory of the actor's optimizer state."""

    @property
    def num_own_devices(self) -> int:
        """Number of devices that roles have for themselves."""
        return sum(role.devices or 0 for role in (self.rollout, self.reference, self.critic))


class ReferenceSection(Section):
    """Reference policy of the KL penalty."""

    model: Literal["start", "base"] = "start"
    """Policy: `start`, the actor at the start of the stage; `base`, the actor's model without its LoRA adapter, which
    needs no copy."""
    path: Locator | None = None
    """Another checkpoint with the actor's tokenizer, as folder or hub id, in place of `model`."""
    refresh_every: PositiveInt | None = None
    """Versions of the actor's weights between updates of the reference from it; None: it never changes."""
    mixup: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the actor in each update of the reference, the rest is the reference before: with `refresh_every: 1` an
    exponential moving average. 1: a copy."""

    def _mistakes(self) -> Iterator[str]:
        if self.path is not None and self.model != "start":
            yield f"path={self.path} and model={self.model} both name the reference; set one of them"
        if self.refresh_every is None and self.mixup != 1.0:
            yield f"mixup={self.mixup} has no effect without refresh_every; set it, such as 1"
        if self.refresh_every is not None and (self.path is not None or self.model != "start"):
            yield "refresh_every copies the actor's weights over a copy of them; it needs model: start"


class CriticOptimizer(AdamW):
    """AdamW settings of the critic."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-5


class CriticSection(Section):
    """Value model of `algorithm: ppo`."""

    path: Locator | None = None
    """Folder or hub id of a reward model or base model with the actor's tokenizer; None: the actor's model at the start
    of the stage, without an adapter. A model without a scalar head gets a new one."""
    warmup: NonNegativeInt = 0
    """First batches of rollouts from which the critic learns alone (value warm-up)."""
    optimizer: Annotated[CriticOptimizer | OtherOptimizer, Field(discriminator="kind"), ANY_KIND] = CriticOptimizer()
    """Optimiser of the critic, of the kinds of the stage's; its schedule has the stage's steps."""

    def _mistakes(self) -> Iterator[str]:
        if self.optimizer.ema is not None:
            yield "optimizer.ema: a critic's values are those of its last weights; remove it"
