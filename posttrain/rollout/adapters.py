"""LoRA adapters of one engine: several over one base, each request with its own, loaded and dropped while it runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from posttrain.errors import ConfigError
from posttrain.mesh import devices_of, param_sharding
from posttrain.models.adapter import AdapterStack
from posttrain.models.decoder import Decoder
from posttrain.models.layers import Embedding, Linear
from posttrain.runtime import processes
from posttrain.weights.files import find_folder, read_json
from posttrain.weights.lora import ALL_LINEAR, Site, has_lora, sites, targeted
from posttrain.weights.peft_load import CONFIG, read_pairs
from posttrain.weights.state import ADAPTER, ModelWeights, Weights

DEFAULT_RANK = 16
"""Largest rank where no adapter is known yet."""


@dataclass(frozen=True, kw_only=True)
class AdapterSlots:
    """Room for the adapters of an engine; its programs depend on nothing else. ValueError for values out of range.

    Every token reads `count * rank` rows and columns of each matrix, whatever is loaded.
    """

    count: int
    """Number of adapters at once."""
    rank: int
    """Largest rank; lower ones are padded with zeros."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Matrices that adapters may change, as `lora.targets` names them; not experts."""

    def __post_init__(self) -> None:
        for name, value in {"count": self.count, "rank": self.rank, "targets": len(self.targets)}.items():
            if value < 1:
                raise ValueError(f"adapters.{name}: must be at least 1, got {value}")


SlotArrays = dict[str, np.ndarray]
"""Arrays of an adapter in one slot, by parameter path."""


class LoadedAdapter(NamedTuple):
    name: str
    slot: int
    number: int
    """Number of the load, from 1: what one adapter has read serves no other, of the same name neither."""


