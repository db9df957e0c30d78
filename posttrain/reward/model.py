"""Reward models: a trained classifier scores whole trajectories, in one program on the run's mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from posttrain.cluster.reference import FrozenModel
from posttrain.config import Locator
from posttrain.data.chat import Renderer
from posttrain.data.format import render_answer
from posttrain.data.packing import fill_rows, to_batch
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError
from posttrain.mesh import row_shards
from posttrain.models.hf import CLASSIFIER
from posttrain.rollout.trajectory import Trajectory
from posttrain.tracking.console import console
from posttrain.weights.load import load_model
from posttrain.weights.locate import read_model_files

Reduce = Literal["last", "min", "mean"]
MIN_WIDTH = 64


class ModelReward:
    """Reward model: the score of a sequence's last token, as in transformers' sequence classifiers. A process reward
    model returns the minimum or mean score of the steps (`reduce`), each ending with a newline, which is added to the
    last step if missing.

    With the policy's tokenizer the model reads the sampled tokens, and after a stop token the template's text that
    follows it, as in training; otherwise it reads the messages rendered with its own tokenizer and chat template, with
    the arguments saved in it and not the policy's (`model.chat_template_args`), and says so. Call `load` before the
    first score. `name` is used in metrics.
    """

    def __init__(self, path: str, reduce: Reduce, name: str):
        self.path, self.reduce = path, reduce
        self.__name__ = name

    def load(self, mesh: Mesh, policy: Renderer, rows: int) -> None:
        """Load the model onto the mesh. `rows`: sequences per forward pass."""
        tokenizer = load_tokenizer(self.path).at(policy.tokenizer.clock)
        model = load_model(self.path, mesh=mesh)
        self._renderer = policy if _same(tokenizer, policy.tokenizer) else _renderer(tokenizer, policy)
        self._as_sampled = self._renderer is policy
        if not self._as_sampled and policy.chat:
            console().print(
                f"{self.__name__}: {self.path} reads messages with its own tokenizer and chat template, which differ "
                "from the policy's; model.chat_template_args are not for it",
                markup=False,
                soft_wrap=True,
            )
        self._stops = frozenset(self._renderer.tokenizer.stop_ids)
        self._tail = _tail(policy) if self._as_sampled and self.reduce == "last" else []
        self._newline = self._renderer.tokenizer.encode_spans("\n", continues=True)[0]
        self._longest = model.config.max_positions
        self._rows = -(-rows // row_shards(mesh)) * row_shards(mesh)
        self._model = FrozenModel(model, mesh, temperature=1.0, rows=self._rows)

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | ValueError]:
        """Reward of each trajectory, of its `answer`; a ValueError for one that cannot be scored."""
        read = [self._read(one) for one in trajectories]
        fitting = [one for one in read if not isinstance(one, ValueError)]
        scores: list[float] = []
        for first in range(0, len(fitting), self._rows):
            scores += self._of_rows(fitting[first : first + self._rows])
        scored = iter(scores)
        return [one if isinstance(one, ValueError) else next(scored) for one in read]

    def _read(self, trajectory: Trajectory) -> tuple[list[int], int] | ValueError:
        """Tokens of the answer; a ValueError for one without a sampled token, longer than the model's context, or
        with messages that the model's chat template does not write."""
        if not trajectory.num_sampled:
            return ValueError("no token was sampled")
        try:
            sequence = self._sequence(trajectory.answer)
        except ConfigError as error:
            return ValueError(f"{self.path}: {error}")
        if len(sequence[0]) > self._longest:
            return ValueError(f"{self.path}: {len(sequence[0])} tokens, more than its {self._longest} positions")
        return sequence

    def _sequence(self, trajectory: Trajectory) -> tuple[list[int], int]:
        """Tokens, and the position at which the completion starts."""
        if self._as_sampled:
            tokens, start = list(trajectory.tokens), list(trajectory.sampled).index(True)
            tokens += self._tail if tokens[-1] in self._stops else []
        else:
            prompt, answer = trajectory.messages[:-1], trajectory.messages[-1:]
            masked = render_answer(prompt, answer, self._renderer)
            tokens, start = list(masked.tokens), masked.mask.index(True)
        return (tokens if self.reduce == "last" else self._with_last_step(tokens, start)), start

    def _with_last_step(self, tokens: list[int], start: int) -> list[int]:
        """Tokens without the end-of-completion tokens, with a newline after an unterminated last step."""
        decode = self._renderer.tokenizer.decode
        while len(tokens) > start + 1 and (tokens[-1] in self._stops or not decode(tokens[-1:]).strip()):
            tokens.pop()
        return tokens if "\n" in decode(tokens[-1:]) else tokens + self._newline

    def _of_rows(self, sequences: Sequence[tuple[list[int], int]]) -> list[float]:
        lengths = [len(tokens) for tokens, _ in sequences]
        # Lengths are powers of two: few compilations, whatever the longest sequence of a step.
        width = min(max(MIN_WIDTH, 1 << (max(lengths) - 1).bit_length()), self._longest)
        rows = [[{"tokens": np.asarray(ids, np.int32)}] for ids, _ in sequences]
        filled = fill_rows(rows, {"tokens": width}, num_rows=self._rows, like=rows[0][0])
        scores = self._model.scores(to_batch(filled | {"loss_weight": filled["tokens_segments"].astype(np.float32)}))
        return [float(self._reduced(scores[row], *one)) for row, one in enumerate(sequences)]

    def _reduced(self, scores: Float[np.ndarray, " T"], tokens: Sequence[int], start: int) -> np.floating:
        last = len(tokens) - 1
        if self.reduce == "last":
            return scores[last]
        decode = self._renderer.tokenizer.decode
        ends = [at for at in range(start, last + 1) if "\n" in decode([tokens[at]])]
        steps = scores[ends]
        return steps.min() if self.reduce == "min" else steps.mean()


def classifier_path(path: Locator) -> str:
    """Resolve the folder or hub id of a reward model. ConfigError for another model."""
    files = read_model_files(path.resolved)
    if files.config is not None and not files.config.scalar_head:
        raise ConfigError(
            f"rewards.model: {path} is no reward model; set a {CLASSIFIER} with one label, such as the model that a "
            "stage of kind reward_model leaves"
        )
    return path.resolved


def _tail(renderer: Renderer) -> list[int]:
    """Tokens that the template writes after the end-of-turn token."""
    if not renderer.chat:
        return []
    asked = render_answer([{"role": "user", "content": "?"}], [{"role": "assistant", "content": "!"}], renderer)
    return asked.tokens[len(asked.mask) - asked.mask[::-1].index(True) :]


def _same(one: Tokenizer, other: Tokenizer) -> bool:
    """Tell whether both tokenizers produce the same tokens for the same messages."""
    return one.chat_template == other.chat_template and one.hf.get_vocab() == other.hf.get_vocab()


def _renderer(tokenizer: Tokenizer, policy: Renderer) -> Renderer:
    return Renderer(tokenizer, policy.chat and tokenizer.chat_template is not None)
