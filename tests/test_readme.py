"""Documents and configs/ say what can be done: commands parse, configurations pass, Python runs, links exist.

A `bash` block holds commands of the forms in `FORMS`. A `python` block is run, but where it would train it is only
checked (`tests/snippets.py`). A `yaml` block is a whole configuration, which is checked, or some of its fields. A block
without a language, or `text`, is output, a tree of files, or another project's code. `-m thorough` runs what the pages
spell out (`tests/test_documents_run.py`).
"""

from __future__ import annotations

import functools
import itertools
import re
import shlex
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer

from posttrain.cli import app
from posttrain.config import DatasetSection, RunConfig
from posttrain.config.yaml_file import build_config, load_config
from posttrain.errors import ConfigError
from posttrain.runs.check import check
from posttrain.stages.table import stage_names
from tests.documents import (
    DOCUMENTS,
    FENCE,
    PYTHON,
    ROOT,
    SHELL,
    YAML,
    Block,
    all_blocks,
    blocks,
    blocks_of,
    check_fields,
    is_part_of_a_file,
    is_whole,
    parse,
    titled,
    write_folder,
)
from tests.often import often
from tests.snippets import run_python

README = ROOT / "README.md"
README_LINES = 150
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
CONFIG_LINES = 40
NUM_ROWS = 50
"""Of each dataset that a check reads; what the commands of the documents check as well is checked once."""
LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|<(?:img|a)[^>]*?(?:src|href)=\"([^\"]+)\"")
INLINE_CALL = re.compile(r"\| `(pt\.\w+\(.*?\))` \|")
REMOTE = re.compile(r"[a-z][a-z0-9+.-]*:", re.I)


def parameters(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.name) for block in all_blocks(*languages)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("documents"))


# --- configurations ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def offline() -> Iterator[None]:
    """As on a machine without network: what only the hub knows becomes a note of the check."""
    from huggingface_hub import constants

    with patch.object(constants, "HF_HUB_OFFLINE", True):
        yield


@functools.cache
def checked(config: str, overrides: tuple[str, ...] = (), *, num_rows: int) -> list[str]:
    """The lines of `posttrain check` over the first rows of each dataset."""
    return check(first_rows(load_config(config, overrides), num_rows))


def first_rows(config: RunConfig, num_rows: int) -> RunConfig:
    """The configuration over so many rows of each dataset; a function that draws `count` rows draws no more."""

    def few(section: Any) -> Any:
        if not isinstance(section, DatasetSection):
            return tuple(map(few, section))
        drawn = {"count": min(section.args["count"], num_rows)} if "count" in section.args else {}
        limit = min(section.limit or num_rows, num_rows)
        return section.model_copy(update={"limit": limit, "args": {**section.args, **drawn}})

    def shorter(stage: Any) -> Any:
        found = {name: getattr(stage, name, None) for name in ("dataset", "eval_dataset", "mix")}
        return stage.model_copy(update={name: few(section) for name, section in found.items() if section})

    return config.model_copy(update={"stages": tuple(map(shorter, config.stages))})


