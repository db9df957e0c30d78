"""Configuration of a run: one model through one or more stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import Field, model_validator

from posttrain.config.base import Flag, ListOf, LocalPath, PositiveInt, Section, Text
from posttrain.config.distill import DistillSection, DrafterSection
from posttrain.config.model import MeshSection, ModelSection
from posttrain.config.preference import OnlinePreferenceSection, PreferenceSection, RewardModelSection
from posttrain.config.rl import OnlineSection, RLSection
from posttrain.config.sft import SFTSection
from posttrain.config.train import ADAPTER_RATE_FACTOR, IMAGE_CACHE_MIB, OfflineSection, TrainSection

Stage = Annotated[
    SFTSection
    | DistillSection
    | RLSection
    | PreferenceSection
    | OnlinePreferenceSection
    | RewardModelSection
    | DrafterSection,
    Field(discriminator="kind"),
]


SECTIONS: Mapping[str, type[TrainSection]] = {
    section.model_fields["kind"].default: section
    for section in (
        SFTSection,
        DistillSection,
        RLSection,
        PreferenceSection,
        OnlinePreferenceSection,
        RewardModelSection,
        DrafterSection,
    )
}
"""Section class of each stage kind."""


def with_adapter_rate(stage: Any) -> Any:
    """Add the default learning rate of adapters to a raw stage without a learning rate."""
    section = SECTIONS.get(stage.get("kind", "")) if isinstance(stage, Mapping) else None
    given = {} if section is None else stage.get("optimizer", {})
    given = {} if given == "adamw" else given
    if section is None or not isinstance(given, Mapping) or {"learning_rate", "fn"} & given.keys():
        return stage
    if given.get("kind", "adamw") != "adamw":  # the others have no default rate
        return stage
    rate = ADAPTER_RATE_FACTOR * section.model_fields["optimizer"].default.learning_rate
    # 10 * 1e-6 is 9.999999999999999e-06.
    return {**stage, "optimizer": {**given, "learning_rate": float(f"{rate:.6g}")}}


def trains_on_samples(stage: Section) -> TypeGuard[OnlineSection | DistillSection]:
    """Tell whether a stage trains on samples of its own model, in all or some of its steps."""
    return isinstance(stage, OnlineSection) or (isinstance(stage, DistillSection) and stage.on_policy > 0)


class ProfileSection(Section):
    """Recording of a few steps with `jax.profiler`, and a table of where their time goes."""

    steps: Literal["auto"] | Annotated[ListOf[PositiveInt], Field(min_length=2, max_length=2)] = "auto"
    """First and last step to record in each stage, counted from 1; `auto`: three steps once the time of a step is
    stable."""

    def _mistakes(self) -> Iterator[str]:
        if self.steps != "auto" and self.steps[0] > self.steps[1]:
            yield f"steps={list(self.steps)}: the first step is after the last one"


class MetricsServerSection(Section):
    """Endpoint `/metrics` of the run's last metrics while it trains, in the text format of Prometheus."""

    port: Annotated[int, Field(ge=1, le=65535)]
    """Port of the endpoint; one that is taken is refused at the start."""
    host: Text = "127.0.0.1"
    """Address of this machine on which it listens, by default for this machine alone; `0.0.0.0` for all. It asks for no
    key, and shows numbers only."""


class RunConfig(Section):
    """Run of one model through one or more stages."""

    output: LocalPath
    """Folder of the run: resolved config, metrics, samples, checkpoints, final model."""
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Random seed of data order, sampling and initial weights."""
    model: ModelSection
    """Model to train: `path` or `init`, tokenizer, dtype, adapter."""
    mesh: MeshSection = MeshSection()
    tensorboard: Flag = True
    """Write TensorBoard's event files to `tensorboard/` of the run's folder."""
    trackers: ListOf[Literal["wandb", "mlflow", "trackio"]] = ()
    """Experiment trackers that get metrics, samples and settings as well, each with its extra: `posttrain[wandb]`."""
    metrics_server: MetricsServerSection | None = None
    """Serve the last metrics to Prometheus while the run trains: `metrics_server: {port: 9090}`."""
    profile: ProfileSection | None = None
    """Record steps to see where their time goes; `profile: {}` records three steps of each stage. Has no effect on
    results; a resumed run may have another."""
    stages: Annotated[ListOf[Stage], Field(min_length=1)]
    """Stages in order; each starts from the weights of the previous one."""

    @model_validator(mode="before")
    @classmethod
    def _adapter_rates(cls, data: Any) -> Any:
        """Apply the adapters' learning rate to stages without one."""
        model = data.get("model") if isinstance(data, Mapping) else None
        stages = data.get("stages") if isinstance(data, Mapping) else None
        get = model.get if isinstance(model, Mapping) else lambda name: getattr(model, name, None)
        if not isinstance(stages, list | tuple) or (get("lora") is None and get("adapter") is None):
            return data
        return {**data, "stages": [with_adapter_rate(stage) for stage in stages]}

    def _mistakes(self) -> Iterator[str]:
        if any(isinstance(stage, RewardModelSection) for stage in self.stages[:-1]):
            yield "a reward_model stage must be the last: its model scores answers and cannot generate"
        if len(self.stages) > 1 and any(isinstance(stage, DrafterSection) for stage in self.stages):
            yield "a drafter stage must be alone in its run: it trains no model; give that of another run as model.path"
        if self.model.adapter is not None and len(self.stages) > 1:
            yield (
                "model.adapter: a stage leaves its adapter merged, so a second one would have none to continue; "
                "give one stage, or lora, of which each stage begins its own"
            )
        if self.model.dtype == "float32" and any(stage.optimizer.stochastic_rounding for stage in self.stages):
            yield (
                "optimizer.stochastic_rounding is for bfloat16 parameters, and model.dtype is float32; "
                "set model.dtype=bfloat16, or remove stochastic_rounding"
            )
        lora = self.model.lora
        if lora is not None and lora.dropout and self.mesh.gather == "update":
            yield f"mesh.gather=update cannot be with model.lora.dropout={lora.dropout}; set one of them to its default"
        if lora is not None and lora.dropout and any(map(trains_on_samples, self.stages)):
            yield (
                f"model.lora.dropout={lora.dropout}: RL has none, nor have online preference and on-policy "
                "distillation: the trainer would be another model than the sampler; set it to 0"
            )
        merging = [one.rollout for one in self.stages if trains_on_samples(one) and one.rollout.merge_lora]
        if merging and lora is None and self.model.adapter is None:
            yield "rollout.merge_lora: the model has no adapter to merge; set model.lora, or remove it"
        elif self.model.quantize != "none" and any(rollout.quantize == "none" for rollout in merging):
            yield (
                f"rollout.merge_lora: no adapter is merged into matrices of model.quantize={self.model.quantize}; "
                "set rollout.quantize for a merged copy in 8 bits, or remove merge_lora"
            )
        for stage in (one for one in self.stages if isinstance(one, OfflineSection)):
            if stage.on_bad_image == "drop" and self.model.vision == "none":
                yield "on_bad_image=drop has no effect without a vision tower; set model.vision: frozen, or remove it"
            taught = isinstance(stage, DistillSection) and self.model.vision != "none"
            if self.model.vision != "frozen" and not taught and stage.image_cache_mib not in (0, IMAGE_CACHE_MIB):
                yield (
                    f"image_cache_mib={stage.image_cache_mib} has no effect with model.vision={self.model.vision}: "
                    "only features of a frozen tower are kept; remove it, or set model.vision to frozen"
                )
