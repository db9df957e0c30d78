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
# # posttrain: a reward of your own, examined before it trains anything
#
# A policy finds out what a reward pays for, and that is seldom quite what was meant. The lab gives a reward function
# answers whose right order is known - right, wrong, empty, hedged, absurd - and says what is wrong with it, in seconds.
# Here a reward with a fault, what the lab finds, the remedy, and a training run with the mended one.
#
# With a TPU or a GPU the run is one of Qwen3-0.6B, which is downloaded; without, of a small model, in a minute.

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
import random
import shutil
from pathlib import Path

import jax

import posttrain as pt
from posttrain.runs.reward_lab import LabSettings, dataset_of, examine

# %% [markdown]
# ## The machine decides

# %%
platform, number = jax.devices()[0].platform, len(jax.devices())
if platform == "cpu":
    machine = "cpu-1"
    settings = {
        "num_steps": 30,
        "prompts_per_step": 32,
        "group_size": 8,
        "row_tokens": 16,
        "sampling": {"max_tokens": 6, "temperature": 1.0},
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
        "lora": {"rank": 16},
        "num_steps": 50,
        "prompts_per_step": 16,
        "group_size": 8,
        "row_tokens": 320,
        "sampling": {"max_tokens": 256, "temperature": 1.0},
        "optimizer": {"learning_rate": 2e-5, "warmup_steps": 5},
    }
print(f"{number} x {jax.devices()[0].device_kind}, planned as {machine}: {settings.get('model', 'a small model')}")

# %% [markdown]
# ## Sums
#
# The model reads `prompt`; `answer` is for the reward, and `completion` is what a pupil wrote, who may have forgotten a
# carry. Every fourth sum is kept for the exam.


# %%
def problems(count, seed, *, held_out, forgotten=0.0):
    draw, rows = random.Random(seed), []
    while len(rows) < count:
        a, b = draw.randint(10, 89), draw.randint(1, 9)
        if ((7 * a + b) % 4 == 0) == held_out:
            written = a + b - 10 * (a % 10 + b > 9 and draw.random() < forgotten)
            rows.append({"prompt": f"{a}+{b}=", "answer": str(a + b), "completion": str(written)})
    return rows


# %% [markdown]
# ## A reward with a fault
#
# 1 for the right answer. It stands in a file, so that the lab, a configuration and this notebook can name it.
# It looks harmless.

# %%
Path("my_rewards.py").write_text("""
def correct(completions, answer, **_):
    return [1.0 if right in text else 0.0 for text, right in zip(completions, answer)]
""")

with open("sums.jsonl", "w", encoding="utf-8") as file:
    for row in problems(16, 7, held_out=False):
        file.write(json.dumps({"prompt": row["prompt"], "answer": row["answer"]}) + "\n")

# %% [markdown]
# ## The lab
#
# On a command line it is `posttrain reward my_rewards.py:correct --data sums.jsonl`. Each finding has its remedy.

# %%
report = examine(["my_rewards.py:correct"], dataset_of("sums.jsonl", None), None, LabSettings())
print(*report.lines, sep="\n")
faults = {finding.code for finding in report.findings["correct"]}
print("\nfound:", ", ".join(sorted(faults)))

# %% [markdown]
# `SUBSTRING`: 112 counts as 12. `HEDGE`: so does a list of many answers. A policy would soon write lists.
#
# ## Mended
#
# The last number of the text, compared as a number, and no other number beside it.

# %%
Path("mended_rewards.py").write_text("""
import re


def correct(completions, answer, **_):
    rewards = []
    for text, right in zip(completions, answer):
        numbers = re.findall(r"-?\\d+(?:\\.\\d+)?", text)
        rewards.append(1.0 if len(set(numbers)) == 1 and float(numbers[0]) == float(right) else 0.0)
    return rewards
""")
mended = examine(["mended_rewards.py:correct"], dataset_of("sums.jsonl", None), None, LabSettings())
print(*mended.lines, sep="\n")
assert mended.passed, mended.findings

# %% [markdown]
# ## The small model
#
# Fine-tuned on sums in which most carries are forgotten. With an accelerator nothing happens here.

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
        dataset=problems(20_000, 1, held_out=False, forgotten=0.5),
        chat=False,
        num_steps=400,
        batch_rows=32,
        row_tokens=64,
        optimizer={"learning_rate": 4e-3, "schedule": "linear", "warmup_steps": 20, "beta2": 0.98},
        output="runs/lab-start",
        seed=0,
    ).fit()
    settings |= {"model": start.model_path, "chat": False}

# %% [markdown]
# ## Train with it
#
# A function named by file runs in a process of its own, with limits: what hangs or crashes there harms no run.
#
# A second reward with weight 0 is scored and written down, but trains nothing: the place for a check that is slow, or
# stricter than the reward. `monitor.verifier` names it, and the run raises an alarm where samples with a high reward
# begin to fail it. The monitor also watches growing lengths, repetition, copies of the prompt and leaks.

# %%
rl = pt.RL(
    dataset=problems(4000, 2, held_out=False),
    eval_dataset=problems(200, 3, held_out=True),
    rewards=[
        {"fn": "mended_rewards.py:correct", "name": "mended"},
        {"fn": "rewards/arithmetic.py:correct", "name": "exact", "weight": 0},
    ],
    monitor={"verifier": "exact"},
    output="runs/lab",
    seed=0,
    **settings,
)
rl.plan(machine)

# %%
result = rl.fit()

# %% [markdown]
# ## Before and after
#
# The mean reward on held-out sums, with its 95 % interval.

# %%
for when in ("before", "after"):
    found = result.results[-1][when]
    print(f"{when:>6}: {found['mean']:.1%} ({found['low']:.1%} to {found['high']:.1%})")
print({name: value for name, value in result.metrics[-1].items() if name.startswith("hacking/")})
result.plot("reward", "rewards/mended/mean", "rewards/exact/mean")

# %% [markdown]
# ## Keep it
#
# The machine of a notebook is lent, and what lies only there is lost with it. Say where to, and run the cell.

# %%
save_to = None  # "drive" (Colab), "kaggle" (its output), or a repository of the hub, such as "me/my-model"
keep, name = result.model_path, "posttrain-reward-lab"

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
