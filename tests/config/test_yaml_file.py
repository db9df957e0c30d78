"""Finding, reading, overriding and refusing run configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config import Locator, LoRA, RLSection, SFTSection, locator
from posttrain.config.yaml_file import build_config, load_config
from posttrain.errors import ConfigError
from tests.config.files import LONG, SHORT, Write, fresh_folder, mistakes, read, rl

pytestmark = pytest.mark.fast

KINDS = "'sft' or 'distill' or 'rl' or 'preference' or 'online_preference' or 'reward_model' or 'drafter'"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    return fresh_folder(tmp_path, monkeypatch)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_long_form(write: Write) -> None:
    config = read(write(LONG))
    assert [type(stage) for stage in config.stages] == [SFTSection, RLSection]
    assert config.stages[0].optimizer.learning_rate == 1e-4
    assert config.model.init == {"model_type": "llama", "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    assert rl(config).dataset.chat is False
    assert [reward.weight for reward in rl(config).rewards] == [1.0, -0.5]


def test_short_form_is_one_stage(write: Write) -> None:
    config = read(write(SHORT))
    assert len(config.stages) == 1
    assert config.stages[0].num_steps == 10
    assert config.model.path == "some/model"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1E5", 1e5), ("+.5", 0.5), ("2.", 2.0), ("-.inf", float("-inf")), ("1_000", 1000),
        ("0x1F", 31), ("0o17", 15), ("-3", -3), ("010", "010"), ("1:30", "1:30"), ("2024-01-31", "2024-01-31"),
        ("yes", "yes"), ("off", "off"), ("true", True), ("null", None), ("", None),
        ("1e", "1e"), ("1.2.3", "1.2.3"), ("-", None),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(write: Write, text: str, value: object) -> None:
    written = "[null]" if text == "-" else text
    config = read(write(LONG), f"model.init.x={written}")
    assert config.model.init is not None
    found = config.model.init["x"]
    assert (found, type(found)) == (([None], list) if text == "-" else (value, type(value)))


def test_anchors_merge_and_are_overridden_apart(write: Write) -> None:
    text = LONG.replace("optimizer: {learning_rate: 1e-4}", "optimizer: &o {learning_rate: 1e-4}")
    text = text.replace("optimizer: {learning_rate: 0.001}", "optimizer: {<<: *o, eps: 1e-6}")
    config = read(write(text), "stages.0.optimizer.learning_rate=1")
    assert (rl(config).optimizer.learning_rate, rl(config).optimizer.eps) == (1e-4, 1e-6)
    shared = text.replace("{<<: *o, eps: 1e-6}", "*o")
    config = read(write(shared), "stages.0.optimizer.learning_rate=1")
    assert [stage.optimizer.learning_rate for stage in config.stages] == [1.0, 1e-4]


def test_build_config_takes_a_mapping() -> None:
    data = {
        "output": "o", "seed": 1, "model": {"path": "m"}, "kind": "sft", "dataset": {"path": "d"}, "num_steps": 1,
        "row_tokens": 8, "batch_rows": 1, "optimizer": {"learning_rate": 0.1},
    }  # fmt: skip
    assert build_config(data, ["seed=2"]).seed == 2
    assert data["seed"] == 1
    with pytest.raises(ConfigError, match=r"^SFT\(\): num_stepz: unknown field; did you mean 'num_steps'\?$"):
        build_config({**data, "num_stepz": 1}, name="SFT()")


# --- overrides --------------------------------------------------------------------------------------------------------


def test_overrides_by_number_kind_and_name(write: Write) -> None:
    config = read(write(LONG), "stages.0.num_steps=5", "stages.rl.num_steps=6", "stages.words.group_size=2")
    assert (config.stages[0].num_steps, rl(config).num_steps, rl(config).group_size) == (5, 6, 2)


def test_overrides_of_list_items_and_new_sections(write: Write) -> None:
    config = read(
        write(LONG), "model.lora.rank=8", "model.lora.targets=[attention]", "stages.rl.rewards.1.weight=2",
        "mesh.tensor=2", "stages.sft.optimizer={learning_rate: 3e-4, schedule: cosine}",
    )  # fmt: skip
    assert config.model.lora == LoRA(rank=8, targets=("attention",))
    assert [reward.weight for reward in rl(config).rewards] == [1.0, 2.0]
    assert config.mesh.tensor == 2
    assert (config.stages[0].optimizer.learning_rate, config.stages[0].optimizer.schedule) == (3e-4, "cosine")


def test_later_overrides_win(write: Write) -> None:
    assert read(write(LONG), "seed=1", "seed=2").seed == 2
    assert read(write(LONG), "model.lora.rank=8", "model.lora=null").model.lora is None
    assert read(write(LONG), "model.lora={rank: 4}", "model.lora.rank=8").model.lora == LoRA(rank=8)


def test_overrides_of_the_short_form(write: Write) -> None:
    config = read(write(SHORT), "num_steps=3", "optimizer.schedule=linear", "seed=9", "stages.sft.batch_rows=2")
    stage = config.stages[0]
    assert isinstance(stage, SFTSection)
    assert (stage.num_steps, stage.optimizer.schedule, config.seed, stage.batch_rows) == (3, "linear", 9, 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "must be KEY=VALUE, such as stages.0.num_steps=5 or model.lora.rank=8"),
        ("a..b=1", "must be KEY=VALUE, such as stages.0.num_steps=5 or model.lora.rank=8"),
        ("stages.2.num_steps=1", "stages has no item 2; it has 2, counted from 0"),
        ("stages.dpo.num_steps=1", "stages: no item is called 'dpo': 0 (sft), 1 (rl words)"),
        ("stages.rl.rewards.short.weight=1", "stages.1.rewards: no item is called 'short': 0 (no name), 1 (no name)"),
        ("seed.x=3", "seed is 0, which has no 'x' in it"),
        ("seed=[1", "not YAML: expected ',' or ']', but got '<stream end>'"),
        ("seed={a: 1, a: 2}", "not YAML: a is given twice, first in line 1; keep one"),
        ("seed=0.5", "seed: must be a whole number; got 0.5"),
        ("seed=", "seed: must be a whole number; got nothing"),
        ("model.lora.rnk=8", "model.lora.rnk: unknown field; did you mean 'rank'?"),
        ("model.lora.alpha=8", "model.lora.rank: required, but missing: Rank: columns of A and rows of B, such as 16."),
        ("modle.path=x", "modle: unknown field; did you mean 'model'?"),
        ("stages.0.dataset.prompt={question}",
         "stages.0.dataset.prompt: must be text; got {question}; write it in quotes inside the shell's: "
         "'stages.0.dataset.prompt=\"{question}\"'"),
        ("num_steps=5", "num_steps: unknown field; did you mean 'stages.sft.num_steps'?"),
    ],
)  # fmt: skip
def test_refused_overrides(write: Write, override: str, message: str) -> None:
    assert mistakes(write(LONG), override) == [f"override {override}: {message}"]


def test_a_name_that_two_stages_have_is_refused(write: Write) -> None:
    file = write(LONG.replace("name: words", "name: sft"))
    assert mistakes(file, "stages.sft.num_steps=1") == [
        "override stages.sft.num_steps=1: stages: 2 items are called 'sft'; use a number: 0 (sft), 1 (rl sft)"
    ]


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sampling: {max_tokens: 32}", "sampling: {max_tokens: 32, temprature: 0.7}",
         "run.yaml:22: stages.1.sampling.temprature: unknown field; did you mean 'temperature'?"),
        ("sampling: {max_tokens: 32}", "sampling: {max-tokens: 32}",
         "run.yaml:22: stages.1.sampling.max-tokens: unknown field; did you mean 'max_tokens'?"),
        ("    group_size: 8\n", "    group_size: 8\n    temperature: 0.7\n",
         "run.yaml:21: stages.1.temperature: unknown field; did you mean 'sampling.temperature'?"),
        ("tokenizer: bytes", "tokenizer: bytes\n  zzz: 1",
         "run.yaml:6: model.zzz: unknown field; known here: path, init, family, tokenizer, chat_template, "
         "chat_template_args, stop_tokens, dtype, "
         "compute_dtype, lora, adapter, quantize, remat, attention, decode_attention, grouped_matmul, "
         "long_context, upscale, image, vision"),
        ("seed: 0\n", "",
         "run.yaml: seed: required, but missing: Random seed of data order, sampling and initial weights."),
        ("num_steps: 10", "num_steps: many", "run.yaml:9: stages.0.num_steps: must be a whole number; got 'many'"),
        ("num_steps: 10", "num_steps: 0", "run.yaml:9: stages.0.num_steps: must be at least 1; got 0"),
        ("{learning_rate: 1e-4}", "{learning_rate: -1}",
         "run.yaml:12: stages.0.optimizer.learning_rate: must be greater than 0; got -1"),
        ("{max_tokens: 32}", "{max_tokens: 32, top_p: 1.5}",
         "run.yaml:22: stages.1.sampling.top_p: must be at most 1; got 1.5"),
        ("{max_tokens: 32}", "{max_tokens: 32, min_p: 1}",
         "run.yaml:22: stages.1.sampling.min_p: must be less than 1; got 1"),
        ("{max_tokens: 32}", "{max_tokens: 32, stop: end}",
         "run.yaml:22: stages.1.sampling.stop: must be a list; got 'end'"),
        ("{max_tokens: 32}", "{max_tokens: 32, temperature: warm}",
         "run.yaml:22: stages.1.sampling.temperature: must be a number; got 'warm'"),
        ("tokenizer: bytes", "tokenizer: bytes\n  dtype: bf16",
         "run.yaml:6: model.dtype: must be 'float32' or 'bfloat16'; got 'bf16'; did you mean 'bfloat16'?"),
        ("tokenizer: bytes", "tokenizer: bytes\n  remat: sure",
         "run.yaml:6: model.remat: must be none, full, dots, offload, auto or a list of activations; got 'sure'"),
        ("tokenizer: bytes", "tokenizer: bytes\n  remat: [attention, gates]",
         "run.yaml:6: model.remat: 'gates' is no activation; did you mean 'gate'?; there are qkv, attention, "
         "projection, gate, up, down, block_input"),
        ("tokenizer: bytes", "tokenizer: bytes\n  remat: {save: [qkv, block_input], offload: [qkv]}",
         "run.yaml:6: model.remat: block_input is always saved; name it in offload to keep it in the host's memory; "
         "qkv: either save or offload"),
        ("tokenizer: bytes", "tokenizer: bytes\n  long_context: sure",
         "run.yaml:6: model.long_context: must be true or false; got 'sure'"),
        ("output: runs/x", "output: 7", "run.yaml:1: output: must be text; got 7; write it in quotes"),
        ("dataset: {path: a.jsonl}", "dataset: {path: a.jsonl, args: 3}",
         "run.yaml:8: stages.0.dataset.args: must be a section of keys and values; got 3"),
        ("{model_type: llama, rms_norm_eps: 1e-6, rope_theta: 1e4}", "7",
         "run.yaml:4: model.init: must be a section of keys and values; got 7"),
        ("tokenizer: bytes", "tokenizer: bytes\n  lora: 16",
         "run.yaml:6: model.lora: must be a section of fields (rank, alpha, targets, layers, rank_pattern, "
         "alpha_pattern, rslora, dora, dropout, modules_to_save); got 16"),
        ("kind: sft", "kind: stf", f"run.yaml:7: stages.0.kind: must be {KINDS}; got 'stf'; did you mean 'sft'?"),
        ("- kind: rl\n    name", "- name", f"run.yaml:13: stages.1.kind: required, but missing: {KINDS}"),
        ("stages:\n", "stages:\n  - none\n",
         f"run.yaml:7: stages.0: must be a section with kind: {KINDS}; got 'none'"),
        ("{max_tokens: 32}", "{max_tokens: 64}",
         "run.yaml:13: stages.1: sampling.max_tokens=64 must be less than row_tokens=64, "
         "which holds prompt and completion"),
        ("  tokenizer: bytes\n", "", "run.yaml:3: model: init needs tokenizer: a folder, a hub id or bytes"),
        ("rope_theta: 1e4}", "torch_dtype: bfloat16}",
         "run.yaml:3: model: init.torch_dtype=bfloat16: the weights have dtype=float32; set that, or remove this"),
        ("seed: 0", "seed: 0\noutput: y", "run.yaml:3: not YAML: output is given twice, first in line 1; keep one"),
        ("max_tokens: 32", "max_tokens: 32, max_tokens: 3",
         "run.yaml:22: not YAML: stages.1.sampling.max_tokens is given twice, first in line 22; keep one"),
        ("seed: 0", "seed: 0: 1", "run.yaml:2: not YAML: mapping values are not allowed here"),
        ("seed: 0", "seed: !!set 0", "run.yaml:2: not YAML: expected a mapping node, but found scalar"),
        ("seed: 0", "seed: !!python/name:a.b",
         "run.yaml:2: not YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/name:a.b'"),
    ],
)  # fmt: skip
def test_one_line_for_a_mistake(write: Write, old: str, new: str, message: str) -> None:
    assert LONG.count(old) == 1
    assert mistakes(write(LONG.replace(old, new))) == [message]


def test_every_mistake_has_its_line_and_a_misspelling_is_one(write: Write) -> None:
    text = LONG.replace("row_tokens: 64\n    batch_rows", "row_token: 64\n    batch_rows").replace("seed: 0", "sed: 0")
    assert mistakes(write(text), "stages.rl.group_size=0") == [
        "run.yaml:10: stages.0.row_token: unknown field; did you mean 'row_tokens'?",
        "override stages.rl.group_size=0: stages.1.group_size: must be at least 1; got 0",
        "run.yaml:2: sed: unknown field; did you mean 'seed'?",
    ]


def test_values_of_a_section_and_its_base_classes_are_checked_together(write: Write) -> None:
    found = mistakes(write(LONG), "stages.rl.eval_every=2", "stages.rl.group_size=1", "stages.rl.updates=3")
    assert [text for text in found if "eval_every needs eval_dataset" in text]
    assert [text for text in found if "group_size=1" in text]
    assert [text for text in found if "updates=3 must divide" in text]


def test_an_empty_list_and_a_list_of_wrong_items(write: Write) -> None:
    head = LONG[: LONG.index("stages:")]
    assert mistakes(write(head + "stages: []\n")) == ["run.yaml:6: stages: must have at least 1 item; got []"]
    assert mistakes(write(head + "stages: [1]\n")) == [
        f"run.yaml:6: stages.0: must be a section with kind: {KINDS}; got 1"
    ]
    assert mistakes(write(head)) == [
        "run.yaml: stages: required, but missing: Stages in order; each starts from the weights of the previous one."
    ]


def test_mistakes_of_the_short_form_have_no_stage_number(write: Write) -> None:
    text = SHORT.replace("num_steps: 10", "num_step: 10").replace("seed: 0", "sead: 0").replace("1e-4", "fast")
    assert mistakes(write(text)) == [
        "run.yaml:9: optimizer.learning_rate: must be a number; got 'fast'",
        "run.yaml:3: sead: unknown field; did you mean 'seed'?",
        "run.yaml:6: num_step: unknown field; did you mean 'num_steps'?",
    ]
    assert mistakes(write(SHORT.replace("kind: sft", "kind: stf"))) == [
        f"run.yaml:1: kind: must be {KINDS}; got 'stf'; did you mean 'sft'?"
    ]


@pytest.mark.parametrize(("text", "shown"), [("", "nothing"), ("- 1\n- 2\n", "[1, 2]"), ("hello\n", "'hello'")])
def test_a_file_that_is_no_mapping(write: Write, text: str, shown: str) -> None:
    assert mistakes(write(text)) == [f"run.yaml: a configuration is a mapping of fields such as `seed: 0`; got {shown}"]


def test_long_values_are_cut(write: Write) -> None:
    (line,) = mistakes(write(LONG), f"seed={'x' * 500}")
    assert line.endswith("must be a whole number; got '" + "x" * 55 + " ...")


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the folder that holds `configs/`."""
    root = tmp_path / "project"
    (root / "configs").mkdir(parents=True)
    (root / "configs" / "quickstart.yaml").write_text(SHORT)
    monkeypatch.setattr(locator, "CHECKOUT", root)
    return root


