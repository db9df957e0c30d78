"""Every notebook runs, agrees with its script, and its install cell leaves an installed JAX as it is."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jupytext
import nbformat
import pytest
import yaml
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.aot.test_notebooks import NOTEBOOKS, run_of

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
CELL_SECONDS = 1200


def code_of(name: str, beginning: str) -> str:
    """Text of the only code cell of a script that begins so."""
    (found,) = [c.source for c in jupytext.read(FOLDER / f"{name}.py").cells if c.source.startswith(beginning)]
    return str(found)


INSTALL = code_of("quickstart", "import importlib.util")
KEEP = code_of("quickstart", "save_to = None").split("\n\n", 1)[1]


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def test_every_script_has_a_notebook_and_the_other_way_round() -> None:
    assert SCRIPTS
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == [path.stem for path in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_and_notebook_agree(script: Path) -> None:
    notebook = read(script.with_suffix(".ipynb"))
    nbformat.validate(notebook)
    command = f"jupytext --to ipynb --update notebooks/{script.name}"
    made = jupytext.read(script)
    cells, wanted = ([(cell.cell_type, cell.source) for cell in n.cells] for n in (notebook, made))
    assert cells == wanted, f"make it again: {command}"
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"lines_to_next_cell"}
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebooks_name_no_machine(script: Path) -> None:
    notebook = read(script.with_suffix(".ipynb"))
    assert set(notebook.metadata) <= {"jupytext", "kernelspec"}
    assert dict(notebook.metadata.kernelspec) == {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert re.findall(r"/(?:home|Users|root|tmp|usr|opt|content|kaggle)/\S*", json.dumps(notebook)) == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_first_cell_installs_and_the_last_one_keeps(script: Path) -> None:
    """Both are the same everywhere, but for what is kept; add_a_model keeps nothing."""
    code = [cell.source for cell in jupytext.read(script).cells if cell.cell_type == "code"]
    assert code[0] == INSTALL
    if script.stem != "add_a_model":
        choice, rest = code_of(script.stem, "save_to = None").split("\n\n", 1)
        assert rest == KEEP
        assert re.fullmatch(r'save_to = None  # .*\nkeep, name = .*, "posttrain-[a-z0-9-]+"', choice)


def kernel_environment(folder: Path) -> dict[str, str]:
    """As of a user: one device, this checkout importable, no settings of Jupyter from the home folder."""
    own = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC")}
    return own | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / "ipython")}


def text_of(cell: NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs if output.output_type == "stream")


def execute(name: str, folder: Path) -> NotebookNode:
    """Run a notebook in a folder of its own, with the suite's cache of compiled programs."""
    folder.mkdir(exist_ok=True)
    notebook = read(FOLDER / f"{name}.ipynb")
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name="python3", resources=resources)
    client.execute(env=kernel_environment(folder.parent))
    return notebook


def printed_by(notebook: NotebookNode) -> str:
    return "\n".join(text_of(cell) for cell in notebook.cells if cell.cell_type == "code")


