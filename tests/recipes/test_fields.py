"""Every field of a configuration reaches the object that it is about."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.config import ConfigError, DistillSection
from posttrain.config_file import load_config
from posttrain.data.format import loss_on
from posttrain.data.pipeline import PromptBatches, SFTBatches, eval_batches
from posttrain.fit import StopRequest
from posttrain.kernels.chunk_stats import Terms
from posttrain.kernels.divergence import Divergence
from posttrain.losses.distill import DistillLoss
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.mesh import single_device_mesh
from posttrain.models.adapter import has_dropout
from posttrain.optim import make_optimizer
from posttrain.recipes.distill import cache_folders, terms_of
from posttrain.recipes.features import distill_loss
from posttrain.recipes.prepare import prepare
from posttrain.recipes.prepare_rl import RLInputs
from posttrain.recipes.prepare_sequences import SFTInputs
from posttrain.recipes.prepared import Prepared
from posttrain.recipes.sampled import eval_sampling
from posttrain.recipes.sequence_evaluation import counted
from posttrain.recipes.stage import StageRun
from posttrain.recipes.teachers import load_teacher
from posttrain.rl.advantages import centered
from posttrain.rl.collect import Sampler, sampling_params
from posttrain.rollout.native import NativeEngine
from posttrain.weights.load import init_model, load_model
from posttrain.weights.lora import count_parameters
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights
from tests.recipes.runs import INIT, lines, posttrain, rl_stage, sft_stage, write_run


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


def model_of(tmp_path: Path, **model: Any) -> Any:
    """The model of the configuration as a stage loads it."""
    loaded = load_config(write_run(tmp_path, sft_stage()), [f"model.{key}={value}" for key, value in model.items()])
    ready = prepare(loaded.config, loaded.base_dir, offline_ok=False)
    fields: dict[str, Any] = {
        "name": "0-sft",
        "kind": "sft",
        "sampled": False,
        "folder": tmp_path,
        "output": tmp_path,
        "stop": StopRequest(),
    }
    fields |= {
        "source": None,
        "source_name": None,
        "adapter": None,
        "seed": loaded.config.seed,
        "mesh": single_device_mesh(),
    }
    return StageRun(model=loaded.config.model, tokenizer=ready.tokenizer, tensorboard=False, **fields).load_model()


def test_model(tmp_path: Path) -> None:
    plain = model_of(tmp_path)
    assert plain.config.vocab_size == 261
    assert plain.compute.dtype == jnp.float32 and plain.embed.embedding[...].dtype == jnp.float32
    low = model_of(tmp_path, dtype="bfloat16", compute_dtype="float32")
    assert low.compute.dtype == jnp.float32 and low.embed.embedding[...].dtype == jnp.bfloat16
    trained = {
        targets: count_parameters(model_of(tmp_path, lora=f"{{rank: 2, targets: {targets}}}")).trainable
        for targets in ("[attention]", "[mlp]", "[attention, mlp]", "[attention.q]")
    }
    assert trained["[attention]"] + trained["[mlp]"] == trained["[attention, mlp]"]
    assert 0 < trained["[attention.q]"] < trained["[attention]"]
    rank4 = count_parameters(model_of(tmp_path, lora="{rank: 4, targets: [mlp]}")).trainable
    assert rank4 == 2 * trained["[mlp]"]
    assert set(ModelWeights(model_of(tmp_path, lora="{rank: 2}")).trainable()) < set(
        ModelWeights(model_of(tmp_path, lora="{rank: 2}")).read()
    )


def test_adapter(tmp_path: Path) -> None:
    file = write_run(tmp_path, sft_stage())
    base = {**INIT, "num_hidden_layers": 2, "vocab_size": 261}

    def adapted(fields: str) -> Any:
        lora = load_config(file, [f"model.lora={{rank: 2, targets: [q_proj]{fields}}}"]).config.model.lora
        return init_model(base, dtype=jnp.float32, seed=0, lora=lora)

    def arrays(fields: str) -> dict[str, np.ndarray]:
        read = ModelWeights(adapted(fields)).read(lambda path: ".lora_" in path)
        assert len({path.rsplit(".", 1)[0] for path in read}) == 1
        return {path.rsplit(".", 1)[1]: np.asarray(w) for path, w in read.items()}

    plain = arrays("")
    for fields, changed in {
        ", alpha: 6": {"lora_scale"},
        ", alpha_pattern: {attention: 6}": {"lora_scale"},
        ", layers: [1]": {"lora_scale", "lora_a"},
        ", rank_pattern: {layers.0.self_attn.q_proj: 1}": {"lora_a"},
        ", dora: true": {"lora_magnitude"},
    }.items():
        other = arrays(fields)
        assert {name for name in other if name not in plain or not np.array_equal(plain[name], other[name])} == changed
    assert arrays(", alpha: 6, rslora: true")["lora_scale"][0] == np.float32(6 / 2**0.5)
    assert has_dropout(adapted(", dropout: 0.1")) and not has_dropout(adapted(""))
    with pytest.raises(ConfigError, match="model.lora.dropout=0.1: RL has none"):
        load_config(write_run(tmp_path, sft_stage(), rl_stage()), ["model.lora={rank: 2, dropout: 0.1}"])
    gkd = {"kind": "distill", "teachers": [{"path": "x"}], "sampling": {"max_tokens": 4}}
    for share, refused in ((0.5, True), (0.0, False)):
        made = gkd | {"on_policy": share} if refused else {"kind": "distill", "teachers": [{"path": "x"}]}
        with pytest.raises(ConfigError, match="on-policy distillation") if refused else nullcontext():
            load_config(write_run(tmp_path, sft_stage(**made)), ["model.lora={rank: 2, dropout: 0.1}"])
    whole = ModelWeights(adapted(", modules_to_save: [embed]"))
    assert "embed.embedding" in whole.trainable()


@pytest.fixture(scope="module")
def nll(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses of three steps on one device for changed settings."""

    def run(**changes: Any) -> list[float]:
        folder = tmp_path_factory.mktemp("nll")
        model = {"init": INIT, "tokenizer": "bytes", **changes.pop("model", {})}
        seed = changes.pop("seed", 3)
        file = write_run(folder, sft_stage(num_steps=3, **changes), model=model, seed=seed)
        assert posttrain("run", file).code == 0
        return [line["nll"] for line in lines(folder / "out")]

    return run