@pytest.mark.parametrize("num_rows", often([NUM_ROWS, 500], NUM_ROWS))
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_pass_their_check(
    path: Path, num_rows: int, offline: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that go on from another run's model find a tiny one here."""
    if re.search(r"path: runs/", path.read_text()):
        monkeypatch.chdir(folder)
    lines = checked(str(path.relative_to(ROOT)), num_rows=num_rows)
    text = "\n".join(lines)
    for name in stage_names(load_config(path)):
        assert name in text
    assert ("not checked" in text) == bool(hub_ids(load_config(path)))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_say_first_what_they_need(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hub ids and the machine, in the first line; or nothing but another run, which an error names."""
    config, text = load_config(path), path.read_text(encoding="utf-8")
    first = text.partition("\n")[0]
    assert ".." not in [part for word in re.findall(r"[\w./-]+", text) for part in word.split("/")]
    if ids := hub_ids(config):
        assert [name for name in ids if name not in first] == []
        assert re.search(r"TPU|v5|GPU", first), first
    elif before := re.search(r"path: (runs/(\w+)/\S+/model)\b", text):
        assert f"configs/{before[2]}.yaml" in text[: text.index("output:")]
        # As in a fresh clone, where nothing ran yet.
        for name in ("configs", "rewards", "envs"):
            (tmp_path / name).symlink_to(ROOT / name)
        monkeypatch.setattr("posttrain.config.locator.CHECKOUT", tmp_path)
        monkeypatch.chdir(tmp_path)
        config = load_config(path.relative_to(ROOT))
        with pytest.raises(ConfigError, match=f"{before[1]}: .*; first run: posttrain run configs/{before[2]}.yaml$"):
            check(first_rows(config, NUM_ROWS))


def hub_ids(config: RunConfig) -> set[str]:
    """The model, its teachers, the tokenizer and the datasets that are on the hub."""
    sections = [section for stage in config.stages for section in (stage.dataset, stage.eval_dataset) if section]
    teachers = [teacher for stage in config.stages for teacher in getattr(stage, "teachers", ())]
    names = {config.model.path, config.model.tokenizer, *(section.path for section in (*sections, *teachers))}
    return {name for name in names if name and re.fullmatch(r"[\w-]+/[\w.-]+", name) and not (ROOT / name).exists()}


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
    if words[1] == "launch":
        posttrain_command(["posttrain", *context.params["command"]])
        return
    if words[1] == "check" and context.params["loss"] is not None:
        file = context.params["loss"].partition(":")[0]
        assert file in {name for name, _ in titled(DOCUMENTS)}, f"no document spells out {file}"
        return
    if words[1] in ("run", "check"):
        checked(context.params["config"], tuple(context.params["overrides"] or ()), num_rows=NUM_ROWS)
        return
    for name in ("model", "source", "run"):
        source = context.params.get(name) or ""
        assert not source.startswith("runs/") or source in output_folders(), f"no configuration writes {source}"


@functools.cache
def output_folders() -> set[str]:
    """The runs that all configurations write, and the models that their stages leave."""
    written = [parse(text) for name, text in titled(DOCUMENTS) if name.endswith(".yaml")]
    loaded = [load_config(path) for path in CONFIGS] + [build_config(data) for data in written if is_whole(data)]
    models = {f"{config.output}/{name}/model" for config in loaded for name in stage_names(config)}
    return models | {config.output for config in loaded}


def pip_command(words: Sequence[str]) -> None:
    """`pip install` or `wheel`: files and extras that it names exist."""
    assert words[1] in ("install", "wheel"), words
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
        assert words[2] in ("pytest", "venv", "mypy", "ruff", "virtualenv", "mkdocs", "build"), words
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
    "mkdocs": names_nothing_of_ours,
}


def check_command(words: Sequence[str]) -> None:
    words = [*itertools.takewhile(lambda word: word != ">", words)]
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program = re.sub(r"^(\./|\.venv(?:-aot)?/bin/|~/\w+/bin/)", "", words[0])
    assert program in FORMS, f"{shlex.join(words)}: a form that no test covers; there are {', '.join(FORMS)}"
    FORMS[program]([program, *words[1:]])


def check_script(text: str) -> list[str]:
    """Check every command of a script; the programs that it calls."""
    found = list(commands(text))
    for words in found:
        check_command(words)
    return [words[0] for words in found]


@pytest.mark.parametrize("block", parameters(*SHELL))
def test_commands(block: Block, folder: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert check_script(block.text)


# --- Python and YAML --------------------------------------------------------------------------------------------------


WITH_PYTHON = [d for d in DOCUMENTS if blocks_of(d, *PYTHON) and d.stem != "serve"]
"""The page of the server is run beside one, by tests/serve."""


@pytest.mark.parametrize("document", WITH_PYTHON, ids=lambda path: path.stem)
def test_python(document: Path, folder: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block may use what the blocks before it define."""
    monkeypatch.chdir(folder)
    patterns = ("rewards/*.py", "notebooks/*.py", "posttrain/**/*.py")
    own = [b for b in blocks_of(document, *PYTHON) if not is_part_of_a_file(b.text, *patterns)]
    # Lines stay where they are in the document, for the message of an error.
    lines: list[str] = []
    for block in own:
        lines += [""] * (block.line - len(lines)) + block.text.splitlines()
    # What tables say in one line comes last: it needs what the blocks define.
    cells = INLINE_CALL.findall(FENCE.sub("", document.read_text(encoding="utf-8")))
    left = run_python("\n".join([*lines, *cells]), folder, document.name)
    if document.stem == "loop":
        assert sum(left["curve"][-5:]) < 0.9 * sum(left["curve"][:5]), "SFT learns"
        assert left["grpo"]["ratio/mean"] == pytest.approx(1.0, abs=1e-6) and left["grpo"]["kl"] > 0


@pytest.mark.parametrize("block", parameters(*YAML))
def test_yaml(block: Block, folder: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    if is_part_of_a_file(block.text, "configs/*.yaml"):
        return
    data = parse(block.text)
    if is_whole(data):
        check(first_rows(build_config(data), NUM_ROWS))
    else:
        check_fields(data)


def test_every_method_begins_with_a_configuration() -> None:
    for page in sorted((ROOT / "docs" / "methods").glob("*.md")):
        first = next(iter(blocks(page.read_text())))
        assert first.language == "yaml" and first.title and is_whole(parse(first.text)), page


# --- files ------------------------------------------------------------------------------------------------------------


def links(text: str) -> list[str]:
    """Targets of links and images in this repository, without anchors."""
    found = [first or second for first, second in LINK.findall(FENCE.sub("", text))]
    return [target.split("#")[0] for target in found if not REMOTE.match(target) and not target.startswith("#")]


GENERATED = {"api.md"}
"""Pages that `docs/hooks.py` makes; `mkdocs build --strict` follows links to them, and to headings."""
NAMED = re.compile(
    r"(?<![\w./-])(?:configs|rewards|notebooks|bench|tests|posttrain|docs)/[\w./*-]*\.(?:py|yaml|md|ipynb|txt|svg)\b"
)


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: path.stem)
def test_links_and_names_of_files(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    targets = [target for target in links(text) if Path(target).name not in GENERATED]
    assert [target for target in targets if not (document.parent / target).exists()] == []
    named = [name for name in NAMED.findall(FENCE.sub("", text)) if not list(ROOT.glob(name))]
    assert named == []


IDENTIFIER = re.compile(r"(?<![\w./:-])[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?![\w/(-]|\.\w)")


@functools.cache
def words_of_the_project() -> set[str]:
    paths = [*ROOT.glob("posttrain/**/*.py"), *ROOT.glob("rewards/*.py"), *ROOT.glob("tests/**/*.py"), *CONFIGS]
    return set().union(*(re.findall(r"\w+", path.read_text()) for path in paths))


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if d.parent.name != "coming-from"], ids=lambda path: path.stem
)
def test_names_in_code_marks_are_of_the_project(document: Path) -> None:
    """So that a field that is renamed is renamed in the documents as well. Pages about other projects have theirs."""
    marked = re.findall(r"`([^`\n]+)`", FENCE.sub("", document.read_text(encoding="utf-8")))
    names = {name for text in marked for name in IDENTIFIER.findall(text)}
    assert sorted(names - words_of_the_project()) == []


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= README_LINES


def tree_names(text: str) -> list[str]:
    """Files and folders that begin a line: `posttrain/`, `  config.py   typed ...`, `├── cli.py`."""
    starts = [re.match(r"[\s│├└─|`+-]*([\w.-][\w./-]*)(?:\s{2,}|\s*$)", line) for line in text.splitlines()]
    names = [found[1] for found in starts if found]
    return [name for name in names if re.search(r"/$|\.(py|yaml|toml|txt|md|ipynb)$", name)]


@pytest.mark.parametrize("block", parameters("", "text"))
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
    python3 -m venv .venv && .venv/bin/pip install -q --no-compile -c constraints.txt -e '.[test]' && \\
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
    write_folder(tmp_path, [])
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
