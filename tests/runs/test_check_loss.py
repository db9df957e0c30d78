"""`posttrain check --loss`: every loss of the package passes, and wrong ones are told by what they depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.config import ALGORITHMS
from posttrain.errors import ConfigError
from posttrain.losses.policy import DAPO, VESPO
from posttrain.losses.preference import PreferenceLoss
from posttrain.losses.ratios import ImportanceSampling, k2
from posttrain.losses.reduce import token_mean
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.runs.check_loss import check_loss, prove
from posttrain.tree import replace
from tests.documents import ROOT, SHELL, blocks_of, write_folder
from tests.rl.helpers import make_algorithm
from tests.stages.runs import posttrain, rl_stage, write_run
from tests.test_readme import commands

LOSSES: dict[str, Any] = {name: make_algorithm(name, max_tokens=8).loss for name in ALGORITHMS} | {
    "importance": replace(DAPO, importance=ImportanceSampling(level="sequence_mean", bound="mask", low=0.9, high=1.2)),
    "rejected": replace(DAPO, importance=ImportanceSampling(bound="reject", low=0.4, high=1.8), off_policy_mask=0.1),
    "weighted vespo": replace(VESPO, importance=ImportanceSampling()),
    "all terms": replace(DAPO, dual_clip=1.5, kl_coef=0.1, kl_estimator=k2, entropy_coef=0.01, reduce=token_mean),
    "nll": SFTLoss(),
    "label smoothing": SFTLoss(0.1),
    "dft": DFTLoss(),
    "dpo": PreferenceLoss(),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_the_package(name: str) -> None:
    line = prove(LOSSES[name], name)
    assert line.startswith(f"{name}: equal value, gradient and metrics") and "over 40 splits" in line


OWN = """
import jax.numpy as jnp
import posttrain as pt


class Loss:
    kind = "right"

    def __call__(self, stats, batch):
        weight = jnp.asarray(batch.loss_weight)
        logps = jnp.where(weight > 0, stats.logps, 0.0)
        nll, total = -(logps * weight), weight.sum()
        mean = pt.Mean(total=nll.sum(), weight=total)
        if self.kind == "mean of means":
            return pt.LossOutput(loss=pt.Mean(total=nll.sum() / total, weight=1.0), metrics={})
        if self.kind == "mean of rows":
            rows = nll.sum(axis=1) / jnp.maximum(weight.sum(axis=1), 1.0)
            return pt.LossOutput(loss=pt.Mean(total=rows.sum(), weight=float(len(weight))), metrics={})
        if self.kind == "unmasked":
            return pt.LossOutput(loss=pt.Mean(total=-(stats.logps * weight).sum(), weight=total), metrics={})
        if self.kind == "place":
            first = nll * (jnp.arange(weight.shape[0])[:, None] == 0)
            return pt.LossOutput(loss=pt.Mean(total=first.sum(), weight=total), metrics={})
        if self.kind == "metric":
            metric = pt.Mean(total=nll.sum() / total, weight=1.0)
            return pt.LossOutput(loss=mean, metrics={"own": metric})
        if self.kind == "no metric":
            return pt.LossOutput(loss=mean, metrics={"own": nll.sum()})
        if self.kind == "number":
            return nll.sum()
        if self.kind == "constant":
            return pt.LossOutput(loss=pt.Mean(total=total, weight=total), metrics={})
        if self.kind == "raising":
            return stats.nothing
        return pt.LossOutput(loss=mean, metrics={"nll": mean})


class Sized:
    def __init__(self, size):
        self.size = size


