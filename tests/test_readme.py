"""What README and configs/ say can be done: commands parse, configurations pass their check, Python runs, links exist.

A `bash` block of README holds commands of the forms in `FORMS`. A `python` block is run, but where it would train, the
run is only checked (`tests/snippets.py`), and checkpoints and data that are not here are tiny ones. A `yaml` block is a
part of a file, a whole configuration, or fields of one. A block without a language is output or a tree of files.
"""

from __future__ import annotations

import functools
import itertools
import re
import shlex
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from posttrain.cli import app
from posttrain.config import RLSection, RunConfig, SFTSection
from posttrain.config.yaml_file import build_config, load_config
from posttrain.runs.check import check
from posttrain.stages.table import stage_names
from tests.snippets import run_python

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
CONFIG_LINES = 40
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```\s*$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|<(?:img|a)[^>]*?(?:src|href)=\"([^\"]+)\"")
REMOTE = re.compile(r"[a-z][a-z0-9+.-]*:", re.I)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int

    @property
    def name(self) -> str:
        return f"{self.language or 'plain'}-line-{self.line}"


def blocks(text: str) -> list[Block]:
    return [
        Block(found["language"], textwrap.dedent(found["text"]), text[: found.start()].count("\n") + 1)
        for found in FENCE.finditer(text)
    ]


def readme() -> str:
    return README.read_text(encoding="utf-8") if README.exists() else ""


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.name) for block in blocks(readme()) if block.language in languages]


# --- configurations ---------------------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without network: what only the hub knows becomes a note of the check."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@functools.cache
def checked(config: str, overrides: tuple[str, ...] = (), *, num_rows: int = 50) -> list[str]:
    """The lines of `posttrain check` over the first rows of each dataset.

    Skips where the configuration needs ../shared and there is none.
    """
    loaded = load_config(config, overrides)
    if "../shared" in loaded.path.read_text() and not (ROOT.parent / "shared").is_dir():
        pytest.skip(f"{config} needs the folder ../shared, which is not there")
    return check(first_rows(loaded.config, num_rows), loaded.base_dir)


def first_rows(config: RunConfig, num_rows: int) -> RunConfig:
    stages = [
        stage.model_copy(update={"dataset": stage.dataset.model_copy(update={"limit": num_rows})})
        for stage in config.stages
    ]
    return config.model_copy(update={"stages": tuple(stages)})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_pass_their_check(path: Path, offline: None) -> None:
    lines = checked(f"configs/{path.name}", num_rows=2000)
    text = "\n".join(lines)
    for name in stage_names(load_config(path).config):
        assert name in text
    assert ("not checked" in text) == needs_hub(load_config(path).config)


def needs_hub(config: RunConfig) -> bool:
    """Whether the model, the tokenizer or a dataset is on the hub."""
    sections = [section for stage in config.stages for section in (stage.dataset, stage.eval_dataset) if section]
    names = {config.model.path, config.model.tokenizer, *(section.path for section in sections)}
    return any(re.fullmatch(r"[\w-]+/[\w.-]+", name) and not (ROOT / name).exists() for name in names if name)


def test_configs_are_short() -> None:
    sizes = {path.name: len(path.read_text().splitlines()) for path in CONFIGS}
    assert {name: size for name, size in sizes.items() if size > CONFIG_LINES} == {}, f"at most {CONFIG_LINES} lines"


# --- commands ---------------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a script: continued lines joined, comments dropped, split at `&&`, `;` and `|`."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="&;|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("&;|"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def in_root(word: str) -> None:
    assert (ROOT / word).exists(), f"{word} is not there"


def posttrain_command(words: Sequence[str]) -> None:
    """Parsed by the command line's own parser; configurations are checked, with their overrides."""
    if words[1:] in ([], ["--help"]) or words[2:] == ["--help"]:
        return
    known = {command.name or command.callback.__name__: command for command in app.registered_commands}
    assert words[1] in known, f"there is no command {words[1]!r}"
    command = typer.main.get_command(app).commands[words[1]]
    context = command.make_context(words[1], list(words[2:]))
    if words[1] in ("run", "check"):
        checked(context.params["config"], tuple(context.params["overrides"] or ()))
    elif context.params["model"].startswith("runs/"):
        assert context.params["model"] in output_folders(), f"no configuration writes {context.params['model']}"


def output_folders() -> set[str]:
    """The models that the stages of all configurations leave."""
    loaded = [load_config(path).config for path in CONFIGS]
    return {f"{config.output}/{name}/model" for config in loaded for name in stage_names(config)}


def pip_command(words: Sequence[str]) -> None:
    """`pip install`: files and extras that it names exist."""
    assert words[1] == "install", words
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for before, word in itertools.pairwise(words):
        if before in ("-c", "-r"):
            in_root(word)
        project = re.fullmatch(r"(?:\.|posttrain)\[([\w,-]+)\]", word)
        if project is not None:
            assert set(project[1].split(",")) <= extras.keys(), f"no such extra: {word}"


def python_command(words: Sequence[str]) -> None:
    """`python -m MODULE ...`, or a script of this project."""
    if words[1] == "-m" and words[2] == "pip":
        pip_command(words[2:])
    elif words[1] == "-m" and words[2] == "posttrain":
        posttrain_command(words[2:])
    elif words[1] == "-m":
        assert words[2] in ("pytest", "venv", "mypy", "ruff", "virtualenv"), words
        for word in words[3:]:
            if word.startswith("tests"):
                in_root(word.split("::")[0])
    else:
        in_root(words[1])


def names_nothing_of_ours(words: Sequence[str]) -> None:
    """`cd`, `git clone`, `test -d`, `tensorboard --logdir`: of folders that another command makes."""


def names_files(words: Sequence[str]) -> None:
    """Files of this project among the words exist."""
    for word in words:
        if re.search(r"\.(py|ipynb)$|^\.ci/", word):
            in_root(word)


FORMS: dict[str, Callable[[Sequence[str]], None]] = {
    "posttrain": posttrain_command,
    "pip": pip_command,
    "python": python_command,
    "python3": python_command,
    ".ci/run": names_files,
    "jupyter": names_files,
    "cd": names_nothing_of_ours,
    "git": names_nothing_of_ours,
    "test": names_nothing_of_ours,
    "tensorboard": names_nothing_of_ours,
}


def check_command(words: Sequence[str]) -> None:
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program = words[0].removeprefix("./").removeprefix(".venv/bin/")
    assert program in FORMS, f"{shlex.join(words)}: a form that no test covers; there are {', '.join(FORMS)}"
    FORMS[program]([program, *words[1:]])


def check_script(text: str) -> list[str]:
    """Check every command of a script; the programs that it calls."""
    found = list(commands(text))
    for words in found:
        check_command(words)
    return [words[0] for words in found]


@pytest.mark.parametrize("block", of("bash", "sh", "shell", "console"))
def test_commands(block: Block, offline: None) -> None:
    assert check_script(block.text)


# --- Python -----------------------------------------------------------------------------------------------------------


def is_part_of_a_file(text: str, *patterns: str) -> bool:
    """Whether a file that is tested elsewhere holds the block as it stands."""
    wanted = "\n" + text.strip("\n") + "\n"
    return any(wanted in "\n" + path.read_text() + "\n" for pattern in patterns for path in ROOT.glob(pattern))


@pytest.mark.parametrize("block", of("python", "py"))
def test_python(block: Block, offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = ("rewards/*.py", "notebooks/*.py", "posttrain/**/*.py")
    if is_part_of_a_file(block.text, *patterns):
        return
    # A block may use what the blocks before it define.
    so_far = [b for b in blocks(readme()) if b.language in ("python", "py") and b.line <= block.line]
    monkeypatch.chdir(tmp_path)
    run_python("\n".join(b.text for b in so_far if not is_part_of_a_file(b.text, *patterns)), tmp_path)


@pytest.mark.parametrize("block", of("yaml", "yml"))
def test_yaml(block: Block) -> None:
    if is_part_of_a_file(block.text, "configs/*.yaml"):
        return
    data = yaml.safe_load(block.text)
    assert isinstance(data, dict)
    if {"model", "output"} <= data.keys():
        build_config(data)
    else:
        known = {*RunConfig.model_fields, *RLSection.model_fields, *SFTSection.model_fields}
        assert data.keys() <= known, f"no field of a configuration: {sorted(data.keys() - known)}"


# --- files ------------------------------------------------------------------------------------------------------------


def links(text: str) -> list[str]:
    """Targets of links and images in this repository, without anchors."""
    found = [first or second for first, second in LINK.findall(FENCE.sub("", text))]
    return [target.split("#")[0] for target in found if not REMOTE.match(target) and not target.startswith("#")]


def test_readme_exists_and_its_links() -> None:
    text = README.read_text(encoding="utf-8")
    assert [target for target in links(text) if not (ROOT / target).exists()] == []
    named = re.findall(r"\bconfigs/[\w./*-]*\w", text)
    assert [name for name in named if not list(ROOT.glob(name))] == []


def tree_names(text: str) -> list[str]:
    """Files and folders that begin a line: `posttrain/`, `  config.py   typed ...`, `├── cli.py`."""
    starts = [re.match(r"[\s│├└─|`+-]*([\w.-][\w./-]*)(?:\s{2,}|\s*$)", line) for line in text.splitlines()]
    names = [found[1] for found in starts if found]
    return [name for name in names if re.search(r"/$|\.(py|yaml|toml|txt|md|ipynb)$", name)]


