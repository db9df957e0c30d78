"""Post-training of language models in JAX: fine-tuning, reinforcement learning, distillation over one model core.

Names load on first use, so that `import posttrain` and the command line's help stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.api import RL as RL
    from posttrain.api import SFT as SFT
    from posttrain.api import Distill as Distill
    from posttrain.api import OnlinePreference as OnlinePreference
    from posttrain.api import Preference as Preference
    from posttrain.api import RewardModel as RewardModel
    from posttrain.batch import Batch as Batch
    from posttrain.batch import LossOutput as LossOutput
    from posttrain.batch import TokenStats as TokenStats
    from posttrain.config import LoRA as LoRA
    from posttrain.data.tokenizer import load_tokenizer as load_tokenizer
    from posttrain.errors import ConfigError as ConfigError
    from posttrain.generation import complete as complete
    from posttrain.generation import generate as generate
    from posttrain.losses.pairs import Needs as Needs
    from posttrain.models.decoder import Decoder as Decoder
    from posttrain.rollout.engine import NativeEngine as NativeEngine
    from posttrain.rollout.shapes import Expected as Expected
    from posttrain.rollout.types import SamplingParams as SamplingParams
    from posttrain.train.trainer import Trainer as Trainer
    from posttrain.tree import Mean as Mean
    from posttrain.weights.load import load_model as load_model
    from posttrain.weights.peft_save import save_adapter as save_adapter
    from posttrain.weights.save import save_model as save_model

__version__ = "0.1.0"

_MODULES = {
    "Batch": "posttrain.batch",
    "ConfigError": "posttrain.errors",
    "Decoder": "posttrain.models.decoder",
    "Distill": "posttrain.api",
    "Expected": "posttrain.rollout.shapes",
    "LoRA": "posttrain.config",
    "LossOutput": "posttrain.batch",
    "Mean": "posttrain.tree",
    "NativeEngine": "posttrain.rollout.engine",
    "Needs": "posttrain.losses.pairs",
    "OnlinePreference": "posttrain.api",
    "Preference": "posttrain.api",
    "RL": "posttrain.api",
    "RewardModel": "posttrain.api",
    "SFT": "posttrain.api",
    "SamplingParams": "posttrain.rollout.types",
    "TokenStats": "posttrain.batch",
    "Trainer": "posttrain.train.trainer",
    "complete": "posttrain.generation",
    "generate": "posttrain.generation",
    "load_model": "posttrain.weights.load",
    "load_tokenizer": "posttrain.data.tokenizer",
    "save_adapter": "posttrain.weights.peft_save",
    "save_model": "posttrain.weights.save",
}

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
