"""Drafted tokens change no sample: each is accepted only if it is what the model itself draws."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.config import MeshSection
from posttrain.errors import ConfigError
from posttrain.models.decoder import Decoder
from posttrain.models.drafter import DrafterConfig, propose
from posttrain.rollout import scheduler
from posttrain.rollout.adapters import AdapterSlots
from posttrain.rollout.blocks import BLOCK
from posttrain.rollout.decode_weights import PassCost
from posttrain.rollout.decoding import Progress
from posttrain.rollout.drafting import FIRST_ROUNDS, FIRST_WAIT, Pace, Speculation, Windows
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.request import HiddenStates, Request
from posttrain.rollout.sampling import Sampling, Tables, guess, sample
from posttrain.rollout.scheduler import Row
from posttrain.rollout.speculative import Block, SpeculativeRows, lookup
from posttrain.rollout.types import Call, Completion, SamplingParams
from posttrain.weights.drafter import StoredDrafter, described
from tests.mixtures import mixture_config, mixture_model
from tests.rollout.engines import VOCABULARY, assert_same, make_engine, params, requests, unusual
from tests.rollout.test_adapters import CASES, weights_of, write
from tests.rollout.test_sharded import sharded_model
from tests.stages.runs import few_devices
from tests.tiny import shake, tiny_model


def make(model: Decoder, speculation: Speculation, *, always: bool = True, **changes: Any) -> NativeEngine:
    engine = make_engine(model, speculation=speculation, **{"decode_steps": 7} | changes)
    drafter = engine._runner.drafter
    assert drafter is not None
    if always:
        drafter.pace.choose = lambda rows: True  # type: ignore[method-assign]
    # The draft models of tests know the model's distribution well.
    drafter.windows.choose = lambda: 0.0  # type: ignore[method-assign]
    return engine


def block(model: Decoder, tokens: int = 3, window: int = 4) -> Speculation:
    """A block drafter with random weights."""
    sizes, draw = {"embed_dim": model.config.embed_dim, "vocab_size": model.config.vocab_size}, np.random.default_rng(0)
    config = DrafterConfig(tokens=tokens, window=window, layers=1, **sizes)
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in config.parameters.items():
        shape = tensor.shape
        arrays[name] = np.ones(shape) if tensor.role == "norm" else draw.normal(0, shape[0] ** -0.5, shape)
    stored = {name: array.astype(np.float32) for name, array in arrays.items()}
    return Speculation(tokens=tokens, block=StoredDrafter(config=config, target=described(model.config), arrays=stored))


SMALL: dict[str, Any] = {"num_layers": 1, "windows": (None,)}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(**SMALL)


@pytest.fixture(scope="module", params=["ngram", "draft"])
def shared(request: pytest.FixtureRequest) -> NativeEngine:
    """With a cache so small that rows are preempted, and a draft model that agrees now and then."""
    draft = tiny_model(**SMALL)
    shake(draft, 3, 0.003)
    speculation = Speculation(tokens=3, model=None if request.param == "ngram" else draft)
    return make(tiny_model(**SMALL), speculation, cache_tokens=160)


@pytest.fixture
def engine(shared: NativeEngine, model: Decoder) -> Iterator[NativeEngine]:
    shared.update_weights(model, 0)
    yield shared
    assert shared.num_free == shared.slots and shared.num_used_blocks == 0


@pytest.fixture(scope="module")
def plain(model: Decoder) -> NativeEngine:
    return make_engine(model)


def check(engine: NativeEngine, plain: NativeEngine, prompts: Sequence[Any], each: list[SamplingParams]) -> None:
    for got, expected in zip(engine.generate_all(prompts, each), plain.generate_all(prompts, each), strict=True):
        assert_same(got, expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_are_those_without_drafts(engine: NativeEngine, plain: NativeEngine, temperature: float) -> None:
    """Stops within a block of drafts, lengths that end in one, truncation, and a stop string."""
    prompts, each = requests(9, temperature=temperature, stop_token_ids=tuple(range(0, VOCABULARY, 20)))
    prompts[3] = prompts[3][:5] * 6  # what n-grams find
    each[4], each[5] = replace(each[4], stop=("7>",)), replace(each[5], top_k=20, top_p=0.8)
    check(engine, plain, prompts, each)
    assert engine.metrics()["rollout/speculative/share"] == 1


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_every_setting(engine: NativeEngine, plain: NativeEngine, temperature: float) -> None:
    """Penalties, bias, allowed tokens and top log-probabilities side by side."""
    prompts, each = requests(9, temperature=temperature, stop_token_ids=tuple(range(0, VOCABULARY, 20)))
    check(engine, plain, prompts, unusual(each))


def test_drafts_are_accepted(engine: NativeEngine, plain: NativeEngine) -> None:
    """What a greedy sample repeats is found in it; a draft model near the model guesses what it draws."""
    greedy = engine._runner.drafter.loaded is None  # type: ignore[union-attr]
    each = [params(i, max_tokens=40, temperature=0.0 if greedy else 1.0) for i in range(4)]
    check(engine, plain, [[3, 4, 5] * 6, [9, 9, 8, 7] * 4, [1, 2], [100]], each)
    metrics = engine.metrics()
    assert metrics["rollout/speculative/accepted"] > (0.3 if greedy else 0.1)
    assert 1 < metrics["rollout/speculative/length"] < 4 and metrics["rollout/preemptions"] > 0


def test_aborted_resumed_cancelled(engine: NativeEngine, plain: NativeEngine) -> None:
    prompt, p = [5, 6, 7] * 7, params(1, max_tokens=30)
    [whole] = plain.generate_all([prompt], [p])

    async def run() -> Completion:
        first, other = (asyncio.create_task(engine.generate(prompt, one)) for one in (p, params(2, max_tokens=40)))
        while not any(call.partial for call in engine.under_way()):
            await asyncio.sleep(0.001)
        other.cancel()
        engine.abort()
        begun = await first
        assert 0 < len(begun.tokens) < 30
        return await engine.generate(prompt, p, partial=begun)

    assert_same(asyncio.run(asyncio.wait_for(run(), 60)), whole)


@patch.object(scheduler, "PROMPT_CHUNK", 2 * BLOCK)  # of 33 tokens the last one is a piece of its own
def test_a_block_drafter_reads_the_newest_hidden_states(model: Decoder, plain: NativeEngine) -> None:
    """Of every row those of the tokens before its newest one, after rounds, calls without drafts and preemptions, and
    behind prompts, of which some are read in pieces and others found in the cache; and samples are those without
    drafts."""
    engine, turns = make(model, block(model), cache_tokens=160), iter(range(10**6))
    drafter = engine._runner.drafter
    assert drafter is not None
    drafter.pace.choose = lambda rows: next(turns) % 4 < 3  # type: ignore[method-assign]
    seen, rows_of, speculate = list[tuple[Request, HiddenStates]](), drafter._block_rows, engine.programs.speculate
    latest: list[tuple[Request, HiddenStates]] = []

    def spied(places: Mapping[int, Row], rows: int) -> Any:
        found = rows_of(places, rows)
        hidden, known, each = np.asarray(found.hidden), np.asarray(found.known), places.items()
        latest[:] = [(r.request, HiddenStates(r.request.position, hidden[i], int(known[i]))) for i, r in each]
        return found

    def run(*arguments: Any) -> Any:
        seen.extend(latest)
        return speculate(*arguments)

    drafter._block_rows, engine.programs.speculate = spied, run  # type: ignore[method-assign]
    prompts, each = requests(7, temperature=1.0)
    prompts[3:5] = [[*range(100, 134)]] * 2
    each = [replace(one, temperature=float(i % 2)) for i, one in enumerate(each)]
    calls = [engine._submit(Call(prompt, one)) for prompt, one in zip(prompts, each, strict=True)]
    while engine.step():
        pass
    tokens = np.zeros((len(calls), 64), np.int32)
    for i, request in enumerate(calls):
        tokens[i, : len(request.history)] = request.history
    places = np.broadcast_to(np.arange(64, dtype=np.int32), tokens.shape)
    hidden = np.asarray(jax.jit(lambda *inputs: model(*inputs)[0])(tokens, places, np.ones_like(tokens)))
    for request, state in seen:
        expected = hidden[calls.index(request), state.position - state.known : state.position]
        np.testing.assert_allclose(state.hidden[4 - state.known :], expected, rtol=1e-3, atol=1e-4)
    behind = {request.number: state for request, state in seen if state.position == len(request.prompt) - 1}
    assert {3, 4} <= behind.keys() and all(state.known == min(4, state.position) for state in behind.values())
    assert len(seen) > 8 and {state.known for _, state in seen} >= {0, 4} and engine.metrics()["rollout/preemptions"]
    for request, one in zip(calls, plain.generate_all(prompts, each), strict=True):
        assert_same(request.future.result(), one)


def test_each_draft_of_a_block_follows_the_one_before_it(model: Decoder) -> None:
    drafts = block(model)
    assert drafts.block is not None
    config, follows = drafts.block.config, drafts.block.arrays
    arrays = jax.device_put(dict(follows))
    newest, known = jnp.asarray([3, 8], jnp.int32), jnp.asarray([4, 2], jnp.int32)
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, config.embed_dim)), jnp.float32)
    greedy, tables = params(3, temperature=0.0), Tables(config.vocab_size)
    sampling = Sampling.of([greedy] * 2, [[1]] * 2, [1] * 2, max_length=64, tables=tables)
    source = Block(config, arrays, model, sampling, jnp.zeros(2), 3, None)
    now = Progress(jnp.ones(2, bool), newest, jnp.asarray([5, 9], jnp.int32), None, None)  # type: ignore[arg-type]
    _, found = jax.jit(source.propose)((hidden, known), now)

    @jax.jit
    def embedded(tokens: jax.Array) -> jax.Array:
        return model.embed(tokens[:, None], jnp.dtype(jnp.float32), None)[:, 0]

    logits = np.asarray(jax.jit(lambda x: model.logits(propose(config, arrays, hidden, known, x)))(embedded(newest)))
    alone, before = logits.argmax(-1), newest
    for place in range(3):
        x = np.asarray(embedded(before))
        x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        before = (logits[:, place] + x @ follows["follows_in"] @ follows["follows_out"]).argmax(-1)
        np.testing.assert_array_equal(found.tokens[:, place], before)
    assert (np.asarray(found.tokens) != alone).any()


def test_a_block_drafter_beside_weights_of_a_mesh_of_one_device() -> None:
    with few_devices(1):
        model = sharded_model(MeshSection(), **SMALL)
    drafter = make(model, block(model))._runner.drafter
    assert drafter is not None and all(x.sharding.is_fully_replicated for x in drafter.weights.values())


@pytest.mark.thorough
def test_the_draft_model_has_read_everything(model: Decoder) -> None:
    """The model itself drafts: whatever is refused shows a hole in its cache, after calls without drafts, preemptions
    and shared prompts."""
    engine = make(model, Speculation(tokens=3, model=tiny_model(**SMALL)), cache_tokens=160)
    turns = iter(range(10**6))
    engine._runner.drafter.pace.choose = lambda rows: next(turns) % 3 > 0  # type: ignore
    # Blocks of the first samples go to others.
    for prompts in ([[*range(40, 60), 7, i % 2] for i in range(6)], [[*range(40 + i, 60 + i), 7] for i in range(6)]):
        engine.generate_all(prompts, [params(i, max_tokens=36) for i in range(6)])
        metrics = engine.metrics()
        assert metrics["rollout/preemptions"] > 0 and 0.2 < metrics["rollout/speculative/share"] < 0.9
        assert metrics["rollout/speculative/accepted"] > 0.95


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["gather", "ragged", "joined"])
@pytest.mark.parametrize("drafts", [1, 5])
def test_every_layout_and_length(layout: str, drafts: int) -> None:
    from posttrain.models.config import Compute
    from tests.tiny import random_model, tiny_config

    compute = Compute(dtype=jnp.dtype(jnp.float32), remat="none", decode_attention=layout)  # type: ignore[arg-type]
    model, draft = (random_model(tiny_config(), compute, dtype=jnp.float32, seed=0) for _ in range(2))
    prompts, each = requests(9)
    expected = make_engine(model).generate_all(prompts, each)
    for speculation in (block(model, drafts), Speculation(tokens=drafts), Speculation(tokens=drafts, model=draft)):
        engine = make(model, speculation)
        for got, one in zip(engine.generate_all(prompts, each), expected, strict=True):
            assert_same(got, one)
    assert engine.metrics()["rollout/speculative/accepted"] > 0.95  # all, but for stops in the middle of a round


def base(where: str, seed: int = 0) -> Decoder:
    if where == "routing":
        return mixture_model(mixture_config(num_layers=3))
    if where == "adapters":
        return tiny_model(seed=seed, num_layers=2, windows=(None,))
    return tiny_model(seed=seed, **SMALL)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["ngram", "draft", "block"])
@pytest.mark.parametrize("where", ["mesh", "routing", "adapters", "int8", "updates"])
def test_beside_other_options(where: str, kind: str, tmp_path: Path) -> None:
    """Rows over eight devices, recorded experts, adapters in one batch, a cache in 8 bits, and new weights in the
    middle of samples: tokens are those without drafts."""
    options: dict[str, dict[str, Any]] = {
        "routing": {"record_routing": True},
        "adapters": {"adapters": AdapterSlots(count=2, rank=4), "slots": 6},
        "int8": {"cache_dtype": "int8"},
        "mesh": {"slots": 8},
    }
    changes, section = options.get(where, {}), MeshSection(data=2, fsdp=2, tensor=2)
    model, draft = (sharded_model(section, **SMALL) if where == "mesh" else base(where) for _ in range(2))
    shake(draft, 3, 0.003)
    drafts = block(model) if kind == "block" else Speculation(tokens=3, model=draft if kind == "draft" else None)
    engine = make(model, drafts, **changes)
    plain = make_engine(base(where), **{"decode_steps": 7} | changes)
    names = ("all", "some", None) if where == "adapters" else (None,)
    for name in filter(None, names):
        folder = write(tmp_path / name, CASES[name], weights_of(CASES[name], base(where))[0])
        for one in (engine, plain):
            one.load_adapter(name, folder)
    prompts = [[3, 4, 5] * 6, [9, 9, 8, 7] * 4, [100]]
    each = [params(i, max_tokens=40, temperature=float(i % 2), adapter=names[i % len(names)]) for i in range(3)]

    def sampled(one: NativeEngine) -> list[Completion]:
        if where != "updates":
            return one.generate_all(prompts, each)
        requests = [one._submit(Call(prompts[0], each[0]))]  # of several a call may pause at another token
        for version in (1, 2):
            one.step()
            one.update_weights(base(where, seed=version), version)
        while one.step():
            pass
        return [request.future.result() for request in requests]

    for got, expected in zip(sampled(engine), sampled(plain), strict=True):
        assert_same(got, expected)
        assert got.weights_versions == expected.weights_versions and (
            where != "updates" or {*got.weights_versions} > {1}
        )
        assert where != "routing" or np.array_equal(got.experts, expected.experts)  # type: ignore[arg-type]
    metrics = engine.metrics()
    assert metrics["rollout/speculative/share"] == 1
    assert metrics["rollout/speculative/accepted"] > 0 or kind == "block"  # whose weights are random


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["draft", "block"])
def test_the_law_on_a_tiny_vocabulary(kind: str) -> None:
    """Chi-square of 10^5 draws of the second and third token, against the product of the model's probabilities."""
    size, number = 5, 100_000
    model = tiny_model(vocab_size=size, num_layers=1, windows=(None,))
    draft = tiny_model(seed=1, vocab_size=size, num_layers=1, windows=(None,))
    drafts = block(model, tokens=2, window=1) if kind == "block" else Speculation(tokens=2, model=draft)
    engine = make(model, drafts, slots=512, max_length=8)
    each = [params(i, max_tokens=3, temperature=0.9) for i in range(number)]
    found = Counter(c.tokens for c in engine.generate_all([[1]] * number, each))
    rows = jnp.asarray([[1, a, b] for a in range(size) for b in range(size)], jnp.int32)
    ones = jnp.ones_like(rows)
    logits = model.logits(model(rows, jnp.cumsum(ones, 1) - 1, ones)[0]) / 0.9
    probs = np.asarray(jax.nn.softmax(logits, axis=-1), np.float64)
    expected = {
        (a, b, c): number * probs[a * size + b, 0, a] * probs[a * size + b, 1, b] * probs[a * size + b, 2, c]
        for a in range(size)
        for b in range(size)
        for c in range(size)
    }
    chi = sum((found[key] - value) ** 2 / value for key, value in expected.items())
    freedom = size**3 - 1
    assert abs(chi - freedom) < 5 * np.sqrt(2 * freedom)
    assert 0.1 < engine.metrics()["rollout/speculative/accepted"] < 0.95


