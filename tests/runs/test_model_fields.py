"""Every field of a model, of the sampler and of a run as a whole has its effect."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.config.yaml_file import load_config
from posttrain.errors import ConfigError
from posttrain.models.adapter import has_dropout
from posttrain.weights.load import init_model, load_model
from posttrain.weights.lora import count_parameters
from posttrain.weights.state import ModelWeights
from tests.stages.runs import INIT, lines, model_of, posttrain, rl_stage, sft_stage, write_run


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


@pytest.mark.thorough
def test_adapter(tmp_path: Path) -> None:
    file = write_run(tmp_path, sft_stage())
    base = {**INIT, "num_hidden_layers": 2, "vocab_size": 261}

    def adapted(fields: str) -> Any:
        lora = load_config(file, [f"model.lora={{rank: 2, targets: [q_proj]{fields}}}"]).model.lora
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


@pytest.mark.thorough
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
    stage = rl_stage(num_steps=2, rollout={"quantize": "int8"})
    model = {"init": INIT, "tokenizer": "bytes", "lora": {"rank": 2}, "quantize": "nf4"}
    done = posttrain("run", write_run(tmp_path, stage, model=model), devices=8)
    assert done.code == 0 and "base quantized to nf4" in done.out
    for line in lines(tmp_path / "out"):
        assert 1e-5 < line["sampling/logp_difference/mean"] < 0.05
        assert abs(line["ratio/mean"] - 1.0) < 1e-4
    dtypes = {array.dtype for array in ModelWeights(load_model(tmp_path / "out" / "0-rl" / "model")).read().values()}
    assert dtypes == {jnp.dtype(jnp.float32)}


@pytest.mark.thorough
def test_the_samplers_cache_and_programs(tmp_path: Path) -> None:
    """`rollout.cache_tokens`, `warm_up`, `merge_lora` and `tensor`."""
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
    failed = posttrain("run", write_run(tmp_path, rl_stage(rollout={"tensor": 2})), devices=8)
    assert failed.error.startswith("rollout.tensor=2 must divide num_kv_heads=1 of qwen3")
    small = write_run(tmp_path, rl_stage(rollout={"cache_tokens": 31}))
    assert posttrain("check", small).error == (
        "rollout.cache_tokens=31 must be at least 32: row_tokens=16 in whole blocks of 16 and one block more"
    )
    assert "must be at least 64" in posttrain("check", small, "mesh.fsdp=2", "--devices=2").error


@pytest.mark.thorough
def test_evaluation_and_checkpoints(tmp_path: Path) -> None:
    held_out = {"path": "rows.jsonl", "chat": False, "limit": 3}
    stage = sft_stage(num_steps=5, eval_dataset=held_out, eval_every=2, checkpoint_every=2, name="mine")
    assert posttrain("run", write_run(tmp_path, stage, tensorboard=True)).code == 0
    output = tmp_path / "out"
    assert [line["step"] for line in lines(output, "0-mine") if "eval/nll" in line] == [0, 2, 4, 5]
    kept = sorted(int(entry.name) for entry in (output / "0-mine" / "checkpoints").iterdir() if entry.name.isdigit())
    assert kept == [4, 5]
    assert list((output / "tensorboard").rglob("events*"))
