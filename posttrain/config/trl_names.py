"""TRL names: fields of TRL's configurations and scripts, with the equivalent posttrain field."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TRLName:
    """Field name of TRL 1.16 (or of transformers and PEFT, where TRL uses theirs) with the posttrain field."""

    trl: str
    field: str
    """Dotted field name, from the stage or from the top of the file."""
    note: str = ""
    """Difference in meaning, shown with the hint and in the reference."""
    kinds: tuple[str, ...] = ()
    """Stage kinds to which the entry applies; by default all that have the field."""


PAIRS = ("preference", "online_preference")
SAMPLED = ("rl", "online_preference")
TRL_NAMES = (
    TRLName("seed", "seed"),
    TRLName("packing", "packing"),
    TRLName("rank_pattern", "model.lora.rank_pattern"),
    TRLName("alpha_pattern", "model.lora.alpha_pattern"),
    TRLName("beta", "beta", kinds=("distill",)),
    TRLName("temperature", "temperature", kinds=("distill",)),
    TRLName("output_dir", "output"),
    TRLName("model_name_or_path", "model.path"),
    TRLName("torch_dtype", "model.dtype"),
    TRLName("bf16", "model.compute_dtype", "write bfloat16"),
    TRLName("attn_implementation", "model.attention"),
    TRLName("gradient_checkpointing", "model.remat", "write full, dots or offload"),
    TRLName("activation_offloading", "model.remat", "write offload"),
    TRLName("load_in_4bit", "model.quantize", "write nf4 or int4"),
    TRLName("load_in_8bit", "model.quantize", "write int8"),
    TRLName("bnb_4bit_quant_type", "model.quantize", "write nf4 or int4"),
    TRLName("eos_token", "model.stop_tokens", "a list"),
    TRLName("chat_template_path", "model.chat_template"),
    TRLName("chat_template_kwargs", "model.chat_template_args"),
    TRLName("use_peft", "model.lora", "a section: lora: {rank: 16}"),
    TRLName("peft_config", "model.lora", "a section: lora: {rank: 16}"),
    TRLName("lora_r", "model.lora.rank"),
    TRLName("r", "model.lora.rank"),
    TRLName("lora_alpha", "model.lora.alpha"),
    TRLName("lora_dropout", "model.lora.dropout"),
    TRLName("lora_target_modules", "model.lora.targets"),
    TRLName("target_modules", "model.lora.targets"),
    TRLName("layers_to_transform", "model.lora.layers"),
    TRLName("lora_modules_to_save", "model.lora.modules_to_save"),
    TRLName("use_rslora", "model.lora.rslora"),
    TRLName("use_dora", "model.lora.dora"),
    TRLName("report_to", "trackers", "a list such as [wandb]; for TensorBoard tensorboard: true"),
    TRLName("train_dataset", "dataset"),
    TRLName("dataset_name", "dataset.path"),
    TRLName("dataset_config", "dataset.args", "write {name: main}"),
    TRLName("dataset_train_split", "dataset.split"),
    TRLName("dataset_test_split", "eval_dataset.split"),
    TRLName("shuffle_dataset", "dataset.shuffle"),
    TRLName("num_train_epochs", "num_epochs"),
    TRLName("num_train_epochs", "num_steps", "steps, not passes over the data", kinds=SAMPLED),
    TRLName("max_steps", "num_steps"),
    TRLName("per_device_train_batch_size", "micro_batch_rows", "rows of one pass over all devices, not over one"),
    TRLName("gradient_accumulation_steps", "batch_rows", "all rows of one update, in passes of micro_batch_rows"),
    TRLName("gradient_accumulation_steps", "prompts_per_step", "all prompts of one update"),
    TRLName("generation_batch_size", "prompts_per_step", "prompts, not completions"),
    TRLName("learning_rate", "optimizer.learning_rate"),
    TRLName("lr_scheduler_type", "optimizer.schedule"),
    TRLName("warmup_steps", "optimizer.warmup_steps"),
    TRLName("warmup_ratio", "optimizer.warmup_steps", "steps, not a share"),
    TRLName("weight_decay", "optimizer.weight_decay"),
    TRLName("adam_beta1", "optimizer.beta1"),
    TRLName("adam_beta2", "optimizer.beta2"),
    TRLName("adam_epsilon", "optimizer.eps"),
    TRLName("max_grad_norm", "optimizer.max_grad_norm"),
    TRLName("save_steps", "checkpoint_every"),
    TRLName("eval_steps", "eval_every"),
    TRLName("router_aux_loss_coef", "router.balance_coef", "0 by default"),
    TRLName("max_length", "row_tokens", "with packing a row holds several sequences"),
    TRLName("max_seq_length", "row_tokens", "with packing a row holds several sequences"),
    TRLName("truncation_mode", "overlong"),
    TRLName("completion_only_loss", "train_on_prompt", "the opposite"),
    TRLName("assistant_only_loss", "train_on_prompt", "the opposite"),
    TRLName("neftune_noise_alpha", "noise_alpha"),
    TRLName("label_smoothing_factor", "label_smoothing"),
    TRLName("beta", "algorithm.kl_coef"),
    TRLName("beta", "loss", "write loss: {kind: sigmoid, beta: 0.1}", kinds=PAIRS),
    TRLName("loss_type", "algorithm"),
    TRLName("loss_type", "loss", kinds=("sft", "reward_model", *PAIRS)),
    TRLName("loss_weights", "loss", "write loss: {kind: [sigmoid, sft], weights: [1, 0.1]}", kinds=PAIRS),
    TRLName("label_smoothing", "loss", "write loss: {kind: robust, label_smoothing: 0.1}", kinds=PAIRS),
    TRLName("ld_alpha", "loss", "write loss: {kind: sigmoid, tail_weight: 0.5}", kinds=PAIRS),
    TRLName("use_weighting", "loss", "write loss: {kind: sigmoid, use_weighting: true}", kinds=PAIRS),
    TRLName("desirable_weight", "loss", "write loss: {kind: kto, desirable_weight: 1.0}", kinds=("preference",)),
    TRLName("undesirable_weight", "loss", "write loss: {kind: kto, undesirable_weight: 1.0}", kinds=("preference",)),
    TRLName(
        "center_rewards_coefficient",
        "loss",
        "write loss: {kind: bradley_terry, center_coef: 0.01}",
        kinds=("reward_model",),
    ),
    TRLName("precompute_ref_log_probs", "reference", "write cached or live"),
    TRLName("num_generations", "group_size"),
    TRLName("num_iterations", "update_epochs"),
    TRLName("steps_per_generation", "updates"),
    TRLName("max_completion_length", "sampling.max_tokens"),
    TRLName("max_new_tokens", "sampling.max_tokens"),
    TRLName("max_prompt_length", "max_prompt_tokens"),
    TRLName("generation_kwargs", "sampling"),
    TRLName("temperature", "sampling.temperature"),
    TRLName("top_p", "sampling.top_p"),
    TRLName("top_k", "sampling.top_k"),
    TRLName("min_p", "sampling.min_p"),
    TRLName("repetition_penalty", "sampling.repetition_penalty"),
    TRLName("reward_funcs", "rewards", "a list of {fn: file.py:function}"),
    TRLName("reward_weights", "rewards", "each with its weight: {fn: file.py:function, weight: 0.5}"),
    TRLName("reward_model_path", "rewards", "write rewards: [{model: PATH}]"),
    TRLName("epsilon", "algorithm.clip_low", "the upper bound is clip_high"),
    TRLName("epsilon_high", "algorithm.clip_high"),
    TRLName("delta", "algorithm.dual_clip"),
    TRLName("entropy_coef", "algorithm.entropy_coef"),
    TRLName("use_bias_correction_kl", "algorithm.kl_bias_correction"),
    TRLName("importance_sampling_level", "algorithm.ratio", "write token, or sequence_mean as in gspo"),
    TRLName("vllm_tensor_parallel_size", "rollout.tensor"),
    TRLName(
        "vllm_importance_sampling_correction", "algorithm.importance_sampling.apply", "write auto, always or never"
    ),
    TRLName("vllm_importance_sampling_mode", "algorithm.importance_sampling.bound", "with importance_sampling.level"),
    TRLName("vllm_importance_sampling_clip_max", "algorithm.importance_sampling.high"),
    TRLName("vllm_importance_sampling_clip_min", "algorithm.importance_sampling.low"),
    TRLName("scale_rewards", "algorithm.advantage_scale", "write group, batch or none"),
    TRLName("multi_objective_aggregation", "algorithm", "gdpo normalises each reward, then sums"),
    TRLName("off_policy_mask_threshold", "algorithm.off_policy_mask"),
    TRLName("top_entropy_quantile", "algorithm.top_entropy"),
    TRLName("mask_truncated_completions", "algorithm.truncated", "write mask or keep"),
    TRLName("sapo_temperature_pos", "algorithm.temperature_positive", "of the kind sapo"),
    TRLName("sapo_temperature_neg", "algorithm.temperature_negative", "of the kind sapo"),
    TRLName("cliprange", "algorithm.clip_low", "of ppo, with clip_high"),
    TRLName("cliprange_value", "algorithm.value_clip"),
    TRLName("lam", "algorithm.gae_lambda"),
    TRLName("num_completions_to_print", "samples_every", "steps between tables"),
    TRLName("lmbda", "on_policy"),
    TRLName("teacher_model_name_or_path", "teachers", "write teachers: [{path: PATH}]"),
    TRLName("use_uld_loss", "teachers", "write teachers: [{path: PATH, tokenizer: gold}]"),
)


def find_trl_name(word: str, known: Iterable[str], kind: str | None = None) -> tuple[str, TRLName] | None:
    """Find the first entry of a TRL name whose field is among `known`, dotted names; return name and entry.

    `kind`: stage kind of the names.
    """
    # Fields of stages are not suggested for the run around them, which may have several.
    names = [name for name in known if not name.startswith("stages.")]
    entries = [entry for entry in TRL_NAMES if entry.trl == word and (not entry.kinds or kind in entry.kinds)]
    pairs = ((name, entry) for entry in entries for name in names if _ends(entry.field, name))
    return next(pairs, None)


def trl_names_of(field: str) -> list[TRLName]:
    """List the entries of a dotted field, such as `model.lora.rank` or `stages.rl.kl_coef`."""
    kind = field.split(".")[1] if field.startswith("stages.") else None
    return [e for e in TRL_NAMES if _ends(field, e.field) and (not e.kinds or kind in e.kinds)]


def _ends(long: str, short: str) -> bool:
    return long == short or long.endswith(f".{short}")
