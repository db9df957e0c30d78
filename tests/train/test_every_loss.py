"""Through the trainer: whatever the packing and the split into micro-batches, every loss is and moves the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from numpy.testing import assert_allclose

from posttrain.batch import NO_ID, Batch, TopK
from posttrain.config import MeshSection
from posttrain.distill.cross_tokenizer import SharedTokens, back_of
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.kernels.logits.divergence import Divergence, pack_ids
from posttrain.losses.distill import DistillLoss
from posttrain.losses.policy import GMPO, GRPO, PPO, PolicyLoss
from posttrain.losses.reward_model import BradleyTerryLoss, ProcessLoss
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.losses.value import ValueLoss
from posttrain.mesh import make_mesh
from posttrain.metrics import to_host
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.tree import replace
from posttrain.weights.scalar_head import with_scalar_head
from tests.losses.test_preference import LOSSES as JUDGED
from tests.losses.test_preference import PROMPTS
from tests.tiny import sgd, tiny_model

VOCAB, OTHERS, K = 512, 300, 6
APART, PACKED = ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1, 4, 5), (6, 7, 2, 3))
"""Sequences in rows; pairs stay together. Both of the second's rows are micro-batches of their own."""
WIDTHS = {len(APART): 24, len(PACKED): 40}

Arrays = dict[str, np.ndarray]


class Case(NamedTuple):
    loss: Any
    terms: Terms = Terms()
    teachers: int = 0
    """In the step."""
    said: Callable[[np.random.Generator, np.ndarray], TopK] | None = None
    """Of the tokens of a sequence."""


def best_ids(rng: np.random.Generator, tokens: np.ndarray) -> TopK:
    """Of a random distribution over the vocabulary, at temperature 2."""
    log_p = rng.normal(size=(len(tokens), VOCAB)) * 2
    log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
    ids = np.argsort(-log_p, axis=1)
    best, others = (np.take_along_axis(log_p, ids[:, part], 1) for part in (slice(K), slice(K, None)))
    return TopK(
        ids=ids[:, :K].astype(np.int32),
        logps=best.astype(np.float32),
        tail=np.log(np.exp(others).sum(axis=1)).astype(np.float32),
        scaled_tail=np.log(np.exp(others / 2).sum(axis=1)).astype(np.float32),
        token_logps=np.take_along_axis(log_p, tokens[:, None], 1)[:, 0].astype(np.float32),
    )


TABLE = np.where(np.arange(OTHERS) % 3 < 2, np.arange(OTHERS), NO_ID)
SHARED = SharedTokens(TABLE, ~np.isin(np.arange(VOCAB), TABLE))


def merged_ids(rng: np.random.Generator, tokens: np.ndarray) -> TopK:
    """Groups of one to three tokens, each one token of the teacher, in random places."""
    sizes = []
    while sum(sizes) < len(tokens) - 1:
        sizes.append(min(int(rng.integers(1, 4)), len(tokens) - 1 - sum(sizes)))
    begins = 1 + np.cumsum([0, *sizes])[:-1]
    theirs = rng.integers(0, OTHERS, len(sizes))
    said = best_ids(rng, theirs)
    said = replace(said, ids=np.argsort(rng.random((len(sizes), OTHERS)), axis=1)[:, :K].astype(np.int32))
    none = np.full(len(sizes), NO_ID - 1)
    made = SHARED.top_k(said, np.arange(len(sizes)), (tokens[begins], theirs), (none, none))
    taught = np.full(len(tokens), -1)
    taught[0], taught[begins] = 0, 1

    def spread(values: np.ndarray) -> np.ndarray:
        whole = np.zeros((len(tokens), *values.shape[1:]), values.dtype)
        whole[begins] = values
        return whole

    return replace(jax.tree.map(spread, made), back=back_of(taught))


def divergence(beta: float) -> Terms:
    return Terms(divergence=Divergence(beta=beta, temperature=2.0))


CASES: dict[str, Case] = {
    "nll": Case(SFTLoss()),
    "label smoothing": Case(SFTLoss(0.1), Terms(mean_over=500)),
    "dft": Case(DFTLoss()),
    "forward_kl": Case(DistillLoss(0.0), divergence(0.0), teachers=1),
    "reverse_kl mixed": Case(DistillLoss(0.3), divergence(1.0), teachers=1),
    "jensen_shannon of two": Case(DistillLoss(0.3), divergence(0.4), teachers=2),
    "best ids": Case(DistillLoss(0.3), divergence(0.4), said=best_ids),
    "live and best ids": Case(DistillLoss(0.0), divergence(0.0), teachers=1, said=best_ids),
    "gold": Case(
        DistillLoss(0.3, uld=0.7),
        Terms(divergence=Divergence(beta=0.4, temperature=1.0), unshared=pack_ids(SHARED.unshared)),
        said=merged_ids,
    ),
    "value": Case(ValueLoss(clip=0.2)),
    "grpo": Case(replace(GRPO, entropy_coef=0.01)),
    "gmpo": Case(GMPO),
    "ppo": Case(PPO),
} | {name: Case(loss, Terms(squares=loss.needs.squares)) for name, loss in JUDGED.items()}


