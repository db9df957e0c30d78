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
# # posttrain: a mixture of experts into a small dense model
#
# The usual way to a small model that is good for its size: train a large one, here a mixture of experts, and let it
# teach a small dense one that starts as a piece of it.
#
# 1. A dense decoder learns short stories from random weights: a grammar makes them, nothing is downloaded.
# 2. `upcycle`: it becomes a mixture of four experts, which reads on.
# 3. `prune`: its two most used experts become one MLP, and half of the layers stay: a dense student.
# 4. The mixture teaches the student: on every token the whole distribution, not only the token that came.
#
# A few minutes on two CPU cores. With other paths the same calls make Qwen3-0.6B of Qwen3-30B-A3B; that run is
# `configs/distill_qwen3.yaml`.

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

import posttrain as pt
from posttrain.export.resize import prune, upcycle
from posttrain.weights.prune import Pruning
from posttrain.weights.upcycle import Upcycling
from rewards.stories import stories

rows = {"batch_rows": 8, "row_tokens": 256, "seed": 0}

# %% [markdown]
# ## Stories
#
# A child, a thing, a place and an animal, which the sentences of a story name again and again. Children, things and
# places of the held-out stories never come together in the others.

# %%
train, held_out = Path("stories.jsonl"), Path("held_out.jsonl")
for path, count, seed in ((train, 8000, 1), (held_out, 200, 2)):
    made = stories(count=count, seed=seed, held_out=path == held_out)
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
print(made[0]["text"])

# %% [markdown]
# ## A dense model
#
# Four layers, and a tokenizer of the few hundred words.


# %%
def show(result, *names):
    for name in names:
        for when in ("before", "after"):
            found = result[when]
            low, high = found[f"{name}_low"], found[f"{name}_high"]
            print(f"{name.removeprefix('eval/'):>12} {when:>6}: {found[name]:.4f} ({low:.4f} to {high:.4f})")
        if change := result["difference"].get(name):
            print(f"{'':>12} change: {change['mean']:+.4f} ({change['low']:+.4f} to {change['high']:+.4f})")


shape = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
dense = pt.SFT(
    model={"init": shape, "tokenizer": "configs/stories"},
    dataset=train,
    eval_dataset=held_out,
    num_steps=240,
    optimizer={"kind": "muon", "learning_rate": 2e-2, "weight_decay": 0.1, "warmup_steps": 10},
    output="runs/moe/dense",
    **rows,
).fit()
show(dense.results[-1], "eval/nll", "eval/perplexity")

# %% [markdown]
# ## Into experts
#
# Each expert is the dense MLP plus a little noise, which sets the experts apart.

# %%
experts = Path("runs/moe/experts")
if not experts.exists():
    plan = Upcycling(experts=4, top_k=2, mode="copy", noise=0.02)
    print(upcycle(str(dense.model_path), experts, plan, seed=0))

# %% [markdown]
# ## The mixture learns
#
# `router.balance_coef` keeps all experts in use. The evaluations before and after are of the same held-out stories: an
# interval of 95 % for each, and one for the difference, from which the difficulty of the stories themselves is gone.

# %%
teacher = pt.SFT(
    model=experts,
    dataset=train,
    eval_dataset=held_out,
    num_steps=120,
    router={"balance_coef": 0.01},
    optimizer={"learning_rate": 2e-3, "schedule": "cosine", "warmup_steps": 10},
    output="runs/moe/teacher",
    **rows,
).fit()
show(teacher.results[-1], "eval/nll", "eval/perplexity")

# %% [markdown]
# ## A piece of it as the student
#
# Dense: the two experts that the stories use most, weighted by their use, side by side in one MLP; then the first and
# the last layer.

# %%
student = Path("runs/moe/student")
if not student.exists():
    print(prune(str(teacher.model_path), student, Pruning(experts=2, layers=(0, 3)), text=str(train)))

# %% [markdown]
# ## The mixture teaches it

# %%
small = pt.Distill(
    model=student,
    teacher=teacher.model_path,
    dataset=train,
    eval_dataset=held_out,
    num_steps=100,
    cross_entropy=0.1,
    optimizer={"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 10},
    output="runs/moe/distilled",
    **rows,
).fit()
result = small.results[-1]
show(result, "eval/distill/kl", "eval/nll", "eval/perplexity")

# %% [markdown]
# The whole interval of the difference must lie below 0, and the intervals before and after apart.

# %%
for name in ("eval/distill/kl", "eval/nll"):
    assert result["difference"][name]["high"] < 0, result["difference"]
    assert result["after"][f"{name}_high"] < result["before"][f"{name}_low"], (name, result)

# %% [markdown]
# ## The result
#
# A dense Llama in Hugging Face layout, which other tools load as well.

# %%
config = json.loads((small.model_path / "config.json").read_text())
print(config["architectures"], config["num_hidden_layers"], "layers, MLP of", config["intermediate_size"])
model, tokenizer = small.load_model(), pt.load_tokenizer(small.model_path)
prompts = ["One day, Tom took his blue kite to the park."]
for text in pt.generate(model, tokenizer, prompts, max_new_tokens=48, temperature=0.0, chat=False):
    print(prompts[0], "|", text)

# %% [markdown]
# ## Keep it
#
# The machine of a notebook is lent, and what lies only there is lost with it. Say where to, and run the cell.

# %%
save_to = None  # "drive" (Colab), "kaggle" (its output), or a repository of the hub, such as "me/my-model"
keep, name = small.model_path, "posttrain-distill-moe"

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
