"""Supervised fine-tuning, and samples of held-out prompts beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from posttrain.config.base import ListOf, PositiveInt
from posttrain.config.locator import Named
from posttrain.config.reward import RewardSection
from posttrain.config.rollout import SamplingSection, answer_tokens
from posttrain.config.train import SequenceSection

OF_SAMPLES = ("num_samples", "eval_sampling", "metrics")
"""Fields that say something of samples of held-out prompts."""


def _greedy(value: Any) -> Any:
    """Fields of sampling that are greedy unless they say otherwise."""
    return {"temperature": 0.0, **value} if isinstance(value, Mapping) else value


class SFTSection(SequenceSection):
    """Supervised fine-tuning."""

    kind: Literal["sft"] = "sft"
    loss: Named = "nll"
    """Loss type: `nll`, `dft`, or a token loss of your own: `file.py:name`, with settings `{fn: file.py:name, ...}`, or
    in Python the object, class or function."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing of the `nll` loss: share of the target that is spread over the vocabulary."""
    noise_alpha: Annotated[float, Field(ge=0)] = 0.0
    """NEFTune noise on the embeddings in training, arXiv:2310.05914; 5 is usual."""

    samples_every: PositiveInt | None = None
    """Steps between samples of held-out prompts, also before the first step and after the last one: in `samples.jsonl`,
    on the console, and as metrics `samples/...`. By default none; needs `eval_dataset`."""
    num_samples: PositiveInt = 6
    """Number of rows of `eval_dataset` that are sampled, the first ones, each up to its last answer."""
    eval_sampling: Annotated[SamplingSection, BeforeValidator(_greedy)] = SamplingSection(temperature=0.0)
    """Sampling of held-out prompts, by default greedy (temperature 0) with `max_tokens` of half a row, at most 512."""
    metrics: ListOf[RewardSection] = ()
    """Functions of your own that score the samples, in the form of rewards of RL: metrics `samples/<function>/...`, on
    which nothing is trained."""

    @property
    def held_out_sampling(self) -> SamplingSection:
        """Sampling of held-out prompts, with the default length resolved."""
        return self.eval_sampling.at_most(answer_tokens(self.row_tokens, 1))

    def _mistakes(self) -> Iterator[str]:
        yield from self._samples()
        if self.label_smoothing and self.loss != "nll":
            yield f"label_smoothing={self.label_smoothing} is for the loss nll, not for {self.loss!r}"

    def _samples(self) -> Iterator[str]:
        if self.samples_every is None:
            fields = type(self).model_fields
            changed = [name for name in OF_SAMPLES if getattr(self, name) != fields[name].default]
            if changed:
                yield f"{changed[0]} is for samples of held-out prompts, and there are none; set samples_every"
            return
        if self.eval_dataset is None:
            yield f"samples_every={self.samples_every} needs eval_dataset, whose prompts are sampled"
        if self.held_out_sampling.max_tokens >= self.row_tokens:
            yield (
                f"eval_sampling.max_tokens={self.held_out_sampling.max_tokens} must be less than row_tokens="
                f"{self.row_tokens}, which holds prompt and completion"
            )
        if any(metric.model is not None for metric in self.metrics):
            yield "metrics.model: reward models score in stages that train on samples; give functions (fn)"
        if any(metric.weight != 1.0 for metric in self.metrics):
            yield "metrics.weight has no effect: each function has a mean of its own; remove it"
