"""Typed run configurations: what a YAML file or a Python call may say. Reading and errors: `posttrain.config_file`."""

from posttrain.config.base import (
    AttentionKernel,
    ConfigError,
    Fraction,
    GroupedKernel,
    ListOf,
    NonNegativeInt,
    PositiveInt,
    Quantize,
    Remat,
    RolloutQuantize,
    RunError,
    Section,
    Text,
)
from posttrain.config.distill import DistillSection, TeacherSection
from posttrain.config.judged import ComparedSection, PreferenceSection, RewardModelSection
from posttrain.config.model import MESH_AXES, ROW_AXES, LoRA, MeshSection, ModelSection
from posttrain.config.rl import RewardSection, RLSection, RolloutSection, SamplingSection
from posttrain.config.run import RunConfig, Stage
from posttrain.config.train import (
    DatasetSection,
    OptimizerSection,
    RouterSection,
    SequenceSection,
    SFTSection,
    TrainSection,
)

__all__ = [
    "MESH_AXES",
    "ROW_AXES",
    "AttentionKernel",
    "ComparedSection",
    "ConfigError",
    "DatasetSection",
    "DistillSection",
    "Fraction",
    "GroupedKernel",
    "ListOf",
    "LoRA",
    "MeshSection",
    "ModelSection",
    "NonNegativeInt",
    "OptimizerSection",
    "PositiveInt",
    "PreferenceSection",
    "Quantize",
    "RLSection",
    "Remat",
    "RewardModelSection",
    "RewardSection",
    "RolloutQuantize",
    "RolloutSection",
    "RouterSection",
    "RunConfig",
    "RunError",
    "SFTSection",
    "SamplingSection",
    "Section",
    "SequenceSection",
    "Stage",
    "TeacherSection",
    "Text",
    "TrainSection",
]
