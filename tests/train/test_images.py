"""A training step on rows with images: devices, micro-batches, remat, a frozen tower, adapters, files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.batch import Batch
from posttrain.config import AdamW, LoRA, MeshSection
from posttrain.errors import ConfigError
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import make_mesh, single_device_mesh
from posttrain.models.config import Compute
from posttrain.models.hf import config_from_hf
from posttrain.models.vision.tower import ImageInputs
from posttrain.train.objective import TrainSettings
from posttrain.train.optimizers import Optimizer
from posttrain.train.programs import TrainPrograms
from posttrain.train.trainer import FrozenTowers, Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.tree import replace
from posttrain.weights.files import read_json
from posttrain.weights.load import load_model, random_weights
from posttrain.weights.quantize import quantizable
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights, active_parameters
from tests.images import VisionCase, batch_of
from tests.often import often

ROWS = [("one", "two"), ("turns",), ("two",), ("one",), ("turns", "one"), ("two",), ("one", "one"), ("turns",)]

PLAIN: dict[str, Any] = {"temperature": 1.0, "max_grad_norm": 1e9}


@pytest.fixture(scope="module")
def case(shared: Path) -> VisionCase:
    return VisionCase(shared / "goldens" / "vision" / "gemma3")


@pytest.fixture(scope="module")
def batch(case: VisionCase) -> Batch:
    return batch_of(case, load_model(case.folder, vision="frozen"), ROWS)


def trainer(
    case: VisionCase, *, vision: Any = "frozen", settings: Any = None, mesh: Any = None, **changes: Any
) -> Trainer:
    model = load_model(case.folder, dtype=jnp.float32, vision=vision, **changes)
    given = {**PLAIN, **(settings or {})}
    return Trainer(model, SFTLoss(), optax.adam(1e-2), TrainSettings(**given), mesh=mesh)


def after_a_step(trained: Trainer, batch: Batch) -> dict[str, np.ndarray]:
    trained.step(batch)
    return {path: np.asarray(w) for path, w in trained.weights.items()}


@pytest.fixture(scope="module")
def stepped(case: VisionCase, batch: Batch) -> tuple[Trainer, dict[str, np.ndarray]]:
    """The frozen tower, outside of the step, which is rematerialized and takes two rows at a time."""
    settings = {"micro_batch_rows": 2, "image_cache_bytes": 2**20}
    trained = trainer(case, settings=settings, remat="full")
    return trained, after_a_step(trained, batch)


def test_a_frozen_tower_is_not_trained(
    case: VisionCase, stepped: tuple[Trainer, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """No optimizer state, no change, the bytes of its source in the files, and the processor's beside them."""
    from safetensors.numpy import load_file

    trained, weights = stepped
    start = ModelWeights(load_model(case.folder, dtype=jnp.float32, vision="frozen")).read()
    tower = {path for path in weights if path.startswith("tower.")}
    assert len(tower) > 20 and not tower & trained.params.keys()
    size = sum(x.size for path, x in start.items() if path not in tower)
    assert sum(x.size for x in jax.tree.leaves(trained._opt_state)) < 2.1 * size
    moved = {path for path in weights if not np.array_equal(weights[path], start[path])}
    assert moved and not moved & tower
    save_model(trained.model, tmp_path)
    source, found = (load_file(folder / "model.safetensors") for folder in (case.folder, tmp_path))
    assert source.keys() == found.keys()
    for name in source:
        if "vision_tower" in name or "projector" in name:
            assert_array_equal(found[name], source[name], err_msg=name)
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / name).read_bytes() == (case.folder / name).read_bytes()
    again = load_model(tmp_path, vision="frozen")
    assert again.config.vision == trained.model.config.vision


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "context": 2}])
def test_eight_devices_give_the_step_of_one(
    case: VisionCase, batch: Batch, stepped: tuple[Trainer, dict[str, np.ndarray]], sizes: dict[str, int]
) -> None:
    """With the tower in the step, and with its features kept."""
    for limit in (0, 2**20) if sizes == {"fsdp": 8} else (2**20,):
        mesh = make_mesh(MeshSection(**{"fsdp": 1} | sizes))
        found = after_a_step(trainer(case, mesh=mesh, settings={"image_cache_bytes": limit}), batch)
        for path, weight in stepped[1].items():
            assert_allclose(found[path], weight, atol=1e-4, err_msg=path)


