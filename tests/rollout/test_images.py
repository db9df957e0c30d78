"""The engine on prompts with pictures: goldens, chunks, the prefix cache, groups, the trainer's log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose

from posttrain.batch import Batch
from posttrain.config import ImageSection, LoRA, MeshSection
from posttrain.data.chat import Prompt, Renderer
from posttrain.data.messages import checked_messages
from posttrain.data.pictures import RowPictures
from posttrain.data.prompt_images import PromptImages
from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import ConfigError
from posttrain.mesh import make_mesh
from posttrain.models.decoder import Decoder
from posttrain.models.vision.tower import ImageInputs
from posttrain.rollout import programs, scheduler, vision
from posttrain.rollout.drafting import Speculation
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.request import Request
from posttrain.rollout.sampling import Sampling, Tables, sample
from posttrain.rollout.types import Call, Completion, SamplingParams, sample_key
from posttrain.weights.files import read_json
from posttrain.weights.load import load_model
from posttrain.weights.lora import merged_lora
from posttrain.weights.state import ModelWeights
from tests.data.test_images import CASES, ENDS
from tests.images import VisionCase
from tests.models.goldens import COMPILER_OPTIONS
from tests.often import often
from tests.rollout.engines import make_engine
from tests.weights.adapted import disturb

FAMILIES = ("gemma3", "qwen2_5_vl", "qwen3_vl", "mistral3", "gemma4", "gemma4_bidirectional")
CHUNK = 32


class Case(NamedTuple):
    golden: VisionCase
    renderer: Renderer
    model: Decoder
    engine: NativeEngine

    def prompt(self, name: str, pictures: list[int] | None = None) -> Prompt:
        """Prompt of a golden case, with its pictures or others."""
        numbers = self.golden.arrays[f"{name}_images"] if pictures is None else pictures
        files = [str(self.golden.folder / "images" / f"{number}.png") for number in numbers]
        said = checked_messages(CASES[name][:1], "messages", RowPictures({"images": files}, Path()))
        return self.renderer.prompt_with_images(said)

    def complete(self, *prompts: Prompt, n: int = 1, **settings: Any) -> list[Completion]:
        several = [prompt for prompt in prompts for _ in range(n)]
        params = [asked(seed, **settings) for seed in range(len(several))]
        images = [prompt.images for prompt in several]
        return self.engine.generate_all([prompt.tokens for prompt in several], params, images)


def asked(seed: int = 0, **settings: Any) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": 10, "temperature": 0.0, "stop_token_ids": (), **settings}
    return SamplingParams(key=sample_key(0, 0, 0, seed), **fields)


@pytest.fixture(scope="module", params=often(FAMILIES, "qwen3_vl"))
def loaded(request: pytest.FixtureRequest, shared: Path) -> Iterator[Case]:
    folder = shared / "goldens" / "vision" / request.param
    plain = load_tokenizer(folder).with_stop_tokens(ENDS.get(request.param, ()))
    tokenizer = plain.for_images(read_json(folder / "config.json"), str(folder), ImageSection())
    model = load_model(folder, dtype=jnp.float32, vision="frozen")
    with pytest.MonkeyPatch.context() as patch:
        for module in (scheduler, programs):
            patch.setattr(module, "PROMPT_CHUNK", CHUNK)
        patch.setattr(programs, "compile_options", lambda _: COMPILER_OPTIONS)
        sizes = {"slots": 2, "max_length": 256, "decode_steps": 4}
        engine = NativeEngine(model, tokenizer_decode=tokenizer.decode, tokenizer=tokenizer, **sizes)
        yield Case(VisionCase(folder), Renderer(tokenizer, True), model, engine)
        engine.close()


@pytest.fixture
def case(loaded: Case) -> Iterator[Case]:
    """With no prefix and no feature kept; every test must leave all slots free."""
    loaded.engine.forget_prompts()
    loaded.engine._runner.images.kept.forget_features()
    yield loaded
    assert loaded.engine.num_free == loaded.engine.slots


def test_samples_are_those_of_transformers(case: Case) -> None:
    """Prompts in chunks of 32 tokens, which begin and end within images where these are causal; up to a token that
    belongs to images, which no sample has."""
    gone = set(case.renderer.tokenizer.unsampled_ids)
    names = ("one", "two")
    for name, done in zip(names, case.complete(*map(case.prompt, names)), strict=True):
        logits, tokens = (case.golden.arrays[f"gen_{name}_{key}"] for key in ("logits", "tokens"))
        length = next((at for at, token in enumerate(tokens.tolist()) if token in gone), len(tokens))
        assert list(done.tokens[:length]) == tokens[:length].tolist()
        expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(length), tokens[:length]]
        assert_allclose(done.logps[:length], expected, atol=5e-4)
        assert not gone & set(done.tokens)


def trained(case: Case, tokens: list[int], images: PromptImages) -> np.ndarray:
    """Log-probabilities of a sequence as a trainer has them: its images beside one row, no cache."""
    count, policy = len(tokens), images.policy
    numbers = images.padded(count)
    arrays: dict[str, Any] = {
        "images": numbers,
        "image_rows": np.where(numbers > 0, np.cumsum(numbers > 0), 0),
        "patches": np.concatenate([image.patches() for image in images.images]),
        "patch_images": np.repeat(np.arange(len(images.images)) + 1, [image.num_patches for image in images.images]),
        "patch_places": np.concatenate([policy.places(grid) for grid in images.grids]),
    }
    if policy.family.axes:
        arrays["rope_positions"] = images.rope_positions(0, count)
    rows = {"tokens": np.asarray(tokens, np.int32), "positions": np.arange(count), "segments": np.ones(count, np.int32)}
    one = {name: jnp.asarray(x)[None] for name, x in (rows | arrays).items()}
    inputs = ImageInputs.of(Batch(loss_weight=jnp.ones((1, count)), **one), case.model.config)

    def logps(model: Decoder) -> jax.Array:
        hidden, _, _ = model.forward(one["tokens"], one["positions"], one["segments"], images=inputs)
        scores = jax.nn.log_softmax(model.logits(hidden))[0, :-1]
        return jnp.take_along_axis(scores, one["tokens"][0, 1:, None], axis=-1)[:, 0]

    weights = ModelWeights(case.model)
    run = jax.jit(lambda arrays: logps(weights.bind(arrays)), compiler_options=COMPILER_OPTIONS)
    return np.asarray(run(weights.read()))


def test_sampled_logps_are_the_trainers(case: Case) -> None:
    """And a group's picture is encoded once; its prompt is read once."""
    prompt = case.prompt("two")
    assert prompt.images is not None
    case.engine.metrics()
    group = case.complete(prompt, n=3, temperature=1.0, max_tokens=6)
    assert case.engine.metrics()["rollout/images_encoded"] == 2
    case.complete(case.prompt("one"), max_tokens=1)
    case.engine.forget_prompts()
    assert "rollout/images_encoded" not in case.engine.metrics(), "as after an evaluation, whose pictures do not count"
    assert [done.num_cached for done in group[1:]] == [len(prompt.tokens) - 1] * 2
    assert all(done.truncation_logps == (0.0,) * 6 for done in group), "tokens of images are no truncation"
    done = group[-1]
    expected = trained(case, [*prompt.tokens, *done.tokens], prompt.images)
    assert_allclose(done.logps, expected[-6:], atol=1e-4)


