"""Export of a run's checkpoint for other tools, verified against the model before it gets its name."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from posttrain.config.yaml_file import load_recorded
from posttrain.errors import ConfigError
from posttrain.export.proof import Proof, prove, proved_folder
from posttrain.export.readers import ProofError, Reader, compare_tokenizers, default_reader
from posttrain.mesh import single_device_mesh
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_to_hf, module_name, stored_name
from posttrain.models.vision.tower import UNREAD
from posttrain.runs.finished import find_stage, open_stage, tokenizer_of, trained_model
from posttrain.runs.folder import CONFIG_NAME
from posttrain.runtime.files import check_local
from posttrain.weights.files import find_folder, read_json
from posttrain.weights.locate import add_family_file
from posttrain.weights.lora import base_tensors, has_lora
from posttrain.weights.peft_save import save_adapter
from posttrain.weights.save import save_model
from posttrain.weights.state import is_quantized

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
    config = load_recorded(output / CONFIG_NAME)
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
    model = trained_model(stage, step)
    _check_target(model, to)
    base = str(stage.path) if to == "peft" and stage.path is not None else None
    if to == "peft" and base is None:
        raise ConfigError(
            "export: the run begins with random weights, so an adapter alone has no base; give --to merged"
        )
    if to == "peft" and stage.model.upscale is not None:
        raise ConfigError(
            f"export: the adapter's base has layers that {stage.path} lacks (model.upscale); give --to merged, or "
            "train on what posttrain upscale writes"
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
        if base is None and stage.model.upscale is not None:
            proof = replace(proof, tensors="not compared with the source, which has fewer layers")
        elif base is None and stage.path is not None:
            proof = replace(proof, tensors=_compare_tensors(model, unproved, find_folder(stage.path)))
        elif quantized != "none":
            proof = replace(proof, tensors=f"both beside the base in full precision, not in {quantized} as in training")
        told = [compare_tokenizers(unproved, tokenizer, python) for python in pythons]
        proof = replace(proof, tokenizer="; ".join(told) or None)
    return out, proof


def _compare_tensors(model: Decoder, folder: Path, source: Path) -> str:
    """Compare the written tensors with the source checkpoint of the run, and describe the result."""
    if read_json(source / "config.json").get("model_type") != config_to_hf(model.config).get("model_type"):
        return "not compared with the source, of which the text part was loaded"
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
        modules = {
            stored_name(model.config, one.name): module_name(model.config, one.name) for one in base_tensors(model)
        }
        return compare_with_source(folder, source, adapter, trained=adapter is None, modules=modules)


def _check_target(model: Decoder, to: Target) -> None:
    if has_lora(model) and to == "hf":
        raise ConfigError("export: the run trains an adapter; give --to merged or --to peft")
    if not has_lora(model) and to != "hf":
        raise ConfigError(f"export: --to {to} needs an adapter, and the run trains the whole model; give --to hf")


# What was not trained must be there under the name, in the shape and with the bytes that it came with; what has an
# adapter must be the source with PEFT's rule applied, W + scale B A.


PACKED = re.compile(r"(.*)(_blocks|_scales|_scale_inv)$")
"""Parts of quantised tensors, whose shapes differ from the written tensors."""
NOT_WRITTEN = re.compile(r".*rotary_emb\.inv_freq$")
WIDTH = {"F32": 4, "F16": 2, "BF16": 2}
MERGED_TOLERANCE = {"F32": 1e-5, "F16": 2e-3, "BF16": 1.6e-2}
"""Relative tolerance of a merged matrix by dtype: summation order and rounding."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    file: Path
    offset: int
    kind: str
    shape: tuple[int, ...]

    def content(self) -> bytes:
        with self.file.open("rb") as opened:
            opened.seek(self.offset)
            return opened.read(math.prod(self.shape) * WIDTH[self.kind])

    def values(self) -> np.ndarray:
        """In float32."""
        raw = np.frombuffer(self.content(), {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[self.kind])
        wide = (raw.astype(np.uint32) << 16).view(np.float32) if self.kind == "BF16" else raw.astype(np.float32)
        return wide.reshape(self.shape)


def stored(folder: Path) -> dict[str, Stored]:
    """The headers of all files of a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start = 8 + length + entry["data_offsets"][0]
            found[name] = Stored(file=file, offset=start, kind=entry["dtype"], shape=tuple(entry["shape"]))
    return found


def compare_with_source(
    folder: Path, source: Path, adapter: Path | None, *, trained: bool, modules: Mapping[str, str] | None = None
) -> str:
    """Compare tensors with the source and describe the result. `adapter`: merged PEFT files. `trained`: all changed.
    `modules`: names in the adapter by names in the files, where they differ.

    ProofError for a tensor that is missing, left over, misshapen, changed though nothing trained it, or not its source
    with the adapter added.
    """
    ours, theirs = stored(folder), _expected(source, folder)
    named = modules or {}
    # What an adapter saves whole replaces the source's.
    whole = {} if adapter is None else {_saved_name(n): t for n, t in stored(adapter).items() if ".lora_" not in n}
    saved = {name: whole[module] for name in theirs if (module := named.get(name, name)) in whole}
    theirs |= saved
    faults = [f"{name} is missing" for name in sorted(theirs.keys() - ours.keys())]
    faults += [f"{name} is not in the source" for name in sorted(ours.keys() - theirs.keys() - {"score.weight"})]
    both = sorted(ours.keys() & theirs.keys())
    same = [name for name in both if theirs[name] is not None]
    faults += [
        f"{name} has the shape {list(ours[name].shape)}, its source {list(other.shape)}"
        for name in same
        if (other := theirs[name]) is not None and ours[name].shape != other.shape
    ]
    if faults:
        raise ProofError(f"{folder}: {len(faults)} tensors are not those of {source}: {'; '.join(faults)}")
    if trained:
        return f"{len(both)} tensors have the names and shapes of the source"
    written = {named.get(name, name): tensor for name, tensor in ours.items()}
    deltas = {} if adapter is None else dict(_deltas(adapter, written))
    added = 0
    for name in same:
        other = theirs[name]
        assert other is not None
        delta = deltas.pop(named.get(name, name).removesuffix(".weight"), None)
        if delta is None and ours[name].kind == other.kind and ours[name].content() != other.content():
            faults.append(f"{name} is changed, though nothing trained it")
        elif delta is not None:
            added += 1
            expected, tolerance = other.values() + delta, MERGED_TOLERANCE[ours[name].kind]
            if not np.abs(ours[name].values() - expected).max() <= tolerance * np.abs(expected).max():
                faults.append(f"{name} is not the source's with the adapter added")
    there = {named.get(name, name).removesuffix(".weight") for name in theirs}
    faults += [f"{name}, which the adapter changes, is not there" for name in sorted(deltas.keys() - there)]
    if faults:
        raise ProofError(f"{folder}: {'; '.join(faults)}")
    return (
        f"{len(both)} tensors have the names and shapes of the source; {added} are it with the adapter added by numpy"
    )


def _expected(source: Path, folder: Path) -> dict[str, Stored | None]:
    """Tensors that must be written; None: of a shape that depends on quantised parts."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found: dict[str, Stored | None] = {}
    for name, tensor in stored(source).items():
        packed = PACKED.match(name)
        if packed:
            found[packed[1]] = None
        elif not (NOT_WRITTEN.match(name) or UNREAD.match(name)) and found.get(name, tensor) is not None:
            found[name] = None if tensor.kind not in WIDTH else tensor
    layers = config.get("num_hidden_layers", math.inf)
    found = {n: t for n, t in found.items() if not (m := re.search(r"\.layers\.(\d+)\.", n)) or int(m[1]) < layers}
    scores = any("SequenceClassification" in name for name in config.get("architectures") or [])
    if config.get("tie_word_embeddings") or scores:
        found = {name: tensor for name, tensor in found.items() if not name.endswith("lm_head.weight")}
    if scores and config.get("vision_config"):
        text = re.compile(r"^model\.(?=(layers|embed_tokens|norm)\.)")
        found = {text.sub("model.language_model.", name): tensor for name, tensor in found.items()}
    return found


def _saved_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _deltas(adapter: Path, written: Mapping[str, Stored]) -> Iterator[tuple[str, np.ndarray]]:
    """PEFT's change of each module's weight [out, in]: scale B A, the scale by its patterns."""
    config: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    targets = tuple(f".{target}" for target in config.get("target_parameters") or ())
    tensors = stored(adapter)
    for name, a in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_(embedding_)?A(\.weight)?", name)
        if match is None:
            continue
        b = tensors[name.replace("lora_embedding_A", "lora_embedding_B").replace("lora_A", "lora_B")]
        module = match[1].replace(".base_layer", "")
        if targets and module.endswith(".experts"):
            # The adapter of a module's last parameter is stored as that of the module, those before it within.
            found = [p for p in ("gate_up_proj", "down_proj") if f".{module}.{p}".endswith(targets)]
            param = f"{module}.{found[len(found) - 1 - match[1].count('.base_layer')]}"
            yield from _expert_deltas(param, a.values(), b.values(), config, written)
            continue
        named = f"{module}.weight" if f".{module}.weight".endswith(targets) else module
        if f"{module}.weight" not in written:
            # A router of Mixtral has another name in transformers.
            module = module.replace(".mlp.", ".block_sparse_moe.")
        delta = _scale(config, named, a.shape[0]) * (b.values() @ a.values())
        yield module, delta.T if match[2] else delta


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    patterns = config.get("alpha_pattern") or {}
    alpha = next((patterns[p] for p in patterns if re.fullmatch(rf"(.*\.)?({p})", name)), config["lora_alpha"])
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _expert_deltas(
    param: str, a: np.ndarray, b: np.ndarray, config: Mapping[str, Any], written: Mapping[str, Stored]
) -> Iterator[tuple[str, np.ndarray]]:
    """Adapter deltas of all experts of a layer, stored as one tensor or one by one."""
    stem = param.rpartition(".")[0]
    stem = stem if any(name.startswith(stem) for name in written) else stem.replace(".mlp.", ".block_sparse_moe.")
    kinds = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
    words = next((w for w in kinds[param.rpartition(".")[2]] if f"{stem}.0.{w[0]}.weight" in written), None)
    if words is None:
        num = written[param].shape[0]
    else:
        num = sum(re.fullmatch(rf"{re.escape(stem)}\.\d+\.{words[0]}\.weight", name) is not None for name in written)
    a, b = a.reshape(num, -1, a.shape[-1]), b.reshape(b.shape[0], -1, num)
    deltas = _scale(config, param, a.shape[1]) * np.einsum("ore,eri->eoi", b, a)
    if words is None:
        # Of gpt-oss alone the matrices are [in, out].
        yield param, deltas.swapaxes(1, 2) if f"{param}_bias" in written else deltas
    for expert, delta in enumerate(deltas if words is not None else ()):
        for word, part in zip(words or (), np.split(delta, len(words or "1")), strict=True):
            yield f"{stem}.{expert}.{word}", part
