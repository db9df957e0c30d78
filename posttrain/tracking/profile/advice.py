"""Reading of a time table: what makes a step slow, and the setting to change."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.tracking.profile.table import TimeTable

DATA, REWARDS, SYNC, NETWORK, HOST, TAIL, PAUSE = 0.05, 0.2, 0.1, 0.3, 0.25, 0.2, 0.1
"""Shares of a step from which a cause is named."""
COMPUTE = ("update", "reference", "actor", "teacher", "logps")
"""Phases in which the devices should always compute."""


def advice(table: TimeTable) -> list[str]:
    """Causes in order of their cost, or what takes most where nothing stands out."""
    found = sorted(_causes(table), key=lambda cause: -cause[0])
    if found:
        return [text for _, text in found]
    largest = table.phases[0]
    return [
        f"nothing stands out: devices compute in {table.device_busy:.0%} of the step, {largest.name} takes "
        f"{largest.share:.0%} of it"
    ]


def _causes(table: TimeTable) -> Iterator[tuple[float, str]]:
    """Shares of a step with their causes."""
    if table.compilations:
        yield (
            1.0,
            f"recompiling: {table.compilations:.3g} programs a step are compiled while training; each new shape of a "
            "batch or of a request costs one. In RL keep rollout.warm_up on; a reward or loss of your own may call "
            "jax.jit anew in every step",
        )
    if (share := table.share("data")) >= DATA:
        yield (
            share,
            f"waiting for data: {share:.0%} of a step. A dataset function or the tokenizer is slower than the device: "
            "read rows from a .parquet or .jsonl file, and keep dataset.shuffle on, which packs further ahead",
        )
    if (share := table.share("rewards")) >= REWARDS:
        yield (
            share,
            f"rewards: {share:.0%} of a step, in which the devices wait. Make slow rewards async, or set "
            "rewards[].isolate: process, so that they run beside each other; lower rewards[].timeout_s",
        )
    if table.tail >= TAIL:
        yield (
            table.tail,
            f"rollout tail: {table.tail:.0%} of a step decodes with at most a quarter of the slots, for the longest "
            "answers. Set asynchronous, which samples them beside the updates, or lower sampling.max_tokens",
        )
    if (share := table.share("sync")) >= SYNC:
        yield (
            share,
            f"sync: {share:.0%} of a step brings the weights to the sampler. Set rollout.tensor: trained, or "
            "rollout.merge_lora: false under LoRA",
        )
    yield from _idle_devices(table)
    network = table.kinds.get("network", 0.0) / table.seconds
    if network >= NETWORK:
        yield (
            network,
            f"network: devices spend {network:.0%} of a step in collectives. Set a smaller mesh.tensor, or more tokens "
            "a pass by micro_batch_rows; posttrain plan shows the bytes",
        )
    for phase, setting in (("evaluation", "eval_every"), ("checkpoint", "checkpoint_every")):
        if (share := table.share(phase)) >= PAUSE:
            yield share, f"{phase}: {share:.0%} of the recorded steps. Set a larger {setting}"


def _idle_devices(table: TimeTable) -> Iterator[tuple[float, str]]:
    """Causes where devices wait for the host. Without device operations in the trace none can be told."""
    if not table.programs:
        return
    if (idle := table.idle(*COMPUTE)) >= HOST:
        yield (
            idle,
            f"host-bound update: devices wait for the host in {idle:.0%} of a step. Set more rows a pass "
            "(micro_batch_rows), or more tokens a step",
        )
    if (idle := table.idle("rollout")) >= HOST:
        yield (
            idle,
            f"host-bound rollout: devices wait for the host in {idle:.0%} of a step. Set a larger rollout.decode_steps "
            "or rollout.slots, so that a dispatch does more",
        )
