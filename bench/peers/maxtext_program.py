"""MaxText's train step of Qwen3-8B compiled for v5e:2x4, 8 x 4096 tokens; its environment has maxtext[tpu].

python maxtext_program.py REMAT FOLDER: REMAT is a remat_policy of MaxText; writes REMAT.hlo, the optimised program, and
REMAT.json, the compiler's figures. `posttrain.plan.hlo.read_program` reads the first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import maxtext
from maxtext.trainers.pre_train import train_compile

SETTINGS = {
    "model_name": "qwen3-8b",
    "compile_topology": "v5e-8",
    "compile_topology_num_slices": "1",
    "per_device_batch_size": "1",
    "max_target_length": "4096",
    "ici_fsdp_parallelism": "8",
    "weight_dtype": "bfloat16",
    "dtype": "bfloat16",
    "mu_dtype": "bfloat16",
    "opt_type": "adamw",
    "attention": "flash",
    "scan_layers": "true",
    "run_name": "compiled",
    "enable_checkpointing": "false",
    "dataset_type": "synthetic",
    "skip_jax_distributed_system": "true",
}
"""Weights and moments in bfloat16, as those beside them have."""


def main() -> None:
    remat, folder = sys.argv[1], Path(sys.argv[2])
    compile_step, found = train_compile.jit_and_compile, {}

    def kept(*args: Any, **settings: Any) -> Any:
        start = time.process_time()
        found["program"] = compile_step(*args, **settings)
        found["seconds"] = time.process_time() - start
        return found["program"]

    train_compile.jit_and_compile = kept
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    settings = SETTINGS | {"remat_policy": remat, "base_output_directory": str(folder)}
    train_compile.main(["maxtext", str(base), *(f"{name}={value}" for name, value in settings.items())])
    memory = found["program"].memory_analysis()
    figures = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "seconds": found["seconds"],
        "versions": {name: version(name) for name in ("maxtext", "jax", "libtpu")},
    }
    (folder / f"{remat}.hlo").write_text(found["program"].as_text())
    (folder / f"{remat}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
