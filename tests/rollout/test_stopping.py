"""A stop string is found at the token that completes it, however the tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from posttrain.rollout.stopping import first_completed

VOCABULARY = ["a", "b", "ab", "", "é", "ba"]


def decode(tokens: Sequence[int]) -> str:
    return "".join(VOCABULARY[token] for token in tokens)


def found_from_the_start(tokens: Sequence[int], stops: Sequence[str]) -> int | None:
    ends = (n for n in range(1, len(tokens) + 1) if any(stop in decode(tokens[:n]) for stop in stops))
    return next(ends, None)


@pytest.mark.parametrize("stops", [("aba",), ("bbab", "éa"), ("abababab",)])
def test_equals_decoding_from_the_start(stops: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(100):
        tokens = rng.integers(0, len(VOCABULARY), 12).tolist()
        expected = found_from_the_start(tokens, stops)
        hits += expected is not None
        arrived, found = 0, None
        while found is None and arrived < len(tokens):
            num_new = min(int(rng.integers(1, 6)), len(tokens) - arrived)
            arrived += num_new
            found = first_completed(decode, tokens[:arrived], num_new, stops)
        assert found == expected
    assert 5 < hits < 100


def test_characters_of_several_tokens() -> None:
    text = "xéy".encode()

    def decode_bytes(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    for num_new in range(1, len(text) + 1):
        assert first_completed(decode_bytes, list(text), num_new, ("éy",)) == len(text)
