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
# # posttrain: preferences (DPO)
#
# A preference pair is a prompt with a better and a worse answer. DPO makes the better one likelier than the worse one,
# compared with what the model said before; it needs no reward and draws no samples.
#
# With a TPU or a GPU: Qwen3-0.6B and pairs of UltraFeedback, which are downloaded. Without: a small model that adds and
# forgets its carries half of the time, and pairs of a right and a wrong sum; a minute, nothing is downloaded.

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
from rewards.arithmetic import correct, pairs, problems

# %% [markdown]
# ## The machine decides
#
# `row_tokens` bounds both answers of a pair, each behind its prompt. `beta` says how dear it is to leave the model as
# it was: the larger, the closer it stays. The small model also imitates the better answer (`sft`): with `sigmoid` alone
# it learns which of two is worse, and forgets how to write either.

# %%
platform, number = jax.devices()[0].platform, len(jax.devices())
if platform == "cpu":
    machine = "cpu-1"
    settings = {
        "loss": {"kind": ["sigmoid", "sft"], "weights": [1, 1], "beta": 0.1},
        "num_steps": 80,
        "batch_rows": 16,
        "row_tokens": 64,
        "optimizer": {"learning_rate": 1e-3},
    }
else:
    chip = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}.get(jax.devices()[0].device_kind, "h100")
    machine = f"{chip}-{number}"
    settings = {
        "model": "Qwen/Qwen3-0.6B",
        "dtype": "bfloat16",
        "remat": "full",
        "mesh": {"fsdp": -1},
        "loss": {"kind": "sigmoid", "beta": 0.1},
        "num_steps": 200,
        "batch_rows": 16,
        "micro_batch_rows": 8,
        "row_tokens": 2048,
        "overlong": "drop",
        "optimizer": {"learning_rate": 1e-6, "warmup_steps": 10},
    }
    if number == 1:
        settings |= {"lora": {"rank": 16}, "optimizer": {"learning_rate": 2e-5, "warmup_steps": 10}}
print(f"{number} x {jax.devices()[0].device_kind}, planned as {machine}: {settings.get('model', 'a small model')}")

# %% [markdown]
# ## The pairs
#
# Rows with `prompt`, `chosen` and `rejected`: texts, or lists of messages. Yours are a list like this one, a JSONL file
# or a dataset of the hub. Here the worse answer forgets a carry, or has one too many: with one kind of mistake alone
# the model would learn to carry always. The held-out pairs are of sums that occur in no training set.


# %%
def sum_pairs(count, seed, *, held_out):
    forgotten = {row["prompt"]: row["rejected"] for row in pairs(count=count, seed=seed, held_out=held_out)}
    rows = problems(count=count, seed=seed, held_out=held_out)
    worse = [forgotten.get(row["prompt"], str(int(row["answer"]) + 10)) for row in rows]
    return [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": text}
        for row, text in zip(rows, worse, strict=True)
    ]


if platform == "cpu":
    dataset, held_out = sum_pairs(3000, 4, held_out=False), sum_pairs(300, 5, held_out=True)
    settings["chat"] = False
    for row in dataset[:4]:
        print(row)
else:
    dataset = {"path": "trl-lib/ultrafeedback_binarized", "limit": 8000}
    held_out = {"path": "trl-lib/ultrafeedback_binarized", "split": "test", "limit": 128}

# %% [markdown]
# ## The small model
#
# Fine-tuned on sums in which most carries are forgotten, so that there is something to prefer. With an accelerator
# nothing happens here.

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
        dataset=problems(count=20_000, seed=1, held_out=False, forgotten=0.65),
        chat=False,
        num_steps=300,
        batch_rows=32,
        row_tokens=64,
        optimizer={"learning_rate": 4e-3, "schedule": "linear", "warmup_steps": 20, "beta2": 0.98},
        output="runs/dpo-start",
        seed=0,
    ).fit()
    settings["model"] = start.model_path

# %% [markdown]
# ## Does it fit?
#
# The programs are compiled for the machine, from shapes alone: no weights are there yet, and of a model on the hub only
# its `config.json` is read.

# %%
dpo = pt.Preference(dataset=dataset, eval_dataset=held_out, output="runs/dpo", seed=0, **settings)
dpo.plan(machine)

# %% [markdown]
# ## Train
#
# The reference is the model as it is now; its log-probabilities are computed once and kept. Stop and run the cell again
# to go on where it stopped.

# %%
result = dpo.fit()

# %% [markdown]
# ## Margins before and after
#
# The margin of a pair is how much more the model has come to favour the better answer, in nats times `beta`. Before the
# first step it is 0. `rewards/accuracies` is the share of pairs with a positive margin, `preferred_ratio` that of those
# whose better answer is the likelier one. All are of held-out pairs.

# %%
for when in ("before", "after"):
    found = result.results[-1][when]["metrics"]
    margin, preferred = found["eval/rewards/margins"], found["eval/preferred_ratio"]
    print(f"{when:>6}: margin {margin:+.3f}, the better answer likelier in {preferred:.1%}")
result.plot("rewards/margins", "rewards/accuracies")

# %% [markdown]
# ## What it says now
#
# A sign of trouble is `logps/chosen` that falls far: both answers become unlikely, only the worse one faster. Then
# raise `beta`, lower the learning rate, or add the loss `sft`.

# %%
if platform == "cpu":
    exam = problems(count=300, seed=3, held_out=True)
    prompts, answers = [row["prompt"] for row in exam], [row["answer"] for row in exam]
    tokenizer = result.load_tokenizer()
    for name, run in (("before", start), ("after", result)):
        texts = pt.generate(run.load_model(), tokenizer, prompts, max_new_tokens=6, temperature=0.0, chat=False)
        print(
            f"{name:>6}: {sum(correct(texts, answers)) / len(exam):.1%} right;",
            "  ".join(p + t for p, t in zip(prompts[:4], texts[:4], strict=True)),
        )
else:
    print(result.chat("Explain to a child why the sky is blue.", max_new_tokens=200))

# %% [markdown]
# ## Keep it
#
# The machine of a notebook is lent, and what lies only there is lost with it. Say where to, and run the cell.

# %%
save_to = None  # "drive" (Colab), "kaggle" (its output), or a repository of the hub, such as "me/my-model"
keep, name = result.model_path, "posttrain-dpo"

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
