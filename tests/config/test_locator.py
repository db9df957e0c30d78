"""Locators are as the user wrote them, and their places stay where the configuration was read."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import yaml

from posttrain.config import DatasetSection, Locator, PreferenceSection, RewardSection, SFTSection, UserObject
from posttrain.config.locator import callable_of
from posttrain.config.yaml_file import dump_config, load_config
from posttrain.errors import ConfigError
from tests.stages.runs import sft_stage, write_run

pytestmark = pytest.mark.fast


def test_places_do_not_follow_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    file = write_run(tmp_path / "run", sft_stage())
    monkeypatch.chdir(tmp_path)
    path = load_config(file).stages[0].dataset.path
    monkeypatch.chdir("/")
    for one in (path, copy.deepcopy(path), pickle.loads(pickle.dumps(path))):
        assert one == "rows.jsonl" and one.resolved == str(tmp_path / "run" / "rows.jsonl")
        assert one.folder == tmp_path / "run" and all(place.is_absolute() for place in one.places)


def test_a_copy_of_a_section_keeps_its_folder(tmp_path: Path) -> None:
    stage = load_config(write_run(tmp_path, sft_stage(loss="losses.py:Own"))).stages[0]
    again = type(stage).model_validate({name: getattr(stage, name) for name in stage.model_fields_set})
    assert isinstance(again, SFTSection) and isinstance(again.loss, UserObject)
    assert again.loss.fn.folder == again.dataset.path.folder == tmp_path


def test_the_dump_has_what_was_written(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, sft_stage()))
    assert yaml.safe_load(dump_config(config))["stages"][0]["dataset"]["path"] == "rows.jsonl"


def test_hub_ids_and_missing_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Locator("owner/model").resolved == "owner/model"
    with pytest.raises(ConfigError, match=r"^/no/such/model: no such file or folder$"):
        str(Locator("/no/such/model").resolved)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert Locator("owner/model").resolved == str(tmp_path / "owner" / "model")


@pytest.mark.parametrize("folder", ["configs", "mine"], ids=["of-the-project", "beside-the-configuration"])
def test_what_another_run_writes_names_its_command(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until that run has begun: then another name in its folder is what was meant."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "first.yaml").write_text("# It comes first.\noutput: runs/first  # its stages\nseed: 0\n")
    monkeypatch.setattr("posttrain.config.locator.CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    missing = Locator("runs/first/0-sft/model", tmp_path / folder)
    with pytest.raises(ConfigError, match=rf"no such file or folder; first run: posttrain run {folder}/first.yaml$"):
        str(missing.resolved)
    (tmp_path / "runs" / "first" / "0-sft" / "modal").mkdir(parents=True)
    with pytest.raises(ConfigError, match="did you mean 'runs/first/0-sft/modal'"):
        str(missing.resolved)
    assert Locator("runs/of_nobody/0-sft/model", tmp_path / folder).suggestion == ""


def test_python_objects_are_found_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "located_here.py").write_text("def one():\n    return 1\n")
    for text in ("located_here.py:one", "located_here:one"):
        (reward,) = [RewardSection.model_validate({"fn": text}, context=tmp_path).fn]
        assert reward == text and callable_of(reward, "fn")() == 1
    with pytest.raises(ConfigError, match=r"^missing.py:one: no file .*missing.py"):
        callable_of(Locator("missing.py:one", tmp_path), "fn")
    data = {"dataset": {"path": "x"}, "num_steps": 1, "loss": {"fn": "located_here:one", "beta": 1.0}}
    loss = PreferenceSection.model_validate(data, context=tmp_path).loss
    assert isinstance(loss, UserObject) and loss.fn.folder == tmp_path and loss.settings == {"beta": 1.0}


def test_a_section_in_python_starts_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert DatasetSection(path="rows.jsonl").path.places[0] == tmp_path / "rows.jsonl"
    in_python = DatasetSection.model_validate({"path": Path("rows.jsonl")}).path
    assert in_python == "rows.jsonl" and in_python.places[0] == tmp_path / "rows.jsonl"
