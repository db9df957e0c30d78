"""Count of what a dataset loses on its way into rows: sequences cut or dropped by `overlong`, and their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Cut(NamedTuple):
    """Tokens that the sequences of one row, or one unit of a pair, lost."""

    truncated: int = 0
    """Number of sequences of which the end was left out."""
    truncated_tokens: int = 0
    dropped: int = 0
    """Number of sequences that were left out as a whole."""
    dropped_tokens: int = 0


def cut_of(before: Sequence[int], after: Sequence[int | None]) -> Cut:
    """Loss of sequences by their lengths before, and after; None: dropped."""
    truncated = [b - a for b, a in zip(before, after, strict=True) if a is not None and a < b]
    dropped = [b for b, a in zip(before, after, strict=True) if a is None]
    return Cut(len(truncated), sum(truncated), len(dropped), sum(dropped))


@dataclass(frozen=True, kw_only=True)
class RowCuts:
    """Sum of what the checked rows of a dataset lost."""

    total: int
    """Number of sequences (or pairs, answers, prompts), before any was dropped."""
    tokens: int
    """Number of their tokens, before any was left out."""
    cut: Cut
    left_out: int = 0
    """Number of those left out for another reason, such as a picture that cannot be read; they count in `total`."""

    @classmethod
    def of(cls, cuts: Iterable[Cut], total: int, kept_tokens: int, left_out: int = 0) -> RowCuts:
        """Sum of cuts. `kept_tokens`: number of tokens that were not lost."""
        cut = Cut(*(sum(column) for column in zip(*cuts, Cut(), strict=False)))
        return cls(
            total=total, tokens=kept_tokens + cut.truncated_tokens + cut.dropped_tokens, cut=cut, left_out=left_out
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Shares of sequences that are dropped and truncated, and of tokens that both leave out."""
        lost = self.cut.truncated_tokens + self.cut.dropped_tokens
        return {
            "data/dropped_ratio": (self.cut.dropped + self.left_out) / max(self.total, 1),
            "data/truncated_ratio": self.cut.truncated / max(self.total, 1),
            "data/lost_tokens_ratio": lost / max(self.tokens, 1),
        }

    def truncation_note(self, what: str, name: str, row_tokens: int) -> list[str]:
        """Line about truncated sequences; none if no one is. `what`: noun for them."""
        if not self.cut.truncated:
            return []
        return [
            f"{self.cut.truncated:,} of {self.total:,} {what} of {name} are truncated to row_tokens={row_tokens}: "
            f"{self.cut.truncated_tokens:,} of {self.tokens:,} tokens are left out (overlong: truncate)"
        ]


def mean_metrics(cuts: Sequence[RowCuts], weights: Sequence[float]) -> dict[str, float]:
    """Metrics of several datasets that are drawn in proportion to weights."""
    whole = sum(weights)
    each = [one.metrics for one in cuts]
    return {name: sum(w * m[name] for w, m in zip(weights, each, strict=True)) / whole for name in each[0]}