@pytest.mark.parametrize("block", of("", "text"))
def test_trees_name_what_is_there(block: Block) -> None:
    hidden = {".git", ".venv", "runs"}
    paths = [path for top in ROOT.iterdir() if top.name not in hidden for path in (top, *top.rglob("*"))]
    known = {"/" + str(path.relative_to(ROOT)) for path in paths}
    missing = [name for name in tree_names(block.text) if not any(k.endswith("/" + name.strip("/")) for k in known)]
    assert missing == []


# --- these checks themselves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("posttrain run configs/quickstat.yaml", "did you mean"),
        ("posttrain check configs/quickstart.yaml stages.rl.num_step=3", "num_step"),
        ("posttrain train configs/quickstart.yaml", "no command 'train'"),
        ("posttrain generate runs/nothing/model 1+1=", "no configuration writes"),
        ("posttrain generate model --max-tokns 3 hi", "max-tokns"),
        (".venv/bin/pip install -e '.[tests]'", "no such extra"),
        ("python bench/nothing.py", "is not there"),
        ("curl example.org", "no test covers"),
    ],
)
def test_a_wrong_command_is_found(line: str, message: str, offline: None) -> None:
    with pytest.raises(Exception, match=message):
        check_script(line)


def test_right_commands_pass(offline: None) -> None:
    text = """
    # set-up and main job
    python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e '.[test]' && \\
        .venv/bin/posttrain check configs/quickstart.yaml stages.rl.num_steps=3
    posttrain generate runs/quickstart/1-rl/model "47+8=" --max-tokens 6
    """
    programs = check_script(textwrap.dedent(text))
    assert programs == ["python3", ".venv/bin/pip", ".venv/bin/posttrain", "posttrain"]