def test_the_longest_latest_match_is_continued() -> None:
    history = jnp.asarray(
        [[1, 2, 3, 9, 1, 2, 3, 7, 2, 3, 8, 1, 2, 3], [5, 6, 5, 6, 5, -1, -1, -1, -1, -1, -1, -1, -1, -1]]
    )
    looked_up = jax.jit(lookup, static_argnums=2)
    drafts = looked_up(history, jnp.asarray([13, 4]), 4)
    assert drafts.tokens.tolist() == [[7, 2, 3, 8], [6, 5, 6, 5]] and drafts.found.all()
    none = looked_up(jnp.arange(8)[None], jnp.asarray([7]), 2)
    assert not none.found.any()


@pytest.mark.thorough
def test_a_guess_agrees_more_often_than_a_draw() -> None:
    rng = np.random.default_rng(0)
    rows, size = 4000, 64
    of = rng.normal(0, 2, (rows, size))
    logits, other = (jnp.asarray(of + rng.normal(0, noise, of.shape), jnp.float32) for noise in (2.0, 0.0))
    each = [params(i, temperature=0.0 if i % 10 == 0 else 1.0, top_p=0.9 if i % 2 else 1.0) for i in range(rows)]
    sampling = Sampling.of(each, [[]] * rows, [0] * rows, max_length=8, tables=Tables(size), allowed={})
    positions = jnp.arange(rows, dtype=jnp.int32)
    drawn = sample(logits, positions, sampling, None).tokens
    guesses = [jax.jit(guess)(other, positions, sampling, None, jnp.full(rows, window)) for window in (0.0, 0.25)]
    agreed = [float(jnp.mean(tokens == drawn)) for tokens in guesses]
    assert agreed[1] > agreed[0] + 0.01
    assert (jax.jit(guess)(logits, positions, sampling, None, jnp.zeros(rows)) == drawn).mean() > 0.999