class Adapters:
    """The adapters of an engine, side by side in the matrices of its model."""

    def __init__(self, slots: AdapterSlots):
        self.slots = slots
        self._held: dict[str, LoadedAdapter] = {}
        self._numbers = itertools.count(1)
        self._outlines: dict[Hashable, ModelWeights] = {}
        self._arrays: Weights = {}
        self._source: ModelWeights
        self._put: Any

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded adapters, in order of loading."""
        return tuple(self._held)

    def attached(self, source: ModelWeights, arrays: Weights) -> tuple[ModelWeights, Weights]:
        """The model with slots, as an outline, and its arrays with what is loaded. ConfigError for a model that has an
        adapter, and for targets that it does not have."""
        self._source, graph = source, nnx.graphdef(source.model)
        if graph not in self._outlines:
            if has_lora(source.model):
                raise ConfigError("adapters: the model has an adapter of its own; merge it first (merge_lora)")
            places = self._places(source.model)
            outline = nnx.eval_shape(lambda: self._with_stacks(source.bind(arrays), places))
            self._outlines[graph] = ModelWeights(outline)
        outlined = self._outlines[graph]
        if not self._arrays:
            shapes, alone = outlined.structs(), next(iter(arrays.values())).sharding
            mesh = devices_of(alone)
            placed = {
                path: alone if mesh is None else param_sharding(mesh, path, dims, shape)
                for path, dims, shape in outlined.shapes()
                if ADAPTER in path
            }
            self._arrays = {
                path: jnp.zeros(shapes[path].shape, shapes[path].dtype, device=place) for path, place in placed.items()
            }
            self._put = jax.jit(_put, out_shardings=placed)
        return outlined, arrays | self._arrays

    def read(
        self, name: str, folder: str | Path, arrays: Mapping[str, Any], text_name: Callable[[str], str | None] | None
    ) -> SlotArrays:
        """Read a PEFT adapter for `load`, in any thread. `arrays`: those of the model. ConfigError for one that cannot
        be."""
        model = self._source.bind({path: w for path, w in arrays.items() if ADAPTER not in path})
        return self._padded(name, read_pairs(model, folder, text_name=text_name))

    def load(self, name: str, new: SlotArrays, busy: Collection[int]) -> Weights:
        """Arrays of the slots with an adapter in one that is neither held nor `busy`. ValueError for a name that is
        taken and where no slot is free."""
        if name in self._held:
            raise ValueError(f"load_adapter: {name!r} is loaded already; drop it first")
        held = {adapter.slot for adapter in self._held.values()}
        free = sorted({*range(self.slots.count)} - held - {*busy})
        if not free:
            raise ValueError(
                f"load_adapter: {name!r}: all {self.slots.count} slots are taken, by {', '.join(self._held)}"
                + (" and by requests of adapters that were dropped" if {*busy} - held else "")
                + "; drop one, or make the engine with more"
            )
        shardings = {path: self._arrays[path].sharding for path in new}
        self._arrays = self._put(self._arrays, processes.on_devices(new, shardings), jnp.int32(free[0]))
        self._held[name] = LoadedAdapter(name, free[0], next(self._numbers))
        return self._arrays

    def drop(self, name: str) -> None:
        """Start no more requests of an adapter; its slot is free when the last one has ended."""
        del self._held[self.of(name).name]

    def of(self, name: str) -> LoadedAdapter:
        """The loaded adapter of a name; ValueError if there is none."""
        if name not in self._held:
            raise ValueError(f"no adapter {name!r} is loaded; loaded: {', '.join(self._held) or 'none'}")
        return self._held[name]

    def _places(self, model: Decoder) -> list[str]:
        """Sites that the targets name."""
        every = {path: site for path, site in sites(model).items() if isinstance(site.owner, Linear | Embedding)}
        chosen = set[str]()
        for target in self.slots.targets:
            found = {path for path, site in every.items() if _names(target, path, site)}
            if not found:
                raise ConfigError(f"adapters.targets: {target!r} matches no matrix that can have several adapters")
            chosen |= found
        return sorted(chosen)

    def _with_stacks(self, model: Decoder, places: Collection[str]) -> Decoder:
        by_path, dtype, width = sites(model), model.embed.embedding.dtype, self.slots.count * self.slots.rank
        for path in places:
            site = by_path[path]
            (*lead, before, after), (*leading, into, out) = site.matrix.shape, site.matrix.get_metadata("dims")
            arrays = {
                "lora_a": jnp.zeros((*lead, before, width), dtype),
                "lora_b": jnp.zeros((*lead, width, after), dtype),
            }
            dims = {"lora_a": (*leading, into, "rank"), "lora_b": (*leading, "rank", out)}
            site.owner.adapters[site.name] = AdapterStack(arrays, dims, count=self.slots.count)
        return model

    def _padded(self, name: str, pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> SlotArrays:
        """Arrays of one slot, of all stacks. ConfigError for what does not fit."""
        rank = self.slots.rank
        new = {path: np.zeros(_slot(w.shape, path, rank), w.dtype) for path, w in self._arrays.items()}
        for param, pair in pairs.items():
            base, _, matrix = param.rpartition(".")
            for key, array in zip(("lora_a", "lora_b"), pair, strict=True):
                path = f"{base}{ADAPTER}{matrix}.{key}"
                if path not in new:
                    targets = f"not among the engine's adapters.targets={list(self.slots.targets)}"
                    why = "of experts, whose adapters cannot be beside others" if ".experts." in param else targets
                    raise ConfigError(
                        f"load_adapter: {name!r} changes {param}, which is {why}; merge it, or leave it out"
                    )
                own = array.shape[_axis(path)]
                if own > rank:
                    raise ConfigError(
                        f"load_adapter: {name!r} has rank {own} at {param}, above the engine's adapters.rank={rank}"
                    )
                if not np.isfinite(array).all():
                    raise ConfigError(f"load_adapter: {name!r} has numbers at {param} that are not finite")
                index = (..., slice(own)) if key == "lora_a" else (..., slice(own), slice(None))
                new[path][index] = array
        return new


def slots_for(
    folders: Collection[str | Path], count: int | None, rank: int | None, *, loads: bool
) -> AdapterSlots | None:
    """Room for PEFT adapters, by default as many and of such ranks as they have; with `loads` for one more at least.
    None where there are none."""
    if not folders and not loads:
        if count is not None or rank is not None:
            raise ConfigError("serve: --adapter-slots and --adapter-rank need --adapter NAME=FOLDER or --load-adapters")
        return None
    configs = [read_json(find_folder(folder) / CONFIG) for folder in folders]
    ranks = [max([of.get("r", 1), *(of.get("rank_pattern") or {}).values()]) for of in configs]
    wanted = len(folders) + loads if count is None else count
    return AdapterSlots(count=wanted, rank=max(ranks, default=DEFAULT_RANK) if rank is None else rank)


def _names(target: str, path: str, site: Site) -> bool:
    named = any(targeted(target, path, site, modules) for modules in site.modules)
    return named and not (target == ALL_LINEAR and site.routes)


def _axis(path: str) -> int:
    """Dimension of the rank."""
    return -1 if path.endswith("lora_a") else -2


def _slot(shape: tuple[int, ...], path: str, rank: int) -> tuple[int, ...]:
    return (*shape[:-1], rank) if _axis(path) == -1 else (*shape[:-2], rank, shape[-1])


def _put(stacks: Weights, new: Weights, slot: Array) -> Weights:
    """The stacks with the arrays of one slot."""
    return {
        path: jax.lax.dynamic_update_slice_in_dim(
            stack, new[path], slot * new[path].shape[_axis(path)], _axis(path) % stack.ndim
        )
        for path, stack in stacks.items()
    }
