"""Checkpoints: what comes back, what is refused, and what a killed process leaves."""

from __future__ import annotations

import errno
import gc
import itertools
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import posttrain.train.checkpoint as module
from posttrain.errors import ConfigError, OutsideError
from posttrain.train.checkpoint import Checkpointer, DamagedCheckpoint


def tree(scale: float = 1.0):
    params = {
        "stages.0.kernel": scale * jnp.arange(64.0).reshape(8, 8),
        "norm.scale": jnp.full((16,), scale, jnp.bfloat16),
    }
    return {"params": params, "opt_state": optax.adam(1e-3).init(params), "count": jnp.int32(scale)}


def like(arrays):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_files_are_written_before_all_is_compressed(tmp_path, monkeypatch):
    """What the writer holds at once is a few files."""
    monkeypatch.setattr(module, "FILE_BYTES", 1 << 16)
    arrays = {f"a{i}": jax.random.normal(jax.random.key(i), (1 << 14,)) for i in range(16)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, arrays, {})
        assert_same(checkpointer.restore(1, like(arrays))[0], arrays)
    sizes = [file.stat().st_size for file in (tmp_path / "1" / "arrays").rglob("d/*")]
    assert sum(sizes) > 10 << 16 and max(sizes) < 4 << 16, sizes


def test_a_step_comes_back_bitwise_and_the_newest_are_kept(tmp_path, capfd):
    host = {"data": {"epoch": 2}, "rng": 2**120, "loss": 0.1, "text": "é\n", "list": [None, True]}
    with Checkpointer(tmp_path / "new" / "folder", keep=2) as checkpointer:
        assert checkpointer.latest_step() is None
        for step in (3, 5, 9):
            checkpointer.save(step, tree(step), {**host, "step": step})
        assert checkpointer.latest_step() == 9
        with pytest.raises(ConfigError, match=r"no checkpoint of step 3; available: \[5, 9\]"):
            checkpointer.restore(3, like(tree()))
    with Checkpointer(tmp_path / "new" / "folder") as checkpointer:
        assert checkpointer.latest_step() == 9
        arrays, restored = checkpointer.restore(5, like(tree()))
        assert_same(arrays, tree(5))
        assert restored == {**host, "step": 5}
        assert_same(checkpointer.restore(9, tree())[0], tree(9))
        checkpointer.save(10, arrays, {})
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == ["10", "9"]
    output = capfd.readouterr()
    assert output.out + output.err == ""


def test_arrays_may_be_donated_and_host_data_changed_when_save_returns(tmp_path):
    overwrite = jax.jit(lambda x: jax.tree.map(lambda a: a * 0 - 1, x), donate_argnums=0)
    arrays, expected = ({n: jnp.arange(1 << 20, dtype=jnp.float32) + k for k, n in enumerate("vw")} for _ in range(2))
    warm = {n: jnp.zeros(1 << 20) for n in "vw"}
    overwrite(warm)
    assert warm["w"].is_deleted()
    host = {"position": [1]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, arrays, host)
        arrays["v"].delete()
        arrays = overwrite({"v": jnp.zeros(1 << 20), "w": arrays["w"]})
        host["position"].append(2)
        for _ in range(5):
            arrays = overwrite(arrays)
        jax.block_until_ready(arrays)
        restored, data = checkpointer.restore(1, like(expected))
    assert_same(restored, expected)
    assert data == {"position": [1]}


def test_restores_to_another_sharding(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    kernel = jnp.arange(64.0).reshape(8, 8)
    rows, columns = (NamedSharding(mesh, PartitionSpec(*p)) for p in (("fsdp", "tensor"), (None, ("fsdp", "tensor"))))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"kernel": jax.device_put(kernel, rows)}, {})
        for sharding in (columns, rows, NamedSharding(mesh, PartitionSpec())):
            target = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
            restored, _ = checkpointer.restore(1, {"kernel": target})
            assert restored["kernel"].sharding == sharding
            np.testing.assert_array_equal(restored["kernel"], kernel)
        restored, _ = checkpointer.restore(1, {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32)})
        assert restored["kernel"].devices() == {jax.local_devices()[0]}


def test_all_differences_of_the_leaves_are_in_one_error(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": jnp.zeros((2, 3)), "b": jnp.zeros(2), "c": jnp.zeros(1), "d": jnp.zeros(4)}, {})
        wanted = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(2, jnp.bfloat16), "d": jnp.zeros(4), "e": {"f": jnp.zeros(5)}}
        with pytest.raises(ConfigError) as error:
            checkpointer.restore(1, wanted)
    message = str(error.value)
    for part in (
        str(tmp_path / "1"),
        "a is float32[2, 3] in the checkpoint and float32[3, 2] in the run",
        "b is float32[2] in the checkpoint and bfloat16[2] in the run",
        "c float32[1] is in the checkpoint but not in the run",
        "e.f float32[5] is not in the checkpoint",
    ):
        assert part in message
    assert "; d " not in message