def test_missing_files_name_the_nearest(write: Write, project: Path) -> None:
    nearest = str(project / "configs" / "quickstart.yaml")
    shown = nearest.removeprefix(f"{Path.cwd()}/")
    assert mistakes("configs/quikstart.yaml") == [f"configs/quikstart.yaml: no such file; did you mean '{shown}'?"]
    assert mistakes("quickstart") == [f"quickstart: no such file; did you mean '{shown}'?"]
    write(SHORT)
    assert mistakes("ran.yaml") == ["ran.yaml: no such file; did you mean 'run.yaml'?"]
    [other] = mistakes("unlike-anything.yaml")
    assert other == "unlike-anything.yaml: no such file; give a YAML file, such as configs/quickstart.yaml"


def test_a_folder_and_binary_data_are_no_config(write: Write) -> None:
    write("").write_bytes(b"\xff\xfe\x00")
    (line,) = mistakes("run.yaml")
    assert line.startswith("run.yaml: cannot be read as text: ")
    Path("folder").mkdir()
    (line,) = mistakes("folder")
    assert line.startswith("folder: cannot be read as text: ")


def test_paths_from_the_current_folder_then_the_file_then_the_project(write: Write, project: Path) -> None:
    write(SHORT)
    path = load_config("configs/quickstart.yaml").model.path
    assert path is not None and path.folder == (project / "configs").resolve()
    base = Path("base")
    base.mkdir()
    assert Locator("rows.jsonl", base).found is None
    for folder in (project, base, Path()):
        (folder / "rows.jsonl").write_text("")
        assert Locator("rows.jsonl", base).file == (folder / "rows.jsonl").absolute()
    absolute = (base / "rows.jsonl").absolute()
    assert Locator(str(absolute)).file == absolute


