"""Cache of compiled programs: on by default, elsewhere or off by JAX's own variables, and bounded."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest

from posttrain.runtime.xla import enable_compile_cache, prune_cache

pytestmark = pytest.mark.fast


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The suite's own cache is put back, so that no test fills another."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update("jax_enable_compilation_cache", True)


def test_it_is_on_unless_jax_is_told_otherwise(own: None, tmp_path: Path) -> None:
    given = jax.config.jax_compilation_cache_dir
    assert enable_compile_cache() == Path(given) and not list(tmp_path.iterdir())
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    assert enable_compile_cache() is None and jax.config.jax_compilation_cache_dir is None
    jax.config.update("jax_enable_compilation_cache", True)
    folder = enable_compile_cache()
    assert folder is not None and folder.parent == tmp_path / "posttrain" / "compiled" and folder.is_dir()
    assert jax.config.jax_compilation_cache_dir == str(folder)


def test_a_home_that_cannot_be_written_is_no_mistake(own: None, tmp_path: Path) -> None:
    (tmp_path / "posttrain").write_text("a file")
    jax.config.update("jax_compilation_cache_dir", None)
    assert enable_compile_cache() is None


def test_the_oldest_programs_go_first(tmp_path: Path) -> None:
    for age, name in enumerate("abcd"):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (100 + age, 100 + age))
    prune_cache(tmp_path, 40)
    assert len(list(tmp_path.iterdir())) == 4
    prune_cache(tmp_path, 39)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["d"]
