"""Moving averages of weights against a loop, resumed and on devices; means of saved models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posttrain as pt
from posttrain.config import AdamW, DistillSection, MeshSection, RLSection
from posttrain.errors import ConfigError
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import make_mesh
from posttrain.metrics import to_host
from posttrain.train.checkpoint import Checkpointer
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.tree import replace
from posttrain.weights.state import ModelWeights
from tests.stages.runs import posttrain, sft_stage, write_run
from tests.tiny import tiny_model
from tests.train.test_trainer import rows

pytestmark = pytest.mark.fast

SECTION = AdamW(learning_rate=0.01, eps=1e-2, ema={"decay": 0.9, "start": 1})


def made(dtype: Any = jnp.float32, mesh: Any = None, **changes: Any) -> Trainer:
    model = tiny_model(num_layers=1, windows=(None,), dtype=dtype)
    section = SECTION.model_copy(update=changes)
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0, offload_optimizer=mesh is not None)
    return Trainer(model, SFTLoss(), make_optimizer(section, 4, 0, model=model), settings, mesh=mesh)


def test_the_average_is_that_of_a_loop_also_when_resumed(tmp_path: Path) -> None:
    """Of float32 masters, as QK-clip leaves them; the first update is not in it, and a step that is skipped changes
    nothing. In evaluations it takes the place of the weights."""
    model = tiny_model(num_layers=1, windows=(None,), qk_norm=False, initializer_range=0.4, dtype=jnp.bfloat16)
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0, qk_clip=2.0)
    trainer = Trainer(model, SFTLoss(), make_optimizer(SECTION, 4, 0, model=model), settings)
    expected: dict[str, Any] = {}
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            assert to_host(trainer.step(rows(step)))["attention/clipped_heads"] > 0
            new = jax.device_get(trainer.params | trainer.state()["opt_state"].masters)
            decay = 0.9 if step else 0.0
            expected = {path: decay * expected.get(path, 0.0) + (1 - decay) * x for path, x in new.items()}
            if step == 1:
                checkpointer.save(2, trainer.state(), {})
        whole, last = jax.device_get(trainer.state()), jax.device_get(trainer.weights)
        for path, x in whole["opt_state"].average.items():
            assert_allclose(x, expected[path], rtol=2e-6, atol=1e-7, err_msg=path)
        with trainer.averaged():
            for path, x in trainer.weights.items():
                assert_array_equal(x, whole["opt_state"].average[path].astype(x.dtype), err_msg=path)
        jax.tree.map(assert_array_equal, jax.device_get(trainer.weights), last)
        empty = replace(rows(3), loss_weight=0 * rows(3).loss_weight)
        assert to_host(trainer.step(empty))["update_skipped"] == 1
        jax.tree.map(assert_array_equal, jax.device_get(trainer.state()), whole)
        state, _ = checkpointer.restore(2, trainer.state())
    trainer.restore(state, 2)
    trainer.step(rows(2))
    jax.tree.map(assert_array_equal, jax.device_get(trainer.state()), whole)


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [{}, {"stochastic_rounding": True, "moments": "int8"}])
def test_devices_and_few_bits(changes: dict[str, Any]) -> None:
    """bfloat16 parameters have an average of what is rounded to them, split as they are and kept in the host's
    memory."""
    mesh = make_mesh(MeshSection(data=2, fsdp=2, tensor=2))
    several, alone = made(jnp.bfloat16, mesh, **changes), made(jnp.bfloat16, **changes)
    for step in range(3):
        for trainer in (several, alone):
            trainer.step(rows(step))
    shardings = {path: x.sharding.spec for path, x in several.params.items()}
    for path, average in several._opt_state.average.items():
        assert average.dtype == jnp.float32 and average.sharding.spec == shardings[path]
        assert_allclose(average, alone._opt_state.average[path], atol=4e-3, err_msg=path)
    with several.averaged():
        assert {x.dtype for x in several.params.values()} == {jnp.dtype(jnp.bfloat16)}
        assert {path: x.sharding.spec for path, x in several.params.items()} == shardings


def test_stages_that_sample_refuse_it() -> None:
    ema: dict[str, Any] = {"learning_rate": 1e-3, "ema": {}}
    with pytest.raises(ValueError, match="ema: a critic's values are those of its last weights"):
        pt.PPO(critic={"optimizer": ema})
    dataset, sampled = {"path": "rows.jsonl"}, {"on_policy": 1.0, "sampling": {"max_tokens": 8}}
    with pytest.raises(ValueError, match="optimizer.ema is for stages that do not sample"):
        RLSection(kind="rl", dataset=dataset, rewards=[{"fn": "a.py:b"}], optimizer=ema)
    with pytest.raises(ValueError, match="optimizer.ema is for stages that do not sample"):
        DistillSection(kind="distill", dataset=dataset, teachers=[{"path": "t"}], **sampled, optimizer=ema)


def test_what_is_changed_beside_the_optimiser_is_refused() -> None:
    model = tiny_model(num_layers=1, windows=(None,))
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0, correction_rate=0.1)
    with pytest.raises(ConfigError, match="optimizer.ema averages what the optimiser updates"):
        Trainer(model, SFTLoss(), make_optimizer(SECTION, 4, 0, model=model), settings)


@pytest.mark.thorough
def test_the_mean_of_saved_models(tmp_path: Path) -> None:
    models = [tiny_model(seed, num_layers=1, windows=(None,)) for seed in range(3)]
    folders = [tmp_path / f"{seed}" for seed in range(3)]
    for model, folder in zip(models, folders, strict=True):
        pt.save_model(model, folder)
    assert "mean of 3 models" in pt.average(folders, tmp_path / "mean", reader="posttrain")
    found, each = ModelWeights(pt.load_model(tmp_path / "mean")).read(), [ModelWeights(m).read() for m in models]
    for path, x in found.items():
        assert_allclose(x, np.mean([np.asarray(one[path], np.float64) for one in each], axis=0), atol=1e-7)
    pt.save_model(tiny_model(num_layers=1, windows=(None,), intermediate_size=40), tmp_path / "narrow")
    pt.save_model(tiny_model(num_layers=1, windows=(None,), qk_norm=False), tmp_path / "llama")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for other, words in (
        ("narrow", r"mlp.down.kernel is \(1, 48, 32\) and \(1, 40, 32\)"),
        ("llama", "two families, qwen3 and llama"),
        ("adapter", "is an adapter, and the mean of its factors"),
    ):
        with pytest.raises(ConfigError, match=words):
            pt.average([folders[0], tmp_path / other], tmp_path / "none")
    with pytest.raises(ConfigError, match="several models, got 1"):
        pt.average(folders[:1], tmp_path / "none")


@pytest.mark.thorough
def test_a_stage_evaluates_and_saves_the_average(tmp_path: Path) -> None:
    """One of which almost all is the initial weights: evaluations between steps and at the end, the best model and the
    saved one are its; the folder `last` has the others."""
    optimizer = {"learning_rate": 0.05, "ema": {"decay": 0.9999999, "keep_last": True}}
    stage = sft_stage(optimizer=optimizer, eval_dataset={"path": "rows.jsonl", "chat": False}, eval_every=2)
    assert posttrain("run", write_run(tmp_path, stage)).code == 0
    folder = tmp_path / "out" / "0-sft"
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line["eval/nll"] for line in lines if "eval/nll" in line]
    assert len(evaluated) == 3 and np.ptp(evaluated) < 1e-4
    assert lines[-2]["nll"] < lines[1]["nll"] - 0.1
    mean, last = (ModelWeights(pt.load_model(folder / name)).read() for name in ("model", "last"))
    for path, x in mean.items():
        assert np.abs(np.asarray(last[path]) - np.asarray(x)).max() > 0.05, path
