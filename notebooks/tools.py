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
# # posttrain: tools (a food assistant)
#
# A model that looks up what it cannot know. A tool is a typed Python function with a docstring; the framework makes its
# schema, runs the calls that the model writes, and gives the results back. RL rewards the right call and the right
# answer, and trains only on what the model wrote itself.
#
# With a TPU or a GPU: Qwen3 (`Qwen/Qwen3-4B`, on one chip `Qwen/Qwen3-0.6B`), which is downloaded, and thirty foods of
# USDA's food composition table with ten nutrients. Without: a table of the energies of thirty foods, and a small model
# that has seen a quarter of its teachers look things up; two minutes, nothing is downloaded.

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
import csv
import random
import shutil
from pathlib import Path

import jax

import posttrain as pt
from envs import food
from posttrain.tools.function import function_schema
from rewards.tool_use import right_calls, right_number, well_formed

# %% [markdown]
# ## The machine decides
#
# `max_turns` bounds a conversation, `max_tokens` a turn, `row_tokens` all of it. Qwen3-4B is trained in full on several
# chips; on one it is Qwen3-0.6B with an adapter.

# %%
platform, number = jax.devices()[0].platform, len(jax.devices())
if platform == "cpu":
    machine = "cpu-1"
    settings = {
        "env": {"max_turns": 2},
        "num_steps": 20,
        "prompts_per_step": 16,
        "group_size": 8,
        "row_tokens": 208,
        "sampling": {"max_tokens": 88, "temperature": 1.0},
        "optimizer": {"learning_rate": 5e-4},
    }
else:
    chip = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}.get(jax.devices()[0].device_kind, "h100")
    machine = f"{chip}-{number}"
    settings = {
        "model": "Qwen/Qwen3-4B",
        "dtype": "bfloat16",
        "remat": "full",
        "mesh": {"fsdp": -1},
        "algorithm": {"kind": "grpo", "kl_coef": 0.001},
        "env": {"max_turns": 4, "timeout_s": 30, "concurrency": 64},
        "num_steps": 200,
        "prompts_per_step": 32,
        "group_size": 8,
        "updates": 2,
        "row_tokens": 2048,
        "max_prompt_tokens": 640,
        "rollout": {"slots": 128},
        "sampling": {"max_tokens": 512, "temperature": 1.0},
        "micro_batch_rows": 8,
        "optimizer": {"learning_rate": 1e-6, "warmup_steps": 10, "moments": "int8", "stochastic_rounding": True},
        "placement": {"optimizer": {"offload": True}, "reference": {"offload": True}},
        "checkpoint_every": 20,
    }
    if number == 1:
        settings |= {"model": "Qwen/Qwen3-0.6B", "lora": {"rank": 16}, "updates": 1, "algorithm": "grpo"}
        settings |= {
            "optimizer": {"learning_rate": 2e-5, "warmup_steps": 10},
            "placement": {},
            "rollout": {"slots": 32},
        }
print(f"{number} x {jax.devices()[0].device_kind}, planned as {machine}: {settings.get('model', 'a small model')}")

# %% [markdown]
# ## The table
#
# The columns are those of USDA's table (SR 28, abbreviated, as CSV), which is in the public domain. `envs/foods.csv`
# has thirty of its foods; the whole table has 8,790.

# %%
usda = None  # path of USDA's whole table, for an accelerator
energies = """KALE 35, RICE 365, BEEF 198, CORN 86, OATS 389, MILK 61, EGGS 143, PEAR 57, PLUM 46, LIME 30, TOFU 76,
PORK 263, DUCK 337, TUNA 144, CRAB 84, LEEK 61, BEET 43, KIWI 61, DATE 277, FIGS 74, LAMB 282, TACO 226, BRAN 216,
DILL 43, SAGE 315, BASS 97, COLA 42, FETA 264, BRIE 334, OKRA 33"""

if platform == "cpu":
    table = Path("foods.csv").resolve()
    with table.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["NDB_No", "Shrt_Desc", "Energ_Kcal"])
        rows.writerows([index, *entry.split()] for index, entry in enumerate(energies.split(",")))
else:
    table = food.TABLE if usda is None else Path(usda).resolve()

# %% [markdown]
# ## The tool
#
# The model sees the name, the description and the typed arguments. `table` is set by the run and hidden from it. An
# exception is a line that the model reads. With USDA's table the tool is `envs/food.py:lookup_nutrition`, which knows
# ten nutrients.


