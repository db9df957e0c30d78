"""Building blocks of training data, public as `pt.data`; they load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.data.packing import pack as pack
    from posttrain.data.packing import to_batch as to_batch
    from posttrain.data.pipeline import SFTBatches as SFTBatches
    from posttrain.data.pipeline import make_batches as make_batches

_MODULES = {
    "SFTBatches": "posttrain.data.pipeline",
    "make_batches": "posttrain.data.pipeline",
    "pack": "posttrain.data.packing",
    "to_batch": "posttrain.data.packing",
}

__all__ = [*_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'posttrain.data' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
