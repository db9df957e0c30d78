"""Post-training of language models in JAX: fine-tuning, reinforcement learning, distillation over one model core.

Names load on first use, so that `import posttrain` and the command line's help stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import posttrain.data as data  # noqa: F401
    import posttrain.losses as losses  # noqa: F401
    import posttrain.rl as rl  # noqa: F401
    from posttrain.api import RL as RL
    from posttrain.api import SFT as SFT
    from posttrain.api import Distill as Distill
    from posttrain.api import Drafter as Drafter
    from posttrain.api import OnlinePreference as OnlinePreference
    from posttrain.api import Preference as Preference
    from posttrain.api import RewardModel as RewardModel
    from posttrain.api import evaluate as evaluate
    from posttrain.batch import Batch as Batch
    from posttrain.batch import LossOutput as LossOutput
    from posttrain.batch import TokenStats as TokenStats
    from posttrain.config import BNPO as BNPO
    from posttrain.config import CISPO as CISPO
    from posttrain.config import DAPO as DAPO
    from posttrain.config import GDPO as GDPO
    from posttrain.config import GMPO as GMPO
    from posttrain.config import GRPO as GRPO
    from posttrain.config import GSPO as GSPO
    from posttrain.config import LUSPO as LUSPO
    from posttrain.config import PPO as PPO
    from posttrain.config import RLOO as RLOO
    from posttrain.config import SAPO as SAPO
    from posttrain.config import VESPO as VESPO
    from posttrain.config import Adafactor as Adafactor
    from posttrain.config import AdamW as AdamW
    from posttrain.config import BlockDrafts as BlockDrafts
    from posttrain.config import DrGRPO as DrGRPO
    from posttrain.config import GSPOToken as GSPOToken
    from posttrain.config import Lion as Lion
    from posttrain.config import LookupDrafts as LookupDrafts
    from posttrain.config import LoRA as LoRA
    from posttrain.config import MeshSection as MeshSection
    from posttrain.config import ModelDrafts as ModelDrafts
    from posttrain.config import Muon as Muon
    from posttrain.config import OnPolicyDistill as OnPolicyDistill
    from posttrain.config import ReinforcePlusPlus as ReinforcePlusPlus
    from posttrain.config import ReinforcePlusPlusBaseline as ReinforcePlusPlusBaseline
    from posttrain.data.grammar import Grammar as Grammar
    from posttrain.data.tokenizer import load_tokenizer as load_tokenizer
    from posttrain.diagnosis.report import why as why
    from posttrain.errors import ConfigError as ConfigError
    from posttrain.errors import RunError as RunError
    from posttrain.export.resize import average as average
    from posttrain.generation import complete as complete
    from posttrain.generation import generate as generate
    from posttrain.losses.pairs import Needs as Needs
    from posttrain.losses.policy import PolicyLoss as PolicyLoss
    from posttrain.mesh import make_mesh as make_mesh
    from posttrain.metrics import to_host as to_host
    from posttrain.models.decoder import Decoder as Decoder
    from posttrain.results.compare import compare as compare
    from posttrain.results.result import RunResult as RunResult
    from posttrain.results.result import attach as attach
    from posttrain.reward.rubric import Rubric as Rubric
    from posttrain.rollout.adapters import AdapterSlots as AdapterSlots
    from posttrain.rollout.engine import NativeEngine as NativeEngine
    from posttrain.rollout.programs import Expected as Expected
    from posttrain.rollout.trajectory import Example as Example
    from posttrain.rollout.trajectory import Trajectory as Trajectory
    from posttrain.rollout.types import SamplingParams as SamplingParams
    from posttrain.tracking.sink import STOP as STOP
    from posttrain.train.checkpoint import Checkpointer as Checkpointer
    from posttrain.train.objective import TrainSettings as TrainSettings
    from posttrain.train.trainer import Trainer as Trainer
    from posttrain.tree import Mean as Mean
    from posttrain.weights.load import load_model as load_model
    from posttrain.weights.peft_save import save_adapter as save_adapter
    from posttrain.weights.save import save_model as save_model

__version__ = "0.1.0"

_MODULES = {
    "BNPO": "posttrain.config",
    "CISPO": "posttrain.config",
    "DAPO": "posttrain.config",
    "DrGRPO": "posttrain.config",
    "GDPO": "posttrain.config",
    "GMPO": "posttrain.config",
    "GRPO": "posttrain.config",
    "GSPO": "posttrain.config",
    "GSPOToken": "posttrain.config",
    "LUSPO": "posttrain.config",
    "OnPolicyDistill": "posttrain.config",
    "PPO": "posttrain.config",
    "RLOO": "posttrain.config",
    "ReinforcePlusPlus": "posttrain.config",
    "ReinforcePlusPlusBaseline": "posttrain.config",
    "SAPO": "posttrain.config",
    "VESPO": "posttrain.config",
    "Adafactor": "posttrain.config",
    "AdapterSlots": "posttrain.rollout.adapters",
    "AdamW": "posttrain.config",
    "Batch": "posttrain.batch",
    "Checkpointer": "posttrain.train.checkpoint",
    "ConfigError": "posttrain.errors",
    "Decoder": "posttrain.models.decoder",
    "BlockDrafts": "posttrain.config",
    "Distill": "posttrain.api",
    "Drafter": "posttrain.api",
    "Example": "posttrain.rollout.trajectory",
    "Expected": "posttrain.rollout.programs",
    "Grammar": "posttrain.data.grammar",
    "LoRA": "posttrain.config",
    "Lion": "posttrain.config",
    "LookupDrafts": "posttrain.config",
    "LossOutput": "posttrain.batch",
    "Mean": "posttrain.tree",
    "MeshSection": "posttrain.config",
    "ModelDrafts": "posttrain.config",
    "Muon": "posttrain.config",
    "NativeEngine": "posttrain.rollout.engine",
    "Needs": "posttrain.losses.pairs",
    "OnlinePreference": "posttrain.api",
    "PolicyLoss": "posttrain.losses.policy",
    "Preference": "posttrain.api",
    "RL": "posttrain.api",
    "RewardModel": "posttrain.api",
    "Rubric": "posttrain.reward.rubric",
    "RunError": "posttrain.errors",
    "RunResult": "posttrain.results.result",
    "SFT": "posttrain.api",
    "STOP": "posttrain.tracking.sink",
    "SamplingParams": "posttrain.rollout.types",
    "TokenStats": "posttrain.batch",
    "TrainSettings": "posttrain.train.objective",
    "Trainer": "posttrain.train.trainer",
    "Trajectory": "posttrain.rollout.trajectory",
    "attach": "posttrain.results.result",
    "average": "posttrain.export.resize",
    "compare": "posttrain.results.compare",
    "complete": "posttrain.generation",
    "evaluate": "posttrain.api",
    "generate": "posttrain.generation",
    "load_model": "posttrain.weights.load",
    "load_tokenizer": "posttrain.data.tokenizer",
    "make_mesh": "posttrain.mesh",
    "save_adapter": "posttrain.weights.peft_save",
    "save_model": "posttrain.weights.save",
    "to_host": "posttrain.metrics",
    "why": "posttrain.diagnosis.report",
}

_UNITS = ("data", "losses", "rl")
"""Folders of the package whose names are public as `pt.data`, `pt.losses` and `pt.rl`."""

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _UNITS:
        return import_module(f"posttrain.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}{_hint(name)}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """Name here for one of another framework, or for one that is misspelt."""
    if name.startswith("_"):
        return ""
    from posttrain.config.other_names import find_class
    from posttrain.errors import did_you_mean

    here = find_class(name)
    return did_you_mean(name, [*_MODULES, *_UNITS]) if here is None else f"; here it is {here}"


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_UNITS})