def test_drafts_go_where_they_pay() -> None:
    """By the tokens of passes with drafts, and fixed costs; what never can pay is never tried."""
    worth = {1: 0.9, 4: 0.5, 8: 0.2}
    pace, drafted = Pace(worth.__getitem__, longest=4), Counter[int]()
    for _ in range(400):
        for rows in worth:
            if pace.choose(rows):
                drafted[rows] += 1
                pace.record(16 * rows, 8 * rows)  # two tokens a pass
    assert pace.gain(1) == pytest.approx(1.8) and pace.gain(4) == pytest.approx(1.0)
    assert drafted[1] == 400 and drafted[8] == 0 and 1 <= drafted[4] < 12
    for _ in range(40 * FIRST_WAIT):  # it pays now
        if pace.choose(4):
            pace.record(96, 32)
    assert pace.choose(4) and pace.gain(4) == pytest.approx(1.5, rel=0.1)
    for _ in range(FIRST_ROUNDS):
        if pace.choose(4):
            pace.record(36, 32)
    assert not pace.choose(4), "and no more"
    pace.forget()
    assert pace.gain(1) is None and pace.choose(4)


def decoded(engine: NativeEngine, slow: Iterator[float]) -> tuple[list[Completion], list[bool]]:
    """Samples of an engine whose dispatches take so long each, and whether each call drafted."""
    run, drafted = engine._runner.run, list[bool]()

    def slowly(dispatch: Any) -> Any:
        time.sleep(next(slow))
        if dispatch.decode is not None:
            drafted.append(isinstance(dispatch.decode.rows, SpeculativeRows))
        return run(dispatch)

    prompts, each = requests(7, temperature=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._runner, "run", slowly)
        return engine.generate_all(prompts, each), drafted