def sequences(name: str) -> list[Arrays]:
    """Four pairs; where a loss wants them, judged steps, or answers to other prompts."""
    case, rng, made = CASES[name], np.random.default_rng(0), []
    for number, (prompt, answer) in enumerate([(4, 3), (4, 5), (2, 4), (2, 6), (3, 2), (3, 7), (5, 4), (5, 3)]):
        answers = np.arange(prompt + answer) >= prompt
        role = 1 if number % 2 == 0 else -1
        if isinstance(case.loss, ProcessLoss):
            answers = answers & (np.arange(prompt + answer) % 2 == 1)
        if name.startswith("kto"):
            role = (1, 2, -1, 2)[number % 4]
        tokens = rng.integers(1, OTHERS, prompt + answer).astype(np.int32)
        weights = answers | ((name in PROMPTS) & (role == 1) & (np.arange(prompt + answer) > 0))
        made.append(
            {
                "tokens": tokens,
                "positions": np.arange(len(tokens), dtype=np.int32),
                "loss_weight": weights * (rng.choice([0.5, 1.0], len(tokens)) if name not in JUDGED else 1.0),
                "roles": (answers * role).astype(np.int32),
                "ref_logps": -3 * rng.random(len(tokens)),
                "margins": answers * 0.3 * (role == 1),
            }
        )
        if isinstance(case.loss, ValueLoss | PolicyLoss):
            names = ("returns", "old_values") if isinstance(case.loss, ValueLoss) else ("advantages",)
            made[-1] |= {name: answers * rng.normal(size=len(tokens)) for name in names}
        if case.said is not None:
            said = case.said(rng, tokens)
            made[-1] |= {f"said.{field}": values for field, values in vars(said).items() if values is not None}
            shares = rng.random((len(tokens), case.teachers + 1))
            made[-1]["teacher_weights"] = shares if case.teachers else np.ones_like(shares)
        elif case.teachers:
            made[-1]["teacher_weights"] = rng.random((len(tokens), case.teachers))
    return made


def lay_out(made: list[Arrays], layout: Sequence[Sequence[int]]) -> Batch:
    def rows_of(field: str) -> np.ndarray:
        like = made[0][field]
        dtype = np.int32 if like.dtype.kind == "i" else np.float32
        whole = np.full((len(layout), WIDTHS[len(layout)], *like.shape[1:]), -1 if field == "said.back" else 0, dtype)
        for row, numbers in enumerate(layout):
            joined = np.concatenate([made[number][field] for number in numbers])
            whole[row, : len(joined)] = joined
        return whole

    for one in made:
        one["segments"] = np.ones_like(one["tokens"])
    arrays = {field: rows_of(field) for field in made[0]}
    starts = arrays["segments"] * (arrays["positions"] == 0)
    arrays["segments"] = (np.cumsum(starts, axis=1) * arrays["segments"]).astype(np.int32)
    said = {field.removeprefix("said."): arrays.pop(field) for field in list(arrays) if field.startswith("said.")}
    return Batch(**arrays, teachers=(TopK(**said),) if said else None)


def stepped(
    name: str, layout: Sequence[Sequence[int]], micro: int | None, mesh: Mesh | None = None
) -> tuple[Arrays, dict[str, float]]:
    """What one step changed, and its metrics."""
    case, model = CASES[name], tiny_model(num_layers=1)
    if isinstance(case.loss, BradleyTerryLoss | ProcessLoss | ValueLoss):
        with_scalar_head(model, seed=0)
    trainer = Trainer(
        model,
        case.loss,
        sgd(1e3),
        TrainSettings(
            temperature=1.3,
            max_grad_norm=1e9,
            micro_batch_rows=micro,
            terms=case.terms,
            gather_once=mesh is not None,
        ),
        mesh=mesh,
        teachers=[tiny_model(num_layers=1, seed=5 + number) for number in range(case.teachers)],
    )
    before = {path: np.asarray(w) for path, w in trainer.params.items()}
    metrics = to_host(trainer.step(lay_out(sequences(name), layout)))
    return {path: np.asarray(w) - before[path] for path, w in trainer.params.items()}, metrics


FEW = ("kto", "process")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.thorough) for n in CASES])
def test_neither_packing_nor_micro_batches_matter(name: str) -> None:
    """Two packed rows, each a micro-batch, beside four rows at once."""
    assert_same_step(stepped(name, PACKED, 1), stepped(name, APART, None))


@pytest.mark.thorough
@pytest.mark.parametrize("axis", ["data", "fsdp"])
@pytest.mark.parametrize("name", CASES)
def test_nor_do_devices_that_add_up_their_own_gradients(name: str, axis: str) -> None:
    """Two micro-batches of two rows, of which each device has one."""
    mesh = make_mesh(MeshSection(**({"fsdp": 1} | {axis: 2})), jax.devices()[:2])
    assert_same_step(stepped(name, APART, 2, mesh), stepped(name, APART, None))


def assert_same_step(one: tuple[Arrays, dict[str, float]], other: tuple[Arrays, dict[str, float]]) -> None:
    (moved, found), (expected, wanted) = one, other
    scale = max(np.abs(update).max() for update in expected.values())
    assert scale > 0.1 and moved.keys() == expected.keys()
    for path, update in expected.items():
        assert_allclose(moved[path], update, rtol=0, atol=1e-5 * scale, err_msg=path)
    assert found.keys() == wanted.keys()
    for metric in wanted.keys() - {"data/filled_ratio"}:
        assert_allclose(found[metric], wanted[metric], rtol=1e-5, atol=1e-6, err_msg=metric)