@pytest.mark.parametrize("family", often(["gemma3", "qwen3_vl"], "gemma3"))
def test_kept_features_are_those_of_the_step(shared: Path, family: str) -> None:
    """Also of deepstack, in the places of a packed row; and bitwise the same whatever is beside a picture."""
    case = VisionCase(shared / "goldens" / "vision" / family)
    trained = trainer(case, settings={"image_cache_bytes": 2**20})
    batch = batch_of(case, trained.model, [("one", "two"), ("turns",)])
    tower, images = trained.model.tower, ImageInputs.of(batch, trained.model.config)
    assert tower is not None and images is not None
    expected = jax.jit(lambda images: tower.features(images, trained.model.compute))(images)
    (found,) = trained.encoded(batch).encoded or ()
    assert found is not None and (found.deeper is None) == (family == "gemma3")
    merge = trained.model.config.vision.merge**2  # type: ignore[union-attr]
    there = np.asarray(batch.patch_images)[:, ::merge] > 0
    assert_allclose(found.features[there], expected.features[there], atol=1e-5)
    if found.deeper is not None:
        first, second = (np.moveaxis(np.asarray(x), 1, 2)[there] for x in (found.deeper, expected.deeper))
        assert_allclose(first, second, atol=1e-5)
    towers = trained._towers
    assert towers is not None
    metrics, flops = towers.counted()
    assert metrics["images/encoded"] == 3 and flops > 0
    again = trained.encoded(batch)
    assert towers.counted() == ({"images/encoded": 0.0, "images/hit_rate": 1.0}, 0.0)
    assert towers.counted() == ({}, 0.0), "each picture is counted once"
    other = FrozenTowers(trained._programs, [trained._weights])
    turned = jax.tree.map(lambda x: x[::-1], batch)
    (apart,) = other.finish(turned, other.begin(turned)).encoded or ()
    for x, y in zip(jax.tree.leaves(apart), jax.tree.leaves(again.encoded), strict=True):
        assert_array_equal(x[::-1], y)


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "limit"), [("gemma3", 2**20), ("qwen3_vl", 9000)])
def test_steps_on_kept_features(shared: Path, family: str, limit: int) -> None:
    """The same parameters after three as with the tower in the step, also where the limit forgets pictures."""
    case = VisionCase(shared / "goldens" / "vision" / family)
    found = []
    for most in (0, limit):
        trained = trainer(case, settings={"image_cache_bytes": most, "micro_batch_rows": 2})
        batch = batch_of(case, trained.model, [("one", "two"), ("turns",), ("two",)])
        for _ in range(3):
            metrics = trained.step(batch)
        if trained._towers is not None:
            assert (metrics["images/hit_rate"] == 1) == (limit > 9000) and trained._towers._cache.num_bytes <= limit
        found.append({path: np.asarray(w) for path, w in trained.params.items()})
    for path, weight in found[0].items():
        assert_allclose(found[1][path], weight, atol=1e-3, err_msg=path)


EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["4 bits", "average", "experts"])
def test_kept_features_beside_other_features(case: VisionCase, shared: Path, way: str) -> None:
    """Parameters and their average after steps are those with the tower in the step: of adapters over 4 bits, of an
    average, and of experts on devices of their own."""
    found: list[dict[str, np.ndarray]] = []
    for limit in (0, 2**20):
        mesh, optimizer, moe = None, Optimizer(transformation=optax.sgd(0.1)), way == "experts"
        if moe:
            case = VisionCase(shared / "goldens" / "vision" / "gemma4")
            fields = read_json(case.folder / "config.json")
            text = fields["text_config"] | EXPERTS
            config, dtype = config_from_hf(fields | {"text_config": text}, vision="frozen"), jnp.dtype(jnp.float32)
            outline, draw = random_weights(config, Compute(dtype=dtype), dtype, "none")
            model = ModelWeights(outline).bind(draw(jnp.uint32(0))[0])
            mesh = make_mesh(MeshSection(expert=4, fsdp=2)) if limit else None
        elif way == "average":
            model = load_model(case.folder, dtype=jnp.float32, vision="frozen")
            optimizer = make_optimizer(AdamW(learning_rate=1e-2, ema={"decay": 0.5}), 10, model=model)
        else:
            lora = LoRA(rank=2)
            model = load_model(case.folder, dtype=jnp.float32, vision="frozen", lora=lora, quantize="nf4", seed=0)
        settings = TrainSettings(**PLAIN, image_cache_bytes=limit, micro_batch_rows=8 if moe else 2)
        trained = Trainer(model, SFTLoss(), optimizer, settings, mesh=mesh)
        rows = batch_of(case, model, ROWS)
        for _ in range(2):
            metrics = trained.step(rows)
        assert not limit or (metrics["images/encoded"], metrics["images/hit_rate"]) == (0, 1)
        with trained.averaged():
            found.append({path: np.asarray(w) for path, w in trained.params.items()})
    for path, weight in found[0].items():
        assert_allclose(found[1][path], weight, atol=1e-4, err_msg=path)


