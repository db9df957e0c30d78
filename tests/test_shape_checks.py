"""Checks that wait for the first call find what they must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from jaxtyping import Float, TypeCheckError

from posttrain.kernels.logits.layout import chunk_length
from tests.shape_checks import check_at_first_call

pytestmark = pytest.mark.fast

checked = check_at_first_call


@checked
def product(a: Float[np.ndarray, "B N"], b: Float[np.ndarray, "B N"]) -> Float[np.ndarray, " B"]:
    return (a * b).sum(axis=1) if a.shape[1] else a


@checked
@dataclass
class Pair:
    a: Float[np.ndarray, " B"]
    b: Float[np.ndarray, " B"]

    @checked
    @classmethod
    def of(cls, count: int) -> Pair:
        return cls(np.ones(count), np.ones(count))

    @checked
    @staticmethod
    def length(count: int) -> int:
        return count

    @checked
    @property
    def whole(self) -> int:
        return self.a.sum()


def test_what_fits_passes() -> None:
    assert product(np.ones((2, 3)), np.ones((2, 3))).tolist() == [3, 3]
    assert Pair.of(2).b.tolist() == [1, 1] and Pair.length(2) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda: product(np.ones((2, 3)), np.ones((2, 4))),
        lambda: product(np.ones((2, 0)), np.ones((2, 0))),
        lambda: Pair(np.ones(2), np.ones(3)),
        lambda: Pair.of("2"),
        lambda: Pair.length("2"),
        lambda: Pair.of(2).whole,
    ],
    ids=["parameter", "result", "dataclass", "classmethod", "staticmethod", "property"],
)
def test_what_does_not_fit_is_found(call: Callable[[], object]) -> None:
    for _ in range(2):
        with pytest.raises(TypeCheckError):
            call()


def test_closures_of_one_code_are_each_checked() -> None:
    def times(factor: int) -> Callable[[object], object]:
        @checked
        def multiply(number: int, *, more: int = factor) -> int:
            return number * factor + more

        return multiply

    made = [times(factor) for factor in (2, 3, 4)]
    assert [multiply(5) for multiply in made] == [12, 18, 24]
    for multiply in made:
        with pytest.raises(TypeCheckError):
            multiply("5")


def test_the_package_is_checked(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--no-shape-checks"):
        pytest.skip("without checks")
    with pytest.raises(TypeCheckError, match=r"chunk_length"):
        chunk_length(rows="2", length=3, vocab=5)
