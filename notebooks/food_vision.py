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
# # posttrain: a food assistant that sees
#
# A model looks at a plate, calls a tool for each food that it sees, adds, and answers with energy and protein. It
# learns to see by naming foods (SFT), the form of conversations from demonstrations that are often careless (SFT), and
# not to be careless with the tools in the loop (GRPO). The plates are drawn here; the tool is a SQLite database with
# the values of USDA's table.
#
# With a TPU or a GPU: Qwen3-VL 4B, on one chip 2B, which is downloaded, and GRPO alone. Without: a new model of 0.67
# million parameters; eight minutes on two cores, nothing is downloaded.

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
import io
import random
import shutil
from pathlib import Path

import jax
from IPython.display import display
from PIL import Image

import posttrain as pt
from envs import meals
from rewards.meals import formed, looked_up, right_totals, sums

# %% [markdown]
# ## Plates
#
# `meals.naming` draws plates with the names and counts of their foods, `meals.questions` asks for their energy and
# protein, and `meals.dialogues` answers with calls. Another seed draws other plates: those of the exam are nobody's.

# %%
draw = random.Random(0)
plates = [meals.meal_of(draw) for _ in range(8)]
sheet = Image.new("RGB", (8 * 96, 96))
for column, plate in enumerate(plates):
    picture = Image.open(io.BytesIO(meals.picture_of(plate, draw)))
    sheet.paste(picture.resize((96, 96), Image.Resampling.NEAREST), (column * 96, 0))
print(plates[0], "with the tool:", meals.lookup_nutrition(*plates[0][0]))
display(sheet)

# %% [markdown]
# ## The machine decides
#
# `max_turns` bounds a conversation, `max_tokens` a turn, `row_tokens` all of it.

# %%
platform, number = jax.devices()[0].platform, len(jax.devices())
small = platform == "cpu"
if small:
    told = {}
    settings = {
        "algorithm": {"kind": "grpo", "kl_coef": 0.0, "advantage_scale": "batch", "reduce": "token_mean"},
        "tool_format": "pythonic",
        "env": {"max_turns": 4},
        "num_steps": 20,
        "prompts_per_step": 20,
        "group_size": 8,
        "row_tokens": 160,
        "sampling": {"max_tokens": 40, "temperature": 1.0},
        "optimizer": {"learning_rate": 3e-4, "schedule": "linear", "warmup_steps": 3},
    }
else:
    told = {
        "system": "Foods on plates are: " + ", ".join(meals.FOODS) + ". Look each up once with its count, add the "
        'energies and the proteins, and end with a line such as "kcal 262 protein 14".'
    }
    settings = {
        "model": {
            "path": "Qwen/Qwen3-VL-4B-Instruct",
            "vision": "frozen",
            "image": {"max_pixels": 262144},
            "dtype": "bfloat16",
            "remat": "full",
        },
        "mesh": {"fsdp": -1},
        "tool_format": "hermes",
        "algorithm": {"kind": "grpo", "kl_coef": 0.001},
        "env": {"max_turns": 4, "timeout_s": 30, "concurrency": 64},
        "num_steps": 200,
        "prompts_per_step": 32,
        "group_size": 8,
        "updates": 2,
        "row_tokens": 2048,
        "max_prompt_tokens": 1024,
        "rollout": {"slots": 128},
        "sampling": {"max_tokens": 384, "temperature": 1.0},
        "micro_batch_rows": 8,
        "optimizer": {"learning_rate": 1e-6, "warmup_steps": 10, "moments": "int8", "stochastic_rounding": True},
        "placement": {"optimizer": {"offload": True}, "reference": {"offload": True}},
        "checkpoint_every": 20,
    }
    if number == 1:
        settings["model"] |= {"lora": {"rank": 16}, "path": "Qwen/Qwen3-VL-2B-Instruct"}
        settings |= {"rollout": {"slots": 32}, "updates": 1, "placement": {}}
        settings |= {"optimizer": {"learning_rate": 2e-5, "warmup_steps": 10}}
