"""Reward models: a trained classifier scores whole trajectories, in one program on the run's mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from posttrain.cluster.reference import FrozenModel
from posttrain.config import ImageSection, Locator
from posttrain.data.chat import Renderer
from posttrain.data.image_rows import Arrays, ImageRows, sampled_arrays
from posttrain.data.images import takes_images
from posttrain.data.messages import pictures_in
from posttrain.data.packing import fill_rows, to_batch
from posttrain.data.prompt_images import PromptImages
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


class ReadSequence(NamedTuple):
    """Sequence that a reward model reads."""

    tokens: list[int]
    start: int
    """Position of the completion's first token."""
    images: PromptImages | None

    def arrays(self) -> Arrays:
        tokens: Arrays = {"tokens": np.asarray(self.tokens, np.int32)}
        return tokens if self.images is None else tokens | sampled_arrays(self.images, len(self.tokens))


class ModelReward:
    """Reward model: the score of a sequence's last token, as in transformers' sequence classifiers. A process reward
    model returns the minimum or mean score of the steps (`reduce`), each ending with a newline, which is added to the
    last step if missing.

    With the policy's tokenizer the model reads the sampled tokens, and after a stop token the template's text that
    follows it, as in training; otherwise it reads the messages rendered with its own tokenizer and chat template, with
    the arguments saved in it and not the policy's (`model.chat_template_args`), and says so. Pictures are read by a
    model with a vision tower: those of the sampled tokens where they become the same patches and tokens, else those of
    the messages. Call `load` before the first score. `name` is used in metrics.
    """

    def __init__(self, path: str, reduce: Reduce, name: str):
        self.path, self.reduce = path, reduce
        self.__name__ = name

    def load(self, mesh: Mesh, policy: Renderer, rows: int) -> None:
        """Load the model onto the mesh. `rows`: sequences per forward pass."""
        tokenizer = load_tokenizer(self.path).at(policy.tokenizer.clock)
        fields = read_model_files(self.path).hf_json if policy.tokenizer.sees else None
        if fields is not None and takes_images(fields):
            tokenizer = tokenizer.for_images(fields, self.path, ImageSection())
        self._images = tokenizer.images if tokenizer.sees else None
        model = load_model(self.path, mesh=mesh, vision="none" if self._images is None else "frozen")
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
        self._longest, self._mesh = model.config.max_positions, mesh
        self._rows, _ = scored_shape(rows, 1, mesh, self._longest)
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

    def _read(self, trajectory: Trajectory) -> ReadSequence | ValueError:
        """Tokens and pictures of the answer; a ValueError for one without a sampled token, longer than the model's
        context, with messages that the model's chat template does not write, or with pictures for a model of text."""
        if not trajectory.num_sampled:
            return ValueError("no token was sampled")
        if trajectory.answer.images is not None and self._images is None:
            return ValueError(f"{self.path} reads text alone, and the sample has pictures")
        try:
            sequence = self._sequence(trajectory.answer)
        except ConfigError as error:
            return ValueError(f"{self.path}: {error}")
        if len(sequence.tokens) > self._longest:
            return ValueError(f"{self.path}: {len(sequence.tokens)} tokens, more than its {self._longest} positions")
        return sequence

    def _sequence(self, trajectory: Trajectory) -> ReadSequence:
        """Tokens, the position at which the completion starts, and the pictures."""
        if self._as_sampled:
            tokens, start = list(trajectory.tokens), list(trajectory.sampled).index(True)
            tokens += self._tail if tokens[-1] in self._stops else []
            images = trajectory.images
        else:
            prompt, answer = trajectory.messages[:-1], trajectory.messages[-1:]
            masked = self._renderer.answer(prompt, answer, trajectory.example.tools)
            tokens, start = list(masked.tokens), masked.mask.index(True)
            seen = map(self._renderer.tokenizer.image_of, pictures_in(prompt) if masked.images else ())
            images = PromptImages.of(list(seen), masked.images or ())
        whole = tokens if self.reduce == "last" else self._with_last_step(tokens, start)
        return ReadSequence(whole, start, images)

    def _with_last_step(self, tokens: list[int], start: int) -> list[int]:
        """Tokens without the end-of-completion tokens, with a newline after an unterminated last step."""
        decode = self._renderer.tokenizer.decode
        while len(tokens) > start + 1 and (tokens[-1] in self._stops or not decode(tokens[-1:]).strip()):
            tokens.pop()
        return tokens if "\n" in decode(tokens[-1:]) else tokens + self._newline

    def _of_rows(self, sequences: Sequence[ReadSequence]) -> list[float]:
        lengths = [len(one.tokens) for one in sequences]
        _, width = scored_shape(self._rows, max(lengths), self._mesh, self._longest)
        rows = [[one.arrays()] for one in sequences]
        filled = fill_rows(rows, {"tokens": width}, num_rows=self._rows, like={"tokens": rows[0][0]["tokens"]})
        filled["loss_weight"] = filled["tokens_segments"].astype(np.float32)
        images = ImageRows.of_samples([one.images for one in sequences], width)
        filled |= {} if images is None else images(rows, filled["tokens"].shape)[1]
        scores = self._model.scores(to_batch(filled))
        return [float(self._reduced(scores[row], one.tokens, one.start)) for row, one in enumerate(sequences)]

    def _reduced(self, scores: Float[np.ndarray, " T"], tokens: Sequence[int], start: int) -> np.floating:
        last = len(tokens) - 1
        if self.reduce == "last":
            return scores[last]
        decode = self._renderer.tokenizer.decode
        ends = [at for at in range(start, last + 1) if "\n" in decode([tokens[at]])]
        steps = scores[ends]
        return steps.min() if self.reduce == "min" else steps.mean()


def scored_shape(samples: int, length: int, mesh: Mesh, longest: int) -> tuple[int, int]:
    """Rows and tokens of a pass over samples of at most `length` tokens, by a model with `longest` positions."""
    # Lengths are powers of two: few compilations, whatever the longest sequence of a step.
    shards, width = row_shards(mesh), max(MIN_WIDTH, 1 << (length - 1).bit_length())
    return -(-samples // shards) * shards, min(width, longest)


def classifier_path(path: Locator) -> str:
    """Resolve the folder or hub id of a reward model. ConfigError for another model."""
    files = read_model_files(path.resolved)
    if files.config is not None and not files.config.scalar_head:
        raise ConfigError(
            f"rewards.model: {path} is no reward model; set a {CLASSIFIER} with one label, such as the model that a "
            "stage of kind reward_model leaves"
        )
    return path.resolved


def takes_pictures(path: str) -> bool:
    """Tell whether a reward model has a vision tower."""
    fields = read_model_files(path).hf_json
    return fields is None or takes_images(fields)


def _tail(renderer: Renderer) -> list[int]:
    """Tokens that the template writes after the end-of-turn token."""
    if not renderer.chat:
        return []
    asked = renderer.answer([{"role": "user", "content": "?"}], [{"role": "assistant", "content": "!"}])
    return asked.tokens[len(asked.mask) - asked.mask[::-1].index(True) :]


def _same(one: Tokenizer, other: Tokenizer) -> bool:
    """Tell whether both tokenizers produce the same tokens for the same messages, and of pictures too if both see."""
    if one.chat_template != other.chat_template or one.hf.get_vocab() != other.hf.get_vocab():
        return False
    both = one.sees and other.sees
    return not both or (one.images.settings == other.images.settings and one.images.difference(other.images) is None)


def _renderer(tokenizer: Tokenizer, policy: Renderer) -> Renderer:
    return Renderer(tokenizer, policy.chat and tokenizer.chat_template is not None)
