"""Typed configuration of a run, section by section: the same for YAML files and Python keywords."""

from posttrain.config.base import (
    AttentionKernel,
    DecodeAttention,
    Flag,
    Fraction,
    GroupedKernel,
    ListOf,
    LocalPath,
    MomentType,
    NonNegativeInt,
    PositiveInt,
    Quantize,
    Remat,
    RolloutQuantize,
    SamplerTensor,
    Section,
    Text,
)
from posttrain.config.distill import DistillSection
from posttrain.config.environment import AgentSection, EnvSection, McpSection, ToolSection
from posttrain.config.features import AttentionFeatures, FeaturesSection, HiddenFeatures, LayerMap
from posttrain.config.groups import AsyncSection
from posttrain.config.locator import Locator, UserObject
from posttrain.config.model import MESH_AXES, ROW_AXES, LoRA, MeshSection, ModelSection
from posttrain.config.policy_loss import SurrogateSection
from posttrain.config.preference import OnlinePreferenceSection, PairSection, PreferenceSection, RewardModelSection
from posttrain.config.reward import EvaluateSection, HeldOutSection, MonitorSection, RecordSection, RewardSection
from posttrain.config.rl import OnlineSection, RLSection
from posttrain.config.rollout import PlacementSection, ReferenceSection, RolloutSection, SamplingSection, answer_tokens
from posttrain.config.run import ProfileSection, RunConfig, Stage, trains_on_samples
from posttrain.config.teacher import TeacherSection
from posttrain.config.train import (
    DatasetSection,
    OfflineSection,
    OptimizerSection,
    RouterSection,
    SequenceSection,
    SFTSection,
    TrainSection,
)

__all__ = [
    "MESH_AXES",
    "ROW_AXES",
    "AgentSection",
    "AsyncSection",
    "AttentionFeatures",
    "AttentionKernel",
    "DatasetSection",
    "DecodeAttention",
    "DistillSection",
    "EnvSection",
    "EvaluateSection",
    "FeaturesSection",
    "Flag",
    "Fraction",
    "GroupedKernel",
    "HeldOutSection",
    "HiddenFeatures",
    "LayerMap",
    "ListOf",
    "LoRA",
    "LocalPath",
    "Locator",
    "McpSection",
    "MeshSection",
    "ModelSection",
    "MomentType",
    "MonitorSection",
    "NonNegativeInt",
    "OfflineSection",
    "OnlinePreferenceSection",
    "OnlineSection",
    "OptimizerSection",
    "PairSection",
    "PlacementSection",
    "PositiveInt",
    "PreferenceSection",
    "ProfileSection",
    "Quantize",
    "RLSection",
    "RecordSection",
    "ReferenceSection",
    "Remat",
    "RewardModelSection",
    "RewardSection",
    "RolloutQuantize",
    "RolloutSection",
    "RouterSection",
    "RunConfig",
    "SFTSection",
    "SamplerTensor",
    "SamplingSection",
    "Section",
    "SequenceSection",
    "Stage",
    "SurrogateSection",
    "TeacherSection",
    "Text",
    "ToolSection",
    "TrainSection",
    "UserObject",
    "answer_tokens",
    "trains_on_samples",
]
