"""Files and folders appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posttrain.errors import ConfigError
from posttrain.runtime import files
from posttrain.runtime.files import check_writable, content_digest, file_digest, whole_folder, write_whole

pytestmark = pytest.mark.fast


def test_a_file_replaces_the_one_before(tmp_path: Path) -> None:
    for content in ("a", "bc"):
        write_whole(tmp_path / "file.json", content)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file.json", content)]


def test_a_folder_is_replaced_unless_its_writer_fails(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "folder"
    with whole_folder(target) as new:
        (new / "a").write_text("1")
        assert not target.exists()
    with pytest.raises(RuntimeError), whole_folder(target) as new:  # noqa: PT012
        (new / "b").write_text("2")
        raise RuntimeError
    assert [path.name for path in target.iterdir()] == ["a"]
    with whole_folder(target) as new:
        (new / "c").write_text("3")
    assert [path.name for path in target.iterdir()] == ["c"] and list(target.parent.iterdir()) == [target]


def test_folders_that_cannot_be_written_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    check_writable(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match=f"cannot be written: {tmp_path / 'file'} is a file"):
        check_writable(tmp_path / "file" / "run")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=f"cannot be written: {tmp_path} is not writable"):
        check_writable(tmp_path / "run")


@pytest.mark.parametrize("settled", [0, files.SETTLED_NS], ids=["known at once", "known once it is old"])
def test_a_rewritten_file_has_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: int) -> None:
    """Of the same size and time of modification, with one byte changed; an unchanged one is not read again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "SETTLED_NS", settled)
    file, content = tmp_path / "weights", bytearray(os.urandom(3 << 20))
    file.write_bytes(content)
    before, first = file.stat(), content_digest(file)
    assert first == file_digest(file)
    reads: list[Path] = []
    monkeypatch.setattr(files, "file_digest", lambda one: reads.append(one) or file_digest(one))
    monkeypatch.setattr(files, "_KEPT", files._KeptDigests())  # as another process
    assert content_digest(file) == first and bool(reads) == bool(settled)
    content[1 << 20] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert content_digest(file) == file_digest(file) != first


def test_kept_digests_survive_damaged_lines_and_a_home_that_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_KEPT", files._KeptDigests())
    files._KEPT.put("1 2 3 4", "a" * 16)
    (line,) = (kept := tmp_path / "cache/posttrain/digests/files.txt").read_text().splitlines()
    kept.write_text(f"{line.replace('a' * 16, 'b' * 16)}\n{line[:-3]}\nother words\n{line.replace('1 2', '5 6')}\n")
    again = files._KeptDigests()
    assert again.get("1 2 3 4") is None and again.get("5 6 3 4") is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(files, "_KEPT", files._KeptDigests())
    monkeypatch.setattr(files, "SETTLED_NS", 0)
    (tmp_path / "weights").write_bytes(bytes(files.KEPT_BYTES))
    assert content_digest(tmp_path / "weights") == content_digest(tmp_path / "weights")
