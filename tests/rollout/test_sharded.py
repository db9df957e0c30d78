"""An engine over eight devices: the samples of one, and no more communication than tensor-parallel products need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from posttrain.config import MeshSection
from posttrain.mesh import make_mesh, param_sharding
from posttrain.models.decoder import Decoder
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.types import Completion
from posttrain.weights.state import ModelWeights
from tests.often import often
from tests.rollout.engines import assert_same, make_engine, params, requests
from tests.tiny import tiny_config, tiny_model

MESHES = {
    "data": MeshSection(data=8, fsdp=1),
    "data and tensor": MeshSection(data=4, fsdp=1, tensor=2),
    "fsdp": MeshSection(data=1, fsdp=8),
    "all": MeshSection(data=2, fsdp=2, tensor=2),
    "context": MeshSection(data=1, fsdp=2, context=2, tensor=2),
    "context alone": MeshSection(data=1, fsdp=1, context=8),
}
COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def sharded_model(section: MeshSection, **changes: Any) -> Decoder:
    mesh, model = make_mesh(section), tiny_model(**changes)
    weights = ModelWeights(model)
    dims = weights.dims()
    weights.write({p: jax.device_put(w, param_sharding(mesh, p, dims[p], w.shape)) for p, w in weights.read().items()})
    return model


def drawn(engine: NativeEngine) -> list[Completion]:
    """Greedy and sampled ones, more than there are slots."""
    prompts, parameters = requests(10)
    mixed = [params(i, max_tokens=p.max_tokens, temperature=float(i % 2)) for i, p in enumerate(parameters)]
    return engine.generate_all([prompt[:15] for prompt in prompts], mixed)


@pytest.fixture(scope="module")
def expected(shared_engine: NativeEngine) -> list[Completion]:
    return drawn(shared_engine)


def collectives_of_loops(program: str) -> Iterator[tuple[str, str]]:
    """Kind and shape of each one inside a loop's body, or in what it calls."""
    computations: dict[str, list[str]] = {}
    for line in program.splitlines():
        if (found := re.match(r"(?:ENTRY )?%([\w.\-]+) .*\{$", line)) is not None:
            computations[found[1]] = lines = []
        elif computations:
            lines.append(line)
    todo, seen = re.findall(r"body=%([\w.\-]+)", program), set[str]()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in computations[name]:
            todo += CALLED.findall(line)
            todo += [name.strip(" %") for names in BRANCHES.findall(line) for name in names.split(",")]
            yield from ((kind, shape) for shape, kind in COLLECTIVE.findall(line))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    often(MESHES, "data and tensor"),
)
def test_the_samples_of_one_device_and_no_keys_that_travel(name: str, expected: list[Completion]) -> None:
    engine = make_engine(sharded_model(MESHES[name]), slots=6)
    shards = 8 // MESHES[name].tensor
    assert engine.slots == 8  # no fewer than asked for, as many in every shard
    for completion, other in zip(drawn(engine), expected, strict=True):
        assert_same(completion, other)
    texts = [program.as_text() for program in engine.programs._compiled.values()]
    assert any("body=" in text for text in texts)
    found = [collective for text in texts for collective in collectives_of_loops(text)]
    config = tiny_config()
    head = config.blocks[0].attention.head_dim
    # Keys and values are [rows, 1, heads, head_dim].
    assert not [shape for _, shape in found if re.search(rf"\[\d+,\d+,\d+,{head}\]", shape)], found
    if name == "data":
        assert not found
    if name == "data and tensor":
        rows, vocab = 8 // shards, config.vocab_size
        # The embedding, two products of each layer; parts of rows of logits for whole rows; and what was drawn: the
        # token, its log-probability, that of what is kept, and the mass that truncation kept.
        expected_kinds = ["all-gather"] * 4 + ["all-reduce"] * (1 + 2 * config.num_layers) + ["all-to-all"]
        assert sorted(kind for kind, _ in found) == expected_kinds
        assert {re.sub(r"[({].*", "", shape.strip("(").split("{")[0]) for _, shape in found} == {
            f"f32[{rows},1,{config.embed_dim}]",
            f"f32[1,1,1,{vocab // 2}]",
            f"f32[{rows}]",
            f"s32[{rows}]",
        }