@pytest.mark.parametrize("source", ["ngram", "block"])
def test_no_measured_time_decides_which_calls_draft(model: Decoder, source: str) -> None:
    """The same calls draft on a busy machine, and in an engine that has sampled before and forgot it, as in a run that
    is resumed: samples have the same bits."""
    speculation = Speculation(tokens=3) if source == "ngram" else block(model)
    engine = make_engine(model, speculation=speculation, decode_steps=2)
    first, drafted = decoded(engine, itertools.repeat(0.0))
    assert any(drafted)
    for forget in (engine.forget_prompts, engine.release_cache, lambda: engine.update_weights(model, 1)):
        forget()
        again, others = decoded(engine, itertools.cycle([0.0, 0.02, 0.0, 0.005, 0.03]))
        assert others == drafted
        for one, other in zip(first, again, strict=True):
            assert (one.tokens, one.logps, one.kept_logps) == (other.tokens, other.logps, other.kept_logps)
    fresh, others = decoded(make_engine(model, speculation=speculation, decode_steps=2), itertools.repeat(0.0))
    assert others == drafted and [one.logps for one in fresh] == [one.logps for one in first]


@pytest.mark.parametrize(
    ("rows", "drafts", "worth"),
    [
        # Weights are what a pass reads: four tokens cost what one does.
        (1, 0.0, 1.0),
        # Arithmetic is what a pass does: four tokens cost four times as much.
        (4096, 0.0, 0.25),
        # The drafts cost as much again.
        (1, 1.0, 0.5),
    ],
)
def test_what_a_pass_costs(rows: int, drafts: float, worth: float) -> None:
    cost = PassCost(
        bandwidth=1e12, flops=1e14, dense_bytes=2e10, dense_size=1e10, expert_bytes=0.0, expert_size=0.0, active=0.0,
        expert_devices=1, layers=0,
    )  # fmt: skip
    plain = max(2e10 / 1e12, 2 * rows * 1e10 / 1e14)
    assert cost.seconds(rows) == pytest.approx(plain)
    assert plain / (cost.seconds(4 * rows) + drafts * plain) == pytest.approx(worth)


def test_the_best_window_is_used() -> None:
    windows, used = Windows(), Counter[float]()
    for _ in range(200):
        used[window := windows.choose()] += 1
        windows.record(int(100 * (0.5 - abs(window - 0.06))), 100)
    assert used[0.06] > 180 and min(used.values()) > 2


def test_a_draft_model_that_cannot_draft_is_refused(model: Decoder) -> None:
    with pytest.raises(ConfigError, match="max_positions=16"):
        make(model, Speculation(tokens=2, model=tiny_model(max_positions=16)))
