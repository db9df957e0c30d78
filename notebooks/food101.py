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
# # posttrain: a food assistant for photographs
#
# A model names the dish of a photograph, looks its energy and protein up with a tool, and answers with them. GRPO
# teaches it to look up and not to guess. The photographs are those of Food-101 (Bossard et al., 2014); the tool has the
# values of USDA's table for 35 of its 101 dishes, and says `unknown` of the others.
#
# With a TPU (v5e-8, or one chip) or a GPU: Qwen3-VL 4B, on one chip 2B, and Food-101, which are downloaded; on several
# the settings are those of `configs/rl/food101_qwen3_vl_4b.yaml`. Without: a new model of 0.5 million parameters and
# drawn dishes, five minutes on two cores, nothing is downloaded.

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
import random
import shutil
from pathlib import Path

import jax
from IPython.display import display
from PIL import Image, ImageDraw

import posttrain as pt
from envs.food101 import DISHES, KNOWN, lookup_dish, values_of
from posttrain.tools.function import function_schema
from rewards.food101 import answered, formed, looked_up

# %% [markdown]
# ## The tool
#
# It knows the names of all dishes, and refuses others: a name that the model invents is an error that it reads.

# %%
print(len(DISHES), "dishes, of which", len(KNOWN), "have values:", lookup_dish("hot dog"), "|", lookup_dish("baklava"))
function_schema(lookup_dish, [])

# %% [markdown]
# ## The machine decides
#
# `max_turns` bounds a conversation, `max_tokens` a turn, `row_tokens` all of it, the photograph's tokens included; a
# photograph of `max_pixels` has 256. Eight chips train the language model in full, one an adapter of it.

# %%
platform, number = jax.devices()[0].platform, len(jax.devices())
if platform == "cpu":
    machine = "cpu-1"
    asked = {"prompt": "Which dish?"}
    settings = {
        "algorithm": {"kind": "grpo", "kl_coef": 0.0},
        "tool_format": "pythonic",
        "env": {"max_turns": 3},
        "num_steps": 12,
        "prompts_per_step": 16,
        "group_size": 8,
        "row_tokens": 128,
        "sampling": {"max_tokens": 40, "temperature": 1.0},
        "optimizer": {"learning_rate": 3e-4, "schedule": "linear", "warmup_steps": 2},
    }
else:
    chip = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}.get(jax.devices()[0].device_kind, "h100")
    machine = f"{chip}-{number}"
    asked = {
        "system": (
            'Name the dish of the photograph, look it up once, and end with a line such as "hot dog: kcal 247 protein '
            '11", or "baklava: unknown" where the tool does not know it. Dish names are lower-case words, such as '
            "fish and chips, tuna tartare, cup cakes."
        ),
        "prompt": "Which dish is this, and how much energy and protein do 100 g of it have?",
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
        "algorithm": {"kind": "grpo", "kl_coef": 0.001},
        "tool_format": "hermes",
        "env": {"max_turns": 3, "timeout_s": 30, "concurrency": 64},
        "num_steps": 200,
        "prompts_per_step": 32,
        "group_size": 8,
        "updates": 2,
        "row_tokens": 1536,
        "max_prompt_tokens": 1024,
        "rollout": {"slots": 128},
        "sampling": {"max_tokens": 256, "temperature": 1.0},
        "micro_batch_rows": 8,
        "optimizer": {"learning_rate": 1e-6, "warmup_steps": 10, "moments": "int8", "stochastic_rounding": True},
        "placement": {"optimizer": {"offload": True}, "reference": {"offload": True}},
        "eval_every": 20,
        "checkpoint_every": 20,
    }
    if number == 1:
        settings["model"] |= {"lora": {"rank": 16}, "path": "Qwen/Qwen3-VL-2B-Instruct"}
        settings |= {"rollout": {"slots": 32}, "updates": 1, "placement": {}}
        settings |= {"optimizer": {"learning_rate": 2e-5, "warmup_steps": 10}}
model_name = settings["model"]["path"] if "model" in settings else "a small model"
print(f"{number} x {jax.devices()[0].device_kind}, planned as {machine}: {model_name}")

# %% [markdown]
# ## Photographs
#
# A row has an `image` and its `label`, the number of the dish, which the rewards read. Without an accelerator six
# dishes are drawn, each with its own colours, on plates that differ in place, size and shade.

# %%
looks = {
    "pizza": ((215, 150, 60), (200, 40, 30)),
    "edamame": ((60, 150, 50), (150, 215, 90)),
    "hot dog": ((190, 110, 60), (240, 200, 40)),
    "sushi": ((245, 245, 240), (240, 120, 90)),
    "waffles": ((225, 185, 95), (130, 80, 30)),
    "baklava": ((150, 95, 35), (95, 140, 60)),
}


def drawn(dish, draw):
    """Picture of a dish: a disc with four dots on a plate."""
    image = Image.new("RGB", (48, 48), draw.choice([(120, 85, 60), (70, 90, 110), (95, 110, 80)]))
    canvas = ImageDraw.Draw(image)
    canvas.ellipse((1, 1, 46, 46), fill=(236, 236, 232))
    base, dots = ([part + draw.randint(-10, 10) for part in colour] for colour in looks[dish])
    x, y, r = draw.uniform(20, 28), draw.uniform(20, 28), draw.uniform(12, 16)
    canvas.ellipse((x - r, y - r, x + r, y + r), fill=tuple(base))
    for dx, dy in ((-0.4, -0.4), (0.4, -0.3), (-0.3, 0.4), (0.4, 0.4)):
        canvas.ellipse((x + dx * r - 3, y + dy * r - 3, x + dx * r + 3, y + dy * r + 3), fill=tuple(dots))
    return image


