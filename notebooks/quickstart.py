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
# # posttrain: imitation, then reward
#
# A small model learns sums by copying the homework of a careless class, which forgets most carries, so that it is right
# about half of the time. Then reinforcement learning (GRPO) with a reward of five lines mends what imitation could not.
#
# Nothing is downloaded: the data is made on the spot and the model starts from random weights. It takes about two
# minutes on two CPU cores; on a TPU or a GPU the same cells run unchanged.

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
import shutil
from pathlib import Path

import jax

import posttrain as pt
from rewards.arithmetic import problems

print(f"posttrain {pt.__version__}, jax {jax.__version__} on {jax.devices()}")

# %% [markdown]
# ## The data
#
# A row is a dict. SFT reads `prompt` and `completion`, what a pupil wrote; a reward may ask for any column, here for
# `answer`. Every fourth problem is kept for the exam and occurs in no training set.
#
# A dataset is a list of such rows, a file, a Hugging Face id, or as here a function that makes them. `chat: False`
# gives the model the bare text, without the turns of a conversation around it.

# %%


def sums(**args):
    return {"path": "rewards.arithmetic:problems", "args": args, "chat": False}


homework = sums(count=20_000, seed=1, held_out=False, forgotten=0.65)
exercises = sums(count=20_000, seed=2, held_out=False)
exam = sums(count=300, seed=3, held_out=True)


def show(row, text):
    print(f"{row['prompt']}{text:<6} {'' if text == row['answer'] else 'no, ' + row['answer']}")


for row in problems(**homework["args"])[:8]:
    show(row, row["completion"])

# %% [markdown]
# ## The reward
#
# One number for each completion. A reward names the dataset columns that it wants as arguments.


# %%
def correct(completions, answer, **_):
    rewards = []
    for text, right in zip(completions, answer, strict=True):
        rewards.append(1.0 if text.strip() == right else 0.0)
    return rewards


# %% [markdown]
# ## Imitation
#
# `model` is a folder or a Hugging Face id, or as here the fields of a `config.json` for random weights. Every keyword
# is a field of the configuration that `posttrain run` reads, and `print(sft)` shows all of it. After an interruption
# `fit` goes on where it stopped; what is done is not done again. To start over, give another `output`.

# %%
small = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "initializer_range": 0.1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
sft = pt.SFT(
    model={"init": small, "tokenizer": "bytes"},
    dataset=homework,
    num_steps=400,
    batch_rows=32,
    row_tokens=64,
    optimizer={"learning_rate": 4e-3, "schedule": "linear", "warmup_steps": 20, "beta2": 0.98},
    output="runs/notebook-sft",
    seed=0,
)
imitation = sft.fit()

# %% [markdown]
# ## What it learned
#
# The bad habits along with the good ones.

# %%
tokenizer = pt.load_tokenizer(imitation.model_path)
questions = problems(**exam["args"])[:8]
prompts = [row["prompt"] for row in questions]


def show_answers(model):
    texts = pt.generate(model, tokenizer, prompts, max_new_tokens=6, temperature=0.0, chat=False)
    for row, text in zip(questions, texts, strict=True):
        show(row, text)


show_answers(imitation.load_model())

# %% [markdown]
# ## Reward
#
# Each step draws 8 answers to each of 64 sums. Answers that beat the others of their sum become likelier. The exam is
# taken before the first step and after the last.

# %%
rl = pt.RL(
    model=imitation.model_path,
    dataset=exercises,
    rewards=[correct],
    eval_dataset=exam,
    num_steps=50,
    prompts_per_step=64,
    group_size=8,
    row_tokens=16,
    sampling={"max_tokens": 6, "temperature": 1.0},
    optimizer={"learning_rate": 3e-4},
    output="runs/notebook-rl",
    seed=0,
)
rewarded = rl.fit()

# %% [markdown]
# ## Before and after
#
# On the held-out exam, each with its 95 % interval: where the two do not overlap, the gain is no accident.

# %%
result = rewarded.results[-1]
for when in ("before", "after"):
    exam_result = result[when]
    print(f"{when:>6}: {exam_result['mean']:.1%} ({exam_result['low']:.1%} to {exam_result['high']:.1%})")

# %% [markdown]
# ## The curve
#
# `rewarded.metrics` has every metric of every step as a list of dicts, `rewarded.samples` some answers; the files
# `metrics.jsonl` and `samples.jsonl` hold the same. After a restart of the kernel `pt.attach("runs/notebook-rl")` is
# the result again, also of a run that still goes on.

# %%
rewarded.plot("reward", "completions/mean_length")

# %% [markdown]
# ## The result
#
# A folder in Hugging Face layout, which other tools load as well.

# %%
show_answers(rewarded.load_model())
print(f"\nmodel: {rewarded.model_path}")

# %% [markdown]
# ## Keep it
#
# The machine of a notebook is lent, and what lies only there is lost with it. Say where to, and run the cell.

# %%
save_to = None  # "drive" (Colab), "kaggle" (its output), or a repository of the hub, such as "me/my-model"
keep, name = rewarded.model_path, "posttrain-quickstart"

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

# %% [markdown]
# ## Next: a real model
#
# The same calls take a real checkpoint: a folder or a Hugging Face id as `model`, your own rows or a file as `dataset`,
# a reward that reads its columns, and longer rows.
#
# ```python
# pt.RL(
#     model="Qwen/Qwen3-0.6B",
#     dtype="bfloat16",
#     lora=pt.LoRA(rank=16),
#     dataset={"path": "train.jsonl", "prompt": "{question}"},
#     rewards=[correct],
#     row_tokens=1024,
#     sampling={"max_tokens": 512},
# ).fit()
# ```
#
# Whole runs as files are in `configs/`; `posttrain check configs/quickstart.yaml` says what one would do, and
# `posttrain run configs/quickstart.yaml` does it.
