"""Files and folders appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.errors import ConfigError
from posttrain.runtime.files import check_writable, whole_folder, write_whole

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
