"""Names of TRL, Unsloth, verl and Tunix with the equivalent posttrain field, and names for which there is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from posttrain.errors import did_you_mean

PAIRS = ("preference", "online_preference")
OFFLINE_PAIRS = ("preference", "reward_model")
SAMPLED = ("rl", "online_preference")


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
    OtherName("finetune_vision_layers", "model.lora.targets", "a list with tower"),
    OtherName("finetune_attention_modules", "model.lora.targets", "a list with attention"),
    OtherName("finetune_mlp_modules", "model.lora.targets", "a list with mlp"),
    OtherName("use_gradient_checkpointing", "model.remat", "write full, dots or offload"),
    OtherName("random_state", "seed"),
    OtherName("max_lora_rank", "model.lora.rank"),
    OtherName("train_on_responses_only", "train_on_prompt", "false, the default, trains on answers alone"),
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
    OtherName("rollout_n", "group_size"),
    OtherName("actor_lr", "optimizer.learning_rate"),
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
    OtherName("ref_model", "reference.path", "by default the model at the start"),
    OtherName("sync_ref_model", "reference.refresh_every", "batches of rollouts between updates of the reference"),
    OtherName("ref_model_sync_steps", "reference.refresh_every", "in batches of rollouts, each of several updates"),
    OtherName("ref_model_mixup_alpha", "reference.mixup"),
    OtherName("max_prompt_length", "row_tokens", "of prompt and answer; overlong says what to do", kinds=OFFLINE_PAIRS),
    OtherName("rpo_alpha", "loss", "write loss: {kind: [sigmoid, sft], weights: [1, 0.1]}", kinds=PAIRS),
    OtherName("f_divergence_type", "loss", "write loss: {kind: sigmoid, divergence: forward_kl}", kinds=PAIRS),
    OtherName("response_template", "train_on_prompt", "false, the default, trains on answers alone"),
    OtherName("packing_strategy", "packing", "true or false"),
    OtherName("log_completions", "samples_every", "steps between tables"),
    OtherName("compute_metrics", "metrics", "functions of samples, with samples_every", kinds=("sft",)),
    OtherName("load_best_model_at_end", "evaluate.keep_best", "the best model is in best/"),
    OtherName("rollout_func", "agent", "a loop of your own: write agent: {fn: file.py:function}"),
    OtherName("environment_factory", "env", "write env: {fn: file.py:Class}"),
    OtherName("run_name", "output", "a folder, whose name is that of the run"),
    OtherName("logging_dir", "output"),
    OtherName("train_file", "dataset.path"),
    OtherName("num_epochs", "num_steps", "steps, not passes over the data", kinds=SAMPLED),
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
    "callbacks": "fit(on_step=FUNCTION) calls a function with each step's metrics; pt.STOP from it ends the stage",
    "compute_metrics": "evaluations have metrics of their own; a reward function adds others",
    "optimizers": "set optimizer: {kind: muon, learning_rate: 1e-4}, or {fn: optax:lamb, learning_rate: 1e-3} of optax",
    "optim": "set optimizer: {kind: adafactor, learning_rate: 1e-3}; optimizer.moments: int8 is 8-bit",
    "logging_steps": "every step is logged",
    "logging_strategy": "every step is logged",
    "save_strategy": "checkpoints are written every checkpoint_every steps and at the end",
    "save_total_limit": "the newest two checkpoints are kept",
    "load_best_model_at_end": "the newest two checkpoints are kept; eval/loss in metrics.jsonl says which was best",
    "metric_for_best_model": "where evaluate.keep_best is there, it compares the mean reward",
    "ref_model": "the reference is the model at the start of the stage",
    "sync_ref_model": "the reference is the model at the start of the stage",
    "ref_model_sync_steps": "the reference is the model at the start of the stage",
    "ref_model_mixup_alpha": "the reference is the model at the start of the stage",
    "reference_free": "losses without a reference have names of their own, such as loss: simpo",
    "dataset_num_proc": "rows are read by threads",
    "group_by_length": "rows are packed by the stage itself",
    "label_pad_token_id": "rows are packed, and padding never counts",
    "pad_token": "rows are packed, and padding never counts",
    "model_init_kwargs": "fields of the model have names of their own, such as model.compute_dtype",
    "wandb_project": "set WANDB_PROJECT in the environment, and trackers: [wandb]",
    "hub_model_id": "the result is a folder in Hugging Face layout, which hf upload takes",
    "save_only_model": "model/ has the weights alone, checkpoints/ what a run resumes from",
    "logging_first_step": "every step is logged",
    "vllm_server_base_url": "the built-in engine samples with the trainer's own weights",
    "resume_from_checkpoint": "the same call resumes from the newest checkpoint",
    "eval_strategy": "eval_dataset is evaluated before and after, and every eval_every steps",
    "evaluation_strategy": "eval_dataset is evaluated before and after, and every eval_every steps",
    "push_to_hub": "the result is a folder in Hugging Face layout, which hf upload takes",
    "fsdp_config": "mesh: {fsdp: -1} shards over all devices",
    "deepspeed": "mesh: {fsdp: -1} shards over all devices",
    "num_slices": "mesh: {slices: 2} splits the batch over two TPU slices",
    "dcn_data_parallelism": "mesh: {slices: 2} splits the batch over two TPU slices",
    "dcn_fsdp_parallelism": "mesh: {slices: 2, slice_axis: fsdp} splits the weights over two TPU slices",
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


OTHER_WORDS = (
    ("dpo", "grpo", "DPO is a stage of kind preference, pt.Preference"),
    ("online_dpo", "grpo", "it is a stage of kind online_preference, pt.OnlinePreference"),
    ("reinforce", "grpo", "REINFORCE with a baseline is rloo or reinforce_plus_plus"),
    ("gkd", "grpo", "it is a stage of kind distill with on_policy, pt.Distill"),
    ("cross_entropy", "nll", "it is nll, the default"),
    ("chunked_nll", "nll", "it is nll, always computed from chunks of logits"),
)
"""Words for kinds of losses and algorithms: the word, a kind that is known where it is meant, and the answer."""

OTHER_CLASSES: Mapping[str, tuple[str, ...]] = {
    "pt.SFT": ("SFTTrainer", "SFTConfig", "PeftTrainer", "TrainingArguments"),
    "pt.Preference": (
        *("DPO", "DPOTrainer", "DPOConfig", "KTO", "KTOTrainer", "KTOConfig", "ORPO", "ORPOTrainer", "ORPOConfig"),
        *("CPO", "CPOTrainer", "CPOConfig", "SimPO", "BCOTrainer", "BCOConfig", "DPOLearner"),
    ),
    "pt.RewardModel": ("Reward", "RewardTrainer", "RewardConfig", "PRMTrainer", "PRMConfig"),
    "pt.RL": ("GRPOTrainer", "GRPOConfig", "RLOOTrainer", "RLOOConfig", "PPOTrainer", "PPOConfig", "RLCluster"),
    "pt.RL with algorithm=pt.GRPO()": ("GRPOLearner", "GrpoLearner", "GrpoConfig"),
    "pt.OnlinePreference": ("OnlineDPO", "OnlineDPOTrainer", "OnlineDPOConfig"),
    "pt.Distill": ("DistillationTrainer", "DistillationConfig", "GKDTrainer", "GKDConfig", "GOLDTrainer", "GOLDConfig"),
    "pt.LoRA": ("LoraConfig", "LoRAConfig", "get_peft_model"),
    "pt.load_model, and model= of every stage": ("AutoModelForCausalLM", "FastLanguageModel", "FastModel"),
    "pt.load_tokenizer": ("AutoTokenizer",),
    "dataset= of every stage": ("load_dataset", "Dataset"),
    ".fit() of pt.SFT, pt.RL, ...": ("train", "fit"),
    ".export() of a result": ("export", "push_to_hub"),
    ".plot() of a result": ("plot",),
    ".plan() of pt.SFT, pt.RL, ..., or posttrain plan": ("plan",),
    "posttrain view": ("view",),
    "posttrain check": ("check",),
}
"""Names of classes and functions, by what is here for them in Python."""


def find_class(name: str) -> str | None:
    """Name here for a class or function of another framework; None if nothing is known of it."""
    return next((here for here, names in OTHER_CLASSES.items() if name in names), None)


def meant_kind(word: str, kinds: Iterable[str]) -> str:
    """Hint at the kind that an unknown word means: a word of others, or the nearest kind; empty if there is none."""
    known = list(kinds)
    found = (text for name, beside, text in OTHER_WORDS if name == word.lower() and beside in known)
    hint = next(found, None)
    return did_you_mean(word, known) if hint is None else f"; {hint}"


def find_other_name(word: str, known: Iterable[str], kind: str | None = None) -> tuple[str, OtherName] | None:
    """Find the first entry of a name whose field is among `known`, dotted names; return name and entry.

    `kind`: stage kind of the names.
    """
    names = [name for name in known if not name.startswith("stages.")]
    entries = [entry for entry in OTHER_NAMES if entry.name == word and (not entry.kinds or kind in entry.kinds)]
    return next(((name, e) for e in entries for name in names if _ends(e.field, name)), None)


def _ends(long: str, short: str) -> bool:
    return long == short or long.endswith(f".{short}")


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
    TRLName("warmup_ratio", "optimizer.warmup_steps", "a share as 3%"),
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
    TRLName("use_uld_loss", "teachers", "write teachers: [{path: PATH, tokenizer: gold}]", kinds=("distill",)),
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