def test_the_prefix_cache_knows_the_picture(case: Case) -> None:
    """Another picture with as many tokens under the same prompt reads nothing of the first; the same one does."""
    first, other = case.prompt("two"), case.prompt("two")
    assert first.images is not None and other.images is not None
    # Equal grids with other pixels, as of another file of the same size.
    changed = [replace(image, picture=image.picture) for image in other.images.images]
    for image in changed:
        patches = 255 - image.patches()
        vars(image).update(digest=bytes(16 - len(changed)) + bytes([7] * len(changed)), patches=lambda own=patches: own)
    vars(changed[1])["digest"] = bytes([9] * 16)
    other = Prompt(other.tokens, replace(other.images, images=tuple(changed)))
    (alone,) = case.complete(other)
    case.engine.forget_prompts()
    (before,), (after,), (again,) = (case.complete(one) for one in (first, other, first))
    assert other.tokens == first.tokens and before.num_cached == 0
    assert_allclose(after.logps, alone.logps, atol=1e-5)
    assert after.tokens == alone.tokens and abs(np.subtract(after.logps, before.logps)).max() > 1e-3
    assert first.images is not None and after.num_cached <= first.images.spans[0][0]
    assert again.num_cached == len(first.tokens) - 1 and again.tokens == before.tokens