def test_what_cannot_be_saved_is_refused_at_once(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match=r"a\.b is a int; put it into host"):
            checkpointer.save(1, {"a": {"b": 3}}, {})
        with pytest.raises(ValueError, match=r"host must be JSON and numpy arrays, but .*set"):
            checkpointer.save(1, {"a": jnp.zeros(1)}, {"x": {1}})
        checkpointer.save(2, {"a": jnp.zeros(1)}, {})
        for step in (1, 2):
            with pytest.raises(ValueError, match=f"step {step} must be after the latest step 2"):
                checkpointer.save(step, {"a": jnp.zeros(1)}, {})
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)


def test_another_format_is_refused(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as before:
            before.setattr("posttrain.train.checkpoint.FORMAT", 1)
            checkpointer.save(1, {"a": jnp.zeros(1)}, {})
            checkpointer.wait()
        with pytest.raises(ConfigError, match="checkpoint has format 1, this version reads 5; resume with the version"):
            checkpointer.restore(1, {"a": jnp.zeros(1)})


def stored(folder: Path) -> dict[str, Any]:
    """A tree in every dtype of a state, and host data with an array."""
    arrays = {
        "w": jax.random.normal(jax.random.key(0), (64, 64)),
        "half": jnp.arange(40, dtype=jnp.bfloat16).reshape(8, 5),
        "codes": jnp.arange(-100, 100, dtype=jnp.int8),
        "on": jnp.array([True, False, True]),
        "count": jnp.int32(7),
    }
    with Checkpointer(folder) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, arrays, {"step": step, "numbers": np.arange(50), "text": "a" * 99})
    return arrays


def test_no_damaged_byte_passes_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A step of which a file is changed in a byte, cut, zeroed or gone is as saved, or refused in one line, before
    TensorStore reads it, which may end the process."""
    arrays = stored(tmp_path)
    folder, whole = tmp_path / "2", tmp_path / "whole"
    folder.rename(whole)
    draw, refused, read = random.Random(0), [], []
    others = itertools.cycle((lambda data: data[: len(data) // 2], lambda data: bytes(len(data)), lambda data: None))
    files = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    with Checkpointer(tmp_path) as checkpointer:
        reads = Mock(wraps=checkpointer._arrays)
        monkeypatch.setattr(checkpointer, "_arrays", reads)
        for file in files:
            data = (whole / file).read_bytes()
            flipped = bytearray(data)
            flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            for damaged in (bytes(flipped), next(others)(data)):
                shutil.copytree(whole, folder)
                (folder / file).unlink() if damaged is None else (folder / file).write_bytes(damaged)
                try:
                    found, host = checkpointer.restore(2, like(arrays))
                except DamagedCheckpoint as error:
                    refused.append(str(error))
                else:
                    read.append(file)
                    assert_same(found, arrays)
                    assert host["step"] == 2 and (host["numbers"] == np.arange(50)).all() and host["text"] == "a" * 99
                shutil.rmtree(folder)
        assert reads.call_count == len(read)
        assert_same(checkpointer.restore(1, like(arrays))[0], arrays)
    assert all(line.startswith(f"{folder}: the checkpoint of step 2 is damaged (") for line in refused)
    assert not any("\n" in line or len(line) > 400 for line in refused)
    of_values = [file for file in files if file.parts[0] != "host" and file.parent.name == "d"]
    assert len(refused) > len(of_values) and set(read) < set(files)
    assert capfd.readouterr() == ("", "")


def test_no_read_outlives_a_failed_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorStore's threads would report it to a closed event loop."""
    monkeypatch.setattr(module, "FILE_BYTES", 1 << 18)
    raised: list[Any] = []
    refused: list[DamagedCheckpoint] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: raised.append(one.exc_value))
    arrays = {f"a{i}": jax.random.normal(jax.random.key(i), (1 << 12,)) for i in range(60)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, arrays, {})
        checkpointer.wait()
        for file in sorted((tmp_path / "1" / "arrays").rglob("d/*"))[:4]:
            whole = file.read_bytes()
            file.write_bytes(bytes(len(whole)))
            try:
                checkpointer.restore(1, like(arrays))
            except DamagedCheckpoint as error:
                refused.append(error)
            file.write_bytes(whole)
            gc.collect()
        assert_same(checkpointer.restore(1, like(arrays))[0], arrays)
    assert refused and not raised and not caplog.messages


