"""Every field of a configuration reaches the object that it is about."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.config import DistillSection
from posttrain.config.yaml_file import load_config
from posttrain.data.format import loss_on
from posttrain.data.pipeline import Prompts, SFTBatches, eval_batches
from posttrain.distill.features import distill_loss
from posttrain.distill.teachers import load_teacher
from posttrain.errors import ConfigError
from posttrain.evaluation.sequences import counted
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.kernels.logits.divergence import Divergence
from posttrain.losses.distill import DistillLoss
from posttrain.losses.ratios import ImportanceSampling, k1, k2
from posttrain.losses.reduce import ConstantLength, sequence_total, token_mean
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.losses.surrogates import CISPOObjective, Clip, GMPOObjective, SAPOObjective, VESPOObjective
from posttrain.mesh import single_device_mesh
from posttrain.rl.advantages import centered, decoupled
from posttrain.rl.returns import RewardKL
from posttrain.rl.sampler import Sampler, Source, sampling_params
from posttrain.rollout.engine import NativeEngine
from posttrain.runs.prepare import prepare
from posttrain.stages.distill import DistillInputs, cache_folder, terms_of
from posttrain.stages.inputs import Prepared
from posttrain.stages.prompts import RLInputs
from posttrain.stages.sft import SequenceInputs, SFTInputs
from posttrain.train.optimizers import Trained
from posttrain.train.transformations import optimizer_of
from posttrain.weights.load import init_model
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights, Parameter
from tests.stages.runs import INIT, model_of, rl_stage, sft_stage, write_run
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fields")
    write_run(folder, sft_stage(), rl_stage())
    return folder


def prepared(folder: Path, *overrides: str) -> Prepared:
    loaded = load_config(folder / "run.yaml", overrides)
    return prepare(loaded, offline_ok=False)


def rl(folder: Path, *overrides: str) -> RLInputs:
    inputs = prepared(folder, *(f"stages.rl.{text}" for text in overrides)).stages[1]
    assert isinstance(inputs, RLInputs)
    return inputs


def sft(folder: Path, *overrides: str) -> SFTInputs:
    inputs = prepared(folder, *(f"stages.sft.{text}" for text in overrides)).stages[0]
    assert isinstance(inputs, SFTInputs)
    return inputs


def made(folder: Path, fields: str, kind: str = "grpo") -> Algorithm:
    """Algorithm of a kind with these fields."""
    return rl(folder, f"algorithm={{kind: {kind}, {fields}}}").algorithm


def test_policy_loss(folder: Path) -> None:
    loss = made(folder, "clip_low: 0.11, clip_high: 0.33, kl_coef: 0.07").loss
    assert (loss.clip_low, loss.clip_high, loss.kl_coef) == (0.11, 0.33, 0.07)
    assert rl(folder, "algorithm.kl_coef=0").algorithm.loss.kl_coef == 0 != rl(folder).algorithm.loss.kl_coef
    others = {"dual_clip": 3.0, "kl_bias_correction": False, "entropy_coef": 0.01, "ratio": "sequence_sum"}
    changed = rl(folder, *(f"algorithm.{name}={value}" for name, value in others.items())).algorithm.loss
    assert {name: getattr(changed, name) for name in others} == others
    assert made(folder, "kl_estimator: k2").loss.kl_estimator is k2
    assert made(folder, "reduce: token_mean").loss.reduce is token_mean
    assert made(folder, "reduce: constant_length").loss.reduce == ConstantLength(6)
    with pytest.raises(ConfigError, match="algorithm.kl_estimator=k1 with kl_coef=0.04: the gradient of k1 is 0"):
        made(folder, "kl_estimator: k1, kl_bias_correction: false")
    algorithms = {rl(folder, f"algorithm={name}").algorithm for name in ("grpo", "dr_grpo", "dapo", "gspo", "rloo")}
    assert len({algorithm.loss for algorithm in algorithms}) == 5
    other = rl(folder, "algorithm=dr_grpo", "sampling.max_tokens=5").algorithm.loss
    assert other.reduce != rl(folder, "algorithm=dr_grpo").algorithm.loss.reduce


def test_algorithm(folder: Path) -> None:
    """Fields of loss, advantage, critic, reference and KL."""
    refused = {
        "algorithm.critic.warmup=2": "algorithm.critic: unknown field; a field of 'ppo', not of 'grpo'",
        "placement.critic.offload=true": "placement.critic: algorithm=grpo has no critic; use algorithm: ppo",
        "reference.refresh_every=2": "reference: without effect, algorithm=dapo has no KL penalty; set algorithm.kl_c",
        "placement.reference.offload=true": "reference: without effect",
        "reference.mixup=0.5": "mixup=0.5 has no effect without refresh_every",
        "updates=3": "updates=3 must divide prompts_per_step=2",
        "update_epochs=3": "num_steps=4 must be a multiple of updates x update_epochs = 3, .* use 3 or 6",
    }
    for override, message in refused.items():
        algorithm = "dapo" if "dapo" in message or "reference" in override else "grpo"
        with pytest.raises(ConfigError, match=message):
            rl(folder, f"algorithm={algorithm}", override)
    other = made(folder, "kl_in: reward, kl_coef: 0.3, truncated: mask, top_entropy: 0.2")
    assert other.reward_kl == RewardKL(coef=0.3, estimator=k1) and other.loss.kl_coef == 0
    assert (other.truncated, other.top_entropy) == ("mask", 0.2)
    values = "algorithm={kind: ppo, gamma: 0.9, gae_lambda: 0.8, value_clip: 0.4}"
    critic = rl(folder, values, "group_size=1").algorithm.critic
    assert critic is not None and (critic.gae.gamma, critic.gae.lam, critic.loss.clip) == (0.9, 0.8, 0.4)
    assert rl(folder, "algorithm=gdpo").algorithm.advantage is decoupled
    assert made(folder, "advantage_scale: none").advantage is centered
    loss = made(folder, "off_policy_mask: 0.3, reduce: sequence_total, ratio: sequence_mean_token").loss
    assert (loss.off_policy_mask, loss.reduce, loss.ratio) == (0.3, sequence_total, "sequence_mean_token")


def test_surrogate(folder: Path) -> None:
    temperatures = "temperature_positive: 0.5, temperature_negative: 2.0"
    sapo, own = (made(folder, f"surrogate: {{kind: sapo, {temperatures}}}"), made(folder, temperatures, "sapo"))
    assert sapo.loss.surrogate == own.loss.surrogate == SAPOObjective(positive=0.5, negative=2.0)
    numbers = "k_positive: 1.0, rate_positive: 2.0, k_negative: 3.5, rate_negative: 4.0"
    vespo, own = made(folder, f"surrogate: {{kind: vespo, {numbers}}}"), made(folder, numbers, "vespo")
    expected = VESPOObjective(k_positive=1.0, rate_positive=2.0, k_negative=3.5, rate_negative=4.0)
    assert vespo.loss.surrogate == own.loss.surrogate == expected
    plain = {kind: made(folder, f"surrogate: {kind}").loss.surrogate for kind in ("cispo", "gmpo")}
    assert (
        plain == {"cispo": CISPOObjective(), "gmpo": GMPOObjective()} and rl(folder).algorithm.loss.surrogate == Clip()
    )
    with pytest.raises(ConfigError, match="surrogate.k_positive: unknown field; a field of 'vespo', not of 'sapo'"):
        made(folder, "surrogate: {kind: sapo, k_positive: 3.0}")


OWN = """
import numpy as np
from posttrain.losses.policy import DAPO

