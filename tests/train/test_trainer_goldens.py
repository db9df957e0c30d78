"""The trainer against TRL's: the same losses and gradient norms step by step, and against its GKD from token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from posttrain.batch import Batch
from posttrain.data.packing import best_fit
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.kernels.logits.divergence import Divergence
from posttrain.losses.distill import DistillLoss
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.metrics import to_host
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.weights.load import load_model
from posttrain.weights.save import hf_tensors
from posttrain.weights.state import ModelWeights
from tests.gradients import assert_gradients, gradient_for_weights
from tests.often import often
from tests.tiny import forward, sgd

GOLDENS = Path(__file__).parents[1] / "goldens"
LOSSES = {"nll": SFTLoss(), "dft": DFTLoss()}


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    with np.load(GOLDENS / "losses" / "e2e.npz") as file:
        return dict(file)


def case(name: str) -> dict[str, Any]:
    cases = json.loads((GOLDENS / "losses" / "e2e.json").read_text())["cases"]
    return next(c for c in cases if c["name"] == name)


def batch(ids: np.ndarray, mask: np.ndarray, weight: np.ndarray) -> Batch:
    """Right-padded rows of one sequence each."""
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return Batch(
        tokens=ids.astype(np.int32),
        positions=np.where(mask, positions, 0).astype(np.int32),
        segments=mask.astype(np.int32),
        loss_weight=weight.astype(np.float32),
    )


@pytest.mark.parametrize(
    "name", often(("run_sft_linear", "run_sft_cosine_dft", "run_sft_const_noclip"), "run_sft_cosine_dft")
)
def test_trajectory_of_sft(arrays: dict[str, np.ndarray], name: str) -> None:
    """Six steps of TRL's SFTTrainer with accumulation over two micro-batches, AdamW and its schedules."""
    golden = case(name)
    args, log = golden["args"], golden["log"]
    rates = jnp.asarray([line["learning_rate"] for line in log] + [0.0])
    model = load_model(GOLDENS / "models" / "llama", dtype=jnp.float32)
    decayed = {p: w.ndim >= 2 and "norm" not in p for p, w in ModelWeights(model).read().items()}
    trainer = Trainer(
        model,
        LOSSES[args.get("loss_type", "nll")],
        optax.adamw(
            lambda count: rates[count],
            b2=args.get("adam_beta2", 0.999),
            eps=args["eps"],
            weight_decay=args["weight_decay"],
            mask=decayed,
        ),
        TrainSettings(
            temperature=1.0,
            max_grad_norm=args["max_grad_norm"] or 1e9,
            micro_batch_rows=args["per_device_train_batch_size"],
        ),
    )
    ids, labels = arrays["in/run_input_ids"], arrays["in/run_labels"]
    # Rows end with their last label; what is behind is padding.
    ends = labels.shape[1] - np.argmax((labels != -100)[:, ::-1], axis=1)
    mask = np.arange(labels.shape[1])[None] < ends[:, None]
    for step, line in enumerate(log):
        rows = slice(4 * step, 4 * step + 4)
        metrics = to_host(trainer.step(batch(ids[rows], mask[rows], labels[rows] != -100)))
        np.testing.assert_allclose(metrics["loss"], line["loss"], rtol=2e-3, err_msg=f"step {step}")
        np.testing.assert_allclose(metrics["grad_norm"], line["grad_norm"], rtol=2e-3, err_msg=f"step {step}")
    probe = forward(model, arrays["in/run_probe_ids"])
    expected = arrays[f"out/{name.replace('run_sft', 'run')}/final_probe_logits"]
    np.testing.assert_allclose(probe, expected, atol=2e-2)
    ends_of = {name: np.linalg.norm(array) for name, array in hf_tensors(model)}
    for tensor, norm in golden["final_param_l2"].items():
        np.testing.assert_allclose(ends_of[tensor], norm, rtol=1e-4, err_msg=tensor)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "loss"), [("sft_nll", SFTLoss()), ("sft_dft", DFTLoss())])
def test_sft_from_token_ids(arrays: dict[str, np.ndarray], name: str, loss: Any) -> None:
    golden = case(name)
    ids, mask, completion = (arrays[f"in/dpo_{n}"] for n in ("input_ids", "attention_mask", "completion_mask"))
    model = load_model(GOLDENS / "models" / "llama", dtype=jnp.float32)
    trainer = Trainer(model, loss, gradient_for_weights(), TrainSettings(temperature=1.0, max_grad_norm=1e9))
    metrics = to_host(trainer.step(batch(ids, mask > 0, completion)))
    np.testing.assert_allclose(metrics["loss"], golden["loss"], rtol=1e-4)
    np.testing.assert_allclose(metrics["grad_norm"], golden["grad_norm_total"], rtol=1e-3)
    np.testing.assert_allclose(metrics["entropy"], golden["metrics"]["entropy"], rtol=1e-4)
    assert_gradients(model, golden, arrays)


