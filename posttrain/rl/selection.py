"""Selection of samples and tokens to learn from: truncated samples, tokens of high entropy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from posttrain.batch import Batch
from posttrain.rollout.trajectory import Group
from posttrain.tree import replace


def ended(groups_P: Sequence[Group]) -> Bool[np.ndarray, "P G"]:
    """Mask of samples that were not cut at `max_tokens` (overlong filter, arXiv:2503.14476 section 3.4). The others
    have no loss but count in the baseline of their group."""
    return np.asarray([[trajectory.stop != "length" for trajectory in group] for group in groups_P], bool)


def top_entropy(
    parts: Sequence[Batch], entropies: Sequence[Float[np.ndarray, "B T"]], share: float
) -> tuple[list[Batch], float]:
    """Advantage 0 on all but the `share` of sampled tokens with the highest entropy; also returns the least entropy
    kept. arXiv:2506.01939.

    The quantile is over all parts of a step, so that micro-batches and rows do not change it. KL and entropy bonus act
    on all tokens, and the loss's denominator counts them.
    """
    if not 0 < share < 1:
        raise ValueError(f"top_entropy={share} must be above 0 and below 1, the share of tokens to learn from")
    counted = [np.asarray(part.loss_weight) > 0 for part in parts]
    found = np.concatenate([values[mask] for values, mask in zip(entropies, counted, strict=True)]).astype(np.float32)
    least = float(np.quantile(found, 1 - share)) if found.size else 0.0
    kept = []
    for part, values in zip(parts, entropies, strict=True):
        advantages = np.asarray(part.advantages)
        kept.append(replace(part, advantages=np.where(values >= least, advantages, np.zeros_like(advantages))))
    return kept, least
