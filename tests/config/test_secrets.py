"""Secrets: refused in every section with arguments, and taken from the environment when a function is called."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import AfterValidator

import posttrain as pt
from posttrain.config import GRPO, ModelSection, RolloutSection, Section, SFTSection
from posttrain.config.environment import AgentSection, EnvSection, McpSection, ToolSection
from posttrain.config.locator import Locator
from posttrain.config.optimizer import UserOptimizer
from posttrain.config.reward import RewardSection
from posttrain.config.secrets import with_secrets, without_named_secrets, without_secrets
from posttrain.config.teacher import TeacherSection
from posttrain.config.train import DatasetSection
from posttrain.config.yaml_file import dump_config, load_config
from posttrain.data.sources import load_rows
from posttrain.errors import ConfigError
from posttrain.reward.function import rewards_of
from posttrain.reward.rubric import Rubric
from posttrain.runs.reward_lab import read_args
from posttrain.runtime.event_loop import run_async
from posttrain.tools.function import FunctionTool
from posttrain.train.transformations import make_optimizer
from tests.rl.helpers import trajectory
from tests.tiny import tiny_model

KEY = "sk-1234"


def judge(completions: list[str], api_key: str, **_: Any) -> list[float]:
    return [float(api_key == KEY)] * len(completions)


def look(word: str, api_key: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return f"{word} {api_key}"


def scaled(learning_rate: Any, api_key: str = "", **_: Any) -> Any:
    return optax.sgd(learning_rate if api_key == KEY else 0.0)


@dataclass(frozen=True)
class Scored:
    api_key: str
    url: str = "http://judge:8000"

    def __call__(self, rewards_PG: Any) -> Any:
        return rewards_PG


SECTIONS = [
    lambda args: RewardSection(fn=judge, args=args),
    lambda args: EnvSection(fn=judge, args=args),
    lambda args: AgentSection(fn=judge, args=args),
    lambda args: ToolSection(fn=look, args=args),
    lambda args: DatasetSection(path=Locator("rows.py:rows"), args=args),
    lambda args: UserOptimizer(fn=scaled, learning_rate=1.0, args=args),
]
SETTINGS = [
    lambda given: GRPO(advantage={"fn": "advantages.py:mine", **given}),
    lambda given: GRPO(loss={"fn": "losses.py:mine", "args": given}),
    lambda given: SFTSection(**SFT, loss={"fn": "losses.py:mine", **given}),
    lambda given: UserOptimizer(fn={"fn": "mine.py:sgd", **given}, learning_rate=1.0),
]
SFT: dict[str, Any] = {"dataset": {"path": "rows.jsonl"}, "num_steps": 1, "batch_rows": 1, "row_tokens": 8}


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    ("args", "place"),
    [
        ({"api_key": KEY}, "api_key"),
        ({"judgeToken": KEY}, "judgeToken"),
        ({"client": {"headers": {"X-Api-Key": KEY}}}, "client.headers.X-Api-Key"),
        ({"clients": [{"password": KEY}]}, r"clients\[0\].password"),
        ({"api_keys": [KEY]}, "api_keys"),
    ],
)
def test_a_secret_among_arguments_is_refused(section: Any, args: dict[str, Any], place: str) -> None:
    name = place.rpartition(".")[2]
    with pytest.raises(
        ConfigError, match=f"{place}: config.yaml and trackers would show .*{name}_env: VARIABLE"
    ) as said:
        section(args)
    assert KEY not in str(said.value)


@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_no_secret_is_taken(section: Any) -> None:
    args = {"max_tokens": 7, "monkey": "x", "api_key": None, "token": 3, "api_key_env": "JUDGE_KEY", "path_env": "x y"}
    assert section({key: value for key, value in args.items() if key != "api_key"}).args["api_key_env"] == "JUDGE_KEY"
    with pytest.raises(ConfigError, match="api_key_env gives the argument that api_key gives; remove one"):
        section(args)
    with pytest.raises(ConfigError, match="api_key_env must be the name of an environment variable"):
        section({"api_key_env": "sk-1234"})


@pytest.mark.parametrize("section", SETTINGS)
def test_a_secret_among_settings_of_an_object_is_refused(section: Any) -> None:
    section({"width": 3, "eos_token": "</s>", "token_env": "JUDGE_KEY"})
    with pytest.raises(ConfigError, match=r"client\.api_key: config.yaml .*give api_key_env: VARIABLE") as said:
        section({"client": {"api_key": KEY}})
    assert KEY not in str(said.value)
    with pytest.raises(ConfigError, match="address: config.yaml .* the password of a URL") as said:
        section({"address": f"https://ann:{KEY}@judge"})
    assert KEY not in str(said.value)


def test_a_secret_among_fields_that_no_function_gets_is_refused() -> None:
    init = {"model_type": "llama", "eos_token_id": 2, "pad_token": "<pad>"}
    ModelSection(init=init, tokenizer=Locator("bytes"), chat_template_args={"bos_token": "<s>"})
    for fields in (
        {"init": {**init, "auth": {"hub_token": KEY}}},
        {"init": init, "chat_template_args": {"api_key": KEY}},
    ):
        with pytest.raises(ConfigError, match=r"(auth\.hub_token|api_key): config.yaml .*remove it") as said:
            ModelSection(tokenizer=Locator("bytes"), **fields)
        assert KEY not in str(said.value)


def test_every_mapping_of_anything_refuses_secrets() -> None:
    """A new field that takes any mapping gets the rule, or a reason here."""
    reasons = {"GrammarSection.json_schema": "a schema, whose names are those of its objects"}
    rules = {without_secrets, without_named_secrets}
    found = 0
    for section in _sections(Section):
        for name, field in section.model_fields.items():
            kind = repr(field.annotation)
            # Settings of objects have their own reader, see above.
            if "typing.Any]" not in kind or "dict[str" not in kind or "UserObject" in kind:
                continue
            metadata = [
                *field.metadata,
                *(m for one in get_args(field.annotation) for m in getattr(one, "__metadata__", ())),
            ]
            kept = any(isinstance(one, AfterValidator) and one.func in rules for one in metadata)
            found += kept
            assert kept or f"{section.__name__}.{name}" in reasons, f"{section.__name__}.{name}"
    assert found >= 8


def _sections(section: type[Section]) -> set[type[Section]]:
    return {section, *(one for child in section.__subclasses__() for one in _sections(child))}


URLS = [
    f"https://ann:{KEY}@hub.example/rows.jsonl",
    f"https://{KEY}@git.example/rows",
    f"postgresql://ann:{KEY}@db/rows",
    f"https://host/rows.jsonl?token={KEY}",
    f"https://store/rows.jsonl?X-Amz-Credential=a&X-Amz-Signature={KEY}",
    f"https://store/rows.jsonl?sv=1&sig={KEY}",
]
PLAIN_URLS = [
    "https://hub.example/rows.jsonl?page=2",
    "ssh://git@host/rows",
    "abfss://rows@account.dfs.core.windows.net/a",
    "a:b@c",
]
PLACES = [
    ("path", lambda url: DatasetSection(path=Locator(url))),
    ("path", lambda url: ModelSection(path=Locator(url))),
    ("url", lambda url: TeacherSection(path=Locator("m"), url=url)),
    (r"args\.clients\[0\]", lambda url: RewardSection(fn=judge, args={"clients": [url]})),
    (r"args\.base\.url", lambda url: UserOptimizer(fn=scaled, learning_rate=1.0, args={"base": {"url": url}})),
    (r"env\.DB", lambda url: McpSection(command=("serve",), env={"DB": url})),
    (r"command\[1\]", lambda url: McpSection(command=("serve", f"--at={url}"))),
    ("command", lambda url: AgentSection(command=("sh", "-c", f"curl {url} > a"))),
    (r"rollout\.engine|engine", lambda url: RolloutSection(engine=Locator(url))),
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(("place", "section"), PLACES)
def test_a_secret_in_a_url_is_refused(place: str, section: Any, url: str) -> None:
    with pytest.raises(ConfigError, match=f"{place}.*would show this secret") as said:
        section(url)
    assert KEY not in str(said.value)


@pytest.mark.parametrize("url", PLAIN_URLS)
@pytest.mark.parametrize(("place", "section"), PLACES)
def test_other_urls_are_taken(place: str, section: Any, url: str) -> None:
    section(url)


def test_overrides_and_keywords_of_the_command_line_are_refused_alike(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "output: runs/x\nseed: 0\nmodel: {path: m}\nkind: sft\ndataset: {path: rows.jsonl}\n"
        "num_steps: 1\nbatch_rows: 1\nrow_tokens: 8\n"
    )
    for override in (
        f"dataset.args.hub_token={KEY}",
        f"dataset.path=https://x:{KEY}@host/rows",
        f"dataset.args={{a: [{{key: {KEY}}}]}}",
    ):
        with pytest.raises(ConfigError, match=r"dataset[.:] ?(args|path).*would show this secret") as said:
            load_config(file, [override])
        assert KEY not in str(said.value)
    for given in (f"api_key={KEY}", f"url=https://x:{KEY}@host"):
        with pytest.raises(ConfigError, match="--set (api_key|url): .*would show this secret") as said:
            read_args([given])
        assert KEY not in str(said.value)
    assert read_args(["api_key_env=JUDGE_KEY", "eos_token=</s>"]) == {"api_key_env": "JUDGE_KEY", "eos_token": "</s>"}


def test_objects_made_in_python_are_written_without_their_secrets() -> None:
    section = RewardSection(fn=functools.partial(judge, ["x"], KEY))
    for given in (section, RewardSection(fn=functools.partial(judge, api_key=KEY)), GRPO(advantage=Scored(KEY))):
        text = dump_config(given)
        assert KEY not in text and "<secret>" in text
    assert "http://judge:8000" in dump_config(GRPO(advantage=Scored(KEY)))


def test_optimizers_get_their_secret_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE_KEY", KEY)
    section = UserOptimizer(fn=scaled, learning_rate=2.0, args={"api_key_env": "RATE_KEY"})
    made = make_optimizer(section, 4, seed=0, model=tiny_model(num_layers=1))
    params = {"x": jnp.ones(3)}
    moved, _ = made.update({"x": jnp.ones(3)}, made.init(params), params, lambda g: g, None, {}, at=jnp.uint32(0))
    np.testing.assert_allclose(moved["x"], -1.0)


@pytest.mark.parametrize("command", [("serve", f"--api-key={KEY}"), ("serve", "--token", KEY), ("env", f"A_KEY={KEY}")])
def test_a_secret_in_a_command_is_refused(command: tuple[str, ...]) -> None:
    for section in (McpSection, AgentSection):
        with pytest.raises(ConfigError, match="the list of processes would show this secret") as said:
            section(command=command)
        assert KEY not in str(said.value)
        section(command=("serve", "--max-tokens", "7", "--token", "--port=1", "key"))


def test_values_come_from_the_environment_at_the_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    given = {"api_key_env": "JUDGE_KEY", "deeper": [{"db_password_env": "JUDGE_KEY"}], "home_env": "HOME"}
    assert with_secrets(given) == {"api_key": KEY, "deeper": [{"db_password": KEY}], "home_env": "HOME"}
    args = {"api_key_env": "JUDGE_KEY"}
    tool = FunctionTool.of(ToolSection(fn=look, args=args))
    assert "api_key" not in json.dumps(tool.schema) and run_async(tool({"word": "a"})) == f"a {KEY}"
    (tmp_path / "rows.py").write_text("def rows(api_key):\n    return [{'prompt': api_key}]\n")
    section = DatasetSection(path=Locator(f"{tmp_path}/rows.py:rows"), args=args)
    assert load_rows(section)[0]["prompt"] == KEY
    (reward,) = rewards_of([RewardSection(fn=judge, args=args)])
    assert KEY not in repr(reward)
    rewards = pt.rl.score(Rubric([reward]), [[trajectory(tokens=range(3))]])
    assert rewards.total_PG.tolist() == [[1.0]]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="args.api_key_env=JUDGE_KEY: no such environment variable is set"):
        rewards_of([RewardSection(fn=judge, args=args)])


def test_no_file_of_a_run_holds_the_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run with a judge in a child process; its folder also has the versions that made it."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    code = "def judge(completions, api_key, **_):\n    return [float(len(text) % 2) for text in completions]\n"
    (tmp_path / "judge.py").write_text(code)
    pt.save_model(tiny_model(vocab_size=261), str(tmp_path / "model"), tokenizer=pt.load_tokenizer("bytes"))
    pt.RL(
        model=str(tmp_path / "model"),
        dataset=[{"prompt": f"{n}+1="} for n in range(4)],
        chat=False,
        num_steps=1,
        prompts_per_step=2,
        row_tokens=16,
        rewards=[{"fn": f"{tmp_path}/judge.py:judge", "args": {"api_key_env": "JUDGE_KEY"}}],
        sampling={"max_tokens": 4},
        output=str(tmp_path / "run"),
    ).fit()
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert len(files) > 5 and not [file for file in files if KEY.encode() in file.read_bytes()]
    assert "api_key_env: JUDGE_KEY" in (tmp_path / "run" / "config.yaml").read_text()
    (versions,) = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert versions["posttrain"] == pt.__version__ and {"python", "platform", "jax", "flax", "optax"} <= versions.keys()
