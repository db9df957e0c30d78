"""Export of a run's checkpoint for other tools, verified against the model before it gets its name."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax

from posttrain.config.yaml_file import load_config
from posttrain.errors import ConfigError
from posttrain.export.proof import Proof, prove, proved_folder
from posttrain.export.readers import Reader, compare_tokenizers, default_reader
from posttrain.export.tensors import compare_with_source
from posttrain.mesh import single_device_mesh
from posttrain.models.decoder import Decoder
from posttrain.runs.finished import find_stage, open_stage, tokenizer_of
from posttrain.runs.run import CONFIG_NAME
from posttrain.runtime.files import check_local
from posttrain.stages.context import StageRun
from posttrain.stages.table import STAGES
from posttrain.train.checkpoint import Checkpointer, DamagedCheckpoint
from posttrain.weights.files import find_folder, read_json
from posttrain.weights.locate import add_family_file
from posttrain.weights.lora import has_lora
from posttrain.weights.peft_save import save_adapter
from posttrain.weights.quantize import is_quantized
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights

Target = Literal["hf", "peft", "merged"]


def export(
    run: Path,
    out: Path | None,
    to: Target,
    *,
    step: int | None = None,
    reader: Reader | None = None,
    pythons: Sequence[str] = (),
) -> tuple[Path, Proof]:
    """Write the model of a run's checkpoint and verify it: `hf` a model without adapter, `merged` one whose adapter is
    merged into its base, `peft` the adapter alone. Returns the folder and the proof.

    `run`: the output of a run (its last started stage) or the folder of a stage. `out`: by default `export-hf`,
    `export-merged` or `export-peft` in the stage's folder. `step`: by default the newest. `pythons`: interpreters of
    further environments, such as one with transformers 4, that must read configuration and tokenizer as they are here.
    ConfigError if it cannot be exported; ProofError if the written model differs, which then stays beside `out` with
    the ending `.unproved`.
    """
    output, name = find_stage(run)
    config = load_config(output / CONFIG_NAME)
    add_family_file(config.model)
    tokenizer = tokenizer_of(output, name, config)
    out = output / name / f"export-{to}" if out is None else Path(check_local(out))
    if out.exists():
        raise ConfigError(f"{out}: exists; give a new folder")
    stage = open_stage(output, name, config, tokenizer, single_device_mesh())
    quantized = stage.model.quantize
    if to == "peft" and quantized != "none":
        # PEFT applies the adapter to the base that it loads: verified with the base in full precision.
        stage = replace(stage, model=stage.model.model_copy(update={"quantize": "none"}))
    model = _trained_model(stage, step)
    _check_target(model, to)
    base = str(stage.path) if to == "peft" and stage.path is not None else None
    if to == "peft" and base is None:
        raise ConfigError(
            "export: the run begins with random weights, so an adapter alone has no base; give --to merged"
        )
    if pythons and base is not None:
        raise ConfigError("export: --also-read-with has no effect on an adapter, which has no tokenizer; remove it")
    with proved_folder(out) as unproved:
        if base is None:
            save_model(model, unproved, tokenizer=tokenizer)
        else:
            save_adapter(model, unproved, base=base)
            if model.config.resized:
                tokenizer.save(unproved)
        proof = prove(model, unproved, tokenizer, reader or default_reader(adapter=base is not None), base=base)
        if base is None and stage.path is not None:
            proof = replace(proof, tensors=_compare_tensors(model, unproved, find_folder(stage.path)))
        elif quantized != "none":
            proof = replace(proof, tensors=f"both beside the base in full precision, not in {quantized} as in training")
        told = [compare_tokenizers(unproved, tokenizer, python) for python in pythons]
        proof = replace(proof, tokenizer="; ".join(told) or None)
    return out, proof


def _compare_tensors(model: Decoder, folder: Path, source: Path) -> str:
    """Compare the written tensors with the source checkpoint of the run, and describe the result."""
    if read_json(source / "config.json").get("model_type") != model.config.model_type:
        return "not compared with the source, which is a multimodal model"
    if is_quantized(model) and model.config.resized:
        return "not compared with the source, whose tables of tokens the adapter replaces, for the base is quantized"
    if is_quantized(model):
        told = compare_with_source(folder, source, None, trained=True)
        return f"{told}; their values are not compared, for the base is quantized"
    with tempfile.TemporaryDirectory() as temporary:
        adapter = None
        if has_lora(model):
            adapter = Path(temporary) / "adapter"
            try:
                save_adapter(model, adapter)
            except ConfigError as error:
                return f"not compared with the source: {str(error).removeprefix('save_adapter: ')}"
            if read_json(adapter / "adapter_config.json")["use_dora"]:
                return "not compared with the source, to which DoRA adds no plain product"
        return compare_with_source(folder, source, adapter, trained=adapter is None)


def _trained_model(stage: StageRun, step: int | None) -> Decoder:
    """Model of the stage at a checkpoint: its initial model with the trained parameters."""
    model = STAGES[stage.kind]().load_model(stage)
    weights = ModelWeights(model)
    with Checkpointer(stage.folder / "checkpoints", read_only=True) as checkpointer:
        if not (steps := checkpointer.steps()):
            raise ConfigError(f"{stage.folder}: has no checkpoint yet")
        chosen = steps[0] if step is None else step
        like = {"params": jax.tree.map(_shape, weights.read(weights.trainable().__contains__))}
        try:
            state, _ = checkpointer.restore(chosen, like, partial=True)
        except DamagedCheckpoint as error:
            others = [one for one in steps if one != chosen]
            raise ConfigError(f"{error}; {f'give --step {others[0]}' if others else 'it is the only one'}") from error
    weights.write(state["params"])
    return model


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _check_target(model: Decoder, to: Target) -> None:
    if has_lora(model) and to == "hf":
        raise ConfigError("export: the run trains an adapter; give --to merged or --to peft")
    if not has_lora(model) and to != "hf":
        raise ConfigError(f"export: --to {to} needs an adapter, and the run trains the whole model; give --to hf")
