"""Oracles of updates in float64: learning rates, clipping, optimizers, averages, QK-clip and noise, by the papers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from tests.offline_oracles import Fields, Labelled


def learning_rate(section: Fields, step: int, num_steps: int) -> float:
    """Rate of step 0, 1, ...: linear warm-up from 0, then constant, or down to 0 at the last step."""
    peak, warmup, kind = section["learning_rate"], section.get("warmup_steps", 0), section.get("schedule", "constant")
    if step < warmup:
        return float(peak * step / warmup)
    share = (step - warmup) / max(num_steps - warmup, 1)
    return float(peak * {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[kind])


def clipped(gradient: Mapping[str, np.ndarray], section: Fields) -> dict[str, np.ndarray]:
    """By the norm of all, then by size."""
    norm = math.sqrt(sum(float((one**2).sum()) for one in gradient.values()))
    factor = min(1.0, section.get("max_grad_norm", 1.0) / norm) if norm else 1.0
    most = section.get("clip_value", math.inf)
    return {path: np.clip(one * factor, -most, most) for path, one in gradient.items()}


class Parameters:
    """Parameters in float64 that are updated by an optimizer of the configuration, from the gradients."""

    def __init__(self, values: Mapping[str, np.ndarray], section: Fields, num_steps: int):
        self.values = {path: np.asarray(one, np.float64) for path, one in values.items()}
        self.average = dict(self.values)
        self.section, self.num_steps, self.count = section, num_steps, 0
        self.state: dict[str, dict[str, np.ndarray]] = {path: {} for path in values}

    def update(self, gradient: Mapping[str, np.ndarray]) -> None:
        """One update. Biases and the scales of norms do not decay."""
        rate = learning_rate(self.section, self.count, self.num_steps)
        self.count += 1
        for path, one in clipped(gradient, self.section).items():
            old, kept = self.values[path], self.state[path]
            decay = 0.0 if path.endswith(("scale", "bias")) else self.section.get("weight_decay", 0.0)
            self.values[path] = old - rate * (self.direction(path, one, old, kept) + decay * old)
        share = self.section.get("ema", {}).get("decay", 0.999)
        self.average = {path: share * old + (1 - share) * self.values[path] for path, old in self.average.items()}

    def moment(self, kept: dict[str, np.ndarray], name: str, value: np.ndarray, decay: float) -> np.ndarray:
        """Moving average, without the correction of its beginning."""
        kept[name] = decay * kept.get(name, 0.0) + (1 - decay) * value
        return kept[name]

    def direction(self, path: str, g: np.ndarray, old: np.ndarray, kept: dict[str, np.ndarray]) -> np.ndarray:
        section, kind = self.section, self.section.get("kind", "adamw")
        if kind == "muon" and takes_muon(path):
            return self.muon(g, kept)
        if kind == "lion":  # arXiv:2302.06675, algorithm 2
            sign = np.sign(0.9 * kept.get("m", 0.0) + 0.1 * g)
            self.moment(kept, "m", g, 0.99)
            return sign
        if kind == "adafactor":
            return self.adafactor(path, g, old, kept)
        if "fn" in section:  # stochastic gradient descent
            return g
        # arXiv:1711.05101, algorithm 2
        b1, b2 = section.get("beta1", 0.9), section.get("beta2", 0.95 if kind == "muon" else 0.999)
        m = self.moment(kept, "m", g, b1) / (1 - b1**self.count)
        v = self.moment(kept, "v", g**2, b2) / (1 - b2**self.count)
        return m / (np.sqrt(v) + section.get("eps", 1e-8))

    def muon(self, g: np.ndarray, kept: dict[str, np.ndarray]) -> np.ndarray:
        kept["m"] = 0.95 * kept.get("m", 0.0) + g
        return muon_direction(g + 0.95 * kept["m"])

    def adafactor(self, path: str, g: np.ndarray, old: np.ndarray, kept: dict[str, np.ndarray]) -> np.ndarray:
        """arXiv:1804.04235, algorithms 4 and 6, each matrix of a stack by itself."""
        decay = 1 - self.count**-0.8
        square = g**2 + 1e-30
        axes = tuple(range(num_stacked(path), g.ndim))
        matrix = len(axes) == 2 and min(g.shape[-2:]) >= self.section.get("min_factored", 128)
        if matrix:
            rows = self.moment(kept, "r", square.mean(-1), decay)
            columns = self.moment(kept, "c", square.mean(-2), decay)
            v = rows[..., :, None] * columns[..., None, :] / rows.mean(-1)[..., None, None]
        else:
            v = self.moment(kept, "v", square, decay)
        u = g / np.sqrt(v)
        u = u / np.maximum(1.0, np.sqrt((u**2).mean(axes, keepdims=True)))
        return u * np.maximum(1e-3, np.sqrt((old**2).mean(axes, keepdims=True)))


def num_stacked(path: str) -> int:
    """Leading axes of a parameter over which optimizers go one by one: layers, and experts of each."""
    return path.startswith("stages.") + (".experts." in path)


def takes_muon(path: str) -> bool:
    """Muon takes the matrices of attention, MLPs and experts in the layers, not the router's."""
    matrix = path.endswith(".kernel") or ".experts." in path
    return path.startswith("stages.") and matrix and ".router." not in path