class Loss:
    kl_coef = 0.0
    def __call__(self, stats, batch):
        return DAPO(stats, batch)

class Bare:
    def __call__(self, stats, batch):
        return DAPO(stats, batch)

class Sized(Loss):
    def __init__(self, size):
        self.size = size

def hard(rewards_PG):
    return np.nanmean(rewards_PG, axis=1) < 0.5

def scores(rewards_PG):
    return np.nanmean(rewards_PG, axis=1)
"""


def test_own_loss_and_filter(folder: Path) -> None:
    (folder / "own.py").write_text(OWN)
    algorithm = rl(folder, "algorithm.loss=own.py:Loss", "algorithm.filter=own.py:hard").algorithm
    assert type(algorithm.loss).__name__ == "Loss" and not algorithm.needs_reference
    rewards_PG = np.asarray([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]], np.float32)
    assert algorithm.kept(rewards_PG).tolist() == [False, True]
    wrong = {
        "algorithm.loss=own.py:Bare": "must be called with .stats, batch. and have kl_coef",
        "algorithm.loss=own.py:Sized": "loss: own.py:Sized needs size; write {fn: own.py:Sized, size: ...}",
        "algorithm.filter=own.py:scores": "own.py:scores must return true or false for each",
        "algorithm.filter=own.py:Sized": "filter: own.py:Sized needs size",
    }
    for override, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            rl(folder, override)
    with pytest.raises(ConfigError, match="algorithm: clip_low without effect on a loss of your own"):
        rl(folder, "algorithm.loss=own.py:Loss", "algorithm.clip_low=0.1")


def test_importance_sampling(folder: Path) -> None:
    """By default exactly where the sampler's distribution is not the trainer's."""
    assert rl(folder).algorithm.loss.importance is None
    plain = ("sampling.temperature=0.7", "sampling.stop=[x]", "sampling.ignore_eos=true")
    assert rl(folder, *plain).algorithm.loss.importance is None
    merged = prepared(folder, "model.lora={rank: 2}", "stages.rl.rollout.merge_lora=true").stages[1]
    assert isinstance(merged, RLInputs) and merged.algorithm.loss.importance is None
    penalties = ("repetition_penalty=1.1", "presence_penalty=0.1", "frequency_penalty=0.1")
    others = ("top_k=3", "top_p=0.9", "min_p=0.1", "logit_bias={5: 1.0}", "allowed_token_ids=[5, 6]")
    changes = (*penalties, *others)
    for override in (
        *(f"sampling.{change}" for change in changes),
        "rollout.quantize=int8",
        "rollout.cache_dtype=fp8",
        "asynchronous={}",
    ):
        assert rl(folder, override).algorithm.loss.importance == ImportanceSampling(), override
    never = rl(folder, "sampling.top_k=3", "algorithm.importance_sampling.apply=never")
    assert never.algorithm.loss.importance is None
    given = "algorithm.importance_sampling={apply: always, level: sequence_mean, bound: mask, low: 0.5, high: 3.0}"
    expected = ImportanceSampling(level="sequence_mean", bound="mask", low=0.5, high=3.0)
    assert rl(folder, given).algorithm.loss.importance == expected
    with pytest.raises(ConfigError, match="masks nothing; set one of them"):
        rl(folder, "algorithm.importance_sampling={apply: always, bound: mask, high: null}")
    with pytest.raises(
        ConfigError, match="algorithm.importance_sampling.high without effect: apply=auto and samples of the same"
    ):
        rl(folder, "algorithm.importance_sampling.high=3.0")


ADVANTAGES = """
import numpy as np
plain = lambda r: r - r.mean(1, keepdims=True)
scaled = lambda r: (r - np.nanmean(r, 1, keepdims=True)) / np.nanstd(r, 1, keepdims=True)
careful = lambda r: (r - np.nanmean(r, 1, keepdims=True)) / (np.nanstd(r, 1, keepdims=True) + 1e-4)
fewer = lambda r: r[:, 1:]
raising = lambda r: r.no_such_method()
parts = lambda parts_PG, weights: sum(weights[name] * np.nan_to_num(part) for name, part in parts_PG.items())
both = lambda rewards_PG, parts_PG, weights: np.where(np.isnan(rewards_PG), 0.0, parts(parts_PG, weights))
penalised = lambda parts_PG, weights, penalties_PG: parts(parts_PG, weights) + penalties_PG
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "plain",
            r"of the group \[nan, 1.0, 2.0, 0.0\] \(nan: no reward\) it made \[0.0, nan, nan, nan\]; use np.nanmean",
        ),
        ("scaled", r"of the group \[1.0, 1.0, 1.0, 1.0\].* and add a small number to what it divides by"),
        ("fewer", r"it returned the shape \(3, 3\)"),
        ("raising", "raised AttributeError: "),
    ],
)
def test_advantages_that_a_run_would_die_of(folder: Path, name: str, message: str) -> None:
    (folder / "advantages.py").write_text(ADVANTAGES)
    with pytest.raises(ConfigError, match=f"advantage: advantages.py:{name}.*{message}"):
        rl(folder, f"algorithm.advantage=advantages.py:{name}")