def test_a_hook_that_a_thread_may_be_in_is_not_freed(tmp_path: Path) -> None:
    before = sys.excepthook
    with Checkpointer(tmp_path):
        hook = weakref.ref(sys.excepthook)
        assert hook() is not before
    gc.collect()
    assert sys.excepthook is before and hook() is not None


def test_a_changed_value_is_told_by_its_leaf(tmp_path: Path) -> None:
    """Values that are read without error: the arrays of another step under the record of this one."""
    arrays = stored(tmp_path)
    other = {**arrays, "w": arrays["w"].at[3, 4].set(jnp.nextafter(arrays["w"][3, 4], 9.0)), "on": ~arrays["on"]}
    with Checkpointer(tmp_path / "other") as checkpointer:
        checkpointer.save(2, other, {"numbers": np.arange(1, 51)})
    for item in ("arrays", "values"):
        shutil.rmtree(tmp_path / "2" / item)
        shutil.copytree(tmp_path / "other" / "2" / item, tmp_path / "2" / item)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(DamagedCheckpoint, match=r"damaged \(on, w, value_0: other values than were saved\)"):
            checkpointer.restore(2, like(arrays))
        with pytest.raises(DamagedCheckpoint, match=r"\(value_0: other"):
            checkpointer.restore(2, {"half": arrays["half"]}, partial=True)


def test_an_outage_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the system ends the read with a code of its own, however the reader words it."""
    arrays = stored(tmp_path)
    outages = [OSError(errno.ESTALE, "Stale file handle"), ValueError("Error reading: [OS error 5: EIO Input/output]")]
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        for outage in outages:
            monkeypatch.setattr(checkpointer, "_arrays", Mock(side_effect=outage))
            with pytest.raises(OutsideError, match="cannot be read") as told:
                checkpointer.restore(2, like(arrays))
            assert told.value.code == 74
        monkeypatch.undo()
        file = next(path for path in (tmp_path / "2" / "arrays").rglob("d/*") if path.is_file())
        file.unlink()
        file.symlink_to(file)
        with pytest.raises(OutsideError, match="cannot be read"):
            checkpointer.restore(2, like(arrays))
        (tmp_path / "2").rename(tmp_path / "away")
        with pytest.raises(OutsideError, match="cannot be read"):
            checkpointer._together(2, lambda: checkpointer._record(2))


def test_a_reader_leaves_what_a_live_run_writes(tmp_path: Path) -> None:
    arrays = stored(tmp_path)
    (unfinished := tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        assert checkpointer.steps() == [2, 1]
        assert_same(checkpointer.restore(2, like(arrays))[0], arrays)
    assert unfinished.exists()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, arrays, {})
    assert not unfinished.exists()


WRITER = """
import sys
import jax
import numpy as np
from posttrain.train.checkpoint import Checkpointer

checkpointer = Checkpointer(sys.argv[1])
first = (checkpointer.latest_step() or 0) + 1
for step in range(first, first + 1000):
    arrays = {f"w{i}": jax.device_put(np.full(40_000 + i, step, np.float32)) for i in range(12)}
    checkpointer.save(step, arrays, {"step": step})
    if step == first:
        checkpointer.wait()
        print("ready", flush=True)
"""


@pytest.mark.thorough
def test_a_killed_process_leaves_only_whole_steps(tmp_path):
    rng = random.Random(0)
    wanted = {f"w{i}": jax.ShapeDtypeStruct((40_000 + i,), jnp.float32) for i in range(12)}
    found = [0]
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.3 * rng.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with Checkpointer(tmp_path) as checkpointer:
            step = checkpointer.latest_step()
            assert step is not None
            assert step > found[-1]
            arrays, host = checkpointer.restore(step, wanted)
            assert host == {"step": step}
            assert all((x == step).all() for x in arrays.values())
        found.append(step)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(found[-1] + 1, {"w": jnp.zeros(1)}, {})
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.isdigit()) == []


def test_host_data_may_hold_arrays_of_any_shape(tmp_path: Path) -> None:
    host = {"a": [1, {"t": np.arange(7, dtype=np.int32)}], "empty": np.zeros((0, 3), np.float32), "b": np.array([True])}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones(3)}, host)
        checkpointer.save(2, {"w": jnp.ones(3)}, {"a": 2})
        _, found = checkpointer.restore(1, {"w": jnp.ones(3)})
        assert checkpointer.restore(2, {"w": jnp.ones(3)})[1] == {"a": 2}
    assert found["a"][0] == 1
    for one, other in (
        (found["a"][1]["t"], host["a"][1]["t"]),
        (found["empty"], host["empty"]),
        (found["b"], host["b"]),
    ):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