def test_an_unknown_path_names_the_nearest(write: Write) -> None:
    write("")
    Path("data").mkdir()
    Path("data/train.jsonl").write_text("")
    with pytest.raises(
        ConfigError, match=r"^data/tran.jsonl: no such file or folder; did you mean 'data/train.jsonl'\?$"
    ):
        str(Locator("data/tran.jsonl").file)
    with pytest.raises(ConfigError, match=r"^nowhere/rows.jsonl: no such file or folder$"):
        str(Locator("nowhere/rows.jsonl").file)


def test_an_installed_package_finds_only_its_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "posttrain" / "configs").mkdir(parents=True)
    (tmp_path / "numpy").mkdir()
    monkeypatch.chdir("/")
    monkeypatch.setattr(locator, "CHECKOUT", None)
    monkeypatch.setattr(locator, "INSTALLED", {"configs": tmp_path / "posttrain", "rewards": tmp_path})
    assert Locator("configs").found == tmp_path / "posttrain" / "configs"
    assert Locator("numpy").found is None


def test_a_text_stands_for_a_path_or_a_list() -> None:
    """`dataset: chats.jsonl`, also where an override sets another of its fields."""
    stage = {"kind": "sft", "dataset": "chats.jsonl", "mix": ["more.jsonl"], "num_steps": 1, "batch_rows": 1}
    given = {"output": "o", "seed": 0, "model": {"path": "m", "lora": {"rank": 2, "targets": "all-linear"}}}
    config = build_config({**given, **stage, "row_tokens": 8}, ["dataset.limit=3"])
    (section,) = config.stages
    assert isinstance(section, SFTSection)
    assert (section.dataset.path, section.dataset.limit, section.mix[0].path) == ("chats.jsonl", 3, "more.jsonl")
    assert config.model.lora is not None and config.model.lora.targets == ("all-linear",)
    with pytest.raises(ConfigError, match=r"dataset.*: must be a section of fields \(path, .*; got 5"):
        build_config({**given, **stage, "row_tokens": 8, "dataset": 5})
