"""Log-probabilities of sample rows, by the model and by independent readers of the written checkpoint."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.models.config import ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.models.hf import CLASSIFIER, config_from_hf
from posttrain.weights.files import find_folder, read_json
from posttrain.weights.load import load_model, vocabulary_of
from posttrain.weights.state import ModelWeights

Reader = Literal["transformers", "posttrain"]

TEXTS = (
    "Once upon a time there was a little girl who asked: how many apples are 17 + 25?",
    "def area(radius: float) -> float:\n    return 3.14159 * radius ** 2  # in m²",
    "Die Prüfung umfaßt 12 Fälle; 東京は日本の首都です。 Привет, мир! 🙂",
)
SAMPLE_TOKENS = 48
SCORED = (12, 24, 36, SAMPLE_TOKENS)
"""Lengths of the beginnings of a row that a reward model scores."""


class ProofError(Exception):
    """Written checkpoint that differs from the model."""


def default_reader(*, adapter: bool) -> Reader:
    """transformers, which shares no code with us, where it (and PEFT for an adapter) can run."""
    needed = ("torch", "peft") if adapter else ("torch",)
    return "transformers" if all(importlib.util.find_spec(name) is not None for name in needed) else "posttrain"


def sample_tokens(vocab_size: int, tokenizer: Tokenizer | None) -> Int[np.ndarray, "B T"]:
    """Rows of text, where there is a tokenizer, and rows of ids from the whole vocabulary."""
    draw = np.random.default_rng(0).integers(0, vocab_size, (2, SAMPLE_TOKENS))
    if tokenizer is None:
        return draw.astype(np.int32)
    encoded = [tokenizer.encode(text) for text in TEXTS]
    texts = [(ids * (SAMPLE_TOKENS // max(len(ids), 1) + 1))[:SAMPLE_TOKENS] for ids in encoded if ids]
    return np.concatenate([np.asarray(texts, np.int32).reshape(-1, SAMPLE_TOKENS), draw.astype(np.int32)])


def without_placeholders(tokens: Int[np.ndarray, "B T"], config: ModelConfig) -> Int[np.ndarray, "B T"]:
    """Tokens of text alone: in a multimodal model others stand for what is not there, by the fields of its config."""
    if config.vision is None:
        return tokens
    fields = json.loads(config.hf_json)
    ids = [value for key, value in fields.items() if key.endswith(("_token_id", "_token_index"))]
    return np.where(np.isin(tokens, [one for one in ids if isinstance(one, int)]), 0, tokens)


OTHER_READER = """
import json, sys
from transformers import AutoConfig, AutoTokenizer, __version__
folder, texts, messages = json.loads(sys.stdin.read())
AutoConfig.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = [tokenizer(text, add_special_tokens=added)["input_ids"] for text in texts for added in (True, False)]
chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) if messages else None
print(json.dumps([__version__, ids, chat, tokenizer.eos_token_id, tokenizer.pad_token_id]))
"""
"""Program that reads configuration and tokenizer in another environment."""
MESSAGES = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), TEXTS, strict=True)]


def compare_tokenizers(folder: Path, tokenizer: Tokenizer, python: str) -> str:
    """Read configuration and tokenizer of a folder with transformers of another environment, and describe the result.

    `python`: interpreter of that environment. ProofError if it cannot read them, or reads other tokens, another
    template or other special tokens.
    """
    own = tokenizer.hf
    messages = MESSAGES if tokenizer.chat_template is not None else None
    expected = [
        [own(text, add_special_tokens=added)["input_ids"] for text in TEXTS for added in (True, False)],
        messages and own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        own.eos_token_id,
        own.pad_token_id,
    ]
    try:
        ended = subprocess.run(
            [python, "-c", OTHER_READER],
            input=json.dumps([str(folder), TEXTS, messages]),
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise ProofError(
            f"{python}: cannot be started ({error.strerror}); give the Python of an environment"
        ) from error
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise ProofError(f"{folder}: {python} cannot read configuration and tokenizer: {last[:500]}")
    version, *found = json.loads(ended.stdout.splitlines()[-1])
    for what, one, other in zip(("tokens", "chat template", "eos token", "pad token"), expected, found, strict=True):
        if one != other:
            raise ProofError(f"{folder}: transformers {version} reads another {what}: {other!r:.200}, not {one!r:.200}")
    return f"transformers {version} reads the same tokens and template"


def start_of(model: Decoder, folder: str | Path) -> int:
    """First position of a sample row: 0, except for models with long-context RoPE factors, which transformers uses only
    beyond a certain position. Attention depends on distances only."""
    first = config_from_hf(read_json(find_folder(folder) / "config.json")).max_positions
    return first if model.config.max_positions > first else 0


def in_float32(model: Decoder) -> Decoder:
    copy = nnx.merge(*nnx.split(model))
    copy.compute = replace(model.compute, dtype=jnp.dtype(jnp.float32))
    # Other programs know nothing of the tokens that there are.
    copy.config = replace(model.config, num_tokens=None)
    return copy


def answers(model: Decoder, tokens: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B _T _V"]:
    """Log-probabilities of every token of the vocabulary after each prefix, a row at a time; of a reward model the
    scores of some prefixes."""
    weights, scored = ModelWeights(model), model.config.scalar_head

    @jax.jit
    def run(arrays: Any, row: Array) -> Array:
        bound = weights.bind(arrays)
        positions = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
        with jax.default_matmul_precision("highest"):
            hidden, _ = bound(row, positions, jnp.ones_like(row))
            if scored:
                return bound.scores(hidden)[:, jnp.asarray(SCORED) - 1, None]
            return jax.nn.log_softmax(bound.logits(hidden), axis=-1)

    return np.concatenate([np.asarray(run(weights.read(), jnp.asarray(row[None]))) for row in tokens])


def read_with_posttrain(
    folder: Path, tokens: Int[np.ndarray, "B T"], base: str | None, *, scores: bool, start: int
) -> Float[np.ndarray, "B _T _V"]:
    try:
        if base is None:
            model = load_model(folder, compute_dtype=jnp.float32, long_context=start > 0)
        else:
            model = load_model(base, adapter=folder, compute_dtype=jnp.float32, long_context=start > 0)
    except ConfigError as error:
        raise ProofError(str(error)) from error
    if model.config.scalar_head != scores:
        raise ProofError(f"{folder}: is {'no' if scores else 'a'} reward model; the model that was written is"
                         f"{'' if scores else ' none'}")  # fmt: skip
    return answers(model, tokens)


def read_with_transformers(
    folder: Path, tokens: Int[np.ndarray, "B T"], base: str | None, *, scores: bool, start: int
) -> Float[np.ndarray, "B _T _V"]:
    import torch

    model, info = _loaded_by_transformers(folder, base, scores=scores)
    # The base of a reward model's adapter has no scalar head: PEFT brings it.
    own = {"score.weight", "lm_head.weight"} if base is not None and scores else set()
    faults = [
        f"{what.replace('_', ' ')}: {', '.join(map(str, sorted(info[what])))}"
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if set(info[what]) - own
    ]
    if faults:
        raise ProofError(f"{folder}: transformers finds {'; '.join(faults)[:2000]}")
    model.eval()
    with torch.no_grad():
        rows = [torch.from_numpy(row[None].astype(np.int64)) for row in tokens]
        if not scores:
            places = torch.arange(start, start + tokens.shape[1])[None]
            logits = [model(row, position_ids=places).logits.float() for row in rows]
            return np.concatenate([torch.log_softmax(x, dim=-1).numpy() for x in logits])
        # Else it takes the score before what it takes for padding.
        model.config.get_text_config().pad_token_id = -1
        scored = [[model(row[:, :length]).logits.float().numpy() for length in SCORED] for row in rows]
        return np.concatenate([np.stack(of_row, axis=1) for of_row in scored])


def _loaded_by_transformers(folder: Path, base: str | None, *, scores: bool) -> tuple[Any, dict[str, Any]]:
    """The model as the usual programs load it, and what its loader says of the tensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    common: dict[str, Any] = {"num_labels": 1} if scores and base is not None else {}
    try:
        # The default for mixtures of experts refuses some widths on CPU.
        seeing = base is None and read_json(folder / "config.json").get("vision_config")
        kind: Any = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
        kind = _classifier(folder if base is None else Path(base)) if scores else kind
        model, info = kind.from_pretrained(
            folder if base is None else base,
            dtype=torch.float32,
            output_loading_info=True,
            experts_implementation="eager",
            **common,
        )
        if base is not None:
            from peft import PeftModel

            if (rows := vocabulary_of(base, folder)) != model.get_input_embeddings().num_embeddings:
                model.resize_token_embeddings(rows, mean_resizing=False)
            with warnings.catch_warnings():
                # PEFT and transformers of one month may not agree on names yet.
                warnings.simplefilter("ignore", FutureWarning)
                model = PeftModel.from_pretrained(model, str(folder))
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ProofError(f"{folder}: transformers cannot read it: {' '.join(str(error).split())[:500]}") from error
    return model, info


def _classifier(folder: Path) -> Any:
    """Class of transformers that reads a reward model: for a family without one of its own, one that is made as those
    of other families are."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING, AutoConfig
    from transformers import AutoModelForSequenceClassification as Known
    from transformers.modeling_layers import GenericForSequenceClassification

    config = type(AutoConfig.from_pretrained(folder))
    if config in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return Known
    parent = type.mro(cast(type, MODEL_MAPPING[config]))[1]
    return type(config.__name__.removesuffix("Config") + CLASSIFIER, (GenericForSequenceClassification, parent), {})
