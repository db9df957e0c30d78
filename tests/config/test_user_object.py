"""What users write for a field: names with settings in files, objects, classes and functions in Python."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from posttrain.config import GRPO, RLSection, RunConfig, UserObject
from posttrain.config.locator import object_text, user_object
from posttrain.config.yaml_file import build_config, diff_config, dump_config, load_config
from posttrain.errors import ConfigError
from posttrain.losses.policy import DAPO
from posttrain.losses.sft import SFTLoss
from tests.stages.runs import rl_stage, sft_stage, write_run

OWN = """
from dataclasses import dataclass
from pathlib import Path

@dataclass(frozen=True)
class Clip:
    width: float
    level: str = "token"
    soft: bool = False
    bounds: tuple[float, ...] = ()
    table: Path | None = None

    def __call__(self, stats, batch):
        return self

class Plain:
    def __init__(self, width, **others):
        self.width, self.others = width, others

    def __call__(self, stats, batch):
        return self

class Silent:
    pass

class Raising:
    def __call__(self, stats, batch):
        return self

    def __init__(self, width=1):
        raise ValueError(f"width={width} is odd")

def clipped(stats, batch, width: float = 0.1):
    return stats, batch, width

clipped.kl_coef = 0.0
narrow = Clip(0.1)
"""


@dataclass(frozen=True)
class Width:
    """Loss of a module, as users pass it in Python."""

    width: float
    names: tuple[str, ...] = ()

    def __call__(self, stats: Any, batch: Any) -> Any:
        return stats


class Bare:
    def __init__(self, width: float):
        self.width = width

    def __call__(self, stats: Any, batch: Any) -> Any:
        return stats


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)


def made(value: Any) -> Any:
    return user_object(value).make("loss", positional=2)


def test_a_class_is_called_a_function_is_bound_and_an_object_is_used() -> None:
    clip = made({"fn": "own.py:Clip", "width": 1, "soft": "off", "bounds": [0, 1]})
    assert (clip.width, type(clip.width), clip.soft, clip.bounds) == (1.0, float, False, (0.0, 1.0))
    assert made({"fn": "own.py:Clip", "args": {"width": 2}}).width == 2
    plain = made({"fn": "own.py:Plain", "width": 3, "more": [1, 2]})
    assert (plain.width, plain.others) == (3, {"more": [1, 2]}), "no type is declared, so that values stay"
    assert made("own.py:narrow").width == 0.1
    assert made("own.py:clipped")(1, 2) == (1, 2, 0.1)
    bound = made({"fn": "own.py:clipped", "width": 3})
    assert bound(1, 2) == (1, 2, 3.0) and bound.kl_coef == 0.0 and bound.__name__ == "clipped"
    loss = Width(0.5)
    assert made(loss) is loss
    assert made({"fn": Width, "width": 1}) == Width(1.0)


def test_a_path_is_that_of_the_configuration(tmp_path: Path) -> None:
    below = tmp_path / "below"
    below.mkdir()
    (below / "t.csv").write_text("")
    (below / "paths.py").write_text("from pathlib import Path\n\ndef loss(s, b, table: Path):\n    return table\n")
    assert (
        user_object({"fn": "paths.py:loss", "table": "t.csv"}, below).make("loss", positional=2)(1, 2)
        == below / "t.csv"
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"fn": "own.py:Clip", "widht": 1},
            "loss: 'widht' is no setting of own.py:Clip; did you mean 'width'?; known: ",
        ),
        ({"fn": "own.py:clipped", "widht": 1}, "'widht' is no setting of own.py:clipped; did you mean 'width'?"),
        ({"fn": "own.py:clipped", "stats": 1}, "'stats' is no setting of own.py:clipped; known: width"),
        ({"fn": "own.py:Silent", "width": 1}, "'width' is no setting of own.py:Silent; it has none"),
        ("own.py:Clip", "loss: own.py:Clip needs width; write {fn: own.py:Clip, width: ...}"),
        ({"fn": "own.py:Clip", "width": "wide"}, "loss: width='wide': Input should be a valid number"),
        ({"fn": "own.py:Raising", "width": 3}, "loss: own.py:Raising(width=3) raised ValueError: width=3 is odd"),
        ({"fn": "own.py:narrow", "width": 3}, "settings are for classes and functions; own.py:narrow is a Clip"),
        ("own.py:Silent", "loss: own.py:Silent is a Silent, which cannot be called"),
        ("own.py:Clap", "own.py has no 'Clap'; did you mean 'Clip'?"),
        ("__main__:Clip", "loss: __main__:Clip was made in Python, in a script or notebook"),
        ("own:make.<locals>.Clip", "loss: own:make.<locals>.Clip was made in Python"),
        ("<own:Clip(width=1)>", "in a script or notebook, and has no name for another process; run that again"),
    ],
)
def test_what_cannot_be_made(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(value)
    assert message in str(caught.value)


def section(loss: Any) -> RunConfig:
    run = {"output": "out", "seed": 0, "model": {"init": {}, "tokenizer": "bytes"}, "stages": [sft_stage(loss=loss)]}
    return build_config(run, python=True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "loss: must be file.py:name or {fn: file.py:name, ...} with settings, or in Python a function, class"),
        ({"width": 1}, "loss: must have fn, the function or class"),
        ({"fn": "own.py:Clip", "args": [1]}, "loss: args must be a mapping of keywords that are not beside it"),
        ({"fn": "own.py:Clip", "width": 1, "args": {"width": 2}}, "args must be a mapping of keywords that are not"),
        ({"fn": "own.py:Clip", "width": len}, "the setting 'width' must be a value of YAML; in Python give an object"),
        ("", "loss: must not be empty"),
    ],
)
def test_what_cannot_be_written(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        section(value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("dft", "dft"),
        ("own.py:clipped", "own.py:clipped"),
        ({"fn": "own.py:Clip", "width": 0.3, "bounds": [1, 2]}, {"fn": "own.py:Clip", "width": 0.3, "bounds": [1, 2]}),
        ({"fn": "own.py:Clip", "args": {"width": 0.3}}, {"fn": "own.py:Clip", "width": 0.3}),
        ({"fn": "own.py:Plain"}, "own.py:Plain"),
        (SFTLoss(0.1), {"fn": "posttrain.losses.sft:SFTLoss", "label_smoothing": 0.1}),
        (Width(0.3, ("a",)), {"fn": f"{__name__}:Width", "width": 0.3, "names": ["a"]}),
        (Width, f"{__name__}:Width"),
        (Bare(1.0), f"<{__name__}:Bare>"),
        (functools.partial(made, value=1), f"<{__name__}:made(value=1)>"),
    ],
)
def test_a_dump_is_read_as_the_same(value: Any, written: Any, tmp_path: Path) -> None:
    config = section(value)
    loss = config.stages[0].loss  # type: ignore[union-attr]
    assert (loss.written if isinstance(loss, UserObject) else loss) == written
    (tmp_path / "dump.yaml").write_text(dump_config(config))
    assert diff_config(load_config("dump.yaml"), config) == []


def test_fields_of_an_object_are_part_of_its_run() -> None:
    one, other = (object_text(pt.losses.GRPO), object_text(DAPO))
    assert one != other and "clip_high=0.28" in other and "reduce=posttrain.losses.reduce:token_mean" in other
    assert diff_config(section(Width(0.3)), section(Width(0.4))) == ["stages.0.loss.width"]
    kept = {"model": {"init": {"model_type": "qwen3"}, "tokenizer": "bytes"}, "dataset": "rows.jsonl", "num_steps": 1}
    outputs = {
        pt.SFT(**kept, loss=loss).config.output for loss in (Width(0.3), Width(0.4), Bare(1.0), Bare(2.0), "nll")
    }
    assert len(outputs) == 5 and pt.SFT(**kept, loss=Width(0.3)).config.output in outputs


def test_fields_of_a_stage_of_rl(tmp_path: Path) -> None:
    own = {"loss": {"fn": "own.py:clipped", "width": 2}, "advantage": "own.py:clipped", "filter": "own.py:clipped"}
    (stage,) = load_config(write_run(tmp_path, rl_stage(algorithm={"kind": "grpo", **own}))).stages
    assert isinstance(stage, RLSection) and isinstance(found := stage.algorithm, GRPO) and found.loss is not None
    assert found.loss.settings == {"width": 2} and str(found.advantage) == str(found.filter) == "own.py:clipped"
