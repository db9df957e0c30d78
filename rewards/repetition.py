"""Penalty of repetition: the share of n-grams that have occurred before in the same completion."""

from __future__ import annotations

from collections.abc import Sequence


def penalty(completion_tokens: Sequence[Sequence[int]], *, ngram_tokens: int, weight: float) -> list[float]:
    """-`weight` times the share of repeated n-grams of tokens; 0 for completions shorter than one. After the n-gram
    penalty of arXiv:2502.03373, as one value per completion.

    >>> penalty([[1, 2, 1, 2, 1], [1, 2, 3], [1]], ngram_tokens=2, weight=1.0)
    [-0.5, 0.0, 0.0]
    """
    if ngram_tokens < 1:
        raise ValueError(f"ngram_tokens={ngram_tokens} must be at least 1")
    if not weight > 0:
        raise ValueError(f"weight={weight} must be above 0: the penalty is subtracted, and below 0 it pays repetition")
    return [_penalty(tokens, ngram_tokens, weight) for tokens in completion_tokens]


def _penalty(tokens: Sequence[int], size: int, weight: float) -> float:
    ngrams = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
    repeated = len(ngrams) - len(set(ngrams))
    return -weight * repeated / len(ngrams) if repeated else 0.0
