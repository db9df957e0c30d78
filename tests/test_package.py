"""Wheel, source distribution and image: complete, and enough for the quick start without the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGED = {"posttrain": "posttrain", "rewards": "rewards", "envs": "envs", "configs": "posttrain/configs"}
"""Folders of the repository, and their places in the wheel."""
SHIPPED = ("chatml", "llama3", "phi3.5", "qwen3")
SHORT = ("stages.sft.num_steps=21", "stages.rl.num_steps=2", "stages.rl.eval_dataset.args.count=8")


def sources() -> dict[str, str]:
    """Files that a user needs: where they are in the repository, and in the wheel."""
    return {
        path.relative_to(ROOT).as_posix(): f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in PACKAGED.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


def context(folder: Path) -> Path:
    """Copy of what `docker build` sees of the repository."""
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*" and lines[-1] == "**/__pycache__"
    folder.mkdir()
    for name in (line.removeprefix("!") for line in lines[1:-1]):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def build(folder: Path, out: Path, *options: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", out, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the source distribution and the wheel that is made from it."""
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out)
    return out


@pytest.mark.thorough
def test_wheel_and_source_distribution_are_complete(built: Path, tmp_path: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == set(sources().values()) >= {f"posttrain/data/chat_templates/{name}.jinja" for name in SHIPPED}
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert sources().keys() | {"README.md", "LICENSE", "constraints.txt", "pyproject.toml", "Dockerfile"} <= inside
    build(context(tmp_path / "context"), tmp_path / "dist", "--wheel")
    (image_wheel,) = (tmp_path / "dist").glob("*.whl")
    assert sorted(zipfile.ZipFile(image_wheel).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


@pytest.mark.thorough
def test_the_wheel_alone_runs_the_quickstart(built: Path, tmp_path: Path) -> None:
    """In an empty folder; only the dependencies are those of the tests."""
    (wheel,) = built.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    below = sysconfig.get_path("purelib")
    (packages / "below.pth").write_text(f"import sys; sys.path.append({below!r})\n")
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    (tmp_path / "empty").mkdir()

    def python(*arguments: str) -> str:
        command = [tmp_path / "env/bin/python", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path / "empty", env=own, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert python("-c", "import posttrain, rewards; print(posttrain.__file__, rewards.__file__)").split() == [
        f"{packages}/posttrain/__init__.py",
        f"{packages}/rewards/__init__.py",
    ]
    python("-m", "posttrain", "run", "configs/quickstart.yaml", *SHORT)
    result = json.loads((tmp_path / "empty/runs/quickstart/1-rl/result.json").read_text())
    assert result["after"]["n"] == 8
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["runs"]


def test_the_image_installs_extras_that_there_are() -> None:
    """From a plain Python image and the registry alone: no other downloads, no address of a registry."""
    text = (ROOT / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    offered = re.search(r"EXTRA says for which: (.*)\.\n", text)
    assert offered is not None
    assert set(re.findall(r"\b(?:tpu|cuda\d*)\b", offered[1])) == {"tpu", "cuda", "cuda12"} <= extras.keys()
    (always,) = re.findall(r"\[\$EXTRA,([\w,]+)\]", text)
    assert set(always.split(",")) <= extras.keys()
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"python:${PYTHON}-slim"}
    commands = re.findall(r"^RUN (\S+) (\S+)", text, re.MULTILINE)
    assert [" ".join(words) for words in commands] == ["pip wheel", "test -n", "pip install", "useradd --uid"]
    assert "://" not in text and "index" not in text
    # Everything is installed before, and nothing after runs as root.
    users = [(number, line) for number, line in enumerate(text.splitlines()) if line.startswith("USER ")]
    last_install = max(number for number, line in enumerate(text.splitlines()) if line.startswith(("RUN", "COPY")))
    assert [line for _, line in users] == ["USER 1000"] and users[0][0] > last_install
    assert re.search(r"useradd --uid 1000\b", text) and "HOME=/work" in text and "--mode 1777" in text
    assert all("$as" in line for line in text.splitlines() if line.startswith("#   docker run"))
    python = re.search(r"^ARG PYTHON=([\d.]+)$", text, re.MULTILINE)
    assert python is not None and python[1] in ("3.11", "3.12", "3.13")
