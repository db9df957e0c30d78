"""Inputs of programs as shapes, and compiled programs as figures, kept in a cache: peak memory, collectives, kernels
and the time to compile."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from posttrain.batch import Batch, DraftLoss, ImageFeatures, ScoreLoss, TokenLoss, TopK
from posttrain.config import (
    DistillSection,
    ImageSection,
    OnlinePreferenceSection,
    OnlineSection,
    PairSection,
    Remat,
    RLSection,
    TrainSection,
)
from posttrain.config.algorithm import PPO
from posttrain.data.image_rows import largest_bucket, picture_size
from posttrain.distill.teachers import DEFAULT_TOP_K
from posttrain.kernels.logits.layout import VocabSharding, chunk_length
from posttrain.kernels.platform import platform_of
from posttrain.losses.distill import BlockDraftLoss
from posttrain.losses.pairs import Needs
from posttrain.losses.value import ValueLoss
from posttrain.models import hf
from posttrain.models.activations import ATTENTION, saved_names
from posttrain.models.config import Compute, ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.models.vision.tower import ImagePatches
from posttrain.plan.hlo import Buffer, Collective, Large, ProgramText, kernel_names, read_program
from posttrain.plan.machine import EFFORT, LEVEL, Machine, libtpu_version
from posttrain.rl.algorithms import needs_reference
from posttrain.rollout.vision import CALL_PATCHES, PromptFeatures, patches_size
from posttrain.runtime.files import cache_folder
from posttrain.runtime.xla import Growth
from posttrain.stages.cluster import critic_settings, drafter_settings
from posttrain.stages.preference import shares_prompts
from posttrain.train.objective import TrainSettings
from posttrain.train.programs import TrainPrograms
from posttrain.train.transformations import make_optimizer
from posttrain.weights.load import outline_of
from posttrain.weights.state import ModelWeights


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one compiled program, per device."""

    arguments: int
    temporaries: int
    peak: int
    """Bytes at the fullest moment, arguments included."""
    code: int
    """Bytes of the program itself."""
    text: ProgramText
    mosaic: tuple[str, ...]
    """Names of the Mosaic kernels."""
    flops: float
    """Operations by XLA's count, without Mosaic kernels; a loop's body counts once."""
    compile_s: float
    compiler: int
    """Bytes that the compiler held at most, in this process."""
    kept: int
    """Bytes that stay in this process while the program lives: its code, and what the compiler has loaded for it."""

    @property
    def made(self) -> int:
        """Bytes at the fullest moment beside the arguments: temporaries, and results in no donated argument."""
        return self.peak - self.arguments


def compile_program(
    lowered: jax.stages.Lowered, num_devices: int, *, num_slices: int = 1, for_cpu: bool = False
) -> Figures:
    """Compile and read a program, `for_cpu` by XLA's compiler for CPU. Raises jax.errors.JaxRuntimeError, such as
    RESOURCE_EXHAUSTED."""
    if for_cpu:
        _load_compiler()
    start = time.perf_counter()
    names = kernel_names(lowered.as_text())
    with Growth() as growth:
        compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    costs = compiled.cost_analysis() or {}
    return Figures(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        peak=_sum_for_cpu(memory) if for_cpu else memory.peak_memory_in_bytes,
        code=memory.generated_code_size_in_bytes,
        text=read_program(compiled.as_text() or "", num_devices, num_slices),
        mosaic=tuple(sorted(names)),
        flops=float(costs.get("flops", 0.0)),
        compile_s=time.perf_counter() - start,
        compiler=growth.highest,
        kept=growth.kept,
    )


def _sum_for_cpu(memory: Any) -> int:
    """Bytes of everything that a program has on CPU, which allocates its temporaries at once; the compiler's own peak
    leaves them out."""
    results: int = memory.output_size_in_bytes - memory.alias_size_in_bytes
    total: int = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
    return total


@cache
def _load_compiler() -> None:
    """Compile a small program, with which the process loads the compiler: no program's own memory."""
    jax.jit(lambda x: jnp.tanh(x @ x).sum()).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile()


