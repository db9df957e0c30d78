"""Log-probabilities, entropies and values that batches need before the first update of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from posttrain.batch import Batch
from posttrain.cluster.cluster import Cluster
from posttrain.config.rl import OldLogps
from posttrain.metrics import Metrics
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.assemble import sample_rows, sampled_rows
from posttrain.rl.returns import with_returns
from posttrain.rl.selection import top_entropy
from posttrain.rl.teachers import TeacherKL, add_teachers
from posttrain.rl.update import merged
from posttrain.rollout.trajectory import Group
from posttrain.tree import Mean, replace


def annotated(
    cluster: Cluster,
    algorithm: Algorithm,
    parts: Sequence[Batch],
    *,
    old_logps: OldLogps,
    teaching: TeacherKL | None,
) -> tuple[list[Batch], Metrics]:
    """Batches with what the loss needs of actor, reference, teachers and critic, under the weights of now; and metrics.

    With a critic the advantages become GAE's, per token.
    """
    made, entropies, told = [], [], list[Metrics]()
    for part in parts:
        if algorithm.loss.kl_coef > 0 or (algorithm.critic is not None and algorithm.reward_kl is not None):
            part = replace(part, ref_logps=cluster.reference.logps(part))
        if old_logps == "trainer" or algorithm.top_entropy is not None:
            stats = cluster.actor.stats(part)
            entropies.append(np.asarray(stats.entropy))
            if old_logps == "trainer":
                part = replace(part, old_logps=np.asarray(stats.logps))
        if old_logps == "sampler":
            part = replace(part, old_logps=part.sampler_logps)
        if teaching is not None:
            part, found = add_teachers(part, cluster.teachers.logps(part), teaching.coef)
            told.append(found)
        made.append(part)
    metrics = merged(told) if told else {}
    if algorithm.critic is not None:
        values = [cluster.critic.values(part) for part in made]
        made, measured = with_returns(made, values, algorithm.critic.gae, algorithm.reward_kl)
        metrics |= measured
    if algorithm.top_entropy is not None:
        made, least = top_entropy(made, entropies, algorithm.top_entropy)
        metrics["entropy/threshold"] = least
    return made, metrics


def reward_penalties(
    cluster: Cluster, algorithm: Algorithm, groups_P: Sequence[Group], *, row_tokens: int, num_rows: int
) -> tuple[Float[np.ndarray, "P G"], Metrics]:
    """KL penalty of each sample, to be added to its reward, against the log-probabilities of the sampler; and the mean
    of the estimates per token."""
    assert algorithm.reward_kl is not None
    rows, owners = sampled_rows(groups_P)
    of_samples, total, count = np.zeros(sum(map(len, groups_P)), np.float32), 0.0, 0.0
    for start in range(0, len(rows), num_rows):
        batch, where = sample_rows(rows[start : start + num_rows], row_tokens=row_tokens, num_rows=num_rows)
        own = np.asarray(batch.sampler_logps)
        found = algorithm.reward_kl.of_samples(batch, own, cluster.reference.logps(batch), where)
        np.add.at(of_samples, owners[start : start + num_rows], found)
        total -= float(found.sum()) / algorithm.reward_kl.coef
        count += float((np.asarray(batch.loss_weight) > 0).sum())
    return of_samples.reshape(len(groups_P), -1), {"kl": Mean(total=total, weight=count)}