def test_python_blocks_are_checked_not_trained(offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = """
import posttrain as pt

def correct(completions, answer, **_):
    return [1.0 if a in c else 0.0 for c, a in zip(completions, answer, strict=True)]

result = pt.RL(model="path/to/model", dataset="train.jsonl", rewards=[correct]).fit()
texts = pt.generate(result.load_model(), pt.load_tokenizer("owner/model"), ["1+1="], max_new_tokens=2, temperature=0.0)
"""
    assert len(run_python(text, tmp_path)["texts"]) == 1
    with pytest.raises(ValueError, match="temprature"):
        run_python(text.replace("rewards=", "sampling={'temprature': 1}, rewards="), tmp_path)
    with pytest.raises(ValueError, match="solution"):
        run_python(text.replace("completions, answer, **_", "completions, solution, **_"), tmp_path)


def test_trees_and_links_are_found() -> None:
    text = '[a](LICENSE) [b](docs/none.md#x) [c](https://example.org) ```x``` <img src="pic.png">'
    assert links(text) == ["LICENSE", "docs/none.md", "pic.png"]
    tree = "posttrain/\n├── cli.py      commands\n  models/   families\nloss 0.3\nmodel   runs/x/model\n"
    assert tree_names(tree) == ["posttrain/", "cli.py", "models/"]
    found = blocks("a\n```bash\nx\n```\n\n  ```python\n  y\n  ```\n")
    assert [(block.language, block.text, block.line) for block in found] == [("bash", "x\n", 2), ("python", "y\n", 6)]
