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
# # posttrain: your own chats, with an adapter (LoRA)
#
# Fine-tuning on a few conversations of your own. LoRA trains a small adapter beside the frozen model: it needs little
# memory, is a file of some megabytes, and can be merged into the model afterwards.
#
# With a TPU or a GPU: Qwen3-0.6B, which is downloaded. Without: a small model that first learns capitals from nothing,
# and then your chats; a minute, nothing is downloaded.

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
import shutil
from pathlib import Path

import jax

import posttrain as pt

# %% [markdown]
# ## The machine decides
#
# The usual rate of an adapter is ten to twenty times that of full fine-tuning. `rank` is its size: raise it if the loss
# stops too early, lower it if the model learns your chats by heart.

# %%
platform, number = jax.devices()[0].platform, len(jax.devices())
if platform == "cpu":
    machine = "cpu-1"
    settings = {
        "lora": {"rank": 16},
        "num_steps": 150,
        "batch_rows": 8,
        "row_tokens": 192,
        "optimizer": {"learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 10},
    }
else:
    chip = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}.get(jax.devices()[0].device_kind, "h100")
    machine = f"{chip}-{number}"
    settings = {
        "model": "Qwen/Qwen3-0.6B",
        "dtype": "bfloat16",
        "remat": "full",
        "mesh": {"fsdp": -1},
        "lora": {"rank": 16, "alpha": 16},
        "num_steps": 60,
        "batch_rows": 8,
        "row_tokens": 1024,
        "optimizer": {"learning_rate": 2e-4, "schedule": "cosine", "warmup_steps": 5},
    }
print(f"{number} x {jax.devices()[0].device_kind}, planned as {machine}: {settings.get('model', 'a small model')}")

# %% [markdown]
# ## Your data
#
# A JSONL file, a chat to a line: `messages` with roles and contents. Here those of a small bookshop. Only what the
# assistant says is trained on. Replace the list by yours, or the file.

# %%
chats = [
    ("When do you open?", "At nine, every day but Sunday."),
    ("When do you close?", "At six, on Saturdays at two."),
    ("Do you buy old books?", "Yes, on Mondays. Bring them along."),
    ("Can I order a book?", "Of course. It is here in two days."),
    ("Do you have maps?", "On the first floor, by the window."),
    ("Is there coffee?", "There is, and it is free."),
    ("May my dog come in?", "Gladly, if it does not eat books."),
    ("Do you wrap gifts?", "Yes, in red paper or blue."),
]
with open("chats.jsonl", "w", encoding="utf-8") as file:
    for question, answer in chats:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        file.write(json.dumps({"messages": messages}) + "\n")

# %% [markdown]
# ## The small model
#
# An adapter needs a model that can already do something. This one learns to answer in the form of a chat. With an
# accelerator nothing happens here.

# %%
small = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
capitals = """Austria Vienna, Belgium Brussels, Chile Santiago, Cuba Havana, Egypt Cairo, France Paris, Ghana Accra,
Greece Athens, Hungary Budapest, India Delhi, Iran Tehran, Italy Rome, Japan Tokyo, Kenya Nairobi, Norway Oslo,
Peru Lima, Poland Warsaw, Qatar Doha, Spain Madrid, Sweden Stockholm"""


def capital_chat(pair):
    country, capital = pair.split()
    question = {"role": "user", "content": f"What is the capital of {country}?"}
    return {"messages": [question, {"role": "assistant", "content": f"It is {capital}, as far as I know."}]}


if platform == "cpu":
    base = pt.SFT(
        model={"init": small, "tokenizer": "bytes"},
        dataset=[capital_chat(pair) for pair in capitals.split(",")],
        num_steps=150,
        batch_rows=8,
        row_tokens=192,
        optimizer={"learning_rate": 5e-3, "schedule": "linear", "warmup_steps": 20},
        output="runs/lora-base",
        seed=0,
    ).fit()
    print(base.chat("What is the capital of Norway?", max_new_tokens=40))
    print(base.chat(chats[0][0], max_new_tokens=40))
    settings["model"] = base.model_path

# %% [markdown]
# ## Does it fit?
#
# The programs are compiled for the machine, from shapes alone: no weights are there yet, and of a model on the hub only
# its `config.json` is read.

# %%
sft = pt.SFT(dataset="chats.jsonl", output="runs/lora", seed=0, **settings)
sft.plan(machine)

# %% [markdown]
# ## Train
#
# Stop and run the cell again to go on where it stopped.

# %%
result = sft.fit()
result.plot("nll")

# %% [markdown]
# ## Chat with it
#
# `result.chat()` without a message is a conversation from the keyboard. The loss alone says little: a model that has
# learned eight answers by heart has a loss near 0. Ask what was not in the data, too.

# %%
for question, answer in chats:
    told = result.chat(question, max_new_tokens=60)
    print(f"{question} {told} {'' if told.strip() == answer else f'(not: {answer})'}")

# %% [markdown]
# ## Two files to choose from
#
# The adapter alone, as PEFT reads it, over the same base; or the whole model with the adapter merged into it, as
# transformers, vLLM and others read it. Each is read again and compared.

# %%
adapter = result.export("peft", "runs/lora-adapter")
merged = result.export("merged", "runs/lora-merged")
for folder in (adapter, merged):
    print(folder, *(f"{file.name}: {file.stat().st_size:,} bytes" for file in folder.glob("*.safetensors")))

# %% [markdown]
# ## Keep it
#
# The machine of a notebook is lent, and what lies only there is lost with it. Say where to, and run the cell.

# %%
save_to = None  # "drive" (Colab), "kaggle" (its output), or a repository of the hub, such as "me/my-model"
keep, name = merged, "posttrain-sft-lora"

if save_to == "drive":
    from google.colab import drive

    drive.mount(str(Path.cwd() / "drive"))
    shutil.copytree(keep, Path.cwd() / "drive" / "MyDrive" / "posttrain" / name, dirs_exist_ok=True)
elif save_to == "kaggle":
    # "Save version" keeps what lies in the folder where a notebook begins.
    print(shutil.make_archive(name, "zip", keep))
elif save_to is not None:
    from huggingface_hub import create_repo, upload_folder

    create_repo(save_to, private=True, exist_ok=True)
    print(upload_folder(repo_id=save_to, folder_path=keep))