@pytest.mark.thorough
def test_only_frozen_towers_are_outside_of_the_step(case: VisionCase) -> None:
    """Not those that are trained, or whose adapters are."""
    reached: list[dict[str, Any]] = [
        {"vision": "projector"},
        {"vision": "frozen", "lora": LoRA(rank=2, targets=["tower"])},
    ]
    for changes in [{"vision": "frozen", "lora": LoRA(rank=2)}, *reached]:
        model, settings = load_model(case.folder, **changes), TrainSettings(**PLAIN, image_cache_bytes=1)
        programs = TrainPrograms(model, SFTLoss(), optax.adam(1e-2), settings, mesh=single_device_mesh())
        assert programs.frozen_towers == (() if changes in reached else (0,))


@pytest.mark.thorough
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapted_tower_on_eight_devices(case: VisionCase, batch: Batch, dora: bool) -> None:
    """Over a base in 8 bits, of which the tower is not; its matrices stay, and all of the adapter moves."""
    lora = LoRA(rank=2, targets=["attention", "tower"], dora=dora)
    mesh, settings = make_mesh(MeshSection(fsdp=4, tensor=2)), {"micro_batch_rows": 1}
    alone = trainer(case, lora=lora, quantize="int8", settings=settings, remat="full", seed=0)
    start = {path: np.asarray(w) for path, w in alone.weights.items()}
    expected = after_a_step(alone, batch)
    moved = {path for path in expected if not np.array_equal(expected[path], start[path])}
    assert moved == {path for path in start if path.endswith(("lora_b", "lora_magnitude"))}
    assert sum(path.startswith("tower.") for path in moved) == (7 - 1) * (2 if dora else 1)
    found = after_a_step(trainer(case, lora=lora, quantize="int8", mesh=mesh, seed=0), batch)
    for path, weight in expected.items():
        assert_allclose(found[path], weight, atol=1e-4, err_msg=path)


@pytest.mark.thorough
@pytest.mark.parametrize("vision", ["projector", "tower"])
def test_parts_of_the_tower_are_trained(case: VisionCase, batch: Batch, vision: Any) -> None:
    """Beside an adapter over a base in 8 bits, which holds nothing of the tower."""
    trained = trainer(case, vision=vision, lora=LoRA(rank=2), quantize="int8")
    start = {path: np.asarray(w) for path, w in trained.weights.items()}
    assert not any(path.startswith("tower.") for path in quantizable(trained.model))
    after = after_a_step(trained, batch)
    moved = {path for path in after if not np.array_equal(after[path], start[path])}
    wanted = {path for path in start if path.startswith("tower.projector." if vision == "projector" else "tower.")}
    # Softmax ignores what is added to the logits of all keys of a query.
    assert {path for path in moved if path.startswith("tower.")} >= {p for p in wanted if "k_proj.bias" not in p}
    assert all(".adapters." in path or path in wanted for path in moved)


@pytest.mark.thorough
def test_padding_is_without_effect(
    case: VisionCase, batch: Batch, stepped: tuple[Trainer, dict[str, np.ndarray]]
) -> None:
    """Patches of no image, and images of a row without weight."""
    trained, _ = stepped
    patches = np.array(batch.patches)
    patches[np.asarray(batch.patch_images) == 0] = 201
    expected = trained.stats(batch).logps
    assert_array_equal(trained.stats(replace(batch, patches=patches)).logps, expected)


def test_adapters_are_of_the_language_model(case: VisionCase) -> None:
    """Also for the names that towers have too."""
    model = load_model(case.folder, vision="frozen", lora=LoRA(rank=2, targets=["q_proj", "all-linear"]))
    adapted = {path for path in ModelWeights(model).trainable() if ".adapters." in path}
    assert adapted and all(path.startswith("stages.") for path in adapted)
    with pytest.raises(ConfigError, match="'vision_tower' matches no matrix"):
        load_model(case.folder, vision="frozen", lora=LoRA(rank=2, targets=["vision_tower"]))


@pytest.mark.parametrize(
    ("vision", "changed", "message"),
    [
        ("none", lambda batch: batch, "set model.vision to frozen"),
        ("frozen", lambda batch: replace(batch, images=None), "lacks images for gemma3"),
        (
            "frozen",
            lambda batch: replace(batch, rope_positions=np.zeros((*batch.tokens.shape, 3), np.int32)),
            "gemma3 turns by positions",
        ),
        ("frozen", lambda batch: replace(batch, patches=batch.patches[..., :27]), "multiple of 4 of 147 values"),
    ],
)
def test_batches_that_do_not_fit_are_refused(
    case: VisionCase, batch: Batch, vision: Any, changed: Callable[[Batch], Batch], message: str
) -> None:
    config = config_from_hf(read_json(case.folder / "config.json"), vision=vision)
    with pytest.raises(ConfigError, match=message):
        ImageInputs.of(changed(jax.tree.map(lambda x: x[:1], batch)), config)


def test_a_tower_is_no_parameter_of_tokens(case: VisionCase) -> None:
    """In operations per token, of plan and metrics."""
    with_tower, alone = (load_model(case.folder, vision=vision) for vision in ("frozen", "none"))
    assert active_parameters(with_tower) == active_parameters(alone)