@pytest.mark.thorough
def test_memory_savers_change_no_result(nll: Any) -> None:
    plain = nll(batch_rows=16)
    np.testing.assert_allclose(nll(batch_rows=16, model={"remat": "full"}), plain, rtol=1e-5)
    np.testing.assert_allclose(nll(batch_rows=16, micro_batch_rows=8), plain, rtol=1e-5)
    noisy = nll(batch_rows=16, noise_alpha=5.0)
    assert noisy[0] != plain[0]
    np.testing.assert_allclose(nll(batch_rows=16, noise_alpha=5.0, micro_batch_rows=8), noisy, rtol=1e-5)


def test_what_changes_a_run(nll: Any) -> None:
    plain = nll()
    assert plain == nll()
    assert plain != nll(seed=4)
    clipped = nll(optimizer={"learning_rate": 1e-2, "max_grad_norm": 1e-9})
    assert clipped[0] == plain[0] and clipped[1:] != plain[1:]
    smoothed = nll(label_smoothing=0.2)
    assert smoothed[0] == plain[0] and smoothed[1:] != plain[1:]


@pytest.mark.thorough
def test_quantized_base_and_sampler(tmp_path: Path) -> None:
    """`model.quantize` and `rollout.quantize`, on several devices."""
    stage = rl_stage(num_steps=2, rollout={"quantize": "int8"}, recompute_old_logps=True)
    model = {"init": INIT, "tokenizer": "bytes", "lora": {"rank": 2}, "quantize": "nf4"}
    done = posttrain("run", write_run(tmp_path, stage, model=model))
    assert done.code == 0 and "base quantized to nf4" in done.out
    for line in lines(tmp_path / "out"):
        assert 1e-5 < line["sampling/logp_difference/mean"] < 0.05
        assert abs(line["ratio/mean"] - 1.0) < 1e-4
    dtypes = {array.dtype for array in ModelWeights(load_model(tmp_path / "out" / "0-rl" / "model")).read().values()}
    assert dtypes == {jnp.dtype(jnp.float32)}


def test_the_samplers_cache_and_programs(tmp_path: Path) -> None:
    """`rollout.cache_tokens`, `warm_up` and `merge_lora`."""
    first = []
    for name, rollout in {"plain": {"warm_up": False}, "large": {"cache_tokens": 512}}.items():
        (tmp_path / name).mkdir()
        assert posttrain("run", write_run(tmp_path / name, rl_stage(num_steps=1, rollout=rollout))).code == 0
        first.append(lines(tmp_path / name / "out")[0])
    plain, large = first
    assert large["rollout/cache_peak"] < plain["rollout/cache_peak"]
    assert large["perf/compilations"] < plain["perf/compilations"]
    assert large["rollout/programs"] == plain["rollout/programs"] == plain["rollout/late_compilations"]
    assert large["rollout/late_compilations"] == 0 < min(line["rollout/compile_s"] for line in first)
    assert large["reward"] == plain["reward"]
    failed = posttrain("run", write_run(tmp_path, rl_stage(rollout={"merge_lora": True})))
    assert failed.error.startswith("rollout.merge_lora: the model has no adapter")
    small = write_run(tmp_path, rl_stage(rollout={"cache_tokens": 31}))
    assert posttrain("check", small).error == (
        "rollout.cache_tokens=31 must be at least 32: row_tokens=16 in whole blocks of 16 and one block more"
    )
    assert "must be at least 64" in posttrain("check", small, "mesh.fsdp=2").error


def test_evaluation_and_checkpoints(tmp_path: Path) -> None:
    held_out = {"path": "rows.jsonl", "chat": False, "limit": 3}
    stage = sft_stage(num_steps=5, eval_dataset=held_out, eval_every=2, checkpoint_every=2, name="mine")
    assert posttrain("run", write_run(tmp_path, stage, tensorboard=True)).code == 0
    output = tmp_path / "out"
    assert [line["step"] for line in lines(output, "0-mine") if "eval/nll" in line] == [0, 2, 4, 5]
    kept = sorted(int(entry.name) for entry in (output / "0-mine" / "checkpoints").iterdir() if entry.name.isdigit())
    assert kept == [4, 5]
    assert list((output / "tensorboard").rglob("events*"))


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