print(f"{number} x {jax.devices()[0].device_kind}: {'a small model' if small else settings['model']['path']}")

# %% [markdown]
# ## The small model
#
# A tower of two layers reads patches of 8 x 8 pixels; four of them are a token, so that a plate is nine. It learns to
# name foods first, and then the form of conversations. With an accelerator nothing happens here.

# %%
text_config = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.08,
    "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 4, 4]},
}
vision_config = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 256,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [],
}
stage = {"batch_rows": 32, "row_patches": 48, "packing": False, "seed": 0}
rate = {"learning_rate": 2e-3, "schedule": "cosine", "warmup_steps": 50}
if small:
    init = {"model_type": "qwen3_vl", "text_config": text_config, "vision_config": vision_config}
    named = pt.SFT(
        model={"init": init, "vision": "tower", "tokenizer": "configs/rl/food/meals"},
        dataset={"path": "envs/meals.py:naming", "args": {"count": 19_200, "seed": 1}},
        num_steps=600,
        row_tokens=27,
        optimizer=rate,
        output="runs/food-vision-naming",
        **stage,
    ).fit()
    spoken = pt.SFT(
        model={"path": named.model_path, "vision": "tower"},
        dataset={"path": "envs/meals.py:dialogues", "args": {"count": 12_000, "seed": 2}},
        num_steps=600,
        row_tokens=120,
        optimizer=rate,
        output="runs/food-vision-dialogues",
        **stage,
    ).fit()
    settings["model"] = {"path": spoken.model_path, "vision": "tower"}

# %% [markdown]
# ## Train with the tools
#
# The rewards: form, right lookups, sums of what was read, right totals. An answer guessed without a lookup has none of
# the last two. `env/tool_calls` is the number of calls in a conversation.

# %%
questions = {"path": "envs/meals.py:questions"}
result = pt.RL(
    dataset={**questions, "args": {**told, "count": 512 if small else 8000, "seed": 3}},
    eval_dataset={**questions, "args": {**told, "count": 200, "seed": 98}},
    tools=[{"fn": meals.lookup_nutrition, "args": {"csv": None}}, {"fn": meals.add}],
    rewards=[
        {"fn": formed, "weight": 0.1},
        {"fn": looked_up, "weight": 0.4},
        {"fn": sums, "weight": 0.1},
        {"fn": right_totals, "weight": 0.4},
    ],
    eval_sampling=settings["sampling"],
    output="runs/food-vision",
    seed=0,
    **settings,
).fit()

# %% [markdown]
# ## Before and after
#
# The mean reward on held-out plates; 1 is perfect.

# %%
for when in ("before", "after"):
    found = result.results[-1][when]
    print(f"{when:>6}: {found['mean']:.3f} ({found['low']:.3f} to {found['high']:.3f})")
result.plot("reward", "rewards/sums/mean")

# %% [markdown]
# ## The assistant at work
#
# A plate that it has not seen. `result.chat` has the tools of the run; `posttrain chat runs/food-vision --page` is the
# same in a browser, and `posttrain view runs/food-vision` shows the samples of training with their plates.

# %%
(row,) = meals.questions(count=1, seed=7, **told)
display(Image.open(io.BytesIO(row["image"])).resize((192, 192), Image.Resampling.NEAREST))
picture = {"type": "image", "image": row["image"]}
asked = {"role": "user", "content": [picture, {"type": "text", "text": meals.QUESTION}]}
print("it says:", result.chat([*row["prompt"][:-1], asked]))
print(f"drawn:   kcal {row['kcal']} protein {row['protein']}", row["foods"])

# %% [markdown]
# ## Keep it
#
# The machine of a notebook is lent, and what lies only there is lost with it. Say where to, and run the cell.

# %%
save_to = None  # "drive" (Colab), "kaggle" (its output), or a repository of the hub, such as "me/my-model"
keep, name = result.model_path, "posttrain-food-vision"

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
