"""On-policy distillation: the teachers' log-probabilities of the student's own samples become a part of the
advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from posttrain.batch import Batch
from posttrain.cluster.reference import Scorer, Teachers
from posttrain.config import DistillSection, RLSection
from posttrain.data.packing import to_batch
from posttrain.distill.cross_tokenizer import Aligner, teacher_rows
from posttrain.distill.targets import teacher_shares
from posttrain.distill.teachers import TeacherSource, in_order
from posttrain.errors import ConfigError, RunError
from posttrain.metrics import Metrics
from posttrain.rl.assemble import Shares, sample_rows, sampled_rows
from posttrain.rollout.trajectory import Example, Group
from posttrain.tree import Mean, Perplexity, replace


@dataclass(frozen=True, kw_only=True)
class TeacherKL:
    """KL penalty against teachers as a part of the advantage."""

    coef: float
    """Coefficient of log(teacher / student) in the advantage."""
    shares: Shares | None
    """Teacher weights by example. None: a single teacher for all rows."""


def add_teachers(batch: Batch, teacher: Float[np.ndarray, "B T"], coef: float) -> tuple[Batch, Metrics]:
    """Add coef (log teacher - log student) to the advantage of each sampled token; return the batch and metrics.

    Over samples of the student the expected policy gradient is the gradient of KL(student || teacher) after each
    prefix, arXiv:2306.13649; the influence of a token on later prefixes is ignored, as in
    thinkingmachines.ai/blog/on-policy-distillation. `distill/kl`: mean of log(student / teacher) over sampled tokens.
    """
    assert batch.advantages is not None
    student = np.asarray(batch.sampler_logps if batch.old_logps is None else batch.old_logps)
    weight = np.asarray(batch.loss_weight)
    sampled = weight > 0
    gap = np.where(sampled, teacher - student, 0.0).astype(np.float32)
    count = float(weight.sum())
    student_nll, teacher_nll = (jnp.asarray(-(x[sampled] * weight[sampled]).sum()) for x in (student, teacher))
    metrics: Metrics = {
        "distill/kl": Mean(total=-float((gap * weight).sum()), weight=count),
        "distill/teacher_nll": Mean(total=teacher_nll, weight=count),
        "distill/student_perplexity": Perplexity(total=student_nll, weight=count),
        "distill/teacher_perplexity": Perplexity(total=teacher_nll, weight=count),
    }
    return replace(batch, advantages=np.asarray(batch.advantages) + np.float32(coef) * gap), metrics


def distances(
    teachers: Sequence[Scorer], groups_P: Sequence[Group], shares: Shares | None, row_tokens: int
) -> Float[np.ndarray, "P G"]:
    """Mean of log(student / teacher) over the tokens of each sample: an estimate of the reverse KL."""
    rows, owners = sampled_rows(groups_P)
    if not rows:
        return np.full((len(groups_P), len(groups_P[0])), np.nan, np.float32)
    batch, where = sample_rows(rows, row_tokens=row_tokens, num_rows=len(rows), shares=shares)
    sampled = np.asarray(batch.loss_weight) > 0
    gap = np.where(sampled, np.asarray(batch.sampler_logps) - Teachers(teachers).logps(batch), 0.0)
    sums, counts = np.zeros((2, sum(map(len, groups_P))))
    np.add.at(sums, owners, [gap[row, tokens].sum() for row, tokens in where])
    np.add.at(counts, owners, [sampled[row, tokens].sum() for row, tokens in where])
    return (sums / np.where(counts > 0, counts, np.nan)).astype(np.float32).reshape(len(groups_P), -1)


def merged_distances(
    teacher: Scorer, aligner: Aligner, dataset: int, groups_P: Sequence[Group]
) -> Float[np.ndarray, "P G"]:
    """Mean of log(student / teacher) as in `distances`, over the tokens aligned with a teacher of another tokenizer.

    NaN for a sample without aligned tokens. RunError if no sample has any. `dataset`: number of the prompts' dataset.
    """
    samples = [sample for group in groups_P for sample in group]
    read = [aligner.align_sample(dataset, s.messages, s.tokens, s.sampled, s.example.tools) for s in samples]
    rows = teacher_rows(read, aligner.row_tokens)
    scored = rows["scored"] != 0
    batch = to_batch(rows | {"loss_weight": scored.astype(np.float32)})
    teacher_sums = np.where(scored, teacher.logps(batch), 0.0).sum(axis=1)
    student_sums = np.asarray([np.asarray(s.logps)[r.covered != 0].sum() for s, r in zip(samples, read, strict=True)])
    counts = np.asarray([np.count_nonzero(r.covered) for r in read], np.float64)
    if not counts.any():
        raise RunError("evaluation: no token of any sample aligns with the teacher's; see posttrain check")
    found = (student_sums - teacher_sums) / np.where(counts > 0, counts, np.nan)
    return found.reshape(len(groups_P), -1).astype(np.float32)


def refuse_blind(teachers: Sequence[TeacherSource], shares: Shares | None, examples: Sequence[Example]) -> None:
    """ConfigError for a prompt with pictures that a teacher with a share in it does not see as the student does."""
    for number, teacher in enumerate(teachers):
        for example in examples if teacher.blind is not None else ():
            if example.images is not None and (shares is None or shares(example)[number] > 0):
                raise ConfigError(
                    f"row {example.index} has pictures, and teacher {teacher.title} reads none as the student does: "
                    f"{teacher.blind}; give a teacher of the same images, or remove the row"
                )


def shares_of(section: DistillSection | RLSection) -> Shares | None:
    """Teacher weights by example; None for a single teacher."""
    if section.teacher_column is None:
        return None
    column, titles = section.teacher_column, [teacher.title for teacher in in_order(section)]
    return lambda example: teacher_shares(example.row, column, titles)
