"""Names of Unsloth, verl and Tunix with the equivalent posttrain field, and names for which there is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from posttrain.config.trl_names import PAIRS, SAMPLED


@dataclass(frozen=True)
class OtherName:
    """Name in another framework with the posttrain field."""

    name: str
    field: str
    """Dotted field name, from the stage or from the top of the file."""
    note: str = ""
    """Difference in meaning, shown with the hint."""
    kinds: tuple[str, ...] = ()
    """Stage kinds to which the entry applies; by default all that have the field."""


OTHER_NAMES = (
    # Unsloth
    OtherName("model_name", "model.path"),
    OtherName("load_in_fp8", "model.quantize", "write fp8"),
    OtherName("full_finetuning", "model.lora", "without it all weights are trained"),
    OtherName("modules_to_save", "model.lora.modules_to_save"),
    OtherName("use_gradient_checkpointing", "model.remat", "write full, dots or offload"),
    OtherName("random_state", "seed"),
    OtherName("max_lora_rank", "model.lora.rank"),
    OtherName("dataset_num_proc", "dataset", "rows are read by threads; nothing to set"),
    # verl
    OtherName("apply_chat_template_kwargs", "model.chat_template_args"),
    OtherName("train_files", "dataset.path"),
    OtherName("val_files", "eval_dataset.path"),
    OtherName("train_batch_size", "prompts_per_step", "prompts of one step", kinds=SAMPLED),
    OtherName("train_batch_size", "batch_rows"),
    OtherName("max_response_length", "sampling.max_tokens"),
    OtherName("filter_overlong_prompts", "overlong", "write drop or error"),
    OtherName("lora_rank", "model.lora.rank"),
    OtherName("enable_gradient_checkpointing", "model.remat", "write full"),
    OtherName("lr", "optimizer.learning_rate"),
    OtherName("lr_warmup_steps", "optimizer.warmup_steps"),
    OtherName("clip_grad", "optimizer.max_grad_norm"),
    OtherName("ppo_micro_batch_size_per_gpu", "micro_batch_rows", "rows of one pass over all devices"),
    OtherName("micro_batch_size_per_gpu", "micro_batch_rows", "rows of one pass over all devices"),
    OtherName("ppo_mini_batch_size", "updates", "number of batches of a step, not prompts in each"),
    OtherName("ppo_epochs", "update_epochs"),
    OtherName("clip_ratio", "algorithm.clip_low", "the upper bound is clip_high"),
    OtherName("clip_ratio_low", "algorithm.clip_low"),
    OtherName("clip_ratio_high", "algorithm.clip_high"),
    OtherName("clip_ratio_c", "algorithm.dual_clip"),
    OtherName("entropy_coeff", "algorithm.entropy_coef"),
    OtherName("loss_agg_mode", "algorithm.reduce", "write token_mean or sequence_mean"),
    OtherName("use_kl_loss", "algorithm.kl_coef", "0 is off"),
    OtherName("kl_loss_coef", "algorithm.kl_coef"),
    OtherName("kl_loss_type", "algorithm.kl_estimator", "write k1, k2 or k3"),
    OtherName("use_kl_in_reward", "algorithm.kl_in", "write reward"),
    OtherName("loss_mode", "algorithm", "such as gspo or gmpo"),
    OtherName("adv_estimator", "algorithm", "such as grpo, rloo or ppo"),
    OtherName("norm_adv_by_std_in_grpo", "algorithm.advantage_scale", "write none for false"),
    OtherName("n", "group_size"),
    OtherName("val_kwargs", "eval_sampling"),
    OtherName("filter_groups", "refill", "write refill: {keep: mixed}"),
    OtherName("tensor_model_parallel_size", "rollout.tensor"),
    OtherName("custom_reward_function", "rewards", 'write rewards: [{fn: "path.py:name"}]'),
    OtherName("total_training_steps", "num_steps"),
    OtherName("total_epochs", "num_epochs"),
    OtherName("total_epochs", "num_steps", "steps, not passes over the data", kinds=SAMPLED),
    OtherName("save_freq", "checkpoint_every"),
    OtherName("test_freq", "eval_every"),
    OtherName("default_local_dir", "output"),
    OtherName("logger", "trackers", "a list such as [wandb]"),
    # Tunix
    OtherName("reward_fns", "rewards"),
    OtherName("loss_algo", "algorithm", "such as grpo or gspo_token"),
    OtherName("clip_range_value", "algorithm.value_clip"),
    OtherName("max_tokens_to_generate", "sampling.max_tokens"),
    OtherName("kv_cache_size", "rollout.cache_tokens"),
    OtherName("rollout_engine", "rollout.engine"),
    OtherName("actor_optimizer", "optimizer", "a section: optimizer: {learning_rate: 1e-6}"),
    OtherName("mini_batch_size", "prompts_per_step", "prompts of one step", kinds=SAMPLED),
    OtherName("mini_batch_size", "batch_rows"),
    OtherName("train_micro_batch_size", "micro_batch_rows"),
    OtherName("eval_every_n_steps", "eval_every"),
    OtherName("checkpoint_root_directory", "output"),
    OtherName("metrics_logging_options", "tensorboard", "true or false"),
    # TRL's arguments of trainers, and widespread words
    OtherName("args", "num_steps", "settings are keywords, such as num_steps or optimizer"),
    OtherName("ref_model", "reference", "the model at the start; write reference: {path: PATH} for another"),
    OtherName("reward_func", "rewards"),
    OtherName("reward_fn", "rewards"),
    OtherName("reward", "rewards"),
    OtherName("data", "dataset"),
    OtherName("train_data", "dataset"),
    OtherName("epochs", "num_epochs"),
    OtherName("epochs", "num_steps", "steps, not passes over the data", kinds=SAMPLED),
    OtherName("steps", "num_steps"),
    OtherName("batch_size", "batch_rows"),
    OtherName("batch_size", "prompts_per_step", "prompts of one step", kinds=SAMPLED),
    OtherName("max_tokens", "sampling.max_tokens"),
    OtherName("kl_penalty", "algorithm.kl_coef"),
    OtherName("kl_beta", "algorithm.kl_coef"),
    OtherName("beta", "loss", "write loss: {kind: sigmoid, beta: 0.1}", kinds=PAIRS),
    # posttrain before 0.1.0
    OtherName("oversample_prompts", "asynchronous", "write asynchronous: {max_staleness: 1}"),
    OtherName("max_staleness", "asynchronous.max_staleness"),
)

ABSENT: Mapping[str, str] = {
    "use_vllm": "the built-in engine samples with the trainer's own weights",
    "vllm_mode": "the built-in engine samples with the trainer's own weights",
    "vllm_gpu_memory_utilization": "the engine's cache has a size in tokens, rollout.cache_tokens",
    "gpu_memory_utilization": "the engine's cache has a size in tokens, rollout.cache_tokens",
    "fast_inference": "the built-in engine is always used",
    "data_collator": "rows are packed by the stage itself",
    "processing_class": "the tokenizer is the model's; set model.tokenizer for another",
    "tokenizer_name": "the tokenizer is the model's; set model.tokenizer for another",
    "formatting_func": "a dataset has templates: dataset: {path: PATH, prompt: '{question}'}",
    "dataset_text_field": "a dataset has templates: dataset: {path: PATH, completion: '{text}'}",
    "callbacks": "fit(on_step=FUNCTION) calls a function with each step's metrics",
    "compute_metrics": "evaluations have metrics of their own; a reward function adds others",
    "optimizers": "the optimiser is AdamW; set optimizer for its rates",
    "optim": "the optimiser is AdamW; optimizer.moments: int8 is its 8-bit form",
    "logging_steps": "every step is logged",
    "logging_strategy": "every step is logged",
    "save_strategy": "checkpoints are written every checkpoint_every steps and at the end",
    "save_total_limit": "the newest two checkpoints are kept",
    "load_best_model_at_end": "evaluate: {keep_best: true} keeps the best model in best/",
    "resume_from_checkpoint": "the same call resumes from the newest checkpoint",
    "eval_strategy": "eval_dataset is evaluated before and after, and every eval_every steps",
    "evaluation_strategy": "eval_dataset is evaluated before and after, and every eval_every steps",
    "push_to_hub": "the result is a folder in Hugging Face layout, which hf upload takes",
    "fsdp_config": "mesh: {fsdp: -1} shards over all devices",
    "deepspeed": "mesh: {fsdp: -1} shards over all devices",
    "ddp_find_unused_parameters": "a compiled step knows which parameters it uses",
    "fp16": "TPUs and GPUs train in bfloat16; set model.compute_dtype to bfloat16",
    "tf32": "set model.compute_dtype to bfloat16",
    "use_liger_kernel": "the loss is always computed from chunks of logits",
    "use_liger_loss": "the loss is always computed from chunks of logits",
    "torch_compile": "the step is always compiled",
    "dataloader_num_workers": "rows are read ahead by threads",
    "padding_free": "packing without padding is the default",
    "device_map": "the mesh places the model; set mesh",
    "bias": "adapters have no biases",
    "use_dynamic_bsz": "samples are always packed into rows of row_tokens",
    "remove_unused_columns": "a reward asks for the columns that it names",
    "disable_dropout": "models have no dropout; an adapter has model.lora.dropout",
    "trust_remote_code": "no code of a checkpoint is run; model.family takes a file of your own",
}
"""Names without a field, and the reason or the remedy that completes `there is none: ...`."""


def find_other_name(word: str, known: Iterable[str], kind: str | None = None) -> tuple[str, OtherName] | None:
    """Find the first entry of a name whose field is among `known`, dotted names; return name and entry.

    `kind`: stage kind of the names.
    """
    names = [name for name in known if not name.startswith("stages.")]
    entries = [entry for entry in OTHER_NAMES if entry.name == word and (not entry.kinds or kind in entry.kinds)]
    return next(((name, e) for e in entries for name in names if _ends(e.field, name)), None)


def _ends(long: str, short: str) -> bool:
    return long == short or long.endswith(f".{short}")
