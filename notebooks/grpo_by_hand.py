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
# # GRPO by hand
#
# `pt.RL(...).fit()` does more than this, but nothing else: sample groups of answers, score them, take the advantage of
# each within its group, update. Here the same in a loop of public names, to change as one likes.
#
# Nothing is downloaded; about two minutes on two CPU cores.

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

import optax

import posttrain as pt
from rewards.arithmetic import problems

# %% [markdown]
# ## A model that is right about half of the time
#
# Fine-tuned on sums in which most carries are forgotten. The prompt and the answer are columns of the rows.

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
start = pt.SFT(
    model={"init": small, "tokenizer": "bytes"},
    dataset=problems(count=20_000, seed=1, held_out=False, forgotten=0.65),
    chat=False,
    num_steps=400,
    batch_rows=32,
    row_tokens=64,
    optimizer={"learning_rate": 4e-3, "schedule": "linear", "warmup_steps": 20, "beta2": 0.98},
    output="runs/by-hand-sft",
    seed=0,
).fit()
start.plot("nll")

# %% [markdown]
# ## The parts
#
# Trainer and engine share the model's arrays. The loss is GRPO's clipped surrogate without a KL penalty; the first
# update after sampling has a ratio of exactly 1.

# %%
PROMPTS, GROUP_SIZE, STEPS = 64, 8, 40


def correct(completions, answer, **_):
    return [1.0 if text.strip() == right else 0.0 for text, right in zip(completions, answer, strict=True)]


model, tokenizer = start.load_model(), start.load_tokenizer()
loss = pt.PolicyLoss(clip_low=0.2, clip_high=0.28, reduce=pt.losses.token_mean)
trainer = pt.Trainer(model, loss, optax.adam(3e-4), pt.TrainSettings(temperature=1.0, max_grad_norm=1.0))
engine = pt.NativeEngine(model, slots=128, max_length=16, decode_steps=8, tokenizer_decode=tokenizer.decode)
sampler = pt.rl.make_sampler(engine, tokenizer, max_tokens=6)
rubric = pt.rl.make_rubric(correct)
exercises = pt.rl.make_examples(problems(count=STEPS * PROMPTS, seed=2, held_out=False), tokenizer, chat=False)

# %% [markdown]
# ## The loop
#
# A group whose answers are all right or all wrong has advantages of 0 and teaches nothing.

# %%
curve = []
for step in range(STEPS):
    prompts = exercises[step * PROMPTS : (step + 1) * PROMPTS]
    groups = pt.rl.sample(sampler, prompts, GROUP_SIZE, step)
    rewards = pt.rl.score(rubric, groups).total_PG
    advantages = pt.rl.standardized(rewards)
    batch = pt.rl.make_batch(groups, advantages, row_tokens=16)
    metrics = pt.to_host(trainer.step(batch))
    engine.update_weights(model, version=step + 1)
    curve.append(float(rewards.mean()))
    if step % 5 == 4:
        print(f"step {step + 1:>3}  reward {sum(curve[-5:]) / 5:.3f}  gradient {metrics['grad_norm']:.2f}")

# %% [markdown]
# ## The exam
#
# Sums of which no step has seen one.

# %%
exam = problems(count=300, seed=3, held_out=True)
texts = pt.generate(model, tokenizer, [row["prompt"] for row in exam], max_new_tokens=6, chat=False)
right = sum(correct(texts, [row["answer"] for row in exam])) / len(exam)
print(f"right: {right:.1%}; the first steps: {sum(curve[:5]) / 5:.1%}")

# %% [markdown]
# ## To keep
#
# A folder in Hugging Face layout. `pt.Checkpointer` saves arrays and host data of a step to resume from.

# %%
pt.save_model(model, "runs/by-hand-rl", tokenizer=tokenizer)

# %% [markdown]
# ## Keep it
#
# The machine of a notebook is lent, and what lies only there is lost with it. Say where to, and run the cell.

# %%
save_to = None  # "drive" (Colab), "kaggle" (its output), or a repository of the hub, such as "me/my-model"
keep, name = Path("runs/by-hand-rl"), "posttrain-grpo-by-hand"

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