# %%
def energy(food: str, table: Path) -> str:
    """Look up the energy of 100 g of a food, in kcal.

    Args:
        food: Name of the food, such as KALE.
    """
    with table.open(encoding="utf-8", newline="") as file:
        found = {row["Shrt_Desc"]: row["Energ_Kcal"] for row in csv.DictReader(file)}
    return f"{found[food]} kcal"


print(energy("KALE", table) if platform == "cpu" else food.lookup_nutrition("kale, raw", "energy", table))
function_schema(energy, ["table"])

# %% [markdown]
# ## Questions, and demonstrations
#
# A question has the `calls` that answer it and the `answer`, which the rewards read. Every second food (of the whole
# table every fifth) is asked for only in the exam. In the demonstrations a quarter of the teachers look the food up,
# and the others guess. Their foods are invented: a name must be copied, it cannot be known.


# %%
def called(name):
    return {"name": "energy", "arguments": {"food": name}}


def asked(entry):
    name, kcal = entry.split()
    return {"prompt": [{"role": "user", "content": f"{name}?"}], "calls": [called(name)], "answer": kcal}


def demonstration(draw):
    name, kcal = "".join(draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=4)), str(draw.randint(30, 400))
    messages = [{"role": "user", "content": f"{name}?"}]
    if draw.random() < 0.25:
        call = {"type": "function", "id": "call00000", "function": called(name)}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00000", "name": "energy", "content": f"{kcal} kcal"},
        ]
    messages.append({"role": "assistant", "content": kcal})
    return {"messages": messages, "tools": [function_schema(energy, ["table"])]}


if platform == "cpu":
    questions = [asked(entry) for entry in energies.split(",")]
    exam, dataset = questions[::2], questions[1::2]
    tool = {"fn": energy, "args": {"table": str(table)}}
else:
    rows = {"path": "envs/food.py:questions"}
    dataset = {**rows, "args": {"csv": str(table), "count": 8000, "seed": 1, "held_out": False}}
    exam = {**rows, "args": {"csv": str(table), "count": 256, "seed": 2, "held_out": True}}
    tool = {"fn": food.lookup_nutrition, "args": {"csv": str(table)}}

# %% [markdown]
# ## The small model
#
# It learns the form of calls from the demonstrations, and to guess. With an accelerator nothing happens here.

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
if platform == "cpu":
    draw = random.Random(1)
    start = pt.SFT(
        model={"init": small, "tokenizer": "bytes", "chat_template": "configs/rl/food/chat_template.jinja"},
        dataset=[demonstration(draw) for _ in range(6000)],
        num_steps=600,
        batch_rows=16,
        row_tokens=208,
        optimizer={"learning_rate": 4e-3, "schedule": "linear", "warmup_steps": 20, "beta2": 0.98},
        output="runs/tools-start",
        seed=0,
    ).fit()
    settings["model"] = start.model_path

# %% [markdown]
# ## Does it fit?
#
# All programs, training and sampling, are compiled for the machine from shapes alone: no weights are there yet, and of
# a model on the hub only its `config.json` is read.

# %%
rl = pt.RL(
    dataset=dataset,
    eval_dataset=exam,
    tools=[tool],
    rewards=[
        {"fn": right_calls, "weight": 0.5},
        {"fn": right_number, "weight": 0.5},
        {"fn": well_formed, "weight": 0.1},
    ],
    output="runs/tools",
    seed=0,
    **settings,
)
rl.plan(machine)

# %% [markdown]
# ## Train
#
# `env/tool_calls` is the number of calls in a conversation, `env/tool_failures` those that ended with an error.

# %%
result = rl.fit()

# %% [markdown]
# ## Before and after
#
# The mean reward on held-out foods; 1.1 is perfect.

# %%
for when in ("before", "after"):
    found = result.results[-1][when]
    print(f"{when:>6}: {found['mean']:.3f} ({found['low']:.3f} to {found['high']:.3f})")
result.plot("reward", "env/tool_calls")

# %% [markdown]
# ## A conversation
#
# As it was recorded in the last step: what the model wrote, and what the tool said to it. `posttrain view runs/tools`
# shows all of them with their tokens and log-probabilities.

# %%
for sample in result.samples[-2:]:
    print(f"{sample['completion']}\nreward {sample['reward']:.2f}\n")

# %% [markdown]
# ## Keep it
#
# The machine of a notebook is lent, and what lies only there is lost with it. Say where to, and run the cell.

# %%
save_to = None  # "drive" (Colab), "kaggle" (its output), or a repository of the hub, such as "me/my-model"
keep, name = result.model_path, "posttrain-tools"

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