def photographs(count, seed):
    draw = random.Random(seed)
    dishes = [draw.choice(list(looks)) for _ in range(count)]
    return [{"image": drawn(dish, draw), "label": DISHES.index(dish)} for dish in dishes]


if platform == "cpu":
    dataset, exam = photographs(1000, 1), photographs(200, 2)
    sheet = Image.new("RGB", (8 * 96, 96))
    for column, row in enumerate(dataset[:8]):
        sheet.paste(row["image"].resize((96, 96), Image.Resampling.NEAREST), (column * 96, 0))
    display(sheet)
else:
    dataset = {"path": "ethz/food101", "split": "train[:20000]", "shuffle": True, **asked}
    exam = {"path": "ethz/food101", "split": "validation[:256]", **asked}

# %% [markdown]
# ## The small model
#
# A tower of two layers reads patches of 8 x 8 pixels; four of them are a token, so that a plate is nine. It learns to
# see, and the form of conversations, from demonstrations of which two thirds guess the values without a lookup. With an
# accelerator nothing happens here.

# %%
text_config = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
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


def demonstration(row, draw):
    dish, messages = DISHES[row["label"]], [{"role": "user", "content": asked["prompt"]}]
    said = values_of(dish)
    if draw.random() < 1 / 3:
        function = {"name": "lookup_dish", "arguments": {"dish": dish}}
        call = {"type": "function", "id": "call00000", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00000", "name": "lookup_dish", "content": said},
        ]
    else:
        said = f"kcal {draw.randint(50, 450)} protein {draw.randint(1, 30)}"
    messages.append({"role": "assistant", "content": f"{dish}: {said}"})
    return {"image": row["image"], "messages": messages, "tools": [function_schema(lookup_dish, [])]}


if platform == "cpu":
    init = {"model_type": "qwen3_vl", "text_config": text_config, "vision_config": vision_config}
    draw = random.Random(3)
    start = pt.SFT(
        model={"init": init, "vision": "tower", "tokenizer": "configs/rl/food/meals"},
        dataset=[demonstration(row, draw) for row in photographs(4000, 4)],
        num_steps=300,
        batch_rows=32,
        row_tokens=112,
        row_patches=48,
        packing=False,
        optimizer={"learning_rate": 2e-3, "schedule": "cosine", "warmup_steps": 30},
        output="runs/food101-start",
        seed=0,
    ).fit()
    settings["model"] = {"path": start.model_path, "vision": "tower"}

# %% [markdown]
# ## Does it fit?
#
# All programs, training and sampling, the vision tower's among them, are compiled for the machine from shapes alone: no
# weights are there yet, and of a model on the hub only its `config.json` is read.

# %%
rl = pt.RL(
    dataset=dataset,
    eval_dataset=exam,
    tools=[lookup_dish],
    rewards=[
        {"fn": formed, "text": False, "weight": 0.1},
        {"fn": looked_up, "text": False, "weight": 0.4},
        {"fn": answered, "text": False, "weight": 0.5},
    ],
    eval_sampling=settings["sampling"],
    output="runs/food101",
    seed=0,
    **(asked if platform == "cpu" else {}),
    **settings,
)
rl.plan(machine)

# %% [markdown]
# ## Train with the tool
#
# The rewards: form, the right dish looked up, and its values as the tool says them. A dish that is named without a
# lookup has none of the last two. `env/tool_calls` is the number of calls in a conversation.

# %%
result = rl.fit()

# %% [markdown]
# ## Before and after
#
# The mean reward on held-out photographs; 1 is perfect.

# %%
for when in ("before", "after"):
    found = result.results[-1][when]
    print(f"{when:>6}: {found['mean']:.3f} ({found['low']:.3f} to {found['high']:.3f})")
result.plot("reward", "rewards/looked_up/mean", "rewards/answered/mean")

# %% [markdown]
# ## One photograph
#
# `result.chat` has the tool of the run. Give the path of a photograph of your own; without one it is the first of the
# exam. `posttrain chat runs/food101 --page` is the same in a browser, where the calls appear as they are made, and
# `posttrain view runs/food101` shows the samples of training with their photographs.

# %%
photograph, dish = None, None  # a path, and the dish's name if it is known
if photograph is not None:
    picture = Image.open(photograph).convert("RGB")
elif platform == "cpu":
    picture, dish = exam[0]["image"], DISHES[exam[0]["label"]]
else:
    from datasets import load_dataset

    (row,) = load_dataset(exam["path"], split="validation[:1]")
    picture, dish = row["image"], DISHES[row["label"]]

display(picture.resize((192, 192)))
told = [{"role": "system", "content": asked["system"]}] if "system" in asked else []
parts = [{"type": "image", "image": picture}, {"type": "text", "text": asked["prompt"]}]
print("it says:", result.chat([*told, {"role": "user", "content": parts}]))
print("it is:  ", "not known" if dish is None else f"{dish}: {values_of(dish)}")

# %% [markdown]
# ## Keep it
#
# The machine of a notebook is lent, and what lies only there is lost with it. Say where to, and run the cell.

# %%
save_to = None  # "drive" (Colab), "kaggle" (its output), or a repository of the hub, such as "me/my-model"
keep, name = result.model_path, "posttrain-food101"

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
