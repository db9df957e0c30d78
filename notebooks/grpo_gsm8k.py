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
# # posttrain: GRPO on GSM8K
#
# Grade-school word problems, whose answers end with `#### 42`. Reinforcement learning with a verifiable reward: sample
# a group of answers to each question, give 1 for the right number, and make those that beat their group likelier.
#
# With a TPU or a GPU: Qwen3-0.6B and GSM8K, which are downloaded. Without: problems of the same form that this notebook
# makes, and a small model that has learned them from careless pupils; a minute or two, nothing is downloaded. The
# reward is the same.

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

import posttrain as pt
from rewards.gsm8k import correct, final_number, has_marker

# %% [markdown]
# ## The machine decides
#
# An adapter where there is one chip, the whole model on several. `temperature: 1` because the update needs the
# distribution from which the samples were drawn.

# %%
platform, number = jax.devices()[0].platform, len(jax.devices())
if platform == "cpu":
    machine = "cpu-1"
    settings = {
        "algorithm": "grpo",
        "num_steps": 30,
        "prompts_per_step": 32,
        "group_size": 8,
        "row_tokens": 64,
        "sampling": {"max_tokens": 20, "temperature": 1.0},
        "optimizer": {"learning_rate": 5e-4},
    }
else:
    chip = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}.get(jax.devices()[0].device_kind, "h100")
    machine = f"{chip}-{number}"
    settings = {
        "model": "Qwen/Qwen3-0.6B",
        "dtype": "bfloat16",
        "remat": "full",
        "mesh": {"fsdp": -1},
        "algorithm": "dapo",
        "num_steps": 200,
        "prompts_per_step": 32,
        "group_size": 8,
        "micro_batch_rows": 16,
        "row_tokens": 1536,
        "sampling": {"max_tokens": 1024, "temperature": 1.0},
        "optimizer": {"learning_rate": 1e-6, "warmup_steps": 5},
        "checkpoint_every": 10,
    }
    if number == 1:
        settings |= {"lora": {"rank": 32}, "optimizer": {"learning_rate": 2e-5, "warmup_steps": 5}}
        settings |= {"rollout": {"slots": 48}}
print(f"{number} x {jax.devices()[0].device_kind}, planned as {machine}: {settings.get('model', 'a small model')}")

# %% [markdown]
# ## The problems
#
# Columns as in GSM8K: `question`, and `answer` with its working. The reward asks for `answer` by naming it. The pupils
# forget half of the carries.


# %%
def word_problems(count, seed, *, held_out, forgotten=0.0):
    draw, rows = random.Random(seed), []
    while len(rows) < count:
        a, b = draw.randint(10, 89), draw.randint(1, 9)
        if ((7 * a + b) % 4 == 0) != held_out:
            continue
        name, thing = draw.choice(("Ann", "Bob", "Eve", "Tom")), draw.choice(("eggs", "pens", "nuts", "cups"))
        total = a + b - 10 * (a % 10 + b > 9 and draw.random() < forgotten)
        question = f"{name} has {a} {thing} and gets {b}. How many?"
        rows.append({"question": question, "answer": f"{a}+{b}={total}\n#### {total}"})
    return rows


if platform == "cpu":
    dataset, exam = word_problems(4000, 2, held_out=False), word_problems(200, 3, held_out=True)
    settings |= {"prompt": "{question}", "chat": False}
else:
    system = "Reason step by step, then give the final number after ####."
    dataset = {"path": "openai/gsm8k", "args": {"name": "main"}, "prompt": "{question}", "system": system}
    exam = {**dataset, "split": "test", "limit": 256}

# %% [markdown]
# ## The reward
#
# Try it before you train with it: `notebooks/reward_lab.ipynb` shows how.

# %%
tries = ["3+4=7\n#### 7", "The answer is 7.", "#### 8"]
print(correct(tries, answer=["3+4=7\n#### 7"] * 3), has_marker(tries), [final_number(text) for text in tries])

# %% [markdown]
# ## The small model
#
# It learns to read the problems from the pupils. With an accelerator nothing happens here.

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
    start = pt.SFT(
        model={"init": small, "tokenizer": "bytes"},
        dataset=word_problems(20_000, 1, held_out=False, forgotten=0.5),
        prompt="{question}",
        completion="{answer}",
        chat=False,
        num_steps=500,
        batch_rows=32,
        row_tokens=64,
        optimizer={"learning_rate": 4e-3, "schedule": "linear", "warmup_steps": 20, "beta2": 0.98},
        output="runs/gsm8k-start",
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
    rewards=[correct, {"fn": has_marker, "weight": 0.1}],
    output="runs/gsm8k",
    seed=0,
    **settings,
)
rl.plan(machine)

# %% [markdown]
# ## Train
#
# Watch `frac_reward_zero_std`, the share of groups whose samples all have the same reward and teach nothing, and
# `completions/clipped_ratio`, the share of samples cut at `max_tokens`.

# %%
result = rl.fit()

# %% [markdown]
# ## Before and after
#
# The mean reward on held-out problems with its 95 % interval; 1.1 is perfect, for the form counts a tenth.

# %%
for when in ("before", "after"):
    found = result.results[-1][when]
    print(f"{when:>6}: {found['mean']:.3f} ({found['low']:.3f} to {found['high']:.3f})")
result.plot("reward", "completions/mean_length")

# %%
for sample in result.samples[-3:]:
    print(f"{sample['prompt']!r} -> {sample['completion']!r}: {sample['reward']:.1f}")

# %% [markdown]
# ## Keep it
#
# The machine of a notebook is lent, and what lies only there is lost with it. Say where to, and run the cell.

# %%
save_to = None  # "drive" (Colab), "kaggle" (its output), or a repository of the hub, such as "me/my-model"
keep, name = result.model_path, "posttrain-grpo-gsm8k"

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