def muon_direction(x: np.ndarray) -> np.ndarray:
    """Matrices [..., in, out] by five Newton-Schulz iterations, https://kellerjordan.github.io/posts/muon, scaled as in
    arXiv:2502.16982."""
    rows, columns = x.shape[-2:]
    wide = np.swapaxes(x, -1, -2) if rows > columns else x
    wide = wide / np.linalg.norm(wide, axis=(-2, -1), keepdims=True)
    for _ in range(5):
        a = wide @ np.swapaxes(wide, -1, -2)
        wide = 3.4445 * wide + (-4.7750 * a + 2.0315 * a @ a) @ wide
    return (np.swapaxes(wide, -1, -2) if rows > columns else wide) * 0.2 * math.sqrt(max(rows, columns))


def nf4() -> np.ndarray:
    """Values of the 16 codes: quantiles of a normal distribution with 0 among them, arXiv:2305.14314 appendix E."""
    normal, offset = NormalDist(), 0.9677083
    above = [normal.inv_cdf(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    below = [-normal.inv_cdf(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    values = np.sort([*above, 0.0, *below])
    return values / values.max()


def of_nf4(x: Any, codes: Any, scales: Any) -> Any:
    """Matrix [*L, in, out] of codes [*L, in / 2, out] and the scales of tiles [*L, tiles, out]: the low halves of a
    tile's bytes are its first inputs."""
    *lead, tiles, outputs = scales.shape
    packed = codes.reshape(*lead, tiles, -1, outputs)
    numbers = x.concatenate([packed & 15, packed >> 4], -2)
    values = x.asarray(nf4())[numbers.astype(x.int32)]
    return (values * scales[..., None, :]).reshape(*lead, -1, outputs)


def check_noise(noise: np.ndarray, alpha: float) -> None:
    """Noise [T, D] on the embeddings of a sequence is uniform up to alpha / sqrt(T D), arXiv:2310.05914."""
    bound = alpha / math.sqrt(noise.size)
    assert 0.9 * bound < np.abs(noise).max() <= bound * (1 + 1e-6)
    assert abs(noise.mean()) < 5 * bound / math.sqrt(3 * noise.size)
    assert 0.6 < (noise**2).mean() / (bound**2 / 3) < 1.4


def clip_of_heads(
    weights: Mapping[str, np.ndarray], sequences: Sequence[Labelled], noise: np.ndarray | None, limit: float, size: int
) -> list[float]:
    """Factor of the attention logits of each head, in a model of one layer of llama: min(1, limit / the largest),
    arXiv:2507.20534 algorithm 1."""
    of_layer = {
        path.rpartition("blocks.0.")[2]: np.asarray(one, np.float64)[0]
        for path, one in weights.items()
        if "blocks.0." in path
    }
    wq, wk = of_layer["attention.q.kernel"], of_layer["attention.k.kernel"]
    largest = np.zeros(wq.shape[-1] // size)
    for number, one in enumerate(sequences):
        x = np.asarray(weights["embed.embedding"], np.float64)[list(one.tokens)]
        if noise is not None:
            x = x + noise[number, : len(x)]
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * of_layer["attention_norm.scale"]
        angles = np.arange(len(x))[:, None] / 10000.0 ** (np.arange(size // 2) / (size // 2))
        turn = np.cos(angles) + 1j * np.sin(angles)
        complex_q, complex_k = (
            (y.reshape(len(x), -1, size)[..., : size // 2] + 1j * y.reshape(len(x), -1, size)[..., size // 2 :])
            * turn[:, None]
            for y in (x @ wq, x @ wk)
        )
        complex_k = np.repeat(complex_k, len(largest) // complex_k.shape[1], 1)
        logits = np.einsum("ihd,jhd->hij", complex_q, complex_k.conj()).real / math.sqrt(size)
        logits = np.where(np.tri(len(x), dtype=bool), logits, 0.0)
        largest = np.maximum(largest, logits.max((1, 2)))
    return [min(1.0, limit / one) for one in largest]
