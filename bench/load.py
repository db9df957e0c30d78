"""Memory and speed of loading: a random Llama in several files, onto eight virtual CPU devices.

    python bench/load.py [--gigabytes 2] [--dtype bfloat16 | float32]

Writes the checkpoint to a temporary folder, which is removed, and loads it in a process of its own on the mesh
fsdp=4, tensor=2. `added` is the peak of the process's resident memory during the load beyond what it had before; it
must stay below 1.3 x the parameters' bytes + the largest tensor. The files lie in the system's cache, so that the time
is the loader's own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from posttrain.config import MeshSection
from posttrain.mesh import make_mesh
from posttrain.models import hf
from posttrain.models.config import Compute
from posttrain.weights.files import WEIGHTS_INDEX
from posttrain.weights.load import load_model, outline_of
from posttrain.weights.lora import base_tensors
from posttrain.weights.state import ModelWeights
from posttrain.weights.tensor_file import Outline, write_tensors

EMBED, MLP, VOCAB = 2048, 5632, 32768
NUM_FILES = 4
DEVICES = 8


def config_of(gigabytes: float, dtype: str) -> dict[str, object]:
    """A Llama of about this size: one layer is 45 million numbers."""
    numbers = gigabytes * 1e9 / jnp.dtype(dtype).itemsize - 2 * VOCAB * EMBED
    per_layer = EMBED * (2 * EMBED + 2 * EMBED // 4 + 3 * MLP)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": EMBED,
        "num_hidden_layers": max(1, round(numbers / per_layer)),
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": MLP,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def write_checkpoint(folder: Path, fields: dict[str, object], dtype: str) -> list[Outline]:
    """Random tensors in files of about equal size."""
    (folder / "config.json").write_text(json.dumps(fields))
    kind = jnp.dtype(dtype)
    outline = outline_of(hf.config_from_hf(fields), Compute.of(kind), kind)
    outlines = [Outline(tensor.name, kind, tensor.shape) for tensor in base_tensors(outline)]
    noise = np.random.default_rng(0).standard_normal(max(o.nbytes for o in outlines) // kind.itemsize, np.float32)
    values = (0.02 * noise).astype(kind)
    shards: list[list[Outline]] = [[] for _ in range(NUM_FILES)]
    total, done = sum(o.nbytes for o in outlines), 0
    for o in outlines:
        shards[min(NUM_FILES - 1, done * NUM_FILES // total)].append(o)
        done += o.nbytes
    places = dict[str, str]()
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{NUM_FILES:05d}.safetensors"
        write_tensors(folder / file, shard, (values[: np.prod(o.shape)].reshape(o.shape) for o in shard))
        places |= {o.name: file for o in shard}
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return outlines


def memory(entry: str) -> int:
    """Bytes of resident memory: `VmRSS` now, `VmHWM` at most so far."""
    found = re.search(rf"{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(folder: Path) -> dict[str, float]:
    """Load once in this process."""
    mesh = make_mesh(MeshSection(fsdp=DEVICES // 2, tensor=2))
    jax.block_until_ready(jnp.zeros(()) + 1)
    before, start, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
    model = load_model(folder, mesh=mesh)
    weights = ModelWeights(model).read()
    jax.block_until_ready(weights)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert all(len(w.sharding.device_set) == DEVICES for w in weights.values())
    final = sum(w.nbytes for w in weights.values())
    return {"final": final, "added": memory("VmHWM") - before, "wall_s": wall, "cpu_s": cpu}


def run(gigabytes: float, dtype: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as temporary:
        outlines = write_checkpoint(Path(temporary), config_of(gigabytes, dtype), dtype)
        flags = f"--xla_force_host_platform_device_count={DEVICES}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        command = [sys.executable, __file__, "--folder", temporary]
        child = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(child.stdout.splitlines()[-1])
    largest = max(o.nbytes for o in outlines)
    return found | {"largest": largest, "limit": 1.3 * found["final"] + largest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        print(json.dumps(measure(arguments.folder)))
        return
    found = run(arguments.gigabytes, arguments.dtype)
    for key in ("final", "largest", "added", "limit"):
        print(f"{key:>12} {found[key] / 1e6:10,.0f} MB")
    print(f"{'beyond final':>12} {(found['added'] - found['final']) / found['largest']:10.2f} x the largest tensor")
    print(f"{'time':>12} {found['wall_s']:10.2f} s, {found['cpu_s']:.2f} s of CPU")
    rates = [found["final"] / found[clock] / 1e9 for clock in ("wall_s", "cpu_s")]
    print(f"{'speed':>12} {rates[0]:10.2f} GB/s, {rates[1]:.2f} GB per CPU second")
    if found["added"] > found["limit"]:
        sys.exit("peak memory is above the limit")


if __name__ == "__main__":
    main()
