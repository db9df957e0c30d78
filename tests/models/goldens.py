"""Golden checkpoints, what transformers computed with them, and the checks that every family passes.

A test file names its goldens in a fixture and takes the checks over:

    @pytest.fixture(scope="module", params=["llama", "qwen2"])
    def golden(request): return Golden(request.param)

    class TestGoldens(GoldenChecks): ...
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.kernels.logits.token_stats import token_stats
from posttrain.models import decoder
from posttrain.models.cache import empty_cache
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_hf, config_to_hf
from posttrain.weights.load import load_model
from posttrain.weights.save import hf_tensors, save_model
from posttrain.weights.state import ModelWeights

GOLDENS = Path(__file__).parent.parent / "goldens" / "models"

DENSE = ("llama", "llama_bf16", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "olmo3", "smollm3", "granite", "glm4")
GEMMA = ("gemma2", "gemma3_text", "gemma3_mm", "gemma4_text", "gemma4_mm")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "gpt_oss_mxfp4")

ROUNDING = 2e-4
"""Of logits in float32."""
ROUNDING_OF = dict.fromkeys(("gemma4_text", "gemma4_mm", "gpt_oss", "gpt_oss_mxfp4"), 0.002)
"""Of the models whose logits react most to rounding."""

COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}
"""Programs that run once: half the time goes into their optimisation."""

GRADIENTS = "right_grad_l2_and_sum_per_param(in-memory HF names)"
VARIANTS = {"plain": slice(0, 2), "right": slice(2, 4), "left": slice(4, 6)}
"""Rows of `Golden.batch`: without padding, padded on the right, padded on the left."""
PACKED_ROW, PACKED_LENGTHS = 6, (13, 9)
"""The first tokens of the two plain rows in one row."""


class Batch(NamedTuple):
    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray


class Outputs(NamedTuple):
    """Of all rows of the batch; the gradient is that of the mean NLL of the rows padded on the right."""

    logits: np.ndarray
    logps: np.ndarray
    entropy: np.ndarray
    nll: float
    gradient: dict[str, jax.Array]


def logits_of(model: Decoder, batch: Batch) -> np.ndarray:
    weights = ModelWeights(model)

    def run(arrays: Any, *inputs: Any) -> Any:
        bound = weights.bind(arrays)
        return bound.logits(bound(*inputs)[0])

    compiled = jax.jit(run, compiler_options=COMPILER_OPTIONS)
    return np.asarray(compiled(weights.read(), *map(jnp.asarray, batch)))


class Golden:
    """A checkpoint with the outputs of transformers, and ours, each computed once."""

    def __init__(self, name: str):
        self.name = name
        self.folder = GOLDENS / name
        self.arrays: dict[str, np.ndarray] = dict(np.load(self.folder / "golden.npz"))
        self.meta: dict[str, Any] = json.loads((self.folder / "golden_meta.json").read_text())
        self.atol = ROUNDING_OF.get(name, ROUNDING)

    @cached_property
    def model(self) -> Decoder:
        return load_model(self.folder, dtype=jnp.float32)

    @cached_property
    def batch(self) -> Batch:
        names = ("input_ids", "position_ids", "attention_mask")
        tokens, positions, segments = ([self.arrays[f"{v}_{name}"] for v in VARIANTS] for name in names)
        plain, (first, second) = tokens[0], PACKED_LENGTHS
        rest = plain.shape[1] - first - second
        packed = np.concatenate([plain[0, :first], plain[1, :second], np.zeros(rest)])
        restarted = np.concatenate([np.arange(first), np.arange(second), np.zeros(rest)])
        numbers = np.repeat([1, 2, 0], [first, second, rest])
        stacks = ((tokens, packed), (positions, restarted), (segments, numbers))
        return Batch(*(np.concatenate([*rows, row[None]]).astype(np.int32) for rows, row in stacks))

    @cached_property
    def outputs(self) -> Outputs:
        """One program for all rows, with their gradient."""
        weights, labels = ModelWeights(self.model), float(self.arrays["right_label_mask"].sum())

        def mean_nll(arrays: Any, tokens: Any, positions: Any, segments: Any) -> Any:
            model = weights.bind(arrays)
            hidden, _ = model(tokens, positions, segments)
            size = model.config.vocab_size
            stats = token_stats(model.logits, hidden, tokens, segments, temperature=1.0, vocab_size=size)
            return -stats.logps[VARIANTS["right"]].sum() / labels, (model.logits(hidden), stats.logps, stats.entropy)

        run = jax.jit(jax.value_and_grad(mean_nll, has_aux=True), compiler_options=COMPILER_OPTIONS)
        (nll, arrays), gradient = run(weights.read(), *map(jnp.asarray, self.batch))
        return Outputs(*map(np.asarray, arrays), float(nll), gradient)


def decode(
    model: Decoder, prompts: list[np.ndarray], steps: int, *, chunk: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens and their logits through the cache: the prompts at once, right-padded, then token by token.

    `chunk`: pad what the model gets to this width, so that prompts and tokens go through the same program.
    """
    weights, config = ModelWeights(model), decoder.decoding_config(model.config, None)

    def step(arrays: Any, tokens: Any, positions: Any, segments: Any, cache: Any) -> Any:
        bound = weights.bind(arrays).for_decoding()
        hidden, cache = bound(tokens, positions, segments, cache)
        return bound.logits(hidden), cache

    compiled = jax.jit(step, compiler_options=COMPILER_OPTIONS)
    done = np.zeros(len(prompts), np.int32)
    cache = empty_cache(config, len(prompts), max(map(len, prompts)) + steps, jnp.dtype(jnp.float32))
    given, seen = list(prompts), []
    for _ in range(steps):
        lengths = np.asarray([len(row) for row in given])
        width = lengths.max() if chunk is None else chunk
        segments = (np.arange(width) < lengths[:, None]).astype(np.int32)
        positions = ((done[:, None] + np.arange(width)) * segments).astype(np.int32)
        tokens = np.stack([np.pad(row, (0, width - len(row))) for row in given]).astype(np.int32)
        logits, cache = compiled(weights.read(), *map(jnp.asarray, (tokens, positions, segments)), cache)
        seen.append(np.asarray(logits)[np.arange(len(prompts)), lengths - 1])
        done, given = done + lengths.astype(np.int32), list(seen[-1].argmax(-1)[:, None])
    stacked = np.stack(seen, axis=1)
    return stacked.argmax(-1), stacked


