"""PEFT's adapters, and ours as PEFT reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file, save_file

from posttrain.config import LoRA
from posttrain.models.decoder import Decoder
from posttrain.weights.load import load_model
from posttrain.weights.lora import base_tensors, has_lora, merged_lora
from posttrain.weights.peft_experts import expert_parameters, shape_of
from posttrain.weights.peft_save import save_adapter
from posttrain.weights.pieces import Gather
from posttrain.weights.save import hf_tensors
from posttrain.weights.state import ModelWeights, Weights
from tests.models.goldens import COMPILER_OPTIONS
from tests.often import often
from tests.weights.adapted import disturb

GOLDENS = Path(__file__).parent.parent / "goldens"
CASES = ("lora", "lora_all", "all_linear", "rslora", "dora", "lm_head_embed", "modules_to_save", "patterns")


def program(model: Decoder, tokens: np.ndarray) -> Callable[[Weights], tuple[Array, Array]]:
    """Logits and mean negative log-likelihood."""
    weights = ModelWeights(model)
    inputs = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)

    def run(arrays: Weights) -> tuple[Array, Array]:
        bound = weights.bind(arrays)
        logits = bound.logits(bound(inputs, positions, jnp.ones_like(inputs))[0])
        logps = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(logps, inputs[:, 1:, None], axis=-1).mean(), logits

    return run


def logits_of(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    run = jax.jit(program(model, tokens), compiler_options=COMPILER_OPTIONS)
    return np.asarray(run(ModelWeights(model).read())[1])


class Golden:
    def __init__(self, case: str):
        self.folder = GOLDENS / "lora" / case
        self.meta = json.loads((self.folder / "golden_meta.json").read_text())
        self.arrays = np.load(self.folder / "golden.npz")
        self.base = GOLDENS / "models" / self.meta["base"].split("/")[0]
        self.model = load_model(self.base, adapter=self.folder)


@pytest.fixture(scope="module", params=often(CASES, "dora", "lora_all", "lm_head_embed", "patterns"))
def golden(request: pytest.FixtureRequest) -> Iterator[Golden]:
    with jax.default_matmul_precision("highest"):
        yield Golden(request.param)


@pytest.mark.thorough
def test_logits_and_gradients(golden: Golden) -> None:
    weights = ModelWeights(golden.model)
    trainable = weights.read(weights.trainable().__contains__)
    frozen = weights.read(lambda path: path not in trainable)
    run = program(golden.model, golden.arrays["input_ids"])

    def of_trainable(trained: Weights) -> tuple[Array, Array]:
        return run({**frozen, **trained})

    step = jax.jit(jax.value_and_grad(of_trainable, has_aux=True), compiler_options=COMPILER_OPTIONS)
    (nll, logits), gradient = step(trainable)
    assert_allclose(logits, golden.arrays["adapter_logits"], atol=5e-4)
    assert_allclose(nll, golden.meta["mean_nll"], rtol=1e-4)
    expected = golden.meta["trainable_grad_l2"]
    got: dict[str, float] = {}
    for path, gradients in gradient.items():
        for layer, of_layer in enumerate(gradients if path.startswith("stages") else [gradients]):
            if (norm := float(jnp.linalg.norm(of_layer))) > 0.0:
                got[peft_name(path, layer)] = norm
    assert got.keys() == expected.keys()
    for name, norm in expected.items():
        assert_allclose(got[name], norm, rtol=1e-3, err_msg=name)


def peft_name(path: str, layer: int) -> str:
    """The name of a trainable tensor in PEFT's model, of a Llama-like decoder."""
    if path == "head.kernel":
        return "lm_head.modules_to_save.weight"
    owner, _, name = path.partition(".adapters.")
    kind = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector.weight"}
    if owner == "embed":
        return f"model.embed_tokens.lora_embedding_{name[-1].upper()}"
    end = kind[name.split(".")[1]]
    if owner == "head":
        return f"lm_head.{end}"
    *_, part, projection = owner.split(".")
    return f"model.layers.{layer}.{'self_attn' if part == 'attention' else 'mlp'}.{projection}_proj.{end}"


@pytest.mark.few(1)
def test_merged(golden: Golden) -> None:
    alone = merged_lora(golden.model)
    assert not has_lora(alone)
    base = dict(hf_tensors(load_model(golden.base)))
    deltas = {name: np.linalg.norm(tensor - base[name]) for name, tensor in hf_tensors(alone)}
    changed = {name: norm for name, norm in deltas.items() if norm > 1e-4}
    assert changed.keys() == golden.meta["merged_delta_l2"].keys()
    for name, norm in golden.meta["merged_delta_l2"].items():
        assert_allclose(changed[name], norm, rtol=1e-4, err_msg=name)


