"""Several LoRA adapters in one engine: each request has the tokens that it has with its adapter alone."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from posttrain.config import LoRA, MeshSection
from posttrain.errors import ConfigError
from posttrain.mesh import mesh_of_arrays
from posttrain.models.decoder import Decoder
from posttrain.models.layers import Linear
from posttrain.rollout.adapters import AdapterSlots, slots_for
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.types import Completion
from posttrain.weights.lora import sites
from posttrain.weights.peft_load import load_adapter
from posttrain.weights.peft_save import save_adapter
from posttrain.weights.quantize import quantize_model
from posttrain.weights.state import ModelWeights
from tests.random_families import random_family_model
from tests.rollout.engines import VOCABULARY, assert_same, make_engine, params
from tests.rollout.test_sharded import sharded_model
from tests.tiny import tiny_model
from tests.weights.adapted import trained

MODULES = {
    name: f"stages.0.blocks.0.{ours}.kernel"
    for name, ours in {
        "self_attn.q_proj": "attention.q",
        "self_attn.k_proj": "attention.k",
        "self_attn.v_proj": "attention.v",
        "self_attn.o_proj": "attention.o",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
    }.items()
}
KINDS = ("deepseek_v3", "gemma4_text", "glm4", "qwen2_moe")
"""Families with latent attention, inputs of layers and shared keys, fused matrices in files, shared experts."""
EMBED = "embed.embedding"
PROMPT = np.random.default_rng(3).integers(0, VOCABULARY, 40).tolist()


class Case(NamedTuple):
    """Adapter as PEFT would write it."""

    modules: tuple[str, ...]
    config: Mapping[str, Any]
    layers: tuple[int, ...] = (0, 1)
    dtype: DTypeLike = jnp.float32

    def rank(self, module: str) -> int:
        patterns = self.config.get("rank_pattern", {})
        return next((rank for name, rank in patterns.items() if module.endswith(name)), self.config["r"])


CASES = {
    "all": Case(tuple(MODULES), {"r": 3, "lora_alpha": 5.0}),
    "rslora": Case(("self_attn.q_proj", "self_attn.o_proj"), {"r": 4, "lora_alpha": 3.0, "use_rslora": True}),
    "some": Case(
        ("mlp.up_proj", "mlp.down_proj"),
        {"r": 2, "lora_alpha": 4, "rank_pattern": {"down_proj": 4}},
        (1,),
        jnp.bfloat16,
    ),
    "embed": Case(("embed_tokens", "mlp.gate_proj"), {"r": 2, "lora_alpha": 2, "ensure_weight_tying": True}),
}


def weights_of(case: Case, model: Decoder) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Tensors of an adapter, and the model's arrays with scale * B A added."""
    draw = np.random.default_rng(len(case.modules))
    arrays = {path: np.array(w) for path, w in ModelWeights(model).read().items()}
    tensors: dict[str, np.ndarray] = {}
    for module in case.modules:
        rank, alpha = case.rank(module), case.config["lora_alpha"]
        scale = alpha / (math.sqrt(rank) if case.config.get("use_rslora") else rank)
        param = MODULES.get(module, EMBED)
        into, out = arrays[param].shape[-2:]
        for layer in case.layers if module in MODULES else (None,):
            a, b = (draw.normal(0, 0.4, shape).astype(case.dtype) for shape in ((rank, into), (out, rank)))
            prefix = f"base_model.model.model.{module if layer is None else f'layers.{layer}.{module}'}.lora_"
            names = ("embedding_A", "embedding_B") if layer is None else ("A.weight", "B.weight")
            tensors |= {prefix + names[0]: a, prefix + names[1]: b}
            delta = scale * (b.astype(np.float32) @ a.astype(np.float32)).T
            arrays[param][() if layer is None else layer] += delta
    return tensors, arrays


def write(folder: Path, case: Case, tensors: Mapping[str, np.ndarray], **changes: Any) -> Path:
    folder.mkdir()
    names = [module.rpartition(".")[-1] for module in case.modules]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "target_modules": names, **case.config, **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return folder


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(num_layers=2, windows=(None,))


