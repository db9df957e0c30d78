"""The notebook `add_a_model` runs, and what it adds computes what transformers computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nbclient import NotebookClient

from tests.test_notebooks import FOLDER, kernel_environment, read, text_of


@pytest.mark.thorough
def test_a_family_is_added_in_one_file(tmp_path: Path) -> None:
    notebook = read(FOLDER / "add_a_model.ipynb")
    work = tmp_path / "work"
    work.mkdir()
    resources = {"metadata": {"path": str(work)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute(
        env=kernel_environment(tmp_path)
    )
    printed = "\n".join(text_of(cell) for cell in notebook.cells if cell.cell_type == "code")
    assert printed.count("window 7, RoPE, norms: post") == 3
    assert sorted(path.name for path in work.iterdir()) == ["families", "tiny-exaone4"]
    pytest.importorskip("torch")
    match = re.search(r"largest difference from Exaone4ForCausalLM of transformers: (\S+)", printed)
    assert match is not None
    assert float(match[1]) < 5e-4