@pytest.mark.thorough
def test_samples_resume_and_read_the_images_again(case: Case) -> None:
    """After an abort, and with scores of the prompt, of which those of pictures are 0."""
    prompt = case.prompt("one")
    assert prompt.images is not None
    (whole,) = case.complete(prompt)
    cut: dict[str, Any] = {
        name: getattr(whole, name)[:4] for name in ("tokens", "logps", "kept_logps", "truncation_logps")
    }
    partial = replace(whole, **cut, weights_versions=whole.weights_versions[:4], stop="abort")
    case.engine.forget_prompts()
    request = case.engine._submit(Call(prompt.tokens, asked(), partial, prompt.images))
    while case.engine.step():
        pass
    assert request.future.result().tokens == whole.tokens
    assert_allclose(request.future.result().logps, whole.logps, atol=1e-5)
    case.engine.forget_prompts()
    (scored,) = case.complete(prompt, prompt_logps=True, max_tokens=1)
    assert scored.prompt_logps is not None
    expected = trained(case, prompt.tokens, prompt.images)
    of_image = prompt.images.padded(len(prompt.tokens))[1:] > 0
    assert_allclose(scored.prompt_logps[1:], np.where(of_image, 0.0, expected), atol=1e-4)


def test_features_are_kept_for_a_tower_that_stays(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for one that was trained, and not beyond the limit."""
    prompt, cache = case.prompt("one"), case.engine._runner.images.kept
    case.complete(prompt, max_tokens=1)
    for train, limit, encoded in (("frozen", 2**20, 0), ("tower", 2**20, 1), ("frozen", 0, 1)):
        config = case.model.config
        assert config.vision is not None
        monkeypatch.setattr(cache, "limit", limit)
        with monkeypatch.context() as patch:
            patch.setattr(type(config.vision), "trained", ("tower.",) if train == "tower" else ())
            case.engine.update_weights(case.model, 1)
        if limit == 0:
            cache.put(b"", np.zeros((1, 1), np.uint8))
            assert cache.num_bytes == 0
        case.engine.metrics()
        case.complete(prompt, max_tokens=1)
        assert case.engine.metrics()["rollout/images_encoded"] == encoded, (train, limit)
    # Red without: features of the first model's tower stand at the pictures of another one's.
    monkeypatch.setattr(cache, "limit", 2**20)
    other = nnx.clone(case.model)
    for model, encoded in ((case.model, 1), (case.model, 0), (other, 1), (other, 0), (case.model, 1)):
        case.engine.metrics()
        with monkeypatch.context() as patch:
            patch.setattr(type(case.model.config.vision), "trained", ())
            case.engine.update_weights(model, 1)
        case.complete(prompt, max_tokens=1)
        assert case.engine.metrics()["rollout/images_encoded"] == encoded
    case.engine.update_weights(case.model, 0)


@pytest.mark.thorough
def test_an_adapted_tower_is_the_merged_one(case: Case) -> None:
    """Also after an update, with which the features that it had computed go."""
    lora, prompt = LoRA(rank=2, targets=("tower",)), case.prompt("one")
    model = load_model(case.golden.folder, dtype=jnp.float32, vision="frozen", lora=lora, seed=0)
    params = [asked(max_tokens=3)]

    def sampled(engine: NativeEngine) -> Completion:
        return engine.generate_all([prompt.tokens], params, [prompt.images])[0]

    before = case.complete(prompt, max_tokens=3)[0]
    tokenizer, sizes = case.renderer.tokenizer, dict[str, Any](slots=2, max_length=256)
    engine = make_engine(model, tokenizer=tokenizer, merge_lora=case.golden.folder.name.startswith("qwen"), **sizes)
    assert_allclose(sampled(engine).logps, before.logps, atol=1e-4)
    disturb(model, 0.1)
    engine.update_weights(model, 1)
    merged = make_engine(merged_lora(model), tokenizer=tokenizer, **sizes)
    found, expected = sampled(engine), sampled(merged)
    assert np.abs(np.subtract(found.logps, before.logps)).max() > 1e-3
    assert list(found.tokens) == list(expected.tokens)
    assert_allclose(found.logps, expected.logps, atol=2e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("section", "settings"),
    [
        (MeshSection(data=4, fsdp=1, tensor=2), {}),  # for one head of keys without tensor
        (MeshSection(data=2, fsdp=4), {"quantize": "int8"}),
        (None, {"cache_dtype": "int8"}),
        (None, {"speculation": Speculation(tokens=3)}),
        (None, {"cache_tokens": 288, "image_cache_mib": 0}),
    ],
)
def test_images_beside_other_options(case: Case, section: MeshSection | None, settings: dict[str, Any]) -> None:
    """Devices, 8 bits, drafts by lookup, samples that are read again for lack of cache."""
    if section is not None and section.tensor == 2 and case.model.config.blocks[0].attention.num_kv_heads == 1:
        section = MeshSection(data=8, fsdp=1)
    mesh = None if section is None else make_mesh(section)
    model = load_model(case.golden.folder, dtype=jnp.float32, vision="frozen", mesh=mesh)
    tokenizer = case.renderer.tokenizer
    sizes: dict[str, Any] = {"slots": 2, "max_length": 256, "decode_steps": 4, "tokenizer_decode": tokenizer.decode}
    engine = NativeEngine(model, tokenizer=tokenizer, **sizes, **settings)
    length = 100 if "cache_tokens" in settings else 20
    expected, found = (
        case._replace(engine=one).complete(case.prompt("one"), case.prompt("two"), temperature=0.5, max_tokens=length)
        for one in (case.engine, engine)
    )
    rounded = {"quantize", "cache_dtype"} & {*settings}
    if rounded:
        pairs = [(a.logps[0], b.logps[0]) for a, b in zip(expected, found, strict=True) if a.tokens[0] == b.tokens[0]]
        assert pairs and max(abs(a - b) for a, b in pairs) < 0.5
    else:
        for one, other in zip(expected, found, strict=True):
            assert one.tokens == other.tokens
            assert_allclose(one.logps, other.logps, atol=1e-4)
    if "cache_tokens" in settings:
        assert engine.metrics()["rollout/preemptions"] > 0
    engine.close()


def test_what_cannot_be_read_is_refused(case: Case, model: Decoder, shared_engine: NativeEngine) -> None:
    prompt = case.prompt("one")
    assert prompt.images is not None
    with pytest.raises(ConfigError, match="loaded without its vision tower"):
        shared_engine.generate_all([prompt.tokens], [asked()], [prompt.images])
    with pytest.raises(ValueError, match="the prompt ends in a picture"):
        case.complete(Prompt(prompt.tokens[: prompt.images.spans[0][1]], prompt.images))
    images = replace(prompt.images, images=(*prompt.images.images, prompt.images.images[0]))
    with pytest.raises(ValueError, match="they must be as many, and in order"):
        case.complete(Prompt(prompt.tokens, images))
    with pytest.raises(ConfigError, match="needs its tokenizer"):
        make_engine(case.model)
    with pytest.raises(ConfigError, match="which a draft model does not see"):
        vision.check_images(case.model.config, prompt.tokens, prompt.images, drafts=True)


def test_pieces_end_outside_of_images_read_at_once() -> None:
    """At the start of a block; beyond a chunk where an image ends there, or none of its blocks ends outside."""
    request = Request(prompt=tuple(range(200)), params=asked(), whole=((20, 60), (70, 110)))
    assert [request.piece_end(start, 32) for start in (0, 16, 64, 112, 176)] == [16, 64, 112, 144, 199]
    assert replace(request, whole=((10, 190),)).piece_end(0, 32) == 192
    assert replace(request, whole=((1, 195),)).piece_end(0, 32) == 199
    assert replace(request, whole=()).piece_end(16, 32) == 48


def test_forbidden_tokens_are_never_drawn() -> None:
    """And count in `kept_logps`, greedy and sampled."""
    logits = jnp.zeros((64, 8)).at[:, 3].set(5.0)
    params = [asked(seed, temperature=float(seed % 2)) for seed in range(64)]
    settings: dict[str, Any] = {"max_length": 4, "tables": Tables(8)}
    sampling = Sampling.of(params, [()] * 64, [0] * 64, forbidden=(3, 6), **settings)
    drawn = jax.jit(sample)(logits, jnp.zeros(64, jnp.int32), sampling, None)
    assert not {3, 6} & set(np.asarray(drawn.tokens).tolist())
    assert_allclose(drawn.logps, np.full(64, -np.log(np.exp(5) + 7)), rtol=1e-5)
    kept = np.where(np.arange(64) % 2, np.asarray(drawn.logps) + np.log(6), 0)
    assert_allclose(drawn.kept_logps, kept, atol=1e-5)
    assert_allclose(drawn.truncation_logps, np.zeros(64), atol=0)