_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)\.weight")
_IN_MEMORY = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj"}
_IN_MEMORY |= {"down_proj": "down_proj", "w2": "down_proj"}


def in_memory_name(name: str) -> str:
    """The parameter of transformers that holds a checkpoint's tensor: all experts are one."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    match = _EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}.{_IN_MEMORY[match[2]]}"


def norms_and_sums(model: Decoder) -> dict[str, tuple[float, float, int]]:
    """L2 norm, sum and size of every parameter that transformers has."""
    found: dict[str, list[np.ndarray]] = {}
    for name, tensor in hf_tensors(model):
        found.setdefault(in_memory_name(name), []).append(tensor.astype(np.float64).ravel())
    joined = {name: np.concatenate(parts) for name, parts in found.items()}
    return {name: (float(np.linalg.norm(x)), float(x.sum()), x.size) for name, x in joined.items()}


def transformers_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """What transformers computes with a checkpoint. Skips the test where torch is not there."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(torch.from_numpy(np.asarray(tokens, np.int64))).logits.numpy()


FORMS = ("llama", "olmo3", "gemma2", "gemma4_text", "deepseek_v3")
"""Families whose decoders differ in form: plain, windows, soft caps, shared caches, latent attention."""


class GoldenChecks:
    """Of the fixture `golden`."""

    @pytest.mark.few(1)
    def test_logits(self, golden: Golden) -> None:
        plain, ours = golden.arrays["plain_logits"], golden.outputs.logits
        assert_allclose(ours[VARIANTS["plain"]], plain, atol=golden.atol, rtol=0)
        right, left = ours[VARIANTS["right"]], ours[VARIANTS["left"]]
        assert_allclose(right[0], plain[0], atol=golden.atol, rtol=0)
        assert_allclose(right[1, :15], plain[1, :15], atol=golden.atol, rtol=0)
        assert_allclose(left[1, -15:], golden.arrays["left_row1_valid_logits"], atol=golden.atol, rtol=0)

    @pytest.mark.few(5)
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_token_stats(self, golden: Golden, variant: str) -> None:
        for name in ("logps", "entropy"):
            ours = getattr(golden.outputs, name)[VARIANTS[variant]]
            assert_allclose(ours[:, 1:], golden.arrays[f"{variant}_{name}"], atol=golden.atol, rtol=0)

    def test_packed_is_apart(self, golden: Golden) -> None:
        first, second = PACKED_LENGTHS
        ours = golden.outputs.logits
        packed = ours[PACKED_ROW]
        assert_allclose(packed[:first], ours[0, :first], atol=1e-5, rtol=0)
        assert_allclose(packed[first : first + second], ours[1, :second], atol=1e-5, rtol=0)

    def test_gradients(self, golden: Golden) -> None:
        if GRADIENTS not in golden.meta:
            pytest.skip("this golden has no gradients")
        assert_allclose(golden.outputs.nll, golden.meta["right_mean_nll"], rtol=1e-4)
        expected = golden.meta[GRADIENTS]
        weights = ModelWeights(golden.model)
        got, trainable = norms_and_sums(weights.bind(golden.outputs.gradient)), weights.trainable()
        marks = {path: np.full(x.shape, path in trainable, x.dtype) for path, x in golden.outputs.gradient.items()}
        trained = norms_and_sums(weights.bind(jax.tree.map(jnp.asarray, marks)))
        # What transformers keeps as a buffer is not trained, or has no gradient.
        assert all(got[name][0] == 0 or trained[name][0] == 0 for name in got.keys() - expected.keys())
        assert all(trained[name][0] > 0 for name in expected)
        assert expected.keys() <= got.keys()
        for name, (norm, total) in expected.items():
            assert_allclose(got[name][0], norm, rtol=1e-3, err_msg=name)
            assert_allclose(got[name][1], total, atol=1e-3 * (norm * got[name][2] ** 0.5 + 1), err_msg=name)

    @pytest.mark.few(1)
    def test_greedy_tokens_through_the_cache(self, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
        """In one program, its layers scanned as on an accelerator; of `FORMS` also with the layers apart, and a program
        for prompts and one for tokens."""
        ids, mask = golden.arrays["gen_prompt_ids"], golden.arrays["gen_prompt_mask"]
        prompts = [row[keep.astype(bool)] for row, keep in zip(ids, mask, strict=True)]
        for chunk in (None, ids.shape[1]) if golden.name in FORMS else (ids.shape[1],):
            if chunk is not None:
                monkeypatch.setattr(decoder, "SPLIT_LAYERS", {})
            tokens, logits = decode(golden.model, prompts, 12, chunk=chunk)
            assert_array_equal(tokens, golden.arrays["gen_tokens"])
            assert_allclose(logits, golden.arrays["gen_logits"], atol=golden.atol, rtol=0)

    @pytest.mark.thorough
    def test_scanned_is_unrolled(self, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
        scanned = golden.outputs.logits
        monkeypatch.setattr(golden.model, "unroll", True)
        assert_allclose(logits_of(golden.model, golden.batch), scanned, atol=golden.atol, rtol=0)

    def test_both_styles_of_config_mean_the_same(self, golden: Golden) -> None:
        loaded = golden.model.config
        again = config_from_hf(config_to_hf(loaded))
        assert again == replace(loaded, generation_json=again.generation_json)
        hub = golden.folder / "config_hub_style.json"
        if hub.exists():
            other = config_from_hf(json.loads(hub.read_text()))
            assert other == replace(again, hf_json=other.hf_json)

    @pytest.mark.few(1)
    def test_saved_is_the_same_here_and_in_transformers(self, golden: Golden, tmp_path: Path) -> None:
        save_model(golden.model, tmp_path / "out")
        again = load_model(tmp_path / "out")
        expected, got = (ModelWeights(model).read() for model in (golden.model, again))
        assert expected.keys() == got.keys()
        for path, value in expected.items():
            assert_array_equal(got[path], value, err_msg=path)
        theirs = transformers_logits(tmp_path / "out", golden.batch.tokens[VARIANTS["plain"]])
        assert_allclose(theirs, golden.arrays["plain_logits"], atol=golden.atol, rtol=0)


def random_checkpoint(folder: Path, fields: dict[str, Any]) -> None:
    """A random model of transformers with this `config.json`; no bias is 0 and no norm 1. Skips without torch."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1))
    model.save_pretrained(folder)


def same_as_transformers(folder: Path, *, atol: float = ROUNDING, length: int = 14, **options: Any) -> Decoder:
    """Our model of a checkpoint, after a comparison of its logits with those of transformers."""
    model = load_model(folder, **options)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, length)).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    ours = logits_of(model, Batch(tokens, positions, np.ones_like(tokens)))
    assert_allclose(ours, transformers_logits(folder, tokens), atol=atol, rtol=0)
    return model
