"""Counters, gauges and histograms of a server, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass
class Histogram:
    """Counts of values by upper bounds, and their sum."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> Iterator[str]:
        below = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self.total}"
        yield f"{name}_count {below}"


@dataclass
class Metrics:
    """Measurements of a server since its start.

    `gauges`: present values by name, with a description each.
    """

    gauges: Callable[[], dict[str, tuple[float, str]]]
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Requests by path and status; 499 of those whose client hung up."""
    counters: Counter[str] = field(default_factory=Counter)
    first_token_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    token_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    request_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))

    def text(self) -> str:
        """All measurements, as Prometheus reads them."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        gauges = self.gauges()  # it also adds to the counters
        name = "posttrain_requests_total"
        yield from _head(name, "counter", "Requests by path and status; 499: the client hung up.")
        yield from (f'{name}{{path="{p}",status="{s}"}} {n}' for (p, s), n in sorted(self.requests.items()))
        for counter, text in COUNTERS.items():
            name = f"posttrain_{counter}_total"
            yield from _head(name, "counter", text)
            yield f"{name} {self.counters[counter]}"
        for gauge, (value, text) in gauges.items():
            name = f"posttrain_{gauge}"
            yield from _head(name, "gauge", text)
            yield f"{name} {value:g}"
        for histogram, values, text in (
            ("time_to_first_token_seconds", self.first_token_s, "From the arrival of a sample to its first tokens."),
            ("time_per_output_token_seconds", self.token_s, "Mean over a sample's tokens after its first ones."),
            ("request_seconds", self.request_s, "From the arrival of a request to the end of its answer."),
        ):
            name = f"posttrain_{histogram}"
            yield from _head(name, "histogram", text)
            yield from values.lines(name)


COUNTERS = {
    "samples": "Samples begun: choices of requests.",
    "prompt_tokens": "Prompt tokens of samples that were admitted.",
    "cached_prompt_tokens": "Of those, found in the prefix cache.",
    "completion_tokens": "Tokens sampled.",
    "preemptions": "Samples that made room for older ones and were read again.",
    "drafted_tokens": "Tokens drafted (--speculative).",
    "accepted_tokens": "Of those, what the model itself has drawn.",
}


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
