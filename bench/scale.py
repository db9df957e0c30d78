"""Bytes of an update on slices of 8 to 256 chips that are not there, and by a fitted law on 4,096, as Markdown.

.venv-aot/bin/python bench/scale.py [fsdp] [data]

Weak scaling: one row of 4,096 tokens a chip. Qwen3-0.6B is compiled with 2 and with 4 layers; 28 follow from these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import numpy as np

from bench.tpu import DTYPE, SMALL, begin
from posttrain.config import AdamW, MeshSection
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import make_mesh
from posttrain.models.config import Compute
from posttrain.plan.lowered import batch_of, compile_program, model_of, vocabulary_trips
from posttrain.plan.machine import GIB, topology_devices
from posttrain.train.objective import TrainSettings
from posttrain.train.programs import TrainPrograms
from posttrain.train.transformations import make_optimizer

SLICES = {8: "2x4", 32: "4x8", 128: "8x16", 256: "16x16"}
LAYERS, LENGTH, FAR = 28, 4096, 4096
LAYOUTS: Mapping[str, Callable[[int], dict[str, int]]] = {
    "fsdp": lambda chips: {"data": 1, "fsdp": chips},
    "data": lambda chips: {"data": chips // 8, "fsdp": 8},
}


def measured(chips: int, sizes: dict[str, int], layers: int) -> np.ndarray:
    """GiB of a chip: peak, and wire of a step."""
    mesh = make_mesh(MeshSection(**sizes), topology_devices("v5e", SLICES[chips]))
    model = model_of(SMALL | {"num_hidden_layers": layers}, Compute(dtype=DTYPE, mesh=mesh, remat="full"), DTYPE)
    optimizer = make_optimizer(AdamW(learning_rate=1e-5), 100, model=model)
    programs = TrainPrograms(model, SFTLoss(), optimizer, TrainSettings(temperature=1.0, max_grad_norm=1.0), mesh=mesh)
    found = compile_program(programs.lower_update(batch_of(chips, LENGTH)), mesh.size)
    trips = vocabulary_trips(mesh, chips, LENGTH, SMALL["vocab_size"])
    wire = sum(c.wire * c.executions([trips] if c.in_dynamic_loop else []) for c in found.text.collectives)
    return np.asarray([found.peak, wire]) / GIB


def whole(chips: int, sizes: dict[str, int]) -> np.ndarray:
    """GiB of a chip for all layers."""
    two, four = (measured(chips, sizes, layers) for layers in (2, 4))
    return two + (LAYERS - 2) * (four - two) / 2


def law(chips: list[int], values: np.ndarray, *, growing: bool) -> Callable[[int], float]:
    """Least-squares fit of a + b / chips, and of c chips if `growing`: what is split falls, and what XLA sends whole
    where a chip's part is too small grows."""
    terms = [np.ones(len(chips)), 1 / np.asarray(chips), *[np.asarray(chips, float)] * growing]
    factors, *_ = np.linalg.lstsq(np.stack(terms, axis=1), values)
    return lambda number: float(np.dot(factors, [1.0, 1 / number, float(number)][: len(factors)]))


def main() -> None:
    begin("bench/scale.py", "v5e")
    print("| layout | chips | peak of a chip, GiB | wire of a chip and step, GiB |\n|---|---|---|---|", flush=True)
    for name in sys.argv[1:] or LAYOUTS:
        found = []
        for chips in SLICES:
            found.append(whole(chips, LAYOUTS[name](chips)))
            print(f"| {name} | {chips} | {found[-1][0]:.2f} | {found[-1][1]:.2f} |", flush=True)
        peaks, wires = np.stack(found, axis=1)
        peak, wire = law([*SLICES], peaks, growing=False)(FAR), law([*SLICES], wires, growing=True)(FAR)
        print(f"| {name} | {FAR}, by the law | {peak:.2f} | {wire:.2f} |", flush=True)


if __name__ == "__main__":
    main()
