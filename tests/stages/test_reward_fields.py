"""Every field of a reward reaches the rubric."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config import RewardSection
from tests.stages.runs import rl_stage, sft_stage, write_run
from tests.stages.test_fields import rl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fields")
    write_run(folder, sft_stage(), rl_stage())
    return folder


def test_rewards(folder: Path) -> None:
    (folder / "graded.py").write_text("def graded(completions, scale):\n    return [scale for _ in completions]\n")
    spec = (
        "[{fn: 'rewards_of_test.py:low', weight: 0.5, timeout_s: 2, on_error: 0, "
        "memory_mib: 9, file_mib: 8, cpu_s: 7, text: true, cache: true}, "
        "{fn: 'graded.py:graded', args: {scale: 3}, name: scaled, isolate: thread}]"
    )
    one, other = rl(folder, f"rewards={spec}").rubric.rewards
    assert (one.name, one.weight, one.args, one.timeout_s, one.on_error) == ("low", 0.5, {}, 2.0, 0.0)
    assert one.isolated == (f"{folder / 'rewards_of_test.py'}:low", str(folder))
    assert one.text and one.cache and other.text is None and not other.cache
    assert one.limits == (9, 8, 7) and other.limits == (4096, 1024, 0)
    assert (other.name, other.weight, other.args, other.timeout_s) == ("scaled", 1.0, {"scale": 3}, 60.0)
    assert other.on_error == "drop" and other.isolated is None
    with pytest.raises(ValueError, match="isolate: process needs a function that a child can import"):
        RewardSection(fn=len, isolate="process")
    with pytest.raises(ValueError, match="cache and text are for functions"):
        RewardSection(model="m", cache=True)
    with pytest.raises(ValueError, match="cpu_s bounds a child process; name the function as file.py:function"):
        RewardSection(fn=len, cpu_s=1)
    with pytest.raises(ValueError, match="timeout_s and isolate are for functions"):
        RewardSection(model="m", timeout_s=5.0)