def test_advantage(folder: Path) -> None:
    (folder / "advantages.py").write_text(ADVANTAGES)
    rewards_PG = np.asarray([[0.0, 1.0, 2.0, 3.0], [np.nan, 1.0, 2.0, 3.0], [np.nan] * 4], np.float32)
    made = rl(folder, "algorithm.advantage=posttrain.rl.advantages:centered").algorithm.advantage(rewards_PG)
    np.testing.assert_array_equal(made, centered(rewards_PG))
    for name in ("parts", "both"):
        rl(folder, f"algorithm.advantage=advantages.py:{name}")
        with pytest.raises(ConfigError, match=f"advantages.py:{name} gives the same advantages whatever"):
            rl(folder, f"algorithm.advantage=advantages.py:{name}", "algorithm.kl_in=reward")
    for name in ("penalised", "careful"):
        rl(folder, f"algorithm.advantage=advantages.py:{name}", "algorithm.kl_in=reward")
    made = rl(folder, "algorithm.advantage=advantages.py:careful").algorithm.advantage(rewards_PG)
    assert np.isfinite(made).all() and (made[np.isnan(rewards_PG)] == 0).all() and made[1, 1] < made[1, 2] < made[1, 3]


def test_sampling(folder: Path) -> None:
    settings = {"max_tokens": 5, "temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2}
    settings |= {"presence_penalty": 0.5, "frequency_penalty": -0.25}
    lists = ("stop=[x]", "stop_token_ids=[9]", "allowed_token_ids=[5, 9, 50]", "logit_bias={5: 1.5, 50: -.inf}")
    given = [f"sampling.{text}" for text in (*(f"{key}={value}" for key, value in settings.items()), *lists)]
    inputs = rl(folder, *given)

    model, tokenizer = model_of(folder / "sampling"), inputs.renderer.tokenizer
    engine = NativeEngine(model, slots=1, max_length=16, decode_steps=4, tokenizer_decode=str, version=0)

    def sampler(seed: int) -> Sampler:
        return Sampler(
            engine=engine,
            renderer=inputs.renderer,
            sampling=inputs.section.sampling,
            max_prompt_tokens=inputs.max_prompt_tokens,
            seed=seed,
        )

    params = sampler(1).params(3, 4)
    assert {key: getattr(params, key) for key in settings} == settings and params.stop == ("x",)
    assert params.stop_token_ids == (*inputs.renderer.tokenizer.stop_ids, 9)
    assert params.allowed_token_ids == (5, 9, 50) and params.logit_bias == {5: 1.5, 50: float("-inf")}
    endless = sampling_params(rl(folder, *given, "sampling.ignore_eos=true").section.sampling, tokenizer, key=(0, 0))
    assert endless.stop_token_ids == (9,)
    with pytest.raises(ConfigError, match=r"eval_sampling.logit_bias: token ids from 3 to 900; .* to "):
        rl(folder, "eval_sampling={max_tokens: 4, logit_bias: {3: 1.0, 900: 1.0}}")
    with pytest.raises(ConfigError, match=r"sampling.stop='a<eos>': contains the special token <eos>"):
        rl(folder, "sampling.stop=['a<eos>']")
    with pytest.raises(ConfigError, match=r"eval_sampling.skip_special_tokens=True must be that of sampling, False"):
        rl(folder, "sampling.skip_special_tokens=false", "eval_sampling={skip_special_tokens: true}")
    with pytest.raises(ConfigError, match=r"stages.1: sampling.allowed_token_ids=\(5,\): must be None, or hold"):
        rl(folder, "sampling.allowed_token_ids=[5]", "sampling.logit_bias={5: -.inf}")
    keys = {p.key for p in (params, sampler(2).params(3, 4), sampler(1).params(4, 4), sampler(1).params(3, 5))}
    assert len(keys) == 4
    greedy = inputs.section.held_out_sampling
    assert (greedy.temperature, greedy.top_k, greedy.max_tokens, greedy.stop) == (0.0, 0, 5, ("x",))
    warm = rl(folder, "eval_sampling={max_tokens: 4, temperature: 0.5}").section
    assert warm.held_out_sampling.temperature == 0.5
    assert inputs.max_prompt_tokens == 11 and rl(folder, "max_prompt_tokens=7").max_prompt_tokens == 7


def test_rows_of_a_forward_pass(folder: Path) -> None:
    assert rl(folder).section.pass_rows == 4
    assert rl(folder, "micro_batch_rows=null", "prompts_per_step=5").section.pass_rows == 3  # an eighth of 20 rows
    assert sft(folder).section.pass_rows is None


def test_last_turn_only(folder: Path) -> None:
    assert loss_on(sft(folder).section) == "answers"
    assert loss_on(sft(folder, "train_on_prompt=true").section) == "all"
    assert loss_on(sft(folder, "last_turn_only=true").section) == "last"
    with pytest.raises(ConfigError, match="with train_on_prompt every turn has loss"):
        sft(folder, "last_turn_only=true", "train_on_prompt=true")


def batch(inputs: SequenceInputs, seed: int = 0) -> dict[str, Any]:
    made = next(SFTBatches(inputs.section, inputs.rows, inputs.renderer, seed=seed, mixed=inputs.mixed))
    return {"tokens": made.tokens, "loss_weight": made.loss_weight, "segments": made.segments}


@pytest.mark.parametrize(
    "override",
    [
        "dataset.shuffle=false",
        "dataset.skip=3",
        "dataset.limit=2",
        "dataset.prompt='{answer}='",
        "dataset.completion='{prompt}'",
        "dataset={path: rows.jsonl, chat: true}",
        "dataset={path: rows.jsonl, chat: true, system: S}",
        "packing=false",
        "train_on_prompt=true",
        "batch_rows=3",
        "row_tokens=12",
        "mix=[{path: rows.jsonl, chat: false, skip: 20}]",
        "seed",
    ],
)
def test_rows_of_sft(folder: Path, override: str) -> None:
    plain = batch(sft(folder, "row_tokens=64"))
    changed = batch(sft(folder, "row_tokens=64", *([] if override == "seed" else [override])), int(override == "seed"))
    same = [np.array_equal(plain[name], changed[name]) for name in plain]
    assert not all(same)
    if override == "train_on_prompt=true":
        assert same == [True, False, True]


@pytest.mark.parametrize("packing", [True, False])
def test_evaluation_counts_its_rows(folder: Path, packing: bool) -> None:
    inputs = sft(folder, f"packing={str(packing).lower()}", "eval_dataset={path: rows.jsonl, chat: false, limit: 11}")
    section, rows, renderer = inputs.section, inputs.eval_rows, inputs.eval_renderer
    assert section.eval_dataset is not None and rows is not None and renderer is not None
    done: list[int] = []
    batches = list(counted(eval_batches(section, section.eval_dataset, rows, renderer), done.append))
    assert sum(done) == 11 and len(done) == len(batches) and (packing or done == [4, 4, 3])


def test_overlong(folder: Path) -> None:
    with pytest.raises(ValueError, match="row_tokens=7"):
        batch(sft(folder, "row_tokens=7"))
    cut, dropped = (batch(sft(folder, "row_tokens=7", f"overlong={rule}")) for rule in ("truncate", "drop"))
    assert not np.array_equal(cut["tokens"], dropped["tokens"])


def test_loss_of_sft(folder: Path) -> None:
    assert isinstance(sft(folder).loss, SFTLoss) and isinstance(sft(folder, "loss=dft").loss, DFTLoss)
    assert isinstance(sft(folder, "loss=posttrain.losses.sft:DFTLoss").loss, DFTLoss)
    assert sft(folder, "label_smoothing=0.1").loss == SFTLoss(0.1)
    with pytest.raises(ConfigError, match="is for the loss nll"):
        sft(folder, "label_smoothing=0.1", "loss=dft")


@pytest.mark.thorough
def test_datasets_are_mixed_by_weight(folder: Path) -> None:
    (folder / "letters.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 5)

    def share(weight: float) -> float:
        inputs = sft(folder, f"mix=[{{path: letters.jsonl, chat: false, weight: {weight}}}]", "dataset.weight=2")
        stream = SFTBatches(inputs.section, inputs.rows, inputs.renderer, seed=0, mixed=inputs.mixed)
        rows = np.concatenate([next(stream).tokens for _ in range(30)])
        letters, sums = np.count_nonzero(rows == ord("a")), np.count_nonzero(rows == ord("+"))
        return letters / (letters + sums)

    assert share(2) == pytest.approx(0.5, abs=0.02) and share(6) == pytest.approx(0.75, abs=0.02)


def test_prompts_of_rl(folder: Path) -> None:
    def order(*overrides: str, seed: int = 0) -> list[int]:
        inputs = rl(folder, *overrides)
        prompts = Prompts(inputs.section.dataset, inputs.rows, seed=seed)
        return [next(prompts) for _ in range(3)]

    assert order("dataset.shuffle=false") == [0, 1, 2]
    assert order() != order(seed=1)


def test_prompts_that_are_too_long_are_counted_or_left_out(folder: Path) -> None:
    """Of the 24 prompts those of two digits have six tokens."""
    said = r"14 of 24 prompts of .*rows.jsonl have more than max_prompt_tokens=5 tokens \(row 10: 6; the longest: 6\)"
    with pytest.raises(ConfigError, match=f"stages.1: {said}; raise row_tokens .*, or set overlong to drop"):
        rl(folder, "max_prompt_tokens=5")
    with pytest.raises(ConfigError, match="24 of 24 prompts .*; raise row_tokens and max_prompt_tokens$"):
        rl(folder, "max_prompt_tokens=4", "overlong=drop")
    inputs = rl(folder, "max_prompt_tokens=5", "overlong=drop", "dataset.skip=8", "dataset.limit=4")
    assert [example.index for example in inputs.examples] == [0, 1]


def test_rows_of_prompts_that_are_left_out_are_never_drawn(folder: Path) -> None:
    """The places drawn are those of the examples; a resumed run has the same ones."""
    section, rows = (inputs := rl(folder)).section, inputs.rows

    def prompts(kept: list[int] | None) -> Prompts:
        return Prompts(section.dataset, rows, seed=0, kept=kept)

    drawn = list(islice(prompts([3, 5, 7, 9]), 24))
    assert set(drawn) == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match="cannot resume: prompts was '24 rows"):
        prompts([3, 5, 7, 9]).restore(prompts(None).state())
    examples = [inputs.examples[index] for index in (3, 5, 7, 9)]
    ahead, resumed = (Source(prompts([3, 5, 7, 9]), examples) for _ in range(2))
    first = ahead.take(3, version=4)
    assert first[1].version == 4
    resumed.restore(json.loads(json.dumps(ahead.state())))
    assert resumed.take(2, version=5) == ahead.take(2, version=5)
    assert [group.number for group in first] == [0, 1, 2] and ahead.issued == resumed.issued == 5


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.02},
        {"schedule": "linear"},
        {"schedule": "cosine"},
        {"warmup_steps": 2},
        {"weight_decay": 0.1},
        {"beta1": 0.5},
        {"beta2": 0.5},
        {"eps": 1.0},
        {"moments": "bfloat16"},
        {"moments": "int8"},
        {"stochastic_rounding": True},
    ],
)
def test_optimizer(folder: Path, change: dict[str, Any]) -> None:
    section = sft(folder).section.optimizer

    def moved(fields: dict[str, Any]) -> Any:
        params = {"w": jnp.ones((16, 2), jnp.bfloat16 if "stochastic_rounding" in change else jnp.float32)}
        declared = Trained(w=Parameter("kernel", ("embed", "mlp")))
        optimizer = optimizer_of(section.model_copy(update=fields), declared, tiny_config(), 4, seed=0)
        state = optimizer.init(params)
        for gradient in (1.0, -0.3, 0.2):
            given = {"w": gradient * jnp.linspace(0.5, 1.0, 32).reshape(16, 2)}
            params, state = optimizer.update(given, state, params, lambda g: g.astype(jnp.float32), None)
        return np.asarray(params["w"])

    assert not np.array_equal(moved({}), moved(change))


