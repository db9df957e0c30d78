"""Stages that learn from a teacher's layers: which ones, what is refused, and that they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from posttrain.config import DistillSection
from posttrain.config.yaml_file import load_config
from posttrain.data.tokenizer import load_tokenizer
from posttrain.distill.features import distill_loss, matching_of
from posttrain.errors import ConfigError
from posttrain.losses.distill import DistillLoss
from posttrain.models.hf import config_from_init
from posttrain.train.layer_matching import Matching, Relation
from posttrain.weights.save import save_model
from tests.stages.runs import INIT, inside, lines, posttrain, start, write_run
from tests.tiny import model_of_fields

STORIES = "models/stories260k"
TEXT = "data/text/tinystories_v2gpt4_train_head.jsonl"
STUDENT = {**INIT, "vocab_size": 261, "num_hidden_layers": 2}
TEACHER = {**STUDENT, "hidden_size": 24, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3}


def stage(teacher: Path | str = "teacher", **changes: Any) -> dict[str, Any]:
    fields = {
        "kind": "distill",
        "dataset": {"path": "rows.jsonl", "chat": False},
        "teachers": [{"path": str(teacher)}],
        "features": {"hidden": {}, "attention": {}},
        "num_steps": 3,
        "batch_rows": 4,
        "row_tokens": 16,
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    }
    return {**fields, **changes}


HIDDEN: dict[str, Any] = {"hidden": {}}
TEACHERS: Any = [{"path": "teacher"}, {"path": "teacher", "name": "b"}]
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ({}, {}, "set hidden or attention"),
    ({"hidden": {"layers": {5: 0}}}, {}, "features.hidden.layers: the student has no layer 5; it has 2, from 0 on"),
    ({"attention": {"layers": {0: 5}}}, {}, "features.attention.layers: the teacher has no layer 5; it has 5"),
    ({"hidden": {"layers": {0: -1}}}, {}, "features.hidden.layers: must be uniform, last, or layers of the student"),
    ({"hidden": {"layers": "first"}}, {}, "features.hidden.layers: must be uniform, last, or"),
    ({"hidden": {"loss": "mae"}}, {}, "features.hidden.loss: must be 'mse' or 'cosine'"),
    ({"hidden": {"project": False}}, {}, "needs equal widths; the student's is 16, the teacher's 24"),
    (
        {"attention": {"heads": 5}},
        {},
        "features.attention.heads=5 must divide the widths of the queries, 16 in layer 1",
    ),
    ({"attention": {"relations": ["q", "q"]}}, {}, "relations: each once"),
    (HIDDEN, {"cache": "cache"}, "features: a cache holds the teachers' top-k, not their layers"),
    (HIDDEN, {"teachers": [{"path": "teacher", "url": "http://h/v1"}]}, "teachers with url are not in the"),
    (HIDDEN, {"teachers": [{"path": "teacher", "mesh": {"fsdp": 2}}]}, "teachers with mesh are not in the"),
    (HIDDEN, {"teachers": [{"path": "teacher", "tokenizer": "align"}]}, "with tokenizer: align are not in the"),
    (HIDDEN, {"teachers": TEACHERS, "teacher_column": "answer"}, "need a single teacher, and teachers has 2"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    save_model(model_of_fields(TEACHER), folder / "teacher", tokenizer=load_tokenizer("bytes"))
    return folder


def run_file(folder: Path, features: Any, **changes: Any) -> Path:
    return write_run(folder, stage(features=features, **changes), model={"init": STUDENT, "tokenizer": "bytes"})


def matching(
    folder: Path, features: Any, student: Any = STUDENT, teacher: Any = TEACHER, **changes: Any
) -> tuple[Matching, DistillLoss]:
    section = load_config(run_file(folder, features, **changes)).stages[0]
    assert isinstance(section, DistillSection) and section.features is not None
    found = matching_of(section.features, config_from_init(student), config_from_init(teacher), seed=7)
    return found, distill_loss(section)


def test_every_field_says_what_is_matched(folder: Path) -> None:
    found, loss = matching(folder, {"hidden": {}})
    assert found == Matching(hidden=((0, 2), (1, 4)), kind="cosine", widths=(16, 24), seed=7)
    assert loss == DistillLoss(0.0, hidden=1.0)
    found, loss = matching(folder, {"attention": {"weight": 0.5}})
    assert found == Matching(relations=(Relation(1, 4, "q", 2), Relation(1, 4, "k", 1), Relation(1, 4, "v", 1)), seed=7)
    assert loss == DistillLoss(0.0, attention=0.5)
    hidden = {"layers": {1: 3}, "weight": 3.0, "loss": "mse"}
    attention = {"layers": "uniform", "relations": ["k"], "heads": 4}
    found, loss = matching(folder, {"hidden": hidden, "attention": attention})
    assert (found.hidden, found.kind, loss.hidden) == (((1, 3),), "mse", 3.0)
    assert found.relations == (Relation(0, 2, "k", 4), Relation(1, 4, "k", 4))
    wide = {**STUDENT, "hidden_size": 24}
    assert matching(folder, {"hidden": {"layers": "last", "project": False}}, wide)[0].widths is None
    latent = {"model_type": "deepseek_v3", "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None}
    latent |= {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6, "first_k_dense_replace": 5}
    latent |= {"kv_lora_rank": 8, "moe_intermediate_size": 8, "n_routed_experts": 4}
    latent |= {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    large = {name: value for name, value in TEACHER.items() if name != "head_dim"} | latent
    found, _ = matching(folder, {"attention": {"layers": {0: 1}}}, teacher=large)
    assert [relation.heads for relation in found.relations] == [2, 1, 1]


def test_what_check_says_and_refuses(folder: Path) -> None:
    with inside(folder):
        checked = posttrain("check", run_file(folder, {"hidden": {}, "attention": {"relations": ["v"]}}))
        assert checked.code == 0, checked.err
        said = " ".join(checked.out.split())
        assert "hidden states from layers of teacher, the student's first: 0 from 2, 1 from 4 (cosine; learned" in said
        assert "projections 16 -> 24)" in said and "relations among values from layers of teacher" in said
        error = posttrain("check", run_file(folder, {"hidden": {"layers": {0: 5}}})).error
        assert "features.hidden.layers: the teacher has no layer 5; it has 5, from 0 on" in error


def test_projections_are_in_the_groups_whose_patterns_match_them(folder: Path) -> None:
    """`check` lists those that a run trains."""
    groups = [{"match": "^matching", "learning_rate": 0.5, "weight_decay": 0.25}]
    with inside(folder):
        file = run_file(folder, {"hidden": {}}, optimizer={"learning_rate": 1e-2, "groups": groups}, num_steps=1)
        checked = posttrain("check", file)
        assert checked.code == 0, checked.err
        said = " ".join(checked.out.split())
        # Two of 16 x 24, of which each number has two moments.
        assert "(groups.0), learning rate 0.5, weight decay 0.25: 2 arrays, 768 parameters, state 6.0 KiB" in said, said
        ended = posttrain("run", file, devices=2)
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(("features", "changes", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(folder: Path, features: Any, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        matching(folder, features, **changes)
    assert text in str(error.value)


@pytest.mark.thorough
@pytest.mark.optimized
def test_layers_of_a_real_teacher_are_learned(shared: Path, tmp_path: Path) -> None:
    """On held-out stories the distances of a narrower student fall: those of attention to less than a half, and
    without their weight by a tenth. What is saved is the student alone."""
    text = str(shared / TEXT)
    made = stage(
        shared / STORIES,
        features={"hidden": {}, "attention": {"layers": {0: 0}}},
        dataset={"path": text, "limit": 200},
        eval_dataset={"path": text, "skip": 1600, "limit": 8},
        overlong="truncate",
        num_steps=60,
        batch_rows=8,
        row_tokens=128,
        checkpoint_every=100,
    )
    student = {**INIT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    student |= {"max_position_embeddings": 256}
    process = start("run", write_run(tmp_path, made, model={"init": student, "tokenizer": str(shared / STORIES)}))
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    before, *_, after = lines(tmp_path / "out")
    print({name: (before[name], after[name]) for name in before if "distill" in name})
    assert after["eval/distill/hidden"] < 0.6 * before["eval/distill/hidden"]
    assert after["eval/distill/attention"] < 0.6 * before["eval/distill/attention"]
    saved = load_file(tmp_path / "out" / "0-distill" / "model" / "model.safetensors")
    assert not [name for name in saved if "matching" in name or "projection" in name]
    assert posttrain("export", "--to", "hf", tmp_path / "out", tmp_path / "exported").code == 0