def bytes_on_device(tree: object) -> int:
    """Bytes of shapes on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize if x.sharding else x.size * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def sizes_of(weights: Mapping[Any, Any]) -> frozenset[tuple[int, ...]]:
    """Sizes of arrays and of single layers of them, whole and on one device, without those of 1."""
    whole = [x.shape for x in weights.values()]
    parts = [x.sharding.shard_shape(x.shape) for x in weights.values()]
    found = {tuple(size for size in shape if size > 1) for shape in [*whole, *parts]}
    return frozenset(found | {shape[1:] for shape in found if len(shape) > 2})


def vocabulary_trips(mesh: Mesh, rows: int, length: int, vocab_size: int) -> int:
    """Chunks of the loss over the vocabulary if every token of the fullest row counts."""
    return -(-(length - 1) // chunk_length(rows, length, vocab_size, VocabSharding.of(mesh)))


POLICY_ARRAYS = ("old_logps", "sampler_logps", "behaviour_logps", "ref_logps", "advantages", "sample_shares")
"""Float arrays of a batch of samples."""


def model_of(fields: Mapping[str, Any], compute: Compute, dtype: np.dtype) -> Decoder:
    """Model as shapes from the fields of a `config.json`."""
    return outline_of(hf.config_from_hf(dict(fields)), compute, dtype)


def batch_of(rows: int, length: int, *, arrays: tuple[str, ...] = ()) -> Batch:
    """Batch [rows, length] for its shapes, without memory for them; `arrays`: optional float arrays that it has."""

    def blank(dtype: type) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), (rows, length))

    batch = Batch(
        tokens=blank(np.int32), positions=blank(np.int32), segments=blank(np.int32), loss_weight=blank(np.float32)
    )
    more: dict[str, Any] = {name: blank(np.float32) for name in arrays}
    return dataclasses.replace(batch, **more)


def taught_batch(section: DistillSection, model: Decoder, image: ImageSection | None, outside: int) -> Batch:
    """Batch with the targets of so many teachers `outside` of the step, of samples where there are any. `image`: limits
    of pictures; None: of text."""
    rows, length = section.batch_rows, section.row_tokens
    batch = batch_of(rows, length, arrays=("sampler_logps",) if section.on_policy else ())
    batch = with_pictures(batch, section, model, image)
    if section.rollout.record_routing:
        batch = with_routing(batch, model)
    if len(section.teachers) > 1:
        shares = np.broadcast_to(np.float32(0), (rows, length, len(section.teachers)))
        batch = dataclasses.replace(batch, teacher_weights=shares)
    if outside:
        k = min(section.top_k or DEFAULT_TOP_K, model.config.num_tokens or model.config.vocab_size)
        batch = dataclasses.replace(batch, teachers=(top_k_of(rows, length, k),) * outside)
    return batch


def sampled_batch(
    section: RLSection | OnlinePreferenceSection, loss: Any, model: Decoder, mesh: Mesh, image: ImageSection | None
) -> Batch:
    """Batch of an update on samples, with all that its loss reads."""
    arrays = ["sampler_logps"]
    if isinstance(section, RLSection):
        arrays += ["behaviour_logps", "advantages", "sample_shares"]
        arrays += ["old_logps"] * (section.proximal_logps != "self")
    arrays += ["ref_logps"] * needs_reference(section)
    batch = batch_of(section.step_rows, section.row_tokens, arrays=tuple(arrays))
    batch = with_pictures(batch, section, model, image)
    if isinstance(section, OnlinePreferenceSection):
        batch = with_pairs(batch, section, loss.pairs.needs, model, mesh)
    return with_routing(batch, model) if section.rollout.record_routing else batch


def with_pairs(
    batch: Batch, section: PairSection | OnlinePreferenceSection, needs: Needs, model: Decoder, mesh: Mesh
) -> Batch:
    """Batch with the roles of answers and what else the loss needs, and their common prompts once where they are."""
    mixture, kernel = bool(model.config.mixtures), model.compute.attention
    shared = shares_prompts(section, needs, kernel, platform_of(mesh), mixture=mixture)
    return dataclasses.replace(
        batch,
        roles=batch.segments,
        parents=batch.segments if shared else None,
        margins=batch.loss_weight if needs.margins else None,
    )


def with_routing(batch: Batch, model: Decoder) -> Batch:
    """Batch with the experts that the sampler has chosen."""
    shape = *batch.shape, len(model.config.mixtures), model.config.mixtures[0].top_k
    return dataclasses.replace(batch, experts=np.broadcast_to(np.zeros((), np.int16), shape))


def with_pictures(batch: Batch, section: TrainSection, model: Decoder, image: ImageSection | None) -> Batch:
    """Batch whose rows have all their patches, of the largest pictures, if the model takes any; None: without."""
    if image is None or (vision := model.config.vision) is None:
        return batch
    return pictured(batch, model.config, largest_bucket(section, vision.merge), image)


def asked_batch(section: OnlineSection, model: Decoder, image: ImageSection | None) -> Batch:
    """Batch of the prompts of a step, each once, which are full of pictures. `image`: see `with_pictures`."""
    batch, vision = batch_of(section.prompts_per_step, section.row_tokens), model.config.vision
    if image is None or vision is None:
        return batch
    most = section.sequence_tokens - section.sampling.max_tokens
    return pictured(batch, model.config, most * vision.merge**2, image)


def top_k_of(rows: int, length: int, k: int) -> TopK:
    """Top-k of a teacher outside of the step, for its shapes."""
    ids = np.broadcast_to(np.zeros((), np.int32), (rows, length, k))
    logps = np.broadcast_to(np.zeros((), np.float32), (rows, length, k))
    one = logps[..., 0]
    return TopK(ids=ids, logps=logps, tail=one, scaled_tail=one, token_logps=one)


def pictured(batch: Batch, config: ModelConfig, patches: int, image: ImageSection) -> Batch:
    """Batch with so many patches beside each row, of the largest pictures, without memory for pixels."""
    rows, length = batch.shape
    blank = np.broadcast_to(np.int32(0), (rows, length))
    return dataclasses.replace(
        batch,
        images=blank,
        image_rows=blank,
        rope_positions=np.broadcast_to(np.int32(0), (rows, length, 3)) if config.turns_by_axes else None,
        **patch_arrays(config, rows, patches, image),
    )


def train_programs(
    section: TrainSection,
    model: Decoder,
    loss: TokenLoss | ScoreLoss | DraftLoss,
    settings: TrainSettings,
    mesh: Mesh,
    teachers: Sequence[Decoder] = (),
) -> TrainPrograms:
    """Programs of a stage's model, with teachers in its step, as shapes."""
    steps, matching = section.num_steps or 1000, settings.matching
    optimizer = make_optimizer(section.optimizer, steps, seed=0, model=model, matching=matching)
    return TrainPrograms(model, loss, optimizer, settings, mesh=mesh, teachers=teachers)


