"""Every field of a configuration reaches the object that it is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.config import DistillSection
from posttrain.config.yaml_file import load_config
from posttrain.data.format import loss_on
from posttrain.data.pipeline import PromptBatches, SFTBatches, eval_batches
from posttrain.distill.features import distill_loss
from posttrain.distill.teachers import load_teacher
from posttrain.errors import ConfigError
from posttrain.evaluation.sequences import counted
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.kernels.logits.divergence import Divergence
from posttrain.losses.distill import DistillLoss
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.mesh import single_device_mesh
from posttrain.rl.advantages import centered
from posttrain.rl.sampler import Sampler, sampling_params
from posttrain.rollout.engine import NativeEngine
from posttrain.runs.prepare import prepare
from posttrain.stages.distill import cache_folders, terms_of
from posttrain.stages.online import eval_sampling
from posttrain.stages.prepared import Prepared
from posttrain.stages.prompts import RLInputs
from posttrain.stages.sequences import SFTInputs
from posttrain.train.optim import make_optimizer
from posttrain.weights.load import init_model
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights
from tests.stages.runs import INIT, model_of, rl_stage, sft_stage, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fields")
    write_run(folder, sft_stage(), rl_stage())
    return folder


def prepared(folder: Path, *overrides: str) -> Prepared:
    loaded = load_config(folder / "run.yaml", overrides)
    return prepare(loaded.config, loaded.base_dir, offline_ok=False)


def rl(folder: Path, *overrides: str) -> RLInputs:
    inputs = prepared(folder, *(f"stages.rl.{text}" for text in overrides)).stages[1]
    assert isinstance(inputs, RLInputs)
    return inputs


def sft(folder: Path, *overrides: str) -> SFTInputs:
    inputs = prepared(folder, *(f"stages.sft.{text}" for text in overrides)).stages[0]
    assert isinstance(inputs, SFTInputs)
    return inputs


def test_policy_loss(folder: Path) -> None:
    loss = rl(folder, "clip_low=0.11", "clip_high=0.33", "kl_coef=0.07").algorithm.loss
    assert (loss.clip_low, loss.clip_high, loss.kl_coef) == (0.11, 0.33, 0.07)
    assert rl(folder, "kl_coef=0").algorithm.loss.kl_coef == 0 != rl(folder).algorithm.loss.kl_coef
    algorithms = {rl(folder, f"algorithm={name}").algorithm for name in ("grpo", "dr_grpo", "dapo", "gspo", "rloo")}
    assert len({algorithm.loss for algorithm in algorithms}) == 5
    other = rl(folder, "algorithm=dr_grpo", "sampling.max_tokens=5").algorithm.loss
    assert other.reduce != rl(folder, "algorithm=dr_grpo").algorithm.loss.reduce


def test_advantage_and_rewards(folder: Path) -> None:
    inputs = rl(folder, "advantage=posttrain.rl.advantages:centered")
    assert inputs.algorithm.advantage is centered
    (folder / "graded.py").write_text("def graded(completions, scale):\n    return [scale for _ in completions]\n")
    spec = "[{fn: 'rewards_of_test.py:low', weight: 0.5}, {fn: 'graded.py:graded', args: {scale: 3}}]"
    rewards = rl(folder, f"rewards={spec}").rubric.rewards
    assert [(r.name, r.weight, dict(r.args)) for r in rewards] == [("low", 0.5, {}), ("graded", 1.0, {"scale": 3})]


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

    params = sampler(1).params(2, 3, 4)
    assert {key: getattr(params, key) for key in settings} == settings and params.stop == ("x",)
    assert params.stop_token_ids == (*inputs.renderer.tokenizer.stop_ids, 9)
    assert params.allowed_token_ids == (5, 9, 50) and params.logit_bias == {5: 1.5, 50: float("-inf")}
    endless = sampling_params(rl(folder, *given, "sampling.ignore_eos=true").section.sampling, tokenizer, key=(0, 0))
    assert endless.stop_token_ids == (9,)
    with pytest.raises(ConfigError, match=r"eval_sampling.logit_bias: token ids from 3 to 900; .* to "):
        rl(folder, "eval_sampling={max_tokens: 4, logit_bias: {3: 1.0, 900: 1.0}}")
    with pytest.raises(ConfigError, match=r"stages.1: sampling.allowed_token_ids=\(5,\): must be None, or hold"):
        rl(folder, "sampling.allowed_token_ids=[5]", "sampling.logit_bias={5: -.inf}")
    keys = {p.key for p in (params, sampler(2).params(2, 3, 4), sampler(1).params(3, 3, 4), sampler(1).params(2, 3, 5))}
    assert len(keys) == 4
    greedy = eval_sampling(inputs.section)
    assert (greedy.temperature, greedy.top_k, greedy.max_tokens, greedy.stop) == (0.0, 0, 5, ("x",))
    warm = rl(folder, "eval_sampling={max_tokens: 4, temperature: 0.5}").section
    assert eval_sampling(warm).temperature == 0.5
    assert inputs.max_prompt_tokens == 11 and rl(folder, "max_prompt_tokens=7").max_prompt_tokens == 7


def test_last_turn_only(folder: Path) -> None:
    assert loss_on(sft(folder).section) == "answers"
    assert loss_on(sft(folder, "train_on_prompt=true").section) == "all"
    assert loss_on(sft(folder, "last_turn_only=true").section) == "last"
    with pytest.raises(ConfigError, match="with train_on_prompt every turn has loss"):
        sft(folder, "last_turn_only=true", "train_on_prompt=true")


def batch(inputs: SFTInputs, seed: int = 0) -> dict[str, Any]:
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
    with pytest.raises(ConfigError, match="is of the loss nll"):
        sft(folder, "label_smoothing=0.1", "loss=dft")


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
        section = inputs.section
        prompts = PromptBatches(section.dataset, inputs.rows, prompts_per_step=section.prompts_per_step, seed=seed)
        return next(prompts)

    assert order("dataset.shuffle=false") == [0, 1]
    assert order("dataset.shuffle=false", "prompts_per_step=3") == [0, 1, 2]
    assert order() != order(seed=1)


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
    ],
)
def test_optimizer(folder: Path, change: dict[str, Any]) -> None:
    section = sft(folder).section.optimizer

    def moved(fields: dict[str, Any]) -> Any:
        params = {"w": jnp.ones((2,))}
        optimizer = make_optimizer(section.model_copy(update=fields), 4)
        state = optimizer.init(params)
        for gradient in (1.0, -0.3, 0.2):
            updates, state = optimizer.update({"w": jnp.full((2,), gradient)}, state, params)
            params = {"w": params["w"] + updates["w"]}
        return np.asarray(params["w"])

    assert not np.array_equal(moved({}), moved(change))


def test_distillation(folder: Path, tmp_path: Path) -> None:
    """What the fields of `kind: distill` become; that they matter for a step, tests/losses/test_distill.py shows."""
    save_model(init_model({**INIT, "vocab_size": 261}, dtype=jnp.float32, seed=0), tmp_path / "t")
    teacher = {"path": str(tmp_path / "t")}
    base = {"kind": "distill", "teachers": [teacher], "beta": 0.3, "temperature": 2.0, "cross_entropy": 0.25}
    file = write_run(tmp_path, sft_stage(**base))

    def inputs(*overrides: str) -> SFTInputs:
        loaded = load_config(file, overrides)
        found = prepare(loaded.config, loaded.base_dir, offline_ok=False).stages[0]
        assert isinstance(found, SFTInputs)
        return found

    assert inputs().loss == DistillLoss(0.25)
    gold = ["stages.0.teachers.0.tokenizer=gold", "stages.0.temperature=1"]
    for more, weight in (([], 1.0), (["stages.0.uld_weight=0.5"], 0.5)):
        section = load_config(file, [*gold, *more]).config.stages[0]
        assert isinstance(section, DistillSection) and distill_loss(section) == DistillLoss(0.25, uld=weight)
    assert terms_of(inputs().section, {}) == Terms(divergence=Divergence(beta=0.3, temperature=2.0))
    assert [source.title for source in inputs().teachers] == ["t"]
    assert [source.title for source in inputs("stages.0.teachers.0.name=mine").teachers] == ["mine"]
    loaded = load_config(file).config
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
    ((_, cache),) = cache_folders(cached, cached.teachers[0], model, tokenizer, to_write=True)
    assert cache.format.k == 5 and cache.folder.parts[:2] == ("said", "t")
    changes = {"quantize": "int8", "dtype": "bfloat16"}
    for name, value in changes.items():
        source = inputs("stages.0.cache=said", f"stages.0.teachers.0.{name}={value}").teachers[0]
        ((_, other),) = cache_folders(cached, source, model, tokenizer, to_write=True)
        assert other.identity[name] == value != cache.identity[name]
    ((_, other),) = cache_folders(
        cached, cached.teachers[0], model.model_copy(update={"compute_dtype": "bfloat16"}), tokenizer, to_write=True
    )
    assert other.identity["compute_dtype"] == "bfloat16" != cache.identity["compute_dtype"]
    for override, text in {"top_k=5": "is of a cache", "teacher_column=who": "has no effect with one teacher"}.items():
        with pytest.raises(ConfigError, match=text):
            inputs(f"stages.0.{override}")
