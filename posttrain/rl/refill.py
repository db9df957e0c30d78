"""Dynamic sampling: groups without a training signal are replaced, in waves. DAPO, arXiv:2503.14476 section 3.2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from posttrain.config import RLSection
from posttrain.rl.advantages import is_mixed
from posttrain.rl.algorithms import GroupFilter, filter_of


@dataclass(frozen=True, kw_only=True)
class Refill:
    """Settings of dynamic sampling."""

    limit: int
    """Maximum number of waves per step."""
    keep: GroupFilter
    """Mask of the useful groups of a wave."""

    @classmethod
    def of(cls, section: RLSection) -> Refill | None:
        """Build dynamic sampling of a stage; None without. ConfigError for a filter that cannot be used."""
        given = section.refill
        if given is None:
            return None
        return cls(limit=given.limit, keep=filter_of(given.keep, "refill.keep", section.group_size))


def group_metrics(rewards_PG: Float[np.ndarray, "P G"], pass_above: float) -> dict[str, float]:
    """Shares of groups with different rewards (`frac_mixed`), and with equal ones above `pass_above` or not
    (`frac_all_good`, `frac_all_bad`), which add up to 1; `pass_rate` of the samples. Samples and groups without a
    reward do not count."""
    valid_PG = ~np.isnan(rewards_PG)
    known_P = valid_PG.any(axis=1)
    if not known_P.any():
        return dict.fromkeys(("frac_mixed", "frac_all_good", "frac_all_bad", "pass_rate"), float("nan"))
    mixed_P = is_mixed(rewards_PG)
    passed_PG = valid_PG & (rewards_PG > pass_above)
    good_P = ~mixed_P & passed_PG.any(axis=1)
    return {
        "frac_mixed": float(mixed_P[known_P].mean()),
        "frac_all_good": float(good_P[known_P].mean()),
        "frac_all_bad": float((~mixed_P & ~good_P)[known_P].mean()),
        "pass_rate": float(passed_PG[valid_PG].mean()),
    }


def refill_metrics(useful_of_waves: Sequence[Bool[np.ndarray, " W"]], wanted: int) -> dict[str, float]:
    """Waves after the first groups, groups begun in them, and useful groups that are still missing."""
    return {
        "sampling/refill/waves": float(len(useful_of_waves) - 1),
        "sampling/refill/begun": float(sum(map(len, useful_of_waves[1:]))),
        "sampling/refill/short": float(wanted - sum(int(useful.sum()) for useful in useful_of_waves)),
    }