"""
WRONG = {
    "mean of means": r"depends on the split into micro-batches: the loss is [\d.]+ instead of .*Return sums",
    "mean of rows": r"depends on the packing of sequences into rows: the loss is",
    "unmasked": r"with nan at tokens whose loss_weight is 0, the loss is nan instead of .* use jnp.where",
    "place": r"depends on the order of rows: the loss is",
    "metric": r"depends on the split into micro-batches: the metric own is",
    "no metric": r"(metrics own must be pt.Mean|raised TypeCheckError: .*metrics)",
    "number": r"returned a .*; return pt.LossOutput",
    "constant": r"has the gradient 0 by all statistics",
    "raising": r"raised AttributeError: .*nothing",
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    classes = [f"class Own{number}(Loss):\n    kind = {kind!r}\n" for number, kind in enumerate(WRONG)]
    (tmp_path / "own.py").write_text(OWN + "\n\n".join(classes))
    return tmp_path


def test_a_right_loss(own: Path) -> None:
    assert "over 40 splits" in check_loss("own.py:Loss")


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_loss_is_told_what_it_depends_on(own: Path, kind: str) -> None:
    name = f"own.py:Own{list(WRONG).index(kind)}"
    with pytest.raises(ConfigError, match=f"^loss: {name}:? {WRONG[kind]}"):
        check_loss(name)


def test_what_is_no_loss(own: Path) -> None:
    with pytest.raises(ConfigError, match="own.py:Sized needs"):
        check_loss("own.py:Sized")
    with pytest.raises(ConfigError, match="own.py has no 'Los'; did you mean 'Loss'"):
        check_loss("own.py:Los")


@pytest.mark.thorough
def test_the_page_about_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command runs, and its losses and functions are right."""
    page = ROOT / "docs" / "extend" / "loss.md"
    folder = write_folder(tmp_path, [page])
    monkeypatch.chdir(folder)
    ran = [words for block in blocks_of(page, *SHELL) for words in commands(block.text)]
    assert ran == [["posttrain", "check", "--loss", "my_losses.py:FocalLoss"]]
    outcome = posttrain(*ran[0][1:])
    assert outcome.code == 0 and outcome.out.endswith("ok\n"), outcome.err
    for name in ("LogProbability", "SquaredMargin"):
        assert "over 40 splits" in check_loss(f"my_losses.py:{name}")
    line = check_loss('{fn: "my_losses.py:power", gamma: 1}')
    assert "loss: my_losses.py:power: equal value" in line and line.endswith("for stages of kind sft")
    with pytest.raises(ConfigError, match="loss: 'gama' is no setting of my_losses.py:Power; did you mean 'gamma'"):
        check_loss('{fn: "my_losses.py:Power", gama: 1}')
    refused = posttrain("check")
    assert refused.code == 2 and "give CONFIG, or --loss FILE:NAME" in refused.err


STAGED = """
import jax.numpy as jnp
import posttrain as pt


def summed(function, batch, *arrays):
    weight = jnp.asarray(batch.loss_weight)
    values = function(*(jnp.where(weight > 0, array, 0.0) for array in arrays)) * weight
    return pt.LossOutput(loss=pt.Mean(total=values.sum(), weight=weight.sum()), metrics={})


class NoKl:
    def __call__(self, stats, batch):
        return summed(lambda a, p: -a * p, batch, batch.advantages, stats.logps)


class Reinforce(NoKl):
    kl_coef = 0.0


class Reference(Reinforce):
    def __call__(self, stats, batch):
        return summed(lambda p, r: (p - r) ** 2, batch, stats.logps, batch.ref_logps)


class Old(Reinforce):
    def __call__(self, stats, batch):
        return summed(lambda a, p, o: -a * jnp.exp(p - o), batch, batch.advantages, stats.logps, batch.old_logps)


class Means(Reinforce):
    def __call__(self, stats, batch):
        made = super().__call__(stats, batch).loss
        return pt.LossOutput(loss=pt.Mean(total=made.total / made.weight, weight=1.0), metrics={})


class NLL(Reinforce):
    def __call__(self, stats, batch):
        return summed(lambda p: -p, batch, stats.logps)
"""


@pytest.mark.thorough
def test_a_loss_is_checked_for_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "staged.py").write_text(STAGED)
    assert check_loss("staged.py:Reinforce").endswith("for stages of kind rl")
    assert check_loss("staged.py:NLL").endswith("for stages of kind sft and rl")
    with pytest.raises(ConfigError, match="NoKl fits no stage: sft: it raised .*; rl: it has no kl_coef"):
        check_loss("staged.py:NoKl")
    with pytest.raises(ConfigError, match="Reference fits no stage: .* rl: it raised .* without ref_logps"):
        check_loss("staged.py:Reference")
    told = {}
    for name, changes in (("Means", {}), ("Old", {}), ("Old", {"old_logps": "trainer"})):
        stage = rl_stage(algorithm={"kind": "grpo", "loss": f"staged.py:{name}", **changes})
        told[name, *changes] = posttrain("check", write_run(tmp_path, stage, name=f"{name}{len(changes)}.yaml"))
    assert told["Old", "old_logps"].code == 0, told["Old", "old_logps"].err
    assert "Old raised " in told[("Old",)].err and "this stage has no" in " ".join(told[("Old",)].err.split())
    assert "Means depends on the split into micro-batches" in " ".join(told[("Means",)].err.split())