def test_distillation(folder: Path, tmp_path: Path) -> None:
    """What the fields of `kind: distill` become; that they matter for a step, tests/losses/test_distill.py shows."""
    save_model(init_model({**INIT, "vocab_size": 261}, dtype=jnp.float32, seed=0), tmp_path / "t")
    teacher = {"path": str(tmp_path / "t")}
    base = {"kind": "distill", "teachers": [teacher], "beta": 0.3, "temperature": 2.0, "cross_entropy": 0.25}
    file = write_run(tmp_path, sft_stage(**base))

    def inputs(*overrides: str) -> DistillInputs:
        loaded = load_config(file, overrides)
        found = prepare(loaded, offline_ok=False).stages[0]
        assert isinstance(found, DistillInputs)
        return found

    assert inputs().loss == DistillLoss(0.25)
    gold = ["stages.0.teachers.0.tokenizer=gold", "stages.0.temperature=1"]
    for more, weight in (([], 1.0), (["stages.0.uld_weight=0.5"], 0.5)):
        section = load_config(file, [*gold, *more]).stages[0]
        assert isinstance(section, DistillSection) and distill_loss(section) == DistillLoss(0.25, uld=weight)
    assert terms_of(inputs().section, {}) == Terms(divergence=Divergence(beta=0.3, temperature=2.0))
    assert [source.title for source in inputs().teachers] == ["t"]
    assert [source.title for source in inputs("stages.0.teachers.0.name=mine").teachers] == ["mine"]
    loaded = load_config(file)
    tokenizer = inputs().renderer.tokenizer
    for override, kinds in {
        "dtype=bfloat16": {jnp.dtype(jnp.bfloat16)},
        "quantize=int8": {jnp.dtype(jnp.int8), jnp.dtype(jnp.float32)},
    }.items():
        source = inputs(f"stages.0.teachers.0.{override}").teachers[0]
        model = load_teacher(source, loaded.model, tokenizer, single_device_mesh())
        assert {array.dtype for array in ModelWeights(model).read().values()} == kinds
    cached = inputs("stages.0.cache=said", "stages.0.top_k=5")
    model = loaded.model
    cache = cache_folder(cached, cached.teachers[0], model, tokenizer, to_write=True)
    assert cache.format.k == 5 and cache.folder.parts == ("said", "t")
    changes = {"quantize": "int8", "dtype": "bfloat16"}
    for name, value in changes.items():
        source = inputs("stages.0.cache=said", f"stages.0.teachers.0.{name}={value}").teachers[0]
        other = cache_folder(cached, source, model, tokenizer, to_write=True)
        assert other.identity[name] == value != cache.identity[name]
    computed = model.model_copy(update={"compute_dtype": "bfloat16"})
    other = cache_folder(cached, cached.teachers[0], computed, tokenizer, to_write=True)
    assert other.identity["compute_dtype"] == "bfloat16" != cache.identity["compute_dtype"]
    for override, text in {"top_k=5": "needs a cache", "teacher_column=who": "has no effect with one teacher"}.items():
        with pytest.raises(ConfigError, match=text):
            inputs(f"stages.0.{override}")