@pytest.mark.thorough
def test_sft_of_a_mixture(arrays: dict[str, np.ndarray]) -> None:
    """The likelihood alone: transformers balances experts over all layers and rows of a batch at once, we for each
    layer and sequence, so that splits do not matter. tests/losses/test_router.py has that one."""
    golden = case("sft_moe_aux0.01")
    ids, mask, completion = (arrays[f"in/dpo_{n}"] for n in ("input_ids", "attention_mask", "completion_mask"))
    model = load_model(GOLDENS / "models" / "qwen3_moe", dtype=jnp.float32)
    trainer = Trainer(model, SFTLoss(), sgd(0.0), TrainSettings(temperature=1.0, max_grad_norm=1e9))
    nll = golden["loss"] - golden["args"]["router_aux_loss_coef"] * golden["metrics"]["aux_loss"]
    found = to_host(trainer.evaluate([batch(ids, mask > 0, completion)]))
    np.testing.assert_allclose(found["loss"], nll, rtol=1e-4)
    np.testing.assert_allclose(found["entropy"], golden["metrics"]["entropy"], rtol=1e-4)


def test_the_same_sequences_share_a_row() -> None:
    """As TRL's strategy `bfd` puts them together; of its others one splits sequences, and one pays no heed to them."""
    golden = case("pack_bfd")
    room = golden["args"]["seq_length"]
    cut = [ids[:room] for ids in golden["args"]["input_ids"]]
    rows = best_fit(np.asarray([[len(ids)] for ids in cut]), np.asarray([room]))
    made = [sorted(token for member in row for token in cut[member]) for row in rows]
    assert sorted(made) == sorted(map(sorted, golden["output"]["input_ids"]))


def test_packed_documents_do_not_see_each_other(arrays: dict[str, np.ndarray]) -> None:
    """Logits of TRL's packing without padding."""
    ids, positions = arrays["in/pack_input_ids"], arrays["in/pack_position_ids"]
    model = load_model(GOLDENS / "models" / "llama", dtype=jnp.float32)
    logits = np.asarray(forward(model, ids, positions, np.cumsum(positions == 0, axis=1)))
    np.testing.assert_allclose(logits, arrays["out/pack_logits"], atol=5e-4)
    log_probs = np.asarray(jax.nn.log_softmax(logits[0, :-1]))
    nll = -log_probs[np.arange(ids.shape[1] - 1), ids[0, 1:]][positions[0, 1:] > 0]
    np.testing.assert_allclose(nll.mean(), case("pack_equivalence")["packed_mean_nll"], rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("name", often(("gkd_beta0.0", "gkd_beta0.5", "gkd_beta1.0"), "gkd_beta0.5"))
def test_gkd(arrays: dict[str, np.ndarray], name: str) -> None:
    """Student and teacher of two families in one step; the teacher's arrays stay where and what they are."""
    golden = case(name)
    teacher = load_model(GOLDENS / "models" / "qwen3", dtype=jnp.float32)
    before = {path: np.asarray(w) for path, w in ModelWeights(teacher).read().items()}
    model = load_model(GOLDENS / "models" / "llama", dtype=jnp.float32)
    trainer = Trainer(
        model,
        DistillLoss(cross_entropy=0.0),
        gradient_for_weights(),
        TrainSettings(
            temperature=1.0,
            max_grad_norm=1e9,
            micro_batch_rows=4,
            terms=Terms(divergence=Divergence(beta=golden["args"]["beta"], temperature=1.0)),
        ),
        teachers=[teacher],
    )
    there = ModelWeights(teacher).read()
    ids, mask, completion = (arrays[f"in/dpo_{n}"] for n in ("input_ids", "attention_mask", "completion_mask"))
    metrics = to_host(trainer.step(batch(ids, mask > 0, completion)))
    np.testing.assert_allclose(metrics["loss"], golden["loss"], rtol=1e-4)
    np.testing.assert_allclose(metrics["grad_norm"], golden["grad_norm_total"], rtol=1e-3)
    assert metrics["distill/divergence"] == pytest.approx(metrics["loss"], rel=1e-6)
    for path, array in ModelWeights(teacher).read().items():
        assert array is there[path] and not array.is_deleted()
        np.testing.assert_array_equal(array, before[path])
    assert_gradients(model, golden, arrays)
