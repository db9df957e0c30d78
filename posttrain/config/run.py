"""A whole run."""

from __future__ import annotations

from typing import Annotated, TypeGuard

from pydantic import Field, model_validator

from posttrain.config.base import Flag, ListOf, Section, Text
from posttrain.config.distill import DistillSection
from posttrain.config.model import MeshSection, ModelSection
from posttrain.config.online_preference import OnlinePreferenceSection
from posttrain.config.pairs import PreferenceSection, RewardModelSection
from posttrain.config.rl import RLSection, SampledSection
from posttrain.config.train import SFTSection

Stage = Annotated[
    SFTSection | DistillSection | RLSection | PreferenceSection | OnlinePreferenceSection | RewardModelSection,
    Field(discriminator="kind"),
]


def is_sampled(stage: Section) -> TypeGuard[SampledSection | DistillSection]:
    """Whether a stage learns from what its model itself samples, wholly or in a share of its steps."""
    return isinstance(stage, SampledSection) or (isinstance(stage, DistillSection) and stage.on_policy > 0)


class RunConfig(Section):
    """A whole run: one model through one or more stages."""

    output: Text
    """Folder of the run: resolved config, metrics, samples, checkpoints, final model."""
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Start of every random key: data order, sampling, initial weights."""
    model: ModelSection
    """What is trained: `path` or `init`, tokenizer, dtype, adapter."""
    mesh: MeshSection = MeshSection()
    tensorboard: Flag = True
    stages: Annotated[ListOf[Stage], Field(min_length=1)]
    """Run in order; each starts from the weights of the one before."""

    @model_validator(mode="after")
    def _reward_model_last(self) -> RunConfig:
        if any(isinstance(stage, RewardModelSection) for stage in self.stages[:-1]):
            raise ValueError("a reward_model stage must be the last: what it leaves scores answers and writes none")
        return self

    @model_validator(mode="after")
    def _adapter_in_one_stage(self) -> RunConfig:
        if self.model.adapter is not None and len(self.stages) > 1:
            raise ValueError(
                "model.adapter: a stage leaves its adapter merged, so that a second one would have none to go on with; "
                "give one stage, or lora, of which each stage begins its own"
            )
        return self

    @model_validator(mode="after")
    def _dropout(self) -> RunConfig:
        lora = self.model.lora
        if lora is not None and lora.dropout and any(map(is_sampled, self.stages)):
            raise ValueError(
                f"model.lora.dropout={lora.dropout}: RL has none, nor have online preference and on-policy "
                "distillation: the trainer would be another model than the sampler; set it to 0"
            )
        return self