def critic_programs(section: RLSection, model: Decoder, mesh: Mesh) -> TrainPrograms:
    """Programs of a critic as shapes."""
    algorithm = section.algorithm
    assert isinstance(algorithm, PPO)
    optimizer = make_optimizer(algorithm.critic.optimizer, section.num_steps, seed=0, model=model)
    loss = ValueLoss(clip=algorithm.value_clip)
    return TrainPrograms(model, loss, optimizer, critic_settings(section, algorithm), mesh=mesh)


def drafter_programs(section: OnlineSection, model: Decoder, mesh: Mesh, gather_once: bool) -> TrainPrograms:
    """Programs of a block drafter that learns beside its target, as shapes."""
    given = section.rollout.drafter_optimizer
    assert given is not None
    optimizer = make_optimizer(given, section.steps, seed=0, model=model)
    settings = drafter_settings(section, given, gather_once=gather_once)
    return TrainPrograms(model, BlockDraftLoss(), optimizer, settings, mesh=mesh)


def with_features(batch: Batch, programs: TrainPrograms) -> Batch:
    """Batch as a step reads it that does not hold the frozen towers, without memory for features."""
    if batch.patches is None or not programs.frozen_towers:
        return batch
    (rows, count), found = batch.patches.shape[:2], dict[int, ImageFeatures]()
    models = [one.model for one in (programs.structure, *programs.objective.teachers)]
    for number in programs.frozen_towers:
        config, zero = models[number].config, np.zeros((), models[number].compute.dtype)
        assert config.vision is not None
        shape, levels = (count // config.vision.merge**2, config.vision.embed_dim), config.deepstack
        found[number] = ImageFeatures(
            features=np.broadcast_to(zero, (rows, *shape)),
            deeper=np.broadcast_to(zero, (rows, levels, *shape)) if levels else None,
        )
    encoded = tuple(found.get(number) for number in range(len(models)))
    return programs.read_by_the_step(dataclasses.replace(batch, encoded=encoded))


def encode_work(programs: TrainPrograms, number: int, batch: Batch) -> dict[str, Any]:
    """Fields of a phase of calls of a frozen tower alone on the pictures of a batch, whose rows are alike. `number`: as
    in `Batch.encoded`."""
    config = (programs.structure, *programs.objective.teachers)[number].model.config
    assert config.vision is not None and batch.patch_images is not None and batch.patch_places is not None
    numbers, places = np.asarray(batch.patch_images[:1]), np.asarray(batch.patch_places[:1])
    pictures, size = int(numbers.max()), picture_size(config.vision.merge, int((numbers == 1).sum()))
    rows, work = programs.call_rows(size), config.vision.work(numbers, places).total / pictures
    call = ImagePatches(**patch_arrays(config, rows, size, ImageSection()))
    return {
        "lower": lambda: programs.lower_encode(number, call),
        "runs": math.ceil(len(batch.tokens) * pictures / rows),
        "trips": (),
        "flops": rows * work / programs.mesh.size,
        "tower": rows * work / programs.mesh.size,
        "read": float(bytes_on_device(programs.weights)),
        "parameters": sizes_of(programs.weights),
        "mesh": programs.mesh,
    }


def patch_arrays(config: ModelConfig, rows: int, patches: int, image: ImageSection) -> dict[str, Any]:
    """Arrays of so many patches beside each row, as in `Batch`, of the largest pictures."""
    vision = config.vision
    assert vision is not None
    largest = min(vision.picture_patches(image) or patches, patches)
    side = max(math.isqrt(largest) // vision.merge, 1) * vision.merge
    in_row = np.arange(patches, dtype=np.int32)
    images, within = np.minimum(in_row // side**2 + 1, max(1, patches // side**2)), in_row % side**2
    places = np.stack([within // side, within % side], axis=-1)
    return {
        "patches": np.broadcast_to(np.uint8(0), (rows, patches, 3 * vision.patch_size**2)),
        "patch_images": np.broadcast_to(np.where(in_row < images[-1] * side**2, images, 0)[None], (rows, patches)),
        "patch_places": np.broadcast_to(places[None], (rows, patches, 2)),
    }


def pictures_of(config: ModelConfig, lanes: int, longest: int, in_lane: int, image: ImageSection) -> ImagePatches:
    """Call of the tower on pictures as large as `image` and prompts of `longest` tokens allow, as many as it takes of
    `in_lane` tokens."""
    vision = config.vision
    assert vision is not None
    most = longest * vision.merge**2
    largest = min(vision.picture_patches(image) or most, most)
    size = patches_size(vision.merge, max(largest, min(CALL_PATCHES, in_lane * vision.merge**2)))
    return ImagePatches(**jax.device_put(patch_arrays(config, lanes, size, image)))


def features_of(model: Decoder, rows: int, length: int) -> PromptFeatures:
    """Features at the tokens of a prefill call, for their shapes."""
    config, dtype = model.config, model.compute.dtype
    assert config.vision is not None
    levels, width = config.deepstack, config.vision.embed_dim
    one, zero = np.zeros((), dtype), np.int32(0)
    arrays: dict[str, Any] = {
        "features": np.broadcast_to(one, (rows, length, width)),
        "deeper": np.broadcast_to(one, (rows, levels, length, width)) if levels else None,
        "images": np.broadcast_to(zero, (rows, length)),
        "rope_positions": np.broadcast_to(zero, (rows, length, 3)) if config.turns_by_axes else None,
    }
    return PromptFeatures(**jax.device_put(arrays))


def tower_flops(model: Decoder, batch: Batch, remat: Remat | None) -> float:
    """Operations of the vision tower: of an update with `remat`, else of a forward pass. Rows are alike."""
    vision = model.config.vision
    if vision is None or batch.patches is None:
        return 0.0
    assert batch.patch_images is not None and batch.patch_places is not None
    rows, work = batch.shape[0], vision.work(np.asarray(batch.patch_images[:1]), np.asarray(batch.patch_places[:1]))
    if remat is None:
        return rows * work.total
    again, (train, adapted) = 0.0, ModelWeights(model).tower_training
    if remat != "none" and train == "tower":
        again = work.products + (0.0 if ATTENTION in saved_names(remat) else work.attention)
    return rows * (work.trained(train, adapted, attention=3.5) + again)


def total_parameters(model: Decoder) -> int:
    return sum(math.prod(shape) for _, _, shape in ModelWeights(model).shapes())


NUM_LARGEST = 12
"""Buffers that are kept of a program."""


def figures_of(lowered: jax.stages.Lowered, machine: Machine, mesh: Mesh) -> Figures:
    """Figures of a program for devices in the order of the mesh, from the cache or by compiling it."""
    effort = f"{jax.config.values.get(EFFORT)} {jax.config.values.get(LEVEL)}"
    names = " ".join(field.name for kind in (Figures, ProgramText) for field in fields(kind))
    compiler = [
        names,
        machine.name,
        jax.__version__,
        libtpu_version() if machine.chip.platform == "tpu" else "",
        effort,
        str([device.id for device in mesh.devices.flat]),
    ]
    key = hashlib.sha256("\n".join([*compiler, lowered.as_text()]).encode()).hexdigest()
    file = cache_folder("plan") / f"{key}.json"
    if file.is_file():
        return _read(json.loads(file.read_text(encoding="utf-8")))
    for_cpu = machine.chip.platform == "cpu" or not machine.has_compiler
    found = compile_program(lowered, mesh.size, num_slices=machine.num_slices, for_cpu=for_cpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(_written(found)), encoding="utf-8")
    partial.rename(file)
    return found


def _written(figures: Figures) -> dict[str, Any]:
    written = asdict(figures)
    written["text"] = {
        "collectives": [asdict(c) for c in figures.text.collectives],
        "between": [asdict(c) for c in figures.text.between],
        "made": [asdict(large) for large in figures.text.largest(NUM_LARGEST)],
        "kernels": dict(figures.text.kernels),
        "cycles": list(figures.text.cycles.items()),
    }
    return written


def _read(written: dict[str, Any]) -> Figures:
    def buffer(given: dict[str, Any]) -> Buffer:
        return Buffer(given["dtype"], tuple(given["dims"]))

    def collective(c: dict[str, Any]) -> Collective:
        operands, results = (tuple(map(buffer, c[name])) for name in ("operands", "results"))
        return Collective(c["kind"], c["group"], operands, results, tuple(c["loops"]), c["op_name"])

    text = written["text"]
    collectives, between = ([*map(collective, text[name])] for name in ("collectives", "between"))
    made = [Large(buffer(x["buffer"]), x["op"], x["op_name"], tuple(x["loops"])) for x in text["made"]]
    cycles = Counter({tuple(loops): count for loops, count in text["cycles"]})
    read = ProgramText(collectives, made, Counter(text["kernels"]), cycles, between)
    return Figures(**{**written, "text": read, "mosaic": tuple(written["mosaic"])})
