"""Preferences through real models: TRL's losses and gradient norms from token ids, and its DPO run step by step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from posttrain import Batch, Decoder, TokenStats, Trainer, load_model
from posttrain.config import OptimizerSection
from posttrain.kernels.token_stats import token_stats_reference
from posttrain.losses.kto import KTOLoss
from posttrain.losses.preference import PreferenceLoss
from posttrain.losses.reward_model import BradleyTerryLoss
from posttrain.metrics import to_host
from posttrain.models.heads import with_scalar_head
from posttrain.optim import make_optimizer
from posttrain.reference import Reference
from posttrain.tree import replace
from posttrain.weights.state import ModelWeights
from tests.losses.conftest import FOLDER, Golden, read_golden
from tests.tiny import forward

MODELS = FOLDER.parent / "models"


@pytest.fixture(scope="module")
def e2e() -> Golden:
    return read_golden("e2e")


def case_of(e2e: Golden, name: str) -> dict[str, Any]:
    return next(case for case in e2e.cases if case["name"] == name)


def pair_rows(sequences: list[tuple[list[int], int, int]], width: int) -> Batch:
    """Two sequences of (tokens, length of the prompt, role) in each row."""
    shape = (len(sequences) // 2, width)
    names = ("tokens", "positions", "segments", "roles", "loss_weight")
    arrays: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in names}
    for number, (tokens, prompt, role) in enumerate(sequences):
        start = 0 if number % 2 == 0 else len(sequences[number - 1][0])
        place = (number // 2, slice(start, start + len(tokens)))
        answer = np.arange(len(tokens)) >= prompt
        values = (tokens, np.arange(len(tokens)), number % 2 + 1, answer * role, answer)
        for name, value in zip(names, values, strict=True):
            arrays[name][place] = value
    return Batch(**arrays | {"loss_weight": arrays["loss_weight"].astype(np.float32)})


def logps_of(model: Decoder, batch: Batch) -> np.ndarray:
    logits = forward(model, batch.tokens, batch.positions, batch.segments)
    inputs = (jnp.asarray(batch.tokens), jnp.asarray(batch.segments))
    return np.asarray(token_stats_reference(logits, *inputs, temperature=1.0).logps)


def given(e2e: Golden, name: str) -> list[tuple[list[int], int]]:
    """Tokens and prompt lengths of the sequences of a case."""
    ids, attention, completion = (
        e2e.arrays[f"in/{name}_{what}"] for what in ("input_ids", "attention_mask", "completion_mask")
    )
    lengths, starts = attention.sum(axis=1), completion.argmax(axis=1)
    return [(list(row[:n]), int(start)) for row, n, start in zip(ids, lengths, starts, strict=True)]


@pytest.fixture(scope="module")
def policy() -> Decoder:
    return load_model(MODELS / "llama")


@pytest.fixture(scope="module")
def reference() -> Decoder:
    return load_model(MODELS / "qwen3")


DPO_CASES = {
    "dpo_sigmoid": PreferenceLoss(),
    "dpo_ipo": PreferenceLoss(kinds=("ipo",)),
    "dpo_hinge": PreferenceLoss(kinds=("hinge",)),
    "dpo_mpo": PreferenceLoss(kinds=("sigmoid", "bco_pair", "sft"), weights=(0.8, 0.2, 1.0)),
    "dpo_ld": PreferenceLoss(tail_weight=0.3),
}


def test_dpo_from_token_ids(e2e: Golden, policy: Decoder, reference: Decoder) -> None:
    sequences = given(e2e, "dpo")
    half = len(sequences) // 2
    ordered = [(*sequences[row], role) for pair in range(half) for row, role in ((pair, 1), (pair + half, -1))]
    batch = pair_rows(ordered, 28)
    batch = replace(batch, ref_logps=logps_of(reference, batch))
    weights = ModelWeights(policy)

    def logps(params: Any) -> jax.Array:
        model = weights.bind(params)
        inputs = [jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segments)]
        logits = model.logits(model(*inputs)[0])
        return token_stats_reference(logits, inputs[0], inputs[2], temperature=1.0).logps

    @jax.jit
    def norms(params: Any) -> Any:
        """One forward pass for all losses."""
        found, pull = jax.vjp(logps, params)

        def value(logps: jax.Array, loss: PreferenceLoss) -> jax.Array:
            out = loss(TokenStats(logps=logps), batch).loss
            return out.total / out.weight

        made = [jax.value_and_grad(value)(found, loss) for loss in DPO_CASES.values()]
        gradients = jax.vmap(lambda cotangent: pull(cotangent)[0])(jnp.stack([grad for _, grad in made]))
        squares = [jnp.sum(jnp.square(g).reshape(len(made), -1), axis=1) for g in jax.tree.leaves(gradients)]
        return jnp.stack([loss for loss, _ in made]), jnp.sqrt(sum(squares))

    for name, loss, norm in zip(DPO_CASES, *jax.device_get(norms(weights.read())), strict=True):
        case = case_of(e2e, name)
        np.testing.assert_allclose(loss, case["loss"], rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(norm, case["grad_norm_total"], rtol=1e-3, err_msg=name)


def test_kto_over_micro_batches(e2e: Golden, policy: Decoder, reference: Decoder) -> None:
    """The KL is that of the whole batch, however few rows the model takes at once."""
    answers, others = given(e2e, "dpo"), given(e2e, "kto_KL")
    labels = e2e.arrays["in/kto_label"]
    roles = [1 if label else -1 for label in labels]
    ordered = [s for a, o, role in zip(answers, others, roles, strict=True) for s in ((*a, role), (*o, 2))]
    batch = pair_rows(ordered, 28)
    batch = replace(batch, ref_logps=logps_of(reference, batch))
    case = case_of(e2e, "kto_kto")
    loss = KTOLoss(beta=0.1, undesirable_weight=1.2)
    trainer = Trainer(policy, loss, optax.sgd(0.0), temperature=1.0, max_grad_norm=1e9, micro_batch_rows=2)
    found = to_host(trainer.step(batch))
    np.testing.assert_allclose(found["loss"], case["loss"], rtol=1e-4)
    np.testing.assert_allclose(found["grad_norm"], case["grad_norm_total"], rtol=1e-3)
    for name in ("kl", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"):
        np.testing.assert_allclose(found[name], case["metrics"][name], rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(to_host(trainer.evaluate([batch]))["loss"], case["loss"], rtol=1e-4)


def test_reward_model_from_token_ids(e2e: Golden) -> None:
    model = load_model(MODELS / "llama")
    with_scalar_head(model, seed=0)
    ModelWeights(model).write({"score.kernel": jnp.asarray(e2e.arrays["in/rm_score_weight"].T)})
    sequences = given(e2e, "dpo")
    half = len(sequences) // 2
    ordered = [(*sequences[row], role) for pair in range(half) for row, role in ((pair, 1), (pair + half, -1))]
    batch = replace(pair_rows(ordered, 28), margins=np.zeros((half, 28), np.float32))
    case = case_of(e2e, "reward_bt")
    trainer = Trainer(model, BradleyTerryLoss(), optax.sgd(0.0), temperature=1.0, max_grad_norm=1e9)
    scores = trainer.scores(batch)
    segments = np.asarray(batch.segments)
    last = [scores[row, np.flatnonzero(segments[row] == part)[-1]] for part in (1, 2) for row in range(half)]
    np.testing.assert_allclose(last, e2e.arrays["out/rm_scores"][:, 0], rtol=1e-4, atol=1e-5)
    found = to_host(trainer.step(batch))
    np.testing.assert_allclose(found["loss"], case["loss"], rtol=1e-4)
    np.testing.assert_allclose(found["grad_norm"], case["grad_norm_total"], rtol=1e-3)
    np.testing.assert_allclose(found["rewards/accuracies"], case["metrics"]["accuracy"], rtol=1e-5)
    np.testing.assert_allclose(found["rewards/margins"], case["metrics"]["margin"], rtol=1e-4)


def torch_run(case: dict[str, Any]) -> list[dict[str, float]]:
    """DPO in transformers and torch, one pair after another: the independent trajectory."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    policy, frozen = (AutoModelForCausalLM.from_pretrained(MODELS / "llama").float() for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=case["args"]["lr"], eps=1e-8, weight_decay=0.0)

    def logp(model: Any, row: dict[str, list[int]], side: str) -> Any:
        ids = torch.tensor([row["prompt_ids"] + row[f"{side}_ids"]])
        logps = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        return logps[len(row["prompt_ids"]) - 1 :].sum()

    log = []
    for step in range(case["args"]["max_steps"]):
        optimizer.zero_grad()
        losses, margins = [], []
        for row in case["args"]["data"][4 * step : 4 * step + 4]:
            ratios = []
            for side in ("chosen", "rejected"):
                with torch.no_grad():
                    before = logp(frozen, row, side)
                ratios.append(logp(policy, row, side) - before)
            margins.append(case["args"]["beta"] * (ratios[0] - ratios[1]))
            losses.append(-torch.nn.functional.logsigmoid(margins[-1]))
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        margin = float(torch.stack(margins).mean().detach())
        log.append({"loss": float(loss.detach()), "grad_norm": float(norm), "rewards/margins": margin})
    return log


def test_dpo_run(e2e: Golden) -> None:
    """Two micro-batches of two pairs: the losses, norms and margins of a plain loop in torch, at every step."""
    case = case_of(e2e, "run_dpo")
    model = load_model(MODELS / "llama")
    optimizer = make_optimizer(OptimizerSection(learning_rate=case["args"]["lr"]), case["args"]["max_steps"])
    loss = PreferenceLoss(beta=case["args"]["beta"])
    trainer = Trainer(model, loss, optimizer, temperature=1.0, max_grad_norm=1.0, micro_batch_rows=2)
    reference = Reference(trainer)
    for step, expected in enumerate(torch_run(case)):
        sequences = [
            (row["prompt_ids"] + row[f"{side}_ids"], len(row["prompt_ids"]), role)
            for row in case["args"]["data"][4 * step : 4 * step + 4]
            for side, role in (("chosen", 1), ("rejected", -1))
        ]
        batch = pair_rows(sequences, 28)
        found = to_host(trainer.step(replace(batch, ref_logps=reference.logps(batch))))
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-5, err_msg=f"step {step}: {name}")