@pytest.fixture(scope="module")
def folders(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write(root / name, case, weights_of(case, model)[0]) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def shared_several(model: Decoder) -> NativeEngine:
    slots = AdapterSlots(count=3, rank=4, targets=("all-linear", "embed"))
    return make_engine(model, slots=6, adapters=slots)


@pytest.fixture
def several(shared_several: NativeEngine) -> NativeEngine:
    for name in shared_several.adapters:
        shared_several.drop_adapter(name)
    return shared_several


Alone = Callable[[str | None, float], list[Completion]]


@pytest.fixture(scope="module")
def alone(model: Decoder) -> Alone:
    """Completions of an engine whose only weights have one adapter merged."""
    engine, weights = make_engine(model, slots=6), ModelWeights(model)

    def run(name: str | None, temperature: float) -> list[Completion]:
        merged = (
            model
            if name is None
            else weights.bind({path: jnp.asarray(w) for path, w in weights_of(CASES[name], model)[1].items()})
        )
        engine.update_weights(merged, 0)
        return engine.generate_all(PROMPTS, [params(i, temperature=temperature) for i in range(len(PROMPTS))])

    return run


PROMPTS = [PROMPT, PROMPT, PROMPT[:33]]


def together(engine: NativeEngine, names: list[str | None], temperature: float) -> dict[tuple[str | None, int], Any]:
    every = [(name, i) for i in range(len(PROMPTS)) for name in names]
    parameters = [params(i, temperature=temperature, adapter=name) for name, i in every]
    done = engine.generate_all([PROMPTS[i] for _, i in every], parameters)
    return dict(zip(every, done, strict=True))


def test_each_request_has_the_tokens_of_its_adapter_alone(
    several: NativeEngine, folders: Mapping[str, Path], alone: Alone
) -> None:
    """One batch of three adapters and the base, on prompts whose blocks all of them would share; then with another
    adapter in a slot that was used, without compiling anything."""
    compiled = 0
    for held in (("all", "rslora", "some"), ("rslora", "some", "embed")):
        for name in {*several.adapters} - {*held}:
            several.drop_adapter(name)
        for name in held:
            if name not in several.adapters:
                several.load_adapter(name, folders[name])
        for temperature in (0.0, 1.0):
            found = together(several, [*held, None], temperature)
            for name in (*held, None):
                for i, expected in enumerate(alone(name, temperature)):
                    assert_same(found[name, i], expected)
            assert len({found[name, 0].tokens for name in (*held, None)}) == 4
        assert several.metrics()["rollout/prefix_hit_rate"] > 0.1  # of the same adapter
        assert compiled in (0, len(several.programs))
        compiled = len(several.programs)


def test_a_dropped_adapter_ends_what_it_began(several: NativeEngine, folders: Mapping[str, Path], alone: Alone) -> None:
    """Its slot is taken until then, and another adapter of its name reads none of its blocks."""
    for name in ("all", "rslora", "some"):
        several.load_adapter(name, folders[name])
    expected = {name: alone(name, 0.0) for name in ("all", "embed")}

    async def run() -> list[Completion]:
        waiting = [
            asyncio.ensure_future(several.generate(p, params(i, temperature=0.0, adapter="all")))
            for i, p in enumerate(PROMPTS)
        ]
        while not several.num_used_blocks:
            await asyncio.sleep(0)
        several.drop_adapter("all")
        with pytest.raises(ValueError, match="no adapter 'all' is loaded; loaded: rslora, some"):
            await several.generate(PROMPT, params(adapter="all"))
        with pytest.raises(ValueError, match="all 3 slots are taken, by rslora, some and by requests of adapters"):
            several.load_adapter("embed", folders["embed"])
        return await asyncio.gather(*waiting)

    for found, one in zip(asyncio.run(run()), expected["all"], strict=True):
        assert_same(found, one)
    several.load_adapter("all", folders["embed"])
    found = together(several, ["all"], 0.0)
    for i, one in enumerate(expected["embed"]):
        assert_same(found["all", i], one)


def test_what_an_engine_cannot_have(several: NativeEngine, model: Decoder, tmp_path: Path) -> None:
    case = CASES["rslora"]
    tensors, _ = weights_of(case, model)
    first = next(iter(tensors))
    wide = weights_of(case._replace(config={**case.config, "r": 5}), model)[0]
    norm = {"base_model.model.model.norm.weight": np.zeros(32, np.float32)}
    for i, (changed, config, message) in enumerate(
        [
            (tensors, {"use_dora": True}, "use_dora=True changes more than low-rank products"),
            (tensors | norm, {"modules_to_save": ["norm"]}, r"modules_to_save=\['norm'\] changes more"),
            (tensors, {"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS' changes more"),
            (tensors, {"bias": "all"}, "bias='all' is not supported"),
            (tensors | norm, {}, "norm.weight differs from the base"),
            (
                wide,
                {"r": 5},
                "'bad' has rank 5 at stages.0.blocks.0.attention.o.kernel, above the engine's adapters.rank=4",
            ),
            (tensors | {first: np.zeros((4, 31), np.float32)}, {}, "q_proj has shapes"),
            (
                tensors | {first: np.full((4, 32), np.nan, np.float32)},
                {},
                "'bad' has numbers at .* that are not finite",
            ),
        ]
    ):
        with pytest.raises(ConfigError, match=message):
            several.load_adapter("bad", write(tmp_path / str(i), case, changed, **config))
    assert several.adapters == ()
    attention = make_engine(model, adapters=AdapterSlots(count=1, rank=8, targets=("q_proj",)))
    with pytest.raises(ConfigError, match="changes stages.0.blocks.0.attention.o.kernel, which is not among"):
        attention.load_adapter("bad", write(tmp_path / "o", case, tensors))
    with pytest.raises(ConfigError, match="adapters.targets: 'experts' matches no matrix"):
        make_engine(model, adapters=AdapterSlots(count=1, rank=8, targets=("experts",)))
    with pytest.raises(ValueError, match="adapters.rank: must be at least 1"):
        AdapterSlots(count=1, rank=0)
    plain = make_engine(model)
    for call in (lambda: plain.load_adapter("a", tmp_path), lambda: plain.generate_all([[1]], [params(adapter="a")])):
        with pytest.raises(ValueError, match="the engine has no slots for adapters"):
            call()


def test_room_for_given_adapters(folders: Mapping[str, Path]) -> None:
    assert slots_for([folders["all"], folders["some"]], None, None, loads=False) == AdapterSlots(count=2, rank=4)
    assert slots_for([folders["all"]], None, None, loads=True) == AdapterSlots(count=2, rank=3)
    assert slots_for([], 3, None, loads=True) == AdapterSlots(count=3, rank=16)
    assert slots_for([], None, None, loads=False) is None
    with pytest.raises(ConfigError, match="--adapter-slots and --adapter-rank need --adapter NAME=FOLDER"):
        slots_for([], 1, None, loads=False)


@pytest.mark.thorough
@pytest.mark.parametrize("family", KINDS)
def test_other_kinds_of_layers(family: str, tmp_path: Path) -> None:
    """One adapter on all matrices but those of experts, beside the base: greedy text of each as alone."""
    base = random_family_model(family, 1)
    targets = [
        path for path, site in sites(base).items() if isinstance(site.owner, Linear) and site.layers and not site.routes
    ]
    adapted = trained(random_family_model(family, 1), LoRA(rank=3, targets=tuple(map(re.escape, targets))))
    save_adapter(adapted, tmp_path / "adapter")
    settings: dict[str, Any] = {"slots": 4, "max_length": 40, "decode_steps": 6, "tokenizer_decode": None}
    engine = NativeEngine(base, adapters=AdapterSlots(count=2, rank=8), **settings)
    engine.load_adapter("one", tmp_path / "adapter")
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, base.config.vocab_size, length).tolist() for length in (20, 3)]
    found = engine.generate_all(
        prompts * 2, [params(0, temperature=0.0, adapter=name) for name in ("one", "one", None, None)]
    )
    for model, mine in ((adapted, found[:2]), (base, found[2:])):
        alone = NativeEngine(model, **settings).generate_all(prompts, [params(0, temperature=0.0)] * 2)
        for one, other in zip(mine, alone, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logps, other.logps, atol=5e-4, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["mesh", "int8"])
def test_split_and_quantized_bases(where: str, folders: Mapping[str, Path], model: Decoder) -> None:
    """Over eight devices, and on matrices in 8 bits: as an engine of the same base that has this adapter alone."""

    def base() -> Decoder:
        changes: dict[str, Any] = {"num_layers": 2, "windows": (None,)}
        if where == "mesh":
            return sharded_model(MeshSection(data=2, fsdp=2, tensor=2), **changes)
        quantize_model(small := tiny_model(**changes), "int8")
        return small

    several = make_engine(base(), slots=8, adapters=AdapterSlots(count=2, rank=4))
    for name in ("rslora", "all"):
        several.load_adapter(name, folders[name])
    adapted = base()
    load_adapter(adapted, folders["all"], mesh=mesh_of_arrays(adapted.embed.embedding[...].sharding))
    expected = make_engine(adapted, slots=8).generate_all(PROMPTS, [params(i) for i in range(3)])
    compiled = set[int]()
    for other in ("rslora", "some"):
        found = together(several, ["all", other, None], 1.0)
        for i, one in enumerate(expected):
            assert_same(found["all", i], one)
        compiled.add(len(several.programs))
        several.drop_adapter(other)
        several.load_adapter("some", folders["some"])
    assert len(compiled) == 1