def result_of(stage: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((stage / "result.json").read_text())
    assert (stage / "model/model.safetensors").exists()
    return found


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
@pytest.mark.optimized
def test_quickstart_runs_and_improves(tmp_path: Path) -> None:
    work = tmp_path / "work"
    printed = printed_by(execute("quickstart", work))
    result = result_of(work / "runs/notebook-rl/0-rl")
    before, after = result["before"], result["after"]
    assert before["mean"] < 0.6, before
    assert after["mean"] > 0.75, after
    assert after["low"] > before["high"], (before, after)
    assert f"{after['mean']:.1%}" in printed
    assert sorted(path.name for path in work.iterdir()) == ["runs"]


@pytest.mark.thorough
@pytest.mark.optimized
def test_a_mixture_is_distilled(tmp_path: Path) -> None:
    """Its own assertions: held-out KL and likelihood improve, with the intervals apart."""
    work = tmp_path / "work"
    execute("distill_moe", work)
    assert result_of(work / "runs/moe/distilled/0-distill")["difference"]["eval/distill/kl"]["high"] < 0


@pytest.mark.thorough
@pytest.mark.optimized
def test_grpo_by_hand_learns(tmp_path: Path) -> None:
    notebook = execute("grpo_by_hand", tmp_path / "work")
    printed = printed_by(notebook)
    right, first = map(float, re.findall(r"right: ([\d.]+)%; the first steps: ([\d.]+)%", printed)[0])
    assert right > first + 15, printed
    # The live display of the first stage is one output, which has the curve at the end.
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert sum("<polyline" in output.data.get("text/html", "") for output in outputs) == 2


@pytest.mark.thorough
@pytest.mark.optimized
def test_sft_lora_learns_the_chats_and_exports_the_adapter(tmp_path: Path) -> None:
    work = tmp_path / "work"
    printed = printed_by(execute("sft_lora", work))
    rows = [row["nll"] for row in metrics_of(work / "runs/lora") if "nll" in row]
    assert rows[-1] < 0.1 * rows[0], (rows[0], rows[-1])
    assert printed.count("(not: ") <= 1, printed
    assert (work / "runs/lora-adapter/adapter_model.safetensors").exists()
    assert (work / "runs/lora-merged/model.safetensors").exists()
    assert "it fits" in printed


@pytest.mark.thorough
@pytest.mark.optimized
def test_dpo_raises_the_margins(tmp_path: Path) -> None:
    work = tmp_path / "work"
    printed = printed_by(execute("dpo", work))
    result = result_of(work / "runs/dpo/0-preference")
    before, after = result["before"]["metrics"], result["after"]["metrics"]
    assert abs(before["eval/rewards/margins"]) < 1e-3 and after["eval/rewards/margins_low"] > 0.2
    assert after["eval/preferred_ratio_low"] > before["eval/preferred_ratio_high"]
    right = [float(share) for share in re.findall(r"(?:before|after): ([\d.]+)% right", printed)]
    assert right[1] > right[0] + 15, printed
    assert "it fits" in printed


@pytest.mark.thorough
@pytest.mark.optimized
def test_grpo_on_word_problems_learns(tmp_path: Path) -> None:
    work = tmp_path / "work"
    printed = printed_by(execute("grpo_gsm8k", work))
    result = result_of(work / "runs/gsm8k/0-rl")
    assert result["after"]["low"] > result["before"]["high"], result
    assert "it fits" in printed


@pytest.mark.thorough
@pytest.mark.optimized
def test_the_lab_finds_the_fault_and_the_mended_reward_trains(tmp_path: Path) -> None:
    work = tmp_path / "work"
    printed = printed_by(execute("reward_lab", work))
    assert re.search(r"^found: .*substring", printed, re.MULTILINE), printed
    assert "correct: no findings" in printed
    result = result_of(work / "runs/lab/0-rl")
    assert result["after"]["low"] > result["before"]["high"], result


@pytest.mark.thorough
@pytest.mark.optimized
def test_tools_are_learned(tmp_path: Path) -> None:
    work = tmp_path / "work"
    printed = printed_by(execute("tools", work))
    result = result_of(work / "runs/tools/0-rl")
    assert result["after"]["low"] > result["before"]["high"], result
    calls = [row["env/tool_calls"] for row in metrics_of(work / "runs/tools") if "env/tool_calls" in row]
    assert calls[-1] > calls[0] + 0.2, calls
    assert "kcal" in printed


@pytest.mark.thorough
@pytest.mark.optimized
def test_the_assistant_that_sees_learns_its_tools(tmp_path: Path) -> None:
    work = tmp_path / "work"
    printed = printed_by(execute("food_vision", work))
    result = result_of(work / "runs/food-vision/0-rl")
    assert result["after"]["low"] > result["before"]["high"], result["difference"]
    assert re.search(r"^it says: kcal \d+ protein \d+$", printed, re.MULTILINE), printed


@pytest.mark.thorough
@pytest.mark.optimized
def test_the_assistant_for_photographs_learns_to_look_up(tmp_path: Path) -> None:
    work = tmp_path / "work"
    printed = printed_by(execute("food101", work))
    result = result_of(work / "runs/food101/0-rl")
    assert result["after"]["low"] > result["before"]["high"], result["difference"]
    assert "it fits" in printed
    assert re.search(r"^it says: [a-z ]+: (unknown|kcal \d+ protein \d+)$", printed, re.MULTILINE), printed


@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_settings_for_a_tpu_are_a_configuration(name: str, number: int, tmp_path: Path) -> None:
    """That they fit is compiled by tests/aot."""
    (stage,) = run_of(name, number, tmp_path).stages
    assert stage.num_steps >= 50


def test_food101_has_the_settings_of_its_configuration() -> None:
    """On eight chips; the notebook's own are the data, the tool and the rewards, which it has in Python."""
    config = yaml.safe_load((ROOT / "configs/rl/food101_qwen3_vl_4b.yaml").read_text(encoding="utf-8"))
    config["optimizer"]["learning_rate"] = float(config["optimizer"]["learning_rate"])  # text in YAML 1.1
    chips = [SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")] * 8
    names: dict[str, Any] = {"jax": SimpleNamespace(devices=lambda: chips), "print": lambda *_: None}
    exec(code_of("food101", "platform, number ="), names)
    own = {"kind", "output", "seed", "dataset", "eval_dataset", "tools", "rewards"}
    assert names["settings"] == {name: value for name, value in config.items() if name not in own}
    assert names["asked"] == {name: config["dataset"][name] for name in ("system", "prompt")}
    scored = {reward["fn"].rpartition(":")[2]: reward["weight"] for reward in config["rewards"]}
    written = code_of("food101", "rl = pt.RL(")
    assert dict(re.findall(r'"fn": (\w+), "text": False, "weight": ([\d.]+)', written)) == {
        name: str(weight) for name, weight in scored.items()
    }


def wheel(folder: Path, name: str, version: str, requires: str = "") -> Path:
    """A package with nothing in it but a module and its metadata."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment with nothing but this one's pip: to install one takes longer than the tests."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    spec = importlib.util.find_spec("pip")
    assert spec is not None and spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, Path(packages) / "pip")
    return python


def test_the_install_cell_asks_where_posttrain_is(tmp_path: Path, environment: str) -> None:
    """In a folder that holds nothing but the notebook, as on Colab and Kaggle."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = [environment, "-c", INSTALL]
    done = subprocess.run(arguments, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert "ValueError: repository is empty and no checkout holds this notebook" in done.stderr
    assert done.returncode == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("requires", "installs"), [("jax>=1", True), ("jax>=2", False)], ids=["jax-serves", "jax-too-old"]
)
def test_the_install_cell_keeps_an_installed_jax(
    tmp_path: Path, environment: str, requires: str, installs: bool
) -> None:
    """With real pip, from a folder of packages: `jax` 1 is there, 2 could be had."""
    install = INSTALL
    packages = tmp_path / "packages"
    packages.mkdir()
    old, _ = wheel(packages, "jax", "1.0"), wheel(packages, "jax", "2.0")
    project = wheel(packages, "posttrain", "1.0", requires)
    assert install.count('repository = ""') == 1
    install = install.replace('repository = ""', f"repository = {str(project)!r}")

    hidden = ("PYTHONPATH", "PIP_CONSTRAINT", "PIP_CONFIG_FILE", "PIP_INDEX_URL")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    variables |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(packages), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [environment, *arguments], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )

    run("-m", "pip", "uninstall", "--yes", "posttrain", "jax")
    before = run("-m", "pip", "install", str(old))
    assert before.returncode == 0, before.stderr
    done = run("-c", install)
    assert (done.returncode == 0) is installs, done.stderr
    assert run("-c", "import jax; print(jax.__version__)").stdout == "1.0\n"
    found = run("-c", "import posttrain; print(posttrain.__version__)")
    assert found.stdout == ("1.0\n" if installs else ""), found.stderr
    if not installs:
        assert "jax" in done.stderr and "conflict" in done.stderr.lower()