@pytest.mark.few(1)
def test_written_again(golden: Golden, tmp_path: Path) -> None:
    save_adapter(golden.model, tmp_path / "out")
    files = [load_file(folder / "adapter_model.safetensors") for folder in (golden.folder, tmp_path / "out")]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        assert_allclose(files[1][name], tensor, atol=1e-6, err_msg=name)
    theirs, ours = (json.loads((f / "adapter_config.json").read_text()) for f in (golden.folder, tmp_path / "out"))
    assert not ours.keys() - theirs.keys()
    same = ("peft_type", "r", "lora_alpha", "bias", "use_rslora", "use_dora", "modules_to_save", "task_type")
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    if golden.meta["config"].get("layers_to_transform") is None:
        assert sorted(ours["target_modules"]) == sorted(theirs["target_modules"])
    again = load_model(golden.base, adapter=tmp_path / "out")
    for path, w in ModelWeights(again).read().items():
        assert_allclose(w, ModelWeights(golden.model).read()[path], atol=1e-6, err_msg=path)


MIXED = LoRA(
    rank=4,
    alpha=6,
    targets=("all-linear",),
    layers=(0, 2),
    rank_pattern={"layers.0.mlp.up_proj": 7},
    rslora=True,
    modules_to_save=("lm_head",),
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama", MIXED),
        ("llama", LoRA(rank=3, targets=("all-linear", "embed", "head"), dora=True)),
        ("qwen3", LoRA(rank=3, targets=("v_proj", "embed_tokens"))),
        ("qwen3", LoRA(rank=3, targets=("v_proj",), modules_to_save=("embed_tokens", "norm"))),
        ("phi3", LoRA(rank=3, targets=("attention.q", "attention.v", "mlp"), dora=True)),
        ("mixtral", LoRA(rank=3, targets=("attention", "experts"))),
        ("qwen3_moe", LoRA(rank=3, targets=("experts",), rank_pattern={"experts.up": 5}, rslora=True)),
        ("gpt_oss", LoRA(rank=3, targets=("attention", "experts"), layers=(0, 3))),
        ("deepseek_v3", LoRA(rank=3, targets=("all-linear",))),
    ],
    ids=["llama", "llama-dora", "tied", "tied-saved", "fused-dora", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"],
)
@pytest.mark.filterwarnings("ignore")
def test_peft_reads_what_we_write(name: str, lora: LoRA, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    folder = GOLDENS / "models" / name
    tokens = np.random.default_rng(0).integers(1, 90, (2, 12))
    model = load_model(folder, lora=lora, seed=0)
    disturb(model)
    ours = logits_of(model, tokens)
    save_adapter(model, tmp_path / "out", base=str(folder))
    again = load_model(folder, adapter=tmp_path / "out")
    assert_allclose(logits_of(again, tokens), ours, atol=1e-4)
    adapted = peft.PeftModel.from_pretrained(transformers_model(transformers, folder), tmp_path / "out").eval()
    with torch.no_grad():
        theirs = adapted(torch.tensor(tokens)).logits.numpy()
    assert_allclose(theirs, ours, atol=5e-4)


def transformers_model(transformers: Any, folder: Path) -> Any:
    # The default for mixtures of experts refuses some widths on CPU.
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="eager", experts_implementation="eager"
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gpt_oss", {"target_modules": ["q_proj"], "rank_pattern": {"experts.down_proj": 2}}),
        ("qwen3_moe", {"target_modules": [], "use_rslora": True, "alpha_pattern": {".*down_proj": 9}}),
        ("deepseek_v3", {"target_modules": ["kv_b_proj"]}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_parameters_of_experts_from_peft(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    folder = GOLDENS / "models" / name
    tokens = np.random.default_rng(0).integers(1, 90, (2, 12))
    parameters = ["mlp.experts.gate_up_proj", "experts.down_proj"]
    if name == "deepseek_v3":
        parameters.append("mlp.shared_experts.up_proj.weight")
    config = peft.LoraConfig(r=3, lora_alpha=5, target_parameters=parameters, init_lora_weights=False, **fields)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(transformers_model(pytest.importorskip("transformers"), folder), config).eval()
    with torch.no_grad():
        theirs = adapted(torch.tensor(tokens)).logits.numpy()
    adapted.save_pretrained(tmp_path / "theirs")
    model = load_model(folder, adapter=tmp_path / "theirs")
    assert_allclose(logits_of(model, tokens), theirs, atol=5e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "order"), [("gpt_oss", "eio"), ("deepseek_v3", "eoi")])
def test_layout_of_experts(name: str, order: str, tmp_path: Path) -> None:
    """PEFT's own formula (`ParamWrapper.get_delta_weight`), written again under the same names."""
    base = load_model(GOLDENS / "models" / name)
    experts = expert_parameters(base_tensors(base))
    rng, stored, deltas = np.random.default_rng(0), {}, {}
    for i, param in enumerate(("down_proj", "gate_up_proj")):
        key = f"model.layers.2.mlp.experts.{param}"
        num, into, out = shape_of(experts[key])
        a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((num * 2, into), (out, 2 * num)))
        start = f"base_model.model.model.layers.2.mlp.experts{'.base_layer' * i}.lora_"
        stored |= {f"{start}A.weight": a, f"{start}B.weight": b}
        wide = a.reshape(num, 2, into), b.reshape(out, 2, num)
        deltas[key] = 1.5 * np.einsum(f"eri,ore->{order}", *wide)
    save_file(stored, tmp_path / "adapter_model.safetensors")
    parameters = [f"layers.2.mlp.experts.{param}" for param in ("gate_up_proj", "down_proj")]
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": [], "target_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    model = load_model(GOLDENS / "models" / name, adapter=tmp_path)
    new, old = (Gather(ModelWeights(m).read()) for m in (merged_lora(model), base))
    for key, delta in deltas.items():
        assert_allclose(new.tensor(experts[key]) - old.tensor(experts[key]), delta, atol=1e-5)
    save_adapter(model, tmp_path / "again")
    for key, array in load_file(tmp_path / "again" / "adapter_model.safetensors").items():
        assert_array_equal(array, stored.pop(key))
    assert not stored


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen2_moe", "glm4_moe", "deepseek_v3", "gemma4_text"])
@pytest.mark.filterwarnings("ignore")
def test_all_linear_of_peft(name: str, tmp_path: Path) -> None:
    """Routers, the gate of a shared expert and the projection of all layers' inputs are among it."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers, folder = pytest.importorskip("transformers"), GOLDENS / "models" / name
    tokens = np.random.default_rng(0).integers(1, 90, (2, 12))
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(transformers_model(transformers, folder), config).eval()
    adapted.save_pretrained(tmp_path / "theirs")
    model = load_model(folder, adapter=tmp_path / "theirs")
    save_adapter(model, tmp_path / "ours", base=str(folder))
    again = peft.PeftModel.from_pretrained(transformers_model(transformers, folder), tmp_path / "ours").eval()
    with torch.no_grad():
        theirs, ours = (m(torch.tensor(tokens)).logits.numpy() for m in (adapted, again))
    assert_allclose(logits_of(model, tokens), theirs, atol=5e-4)
    assert_allclose(ours, theirs, atol=5e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "router"), [("mixtral", "block_sparse_moe.gate"), ("gpt_oss", "mlp.router")])
def test_routers_take_what_files_bring(name: str, router: str, tmp_path: Path) -> None:
    """Under the name of transformers, as a parameter; PEFT's `all-linear` has them."""
    base, rng = load_model(GOLDENS / "models" / name), np.random.default_rng(0)
    key = f"model.layers.1.{router}.weight"
    wide = dict(hf_tensors(base))[key]
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((2, wide.shape[1]), (wide.shape[0], 2)))
    module = f"layers.1.mlp.{router.rsplit('.')[-1]}"
    start = f"base_model.model.model.{module}.lora_"
    stored = {f"{start}A.weight": a, f"{start}B.weight": b}
    save_file(stored, tmp_path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 3,
        "target_modules": [],
        "target_parameters": [f"{module}.weight"],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    model = load_model(GOLDENS / "models" / name, adapter=tmp_path)
    assert_allclose(dict(hf_tensors(merged_lora(model)))[key], wide + 1.5 * b @ a, atol=1e-5)
    save_adapter(model, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["target_parameters"] == [
        f"model.{module}.weight"
    ]
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert again.keys() == stored.keys()
    for name, array in again.items():
        assert_array_equal(array, stored[name])


def test_fused_modules_take_an_adapter_apart(tmp_path: Path) -> None:
    """Of queries, keys and values as one module: A is shared, B falls into parts."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "peft"
    folder.mkdir()
    base = load_model(GOLDENS / "models" / "phi3")
    wide = dict(hf_tensors(base))["model.layers.1.self_attn.qkv_proj.weight"]
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((2, wide.shape[1]), (wide.shape[0], 2)))
    start = "base_model.model.model.layers.1.self_attn.qkv_proj.lora_"
    save_file({f"{start}A.weight": a, f"{start}B.weight": b}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["qkv_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    model = load_model(GOLDENS / "models" / "phi3", adapter=folder)
    new = dict(hf_tensors(merged_lora(model)))["model.layers.1.self_attn.qkv_proj.weight"]
    assert_allclose(new, wide + 1.5 * b @ a, atol=1e-5)
    save_adapter(model, tmp_path / "again")
    stored = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert_array_equal(stored[f"{start}A.weight"], a)
    assert_array_equal(stored[f"{start}B.weight"], b)
