# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # posttrain: add a model family
#
# There is one decoder. A family is one file, named like the `model_type` in a checkpoint's `config.json`. It says what
# the layers are made of and what the tensors are called. Here we add one that is not part of the package, EXAONE 4
# (arXiv:2507.11407), and check it against transformers.
#
# Nothing is downloaded: the checkpoint is a tiny one with random weights. It takes less than a minute.

# %% [markdown]
# ## Install
#
# Only where the package is missing, and never at the cost of the JAX that this machine came with: its version, and that
# of its accelerator plugins, is held fixed. If it is too old for the package, pip says so and changes nothing.

# %%
import importlib.util

if importlib.util.find_spec("posttrain") is None:
    import re
    import subprocess
    import sys
    from importlib.metadata import distributions
    from pathlib import Path

    # Where it comes from: an address as pip takes it ("git+https://..."), or a wheel. Empty: this notebook's checkout
    repository = ""

    if not repository and not Path("..", "pyproject.toml").is_file():
        raise ValueError("repository is empty and no checkout holds this notebook: set it above to where posttrain is")
    installed = {d.name.lower().replace("_", "-"): d.version for d in distributions()}
    jax_parts = sorted(name for name in installed if re.fullmatch(r"jax|jaxlib|jax-(cuda|rocm).*|libtpu.*", name))
    pins = [f"{name}=={installed[name]}" for name in jax_parts]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *pins, repository or ".."], check=True)
    importlib.invalidate_caches()

# %%
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import posttrain as pt
from posttrain.models.hf import add_families, config_from_hf
from posttrain.weights.load import init_model

# %% [markdown]
# ## What is new in it
#
# Read the model's paper or its code in transformers, and compare it with Llama. EXAONE 4 differs in three ways:
#
# - the norms stand after attention and MLP, before the residual sum, and not before them;
# - queries and keys are normed, head by head;
# - three of four layers see a window of tokens only; the others see all of them, but no positions.
#
# The decoder has all of this, so the file only has to say it. `posttrain/models/config.py` lists what there is to say.
# For what a decoder does not have, a family brings a subclass of `Block`, as Gemma 4 does.

# %% [markdown]
# ## The file
#
# - `ARCHITECTURE`: the name of the class in transformers, for the `config.json` of what we save.
# - `NAMES`: our parameters and the tensors of a checkpoint. Loading, saving and the transfer to other engines use this
#   one table. Most of it is as in Llama; here only the norms have other places.
# - `config_from_hf`: from the fields of `config.json` to a description. Give `hf.get` the default that transformers
#   has; without one the field is required. Values of another type are refused.

# %%
EXAONE4 = '''
"""EXAONE 4 (arXiv:2507.11407): norms after attention and MLP, a window in three of four layers."""

from dataclasses import replace

from posttrain.models.hf import attention_config, decoder_config, head_dim_of, layer_types, mlp_config
from posttrain.models.names import DECODER_NAMES, LAYER, Name
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "Exaone4ForCausalLM"
NAMES = {
    **DECODER_NAMES,
    "attention_post_norm.scale": Name(f"{LAYER}.post_attention_layernorm.weight"),
    "mlp_post_norm.scale": Name(f"{LAYER}.post_feedforward_layernorm.weight"),
}


def config_from_hf(hf):
    num_layers, head_dim = hf.get("num_hidden_layers", int), head_dim_of(hf)
    window = hf.optional("sliding_window", int, 4096)
    local = attention_config(
        hf, rope=rope_from_hf(hf, head_dim), head_dim=head_dim, default_kv_heads=32, qk_norm="head", window=window
    )
    # Only where other layers have a window do those without one see no positions.
    full = replace(local, window=None, rope=None if window else local.rope)
    kinds = layer_types(hf, ["sliding_attention" if i % 4 else "full_attention" for i in range(1, num_layers + 1)])
    attentions = [local if kind == "sliding_attention" else full for kind in kinds]
    return decoder_config(hf, attentions, [mlp_config(hf)] * num_layers, block={"norms": "post"}, norm_eps=1e-5)
'''

folder = Path("families")
folder.mkdir(exist_ok=True)
(folder / "exaone4.py").write_text(EXAONE4)
add_families(folder)

# %% [markdown]
# `add_families` is for files outside of the package; in a checkout of it, `posttrain/models/families` is the place.
#
# ## A look at the description
#
# The layers are found to be a pattern that repeats. Training compiles the pattern once, however deep the model is.

# %%
tiny = {
    "model_type": "exaone4",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 60,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "sliding_window": 7,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-3,
}
config = config_from_hf(tiny)
for stage in config.stages:
    print(f"{stage.repeats} times")
    for block in stage.blocks:
        rope = "RoPE" if block.attention.rope else "no positions"
        print(f"    window {block.attention.window}, {rope}, norms: {block.norms}")

# %% [markdown]
# ## A tiny checkpoint
#
# Random weights that are not the first values of anything: a norm that is forgotten would not show if all of its scales
# were 1. `save_model` writes what transformers loads.

# %%
model = init_model(tiny, dtype=jnp.float32, seed=0)
rng = np.random.default_rng(0)
for block in model.stages[0].blocks:
    for norm in (block.attention_post_norm, block.mlp_post_norm, block.attention.q_norm, block.attention.k_norm):
        norm.scale.set_value(jnp.asarray(rng.uniform(0.5, 1.5, norm.scale.shape), jnp.float32))
pt.save_model(model, "tiny-exaone4")
print(json.dumps(json.loads(Path("tiny-exaone4/config.json").read_text()), indent=1))

# %% [markdown]
# ## The same logits here and there
#
# Load the files anew, and compare with an independent implementation: all logits of two rows that are longer than the
# window. A wrong name would be an error that lists every tensor that is missing, unknown or misshapen; a wrong
# description shows here. With a real checkpoint of the family, give its folder or hub id instead.

# %%
loaded = pt.load_model("tiny-exaone4")
tokens = rng.integers(0, 96, (2, 24)).astype(np.int32)
positions = np.broadcast_to(np.arange(24, dtype=np.int32), tokens.shape)
hidden, _ = loaded(jnp.asarray(tokens), jnp.asarray(positions), jnp.ones_like(jnp.asarray(tokens)))
ours = np.asarray(loaded.logits(hidden))
print(f"logits {ours.shape}, standard deviation {ours.std():.2f}")

if importlib.util.find_spec("torch") is None:
    print("torch is not installed, so there is nothing to compare with")
else:
    import torch
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained("tiny-exaone4").eval()
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    difference = np.abs(ours - expected).max()
    print(f"largest difference from {type(theirs).__name__} of transformers: {difference:.1e}")
    assert difference < 5e-4

# %% [markdown]
# ## Done
#
# Everything else works as with the families of the package: training in full or with an adapter, generation, meshes,
# saving. To bring a family into the package, add a tiny checkpoint with the logits of transformers to `tests/goldens`
# and name it in `tests/models/goldens.py`; its log-probabilities, gradients and greedy text are then checked as well.
