"""Pairs of features of offline stages, see `tests.test_pairs`, against `tests.offline_oracles`; and faults that turn
them red."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

from posttrain.batch import Batch
from posttrain.cluster.reference import Reference
from posttrain.data import format as data_format
from posttrain.data import pair_examples, pipeline
from posttrain.data.chat import Renderer
from posttrain.data.format import TokenizedExample
from posttrain.distill import cache as distill_cache
from posttrain.distill import features, targets
from posttrain.distill import teachers as distill_teachers
from posttrain.kernels.attention import dispatch
from posttrain.kernels.logits import divergence, layout
from posttrain.losses import pairs, preference, reward_model, sft
from posttrain.losses.preference import KTOLoss, LogRatios, PreferenceLoss
from posttrain.losses.reference_free import SimPOLoss
from posttrain.losses.router import RouterLoss
from posttrain.models import drafter, quant
from posttrain.models.adapter import Adapter
from posttrain.models.cache import KVCache
from posttrain.rl import online_dpo
from posttrain.stages import distill as distill_stage
from posttrain.stages import sft as sft_stage
from posttrain.stages.preference import PREFERENCE_LOSSES
from posttrain.train import layer_matching, muon, objective, optimizers, programs, transformations
from posttrain.train.objective import Objective
from posttrain.train.optimizers import Optimizer
from posttrain.train.trainer import Trainer
from posttrain.tree import Mean
from posttrain.weights import load, quantize
from posttrain.weights.state import ModelWeights, Parameter
from tests.often import often
from tests.pairs import STAGES, write
from tests.rl_faults import counted_on_each, first_rows_alone, without_new_masters, without_values
from tests.stages.observer import Observer
from tests.stages.runs import posttrain
from tests.test_pairs import cases, frozen, keep_as_killed, own_cache, saved, take_killed, teacher

__all__ = ["frozen", "own_cache", "teacher"]


def run(file: Path, devices: int, observer: Observer | None, killed_at: int) -> int:
    """Run to the end, and count the updates. `killed_at`: keep the files of this step, as a kill in the next one would
    leave them."""
    number = 0
    step, evaluate, pairs_of = Trainer.step, Trainer.evaluate, online_dpo.pairs_of_groups

    def spied(self: Trainer, batch: Batch, *, update: bool = True) -> Any:
        nonlocal number
        if killed_at and number == killed_at:
            keep_as_killed(file, killed_at)
        number += 1
        if observer is None:
            return step(self, batch, update=update)
        return observer.step(self, batch, lambda: step(self, batch, update=update))

    def evaluated(self: Trainer, batches: Any, each: Any = None) -> Any:
        given = list(batches)
        if observer is not None:
            observer.evaluated.append(given)
        return evaluate(self, given, each)

    def paired(groups_P: Any, roles_PG: Any) -> Any:
        if observer is not None:
            observer.groups.append([[(tuple(s.tokens), s.sampled.index(True)) for s in group] for group in groups_P])
            observer.logps.append([np.asarray(s.logps) for group in groups_P for s in group])
        return pairs_of(groups_P, roles_PG)

    # `MonkeyPatch` would forget the programs, which pairs share; no program is traced of these.
    with (
        mock.patch.object(Trainer, "step", spied),
        mock.patch.object(Trainer, "evaluate", evaluated),
        mock.patch.object(online_dpo, "pairs_of_groups", paired),
    ):
        outcome = posttrain("run", file, devices=devices)
    assert outcome.code == 0, outcome.out + outcome.err
    return number


def write_cache(file: Path, devices: int) -> None:
    """Write the records of a teacher, where the stage reads them."""
    if "cache" in yaml.safe_load(file.read_text())["stages"][0]:
        written = posttrain("distill", file, "--cache", devices=devices)
        assert written.code == 0, written.err


@pytest.mark.by_case
@pytest.mark.parametrize(
    ("kind", "a", "b"), cases("sft", "preference", "distill", "reward_model", "online_preference", "drafter")
)
def test_a_pair_runs(tmp_path: Path, teacher: Path, kind: str, a: str, b: str) -> None:
    """A pair of features runs for two steps as the oracle has them, and once more from where a kill in the second
    leaves it."""
    devices = max(STAGES[kind][name].devices for name in (a, b))
    file = write(tmp_path, teacher, kind, a, b)
    write_cache(file, devices)
    observer = Observer(file)
    run(file, devices, observer, killed_at=1)
    observer.check()
    expected = take_killed(file)
    assert run(file, devices, None, killed_at=0) == 1, "the second step alone is done again"
    assert saved(file.parent / "out") == expected


LOSSES: dict[str, Any] = {
    "dpo": {"kind": "dpo", "label_smoothing": 0.1},
    "sigmoid": {"kind": "sigmoid", "divergence": "js_divergence"},
    "sigmoid_norm": {"kind": "sigmoid_norm", "divergence": "forward_kl", "beta": 0.5},
    "hinge": {"kind": "hinge", "divergence": "alpha_divergence", "alpha": 0.5},
    "ipo": {"kind": "ipo", "beta": 0.5},
    "exo_pair": {"kind": "exo_pair", "label_smoothing": 0.01},
    "nca_pair": "nca_pair",
    "robust": {"kind": "robust", "label_smoothing": 0.1},
    "bco_pair": "bco_pair",
    "sppo_hard": "sppo_hard",
    "aot": {"kind": ["aot", "sft"], "label_smoothing": 0.1},
    "aot_unpaired": "aot_unpaired",
    "apo_zero": "apo_zero",
    "apo_down": "apo_down",
    "discopop": "discopop",
    "kto": {"kind": "kto", "desirable_weight": 2.0, "undesirable_weight": 0.5},
    "apo_zero_unpaired": "apo_zero_unpaired",
    "cpo": {"kind": "cpo", "label_smoothing": 0.1},
    "cpo_hinge": "cpo_hinge",
    "cpo_ipo": "cpo_ipo",
    "simpo": {"kind": "simpo", "alpha": 0.1, "nll_coef": 0.5, "label_smoothing": 0.1},
    "orpo": {"kind": "orpo", "beta": 0.5},
    "sft": "sft",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_every_loss_of_preference_is_the_oracles(tmp_path: Path, teacher: Path, name: str) -> None:
    file = write(tmp_path, teacher, "preference", "kto" if name in ("kto", "apo_zero_unpaired") else "ipo", "truncate")
    written = yaml.safe_load(file.read_text())
    written["stages"][0]["loss"] = LOSSES[name]
    file.write_text(yaml.safe_dump(written))
    observer = Observer(file)
    run(file, 1, observer, killed_at=0)
    observer.check()


def original(place: Any, name: str) -> Any:
    """Function before a fault takes its place."""
    return vars(place)[name]


class Fault(NamedTuple):
    """A pair, and the function in whose place a wrong one is put."""

    pair: tuple[str, str, str]
    place: Any
    name: str
    wrong: Callable[[Any], Any]
    """Substitute for the right function."""


def per_batch(right: Any) -> Any:
    """Mean of each part in place of sum and weight."""

    def mean(*given: Any) -> Mean:
        found = right(*given)
        return Mean(total=found.total / jnp.maximum(found.weight, 1.0), weight=jnp.minimum(found.weight, 1.0))

    return mean


FAULTS = {
    "loss on prompts": Fault(
        ("sft", "packing", "mix"),
        pipeline,
        "sequence",
        lambda right: lambda one: right(one) | {"loss_weight": np.ones(len(one.tokens), np.float32)},
    ),
    "the first turn too": Fault(
        ("sft", "last_turn_only", "mix"), data_format, "_first", lambda _: lambda messages, first, loss: first
    ),
    "cut from the left": Fault(
        ("sft", "truncate", "mix"),
        pipeline,
        "fit_to_row",
        lambda right: (
            lambda one, length, how: right(
                dataclasses.replace(one, tokens=one.tokens[-length:], loss_mask=one.loss_mask[-length:]), length, how
            )
        ),
    ),
    "a row left out": Fault(
        ("sft", "packing", "dft"), pipeline, "order", lambda right: lambda count, **how: right(count - 1, **how)
    ),
    "neighbours seen": Fault(
        ("sft", "mix", "micro_batch_rows"),
        dispatch,
        "visible",
        lambda right: lambda q, k, segments, others, *rest: right(q, k, segments * 0, others * 0, *rest),
    ),
    "mean of means": Fault(("sft", "mix", "micro_batch_rows"), sft, "token_mean", per_batch),
    "DFT without the probability": Fault(
        ("sft", "dft", "packing"), sft.DFTLoss, "__call__", lambda _: lambda self, *given: sft.SFTLoss()(*given)
    ),
    "labels smoothed over half of the ids": Fault(
        ("sft", "label_smoothing", "mix"),
        sft_stage,
        "train_settings",
        lambda right: lambda section, num_ids, **how: right(section, num_ids // 2, **how),
    ),
    "noise by the row's length": Fault(
        ("sft", "noise_alpha", "mix"),
        Objective,
        "_noise",
        lambda right: lambda self, keys, segments: right(self, keys, jnp.ones_like(segments)),
    ),
    "norms decay": Fault(("sft", "packing", "adamw"), Parameter, "decays", lambda _: property(lambda _: True)),
    "gradient not clipped": Fault(("sft", "mix", "adamw"), programs, "clipped", lambda _: lambda g, *_: g),
    "rate stays": Fault(
        ("sft", "dft", "adamw"),
        transformations,
        "make_schedule",
        lambda right: lambda section, steps: right(section, 100 * steps),
    ),
    "Muon of the transposed scale": Fault(
        ("sft", "packing", "muon"),
        muon,
        "update_scale",
        lambda right: lambda scale, inputs, outputs: right(scale, min(inputs, outputs), 1),
    ),
    "keys alone are clipped": Fault(
        ("sft", "packing", "qk_clip"),
        programs,
        "clip_factors",
        lambda right: lambda *given: {path: f for path, f in right(*given).items() if ".k." in path},
    ),
    "average of the new weights": Fault(
        ("sft", "packing", "ema"), Optimizer, "_averaged", lambda _: lambda self, old, new, step: new
    ),
    "held-out rows by the last weights": Fault(
        ("sft", "eval_dataset", "ema"), Trainer, "averaged", lambda _: lambda self: contextlib.nullcontext()
    ),
    "router's z-loss left out": Fault(
        ("sft", "mixture", "micro_batch_rows"),
        RouterLoss,
        "__call__",
        lambda _: lambda self, stats: self.balance_coef * jnp.sum(stats.balance),
    ),
    "router's loss by rows": Fault(
        ("sft", "mixture", "data"), objective, "num_tokens", lambda right: lambda batch: right(batch) / 2
    ),
    "a reference that moves": Fault(
        ("preference", "live", "micro_batch_rows"),
        Reference,
        "logps",
        lambda _: lambda self, batch: np.asarray(self._actor.logps(batch)),
    ),
    "IPO of sums": Fault(("preference", "ipo", "truncate"), LogRatios, "mean_delta", lambda _: lambda self: self.delta),
    "KTO's KL below zero": Fault(("preference", "kto", "packing"), KTOLoss, "_kl", lambda _: unclipped),
    "SimPO's margin turned": Fault(
        ("preference", "simpo", "packing"),
        SimPOLoss,
        "__call__",
        lambda right: lambda self, *given: right(dataclasses.replace(self, gamma=-self.gamma), *given),
    ),
    "ORPO without its prompts": Fault(
        ("preference", "orpo", "packing"),
        pair_examples.LabelledSequence,
        "of",
        lambda right: classmethod(lambda cls, *given, whole=False, **how: right.__func__(cls, *given, **how)),
    ),
    "tails in full": Fault(
        ("preference", "tail_weight", "packing"), pairs, "_discount_tail", lambda _: lambda weight, *_: weight
    ),
    "pairs not weighted": Fault(
        ("preference", "use_weighting", "packing"), PreferenceLoss, "_share", lambda _: lambda *_: 1.0
    ),
    "NLL by pairs": Fault(
        ("preference", "combined", "micro_batch_rows"),
        preference,
        "with_nll",
        lambda _: lambda loss, nll, coef: Mean(total=loss.total + coef * nll.total, weight=loss.weight),
    ),
    "margins left out": Fault(
        ("reward_model", "center_coef", "packing"),
        reward_model,
        "_margins",
        lambda right: lambda batch: 0 * right(batch),
    ),
    "score of the prompt": Fault(
        ("reward_model", "share_prompts", "micro_batch_rows"),
        reward_model,
        "reward_pairs",
        lambda right: (
            lambda stats, batch: right(dataclasses.replace(stats, scores=jnp.roll(stats.scores, 1, axis=1)), batch)
        ),
    ),
    "steps not signed": Fault(
        ("reward_model", "process", "packing"),
        reward_model.ProcessLoss,
        "__call__",
        lambda right: (
            lambda self, stats, batch: right(
                self, stats, dataclasses.replace(batch, roles=abs(jnp.asarray(batch.roles)))
            )
        ),
    ),
    "divergence turned": Fault(
        ("distill", "beta", "packing"),
        distill_stage,
        "terms_of",
        lambda right: lambda section, *given: right(section.model_copy(update={"beta": 1 - section.beta}), *given),
    ),
    "the teacher at another temperature": Fault(
        ("distill", "temperature", "packing"), divergence.VocabSharding, "resized", lambda _: lambda self, x, n: x / 2
    ),
    "teachers exchanged": Fault(
        ("distill", "two_teachers", "mix"), targets, "teacher_shares", lambda right: lambda *given: right(*given)[::-1]
    ),
    "cross-entropy's share turned": Fault(
        ("distill", "cross_entropy", "packing"),
        features,
        "DistillLoss",
        lambda right: lambda share, **how: right(1 - share, **how),
    ),
    "features of the next token": Fault(
        ("distill", "features", "packing"),
        layer_matching,
        "hidden_distance",
        lambda right: lambda own, other, *rest: right(own, jnp.roll(other, -1, axis=1), *rest),
    ),
    "the rest of the top-k": Fault(
        ("distill", "packing", "top_k"),
        distill_teachers.FrozenModel,
        "top_k",
        lambda right: lambda self, batch: doubled_tail(right(self, batch)),
    ),
    "the worst is chosen": Fault(
        ("online_preference", "combined", "rewards"),
        online_dpo,
        "best_and_worst",
        lambda right: lambda rewards: -right(rewards),
    ),
    "one reward counts": Fault(
        ("online_preference", "rewards", "share_prompts"),
        online_dpo,
        "best_and_worst",
        lambda right: lambda rewards: right(np.round(rewards, 0)),
    ),
    "answers alone": Fault(("sft", "packing", "train_on_prompt"), pipeline, "loss_on", lambda _: lambda _: "answers"),
    "cut in place of dropped": Fault(
        ("sft", "drop", "mix"),
        pipeline,
        "fit_to_row",
        lambda right: lambda one, length, how: right(one, length, "truncate"),
    ),
    "parts without context": Fault(("sft", "packing", "split"), pipeline, "fit_to_row", lambda _: apart),
    "the last turn alone": Fault(
        ("sft", "mix", "chat_template"),
        Renderer,
        "conversations",
        lambda right: lambda self, *given, **how: right(self, *given, **how)[-1:],
    ),
    "rates of Lion exchanged": Fault(
        ("sft", "packing", "lion"),
        optax,
        "lion",
        lambda right: lambda rate, b1, b2, **how: right(rate, b1=b2, b2=b1, **how),
    ),
    "Adafactor forgets": Fault(
        ("sft", "packing", "adafactor"),
        transformations,
        "_adafactor",
        lambda right: lambda section, *given: right(section.model_copy(update={"decay_rate": 0.2}), *given),
    ),
    "twice the rate of one's own optimiser": Fault(
        ("sft", "packing", "optax"),
        transformations,
        "make_schedule",
        lambda right: lambda section, steps: lambda at: 2 * right(section, steps)(at),
    ),
    "first moments of twice the size": Fault(
        ("sft", "packing", "moments"),
        optimizers,
        "moment_value",
        lambda right: lambda stored: right(stored) * (1 + (getattr(stored, "codes", stored).dtype == jnp.int8)),
    ),
    "masters stand still": Fault(
        ("sft", "packing", "bfloat16"),
        Optimizer,
        "_updated",
        without_new_masters,
    ),
    "both directions": Fault(
        ("distill", "reverse", "packing"),
        distill_stage,
        "terms_of",
        lambda right: lambda section, *given: right(section.model_copy(update={"beta": 0.5}), *given),
    ),
    "records of the token before": Fault(
        ("distill", "packing", "cache"),
        distill_cache.TeacherCache,
        "places",
        lambda right: (
            lambda self, given: [None if one is None else np.maximum(one - 1, one > 0) for one in right(self, given)]
        ),
    ),
    "ends that are not learned": Fault(
        ("distill", "beta", "on_policy"), distill_stage, "sample_rows", lambda right: without_ends(right)
    ),
    "an adapter of half the scale": Fault(
        ("sft", "packing", "lora"),
        Adapter,
        "scaled_b",
        lambda right: lambda self, dtype: right(self, dtype) / 2,
    ),
    "half an adapter": Fault(
        ("preference", "ipo", "lora"),
        ModelWeights,
        "trainable",
        lambda right: lambda self: frozenset(path for path in right(self) if not path.endswith("lora_a")),
    ),
    "codes of half the scale": Fault(
        ("sft", "packing", "quantize"),
        quant,
        "dequantized",
        lambda right: lambda codes, scales, *given: right(codes, scales / 2, *given),
    ),
    "scales of twice the size": Fault(
        ("distill", "packing", "quantize"),
        load,
        "random_weights",
        lambda right: lambda *given: twice_scaled(*right(*given)),
    ),
    "samples of codes of another scale": Fault(
        ("online_preference", "ipo", "rollout.quantize"),
        quantize.Copies,
        "__call__",
        lambda right: lambda self, model: twice_as_large(*right(self, model)),
    ),
    "samples of no codes": Fault(
        ("online_preference", "ipo", "rollout.quantize"),
        quantize,
        "quantize_model",
        lambda _: lambda *_: {},
    ),
    "samples without values": Fault(("online_preference", "ipo", "cache_dtype"), KVCache, "rounded", without_values),
    "samples at another temperature": Fault(
        ("distill", "beta", "on_policy"),
        distill_stage,
        "Sampler",
        lambda right: lambda sampling, **how: right(sampling=sampling.model_copy(update={"temperature": 2.0}), **how),
    ),
    "tokens chosen on each device": Fault(
        ("sft", "packing", "tensor"),
        layout.VocabSharding,
        "chosen",
        counted_on_each,
    ),
    "rows of the first device on each": Fault(
        ("sft", "packing", "fsdp"),
        layout.VocabSharding,
        "gathered",
        first_rows_alone,
    ),
    "hidden states of the future": Fault(
        ("drafter", "packing", "mix"),
        drafter.Blocks,
        "of",
        lambda right: classmethod(lambda cls, *given: later(right.__func__(cls, *given))),
    ),
    "one layer of a drafter": Fault(
        ("drafter", "packing", "layers"),
        drafter,
        "propose",
        lambda right: lambda config, *given: right(dataclasses.replace(config, layers=1), *given),
    ),
}


def apart(one: TokenizedExample, length: int, how: str) -> list[TokenizedExample]:
    """Parts of a text that do not overlap, so that the first token of each is never learned."""
    parts = [one.tokens[start : start + length] for start in range(0, len(one.tokens), length)]
    return [TokenizedExample(part, np.arange(len(part)) > 0) for part in parts if len(part) > 1]


def without_ends(right: Any) -> Any:
    def wrong(*given: Any, **how: Any) -> Any:
        batch, where = right(*given, **how)
        last = np.asarray(batch.segments) != np.roll(np.asarray(batch.segments), -1, axis=1)
        return dataclasses.replace(batch, loss_weight=np.where(last, 0, np.asarray(batch.loss_weight))), where

    return wrong


def twice_as_large(outline: Any, weights: Any) -> tuple[Any, Any]:
    return outline, {path: 2 * x if path.endswith(".scales") else x for path, x in weights.items()}


def twice_scaled(outline: Any, draw: Any) -> tuple[Any, Any]:
    """Random weights whose codes stand for twice as much."""

    def wrong(seed: Any) -> Any:
        weights, errors = draw(seed)
        return twice_as_large(outline, weights)[1], errors

    return outline, wrong


def later(blocks: drafter.Blocks) -> drafter.Blocks:
    """Blocks that read the hidden state of their newest token too."""
    return blocks._replace(before=blocks.before + 1)


def unclipped(self: KTOLoss, sequences: Any, ratios: Any) -> Mean:
    others = (sequences.roles == 2) * (sequences.lengths > 0)
    return Mean(total=(others * ratios).sum(), weight=1.0 * others.sum())


def doubled_tail(found: Any) -> Any:
    return dataclasses.replace(found, tail=found.tail + np.log(2))


@pytest.mark.parametrize("name", often(FAULTS, "neighbours seen"))
def test_a_seeded_fault_turns_its_pair_red(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is the comparison that fails, or the gate of sampler and trainer, and not the run."""
    kind, a, b = FAULTS[name].pair
    file = write(tmp_path, teacher, kind, a, b)
    devices = max(STAGES[kind][one].devices for one in (a, b))
    write_cache(file, devices)
    observer = Observer(file)
    with pytest.raises(AssertionError) as error:
        compare(file, devices, monkeypatch, observer, FAULTS[name])
    compared = any(entry.path.name == "observer.py" for entry in error.traceback)
    assert compared or "disagree" in str(error.value), str(error.value)


def compare(file: Path, devices: int, monkeypatch: pytest.MonkeyPatch, observer: Observer, fault: Fault) -> None:
    """Run with a fault, and compare without it."""
    with monkeypatch.context() as patch:
        patch.setattr(fault.place, fault.name, fault.wrong(original(fault.place, fault.name)))
        run(file, devices, observer, killed_at=0)
    observer.check()
