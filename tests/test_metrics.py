"""Metrics: one transfer, exact merging, timers, the compilation counter, peak memory."""

from __future__ import annotations

import itertools
import math
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.metrics import CompileCounter, Timer, merge, peak_memory_gib, to_host
from posttrain.tree import Mean

pytestmark = pytest.mark.fast


def test_to_host_divides_once_and_says_what_was_not_counted(monkeypatch):
    transfers = []
    real = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: transfers.append(tree) or real(tree))
    host = to_host(
        {"mean": Mean(total=jnp.float32(3), weight=jnp.float32(4)), "none": Mean(total=0.0, weight=jnp.float32(0))}
        | {"plain": 2.5, "array": jnp.int32(7)}
    )
    assert host.pop("mean") == 0.75
    assert math.isnan(host.pop("none"))
    assert host == {"plain": 2.5, "array": 7.0}
    assert {type(value) for value in host.values()} == {float}
    assert len(transfers) == 1


def test_merging_is_exact_for_any_split():
    values, weights = np.random.default_rng(0).random((2, 12))

    def part(i, j):
        return {"x": Mean(total=float((values * weights)[i:j].sum()), weight=float(weights[i:j].sum()))}

    whole = to_host(part(0, 12))["x"]
    for cuts in ((0, 12), (0, 5, 12), (0, 1, 2, 11, 12)):
        merged = merge(*(part(i, j) for i, j in itertools.pairwise(cuts)))
        assert to_host(merged)["x"] == pytest.approx(whole, rel=1e-14)
    assert merge({"a": Mean(total=1.0, weight=1.0)}, {"b": Mean(total=1.0, weight=2.0)}).keys() == {"a", "b"}
    assert merge() == {}


def test_timer_adds_up_a_phase_and_starts_again():
    timer = Timer()
    for _ in range(2):
        with timer("rollout"):
            time.sleep(0.02)
    with pytest.raises(KeyError), timer("reward"):
        raise KeyError
    seconds = timer.metrics()
    assert seconds.keys() == {"timing_s/rollout", "timing_s/reward"}
    assert 0.04 <= seconds["timing_s/rollout"] < 1.0
    assert timer.metrics() == {}


class Device:
    """Device that states its memory."""

    peak = 2**30

    def memory_stats(self):
        return {"peak_bytes_in_use": self.peak}


def test_a_phase_has_a_peak_where_it_is_the_highest_so_far(monkeypatch):
    device, timer = Device(), Timer()
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(), device])
    for phase, peak in (("rollout", 3 << 30), ("logps", 3 << 30), ("update", 4 << 30), ("update", 5 << 30)):
        with timer(phase):
            device.peak = peak
    peaks = {name: value for name, value in timer.metrics().items() if name.startswith("memory/")}
    assert peaks == {"memory/rollout/peak_gib": 3.0, "memory/update/peak_gib": 5.0}
    assert timer.metrics() == {}


def test_only_a_new_shape_is_a_compilation():
    function = jax.jit(lambda x: jnp.tanh(x) @ x)
    small, large = jax.device_put(np.ones((3, 3), np.float32)), jax.device_put(np.ones((4, 4), np.float32))
    counter = CompileCounter()
    try:
        function(small)
        first = counter.metrics()
        assert first["perf/compilations"] == 1
        assert first["perf/compile_s"] > 0
        function(small)
        assert counter.metrics() == {"perf/compilations": 0, "perf/compile_s": 0}
        worker = threading.Thread(target=function, args=(large,))
        worker.start()
        worker.join()
        assert counter.metrics()["perf/compilations"] == 1
    finally:
        counter.close()
    jax.jit(lambda x: x - 2)(small)
    assert counter.metrics()["perf/compilations"] == 0


def test_a_hit_in_the_persistent_cache_is_a_program_built(tmp_path):
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    x = jax.device_put(np.ones((5, 7), np.float32))
    counter = CompileCounter()
    try:
        jax.config.update(names[0], str(tmp_path))
        jax.config.update(names[1], 0.0)
        compilation_cache.reset_cache()
        for _ in range(2):
            jax.jit(lambda x: jnp.sin(x) * 3)(x)
            assert counter.metrics()["perf/compilations"] == 1
        assert any(tmp_path.iterdir())
    finally:
        counter.close()
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_peak_memory_sees_what_was_allocated():
    before = peak_memory_gib()
    assert 0.05 < before < 64
    block = np.ones(40 << 20, np.uint8)
    assert peak_memory_gib() >= before
    assert block[-1] == 1
