"""Observer of whole RL runs from outside: what each step learned from and did, compared with `tests.oracles`."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posttrain.batch import IMAGE_ARRAYS, Batch, model_inputs
from posttrain.models.decoder import Decoder
from posttrain.rl.assemble import sample_rows
from posttrain.runtime.xla import Recent
from posttrain.train.trainer import Trainer
from posttrain.weights.load import load_model
from posttrain.weights.state import ModelWeights
from tests.oracles import (
    OptimizerReference,
    Rollouts,
    Sample,
    algorithm_of,
    credit_of_tokens,
    critic_credit,
    gradient_reference,
    is_learned,
    keep_highest_entropies,
    largest_logits,
    policy_loss_reference,
    query_key_products,
    sample_advantages,
    total_reward,
    value_loss_reference,
)

ROWS = 16
"""Rows of a pass of `PlainModel`."""
PROGRAMS = Recent[Any](16)
NO_GRADIENT = 1e-10
"""Norm of a gradient of which all is rounding of the oracle's differences: where every token is rejected."""

Arrays = Mapping[str, np.ndarray]
SCALED = (".attention.q.kernel", ".attention.k.kernel")
"""Parameters that `qk_clip` scales."""


class OfRow(NamedTuple):
    """What a model says of the tokens of a row, float64; 0 where it does not."""

    logps: np.ndarray
    entropy: np.ndarray
    values: np.ndarray
    """Scores of the token before."""
    scores: np.ndarray
    best: np.ndarray
    """Most probable token at each place."""


class PlainModel:
    """Statistics of a model by its full logits, each row by itself, on one device; and gradients by its parameters."""

    def __init__(self, model: Decoder, temperature: float):
        weights = ModelWeights(model)
        shapes, structs = weights.outline(), weights.structs()
        adapter = frozenset(path for path in structs if path.endswith(("lora_a", "lora_b")))
        tower = frozenset(path for path in structs if path.startswith("tower."))
        trainable = adapter | tower if adapter else frozenset(structs)
        self.trainable, self.scalar_head = trainable, model.config.scalar_head

        def forward(trained: Any, frozen: Any, batch: Batch, *, greedy: bool = False) -> dict[str, jax.Array]:
            own = shapes.bind({**frozen, **trained})
            own.compute = dataclasses.replace(own.compute, mesh=None)
            tokens = jnp.asarray(batch.tokens)
            experts = None if batch.experts is None else jnp.moveaxis(jnp.asarray(batch.experts, jnp.int32), 2, 0)
            hidden, _, _ = own.forward(
                tokens,
                jnp.asarray(batch.positions),
                jnp.asarray(batch.segments),
                experts=experts,
                images=own.images_of(batch),
            )
            first = ((0, 0), (1, 0))
            if own.config.scalar_head:
                scores = own.scores(hidden)
                return {"values": jnp.pad(scores[:, :-1], first), "scores": scores}
            logits = own.logits(hidden)[:, :-1, : own.config.vocab_size].astype(jnp.float32) / temperature
            logs = jax.nn.log_softmax(logits)
            logps = jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1)[..., 0]
            entropy = -jnp.sum(jnp.exp(logs) * logs, axis=-1)
            best = {"best": jnp.pad(jnp.argmax(logits, axis=-1), first)} if greedy else {}
            return {"logps": jnp.pad(logps, first), "entropy": jnp.pad(entropy, first), **best}

        def make() -> tuple[Any, Any]:
            def pull(trained: Any, frozen: Any, batch: Batch, cotangents: Any) -> Any:
                return jax.vjp(lambda x: forward(x, frozen, batch), trained)[1](cotangents)[0]

            return jax.jit(functools.partial(forward, greedy=True)), jax.jit(pull)

        key = (weights.graph, frozenset((p, x.shape, x.dtype) for p, x in structs.items()), temperature)
        self._forward, self._pull = PROGRAMS.of(key, make)

    def stats(self, weights: Arrays, rows: Sequence[Any]) -> list[OfRow]:
        """Statistics of each row under these weights."""
        made = []
        for some, batch in passes(rows):
            out = self._forward(*self._split(weights), batch)
            arrays = {name: np.asarray(x, np.float64) for name, x in out.items()}
            none = np.zeros(batch.shape)
            of = [arrays.get(name, none) for name in OfRow._fields]
            made += [OfRow(*(x[n, : len(row.tokens)] for x in of)) for n, row in enumerate(some)]
        return made

    def gradient(
        self, weights: Arrays, rows: Sequence[Any], cotangents: Mapping[str, Sequence[np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """Gradient by the trained parameters of the sum of statistics times their cotangents."""
        total: dict[str, np.ndarray] = {}
        for start, (some, batch) in zip(range(0, len(rows), ROWS), passes(rows), strict=True):
            names = ("values", "scores") if self.scalar_head else ("logps", "entropy")
            padded = {name: np.zeros(batch.shape, np.float32) for name in names}
            for name, one in cotangents.items():
                for number in range(len(some)):
                    values = one[start + number]
                    padded[name][number, : len(values)] = values
            for path, x in self._pull(*self._split(weights), batch, padded).items():
                total[path] = total.get(path, 0.0) + np.asarray(x, np.float64)
        return total

    def _split(self, weights: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
        trained = {path: x for path, x in weights.items() if path in self.trainable}
        return trained, {path: x for path, x in weights.items() if path not in trained}


def passes(rows: Sequence[Any]) -> Iterator[tuple[Sequence[Any], Batch]]:
    """Batches of `ROWS` rows, one sequence in each."""
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        if any(row.images is not None for row in some):
            yield some, pictured(some)
            continue
        arrays = np.zeros((4, ROWS, 64), np.int32)
        experts = None
        if some[0].experts is not None:
            experts = np.full((ROWS, 64, *some[0].experts.shape[1:]), -1, np.int32)
        for number, row in enumerate(some):
            size = len(row.tokens)
            arrays[0, number, :size] = row.tokens
            arrays[1, number, :size] = np.arange(size)
            arrays[2, number, :size] = 1
            arrays[3, number, :size] = row.sampled
            if experts is not None:
                experts[number, :size] = row.experts
        tokens, positions, segments, sampled = arrays
        weight = sampled.astype(np.float32)
        yield some, Batch(tokens=tokens, positions=positions, segments=segments, loss_weight=weight, experts=experts)


def pictured(rows: Sequence[Any]) -> Batch:
    """Batch with one sequence and its picture, if it has one, in each row; rows at the end are copies of the first."""
    made = [model_inputs(sample_rows([row], row_tokens=64, num_rows=1)[0]) for row in rows]
    like = next(one for one in made if one.has_images)
    arrays = {name: x for name in IMAGE_ARRAYS if (x := getattr(like, name)) is not None}
    none: dict[str, Any] = {name: np.zeros_like(x) for name, x in arrays.items()}
    made = [one if one.has_images else dataclasses.replace(one, **none) for one in made]
    made += [made[0]] * (ROWS - len(made))
    batch: Batch = jax.tree.map(lambda *x: np.concatenate(x), *made)
    return batch


def on_host(weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Copies of parameters, which the next update donates."""
    return {path: np.array(x) for path, x in weights.items()}


@dataclass(kw_only=True)
class Update:
    """An update of a learner, and what the run told of it."""

    batch: Batch
    stats: list[OfRow]
    """Statistics of all rows before it."""
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    """Trained parameters after it."""
    loss: float
    grad_norm: float
    skipped: bool


@dataclass(kw_only=True)
class Step:
    """A step as it was seen from outside."""

    version: int
    """Version of the actor's weights before it."""
    run: Rollouts
    rows: list[Any]
    record: dict[tuple[int, int], tuple[float, float]]
    """Reward and advantage of each sample by number of group and sample, of the run."""
    updates: list[Update] = field(default_factory=list)
    critic_updates: list[Update] = field(default_factory=list)

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [tuple(row.tokens) for row in self.rows]


@dataclass
class Text:
    """Row of tokens alone."""

    tokens: list[int]
    images: None = None
    experts: None = None

    @property
    def sampled(self) -> list[bool]:
        return [True] * len(self.tokens)


class Observer:
    """Looks at steps of RL. The reference is followed here, too: `mixup` of the new weights each time."""

    def __init__(self, config: Mapping[str, Any], teachers: Sequence[Path]):
        self.stage, self.teachers = config["stages"][0], teachers
        self.model = config["model"]
        self.bfloat16 = self.model.get("dtype") == "bfloat16"
        stage = self.stage
        self.algorithm = algorithm_of(stage)
        self.temperature: float = stage["sampling"].get("temperature", 1.0)
        self.steps: list[Step] = []
        self.reference: dict[str, np.ndarray] | None = None
        self.actor: PlainModel | None = None
        self.critic: PlainModel | None = None
        self.versions: dict[int, dict[str, np.ndarray]] = {}
        """Weights of the actor before each step, by their version."""
        self.rates: dict[int, float] = {}
        """Pass rate of each prompt with a group, as a curriculum counts it."""

    def begin(self, cluster: Any, rollouts: Any) -> None:
        """Take note of a step's samples, and of what all models say of them, before its first update."""
        actor = cluster.actor
        if self.actor is None:
            self.actor = PlainModel(actor.model, self.temperature)
        weights = on_host(actor.weights)
        self.follow({path: x.astype(np.float64) for path, x in weights.items() if path in self.actor.trainable})
        assert self.reference is not None
        rows: list[Any] = []
        groups = []
        total_PG = rollouts.rewards.total_PG
        for p, group in enumerate(rollouts.groups_P):
            made = []
            for g, sample in enumerate(group):
                rewards = {name: float(part[p, g]) for name, part in rollouts.rewards.parts_PG.items()}
                made.append(self.sample(sample, rewards, len(rows)))
                rows += sample.rows
            groups.append(made)
        own = {path: x.astype(weights[path].dtype) for path, x in self.reference.items()}
        if self.stage.get("reference", {}).get("model") == "base":
            own = {path: np.zeros_like(x) for path, x in weights.items() if path.endswith("lora_b")}
        old, sampler = self.actor.stats(weights, rows), [np.asarray(row.logps, np.float64) for row in rows]
        # A reference routes by itself.
        ref = self.actor.stats({**weights, **own}, [unrouted(row) for row in rows])
        none = [np.zeros(len(row.tokens)) for row in rows]
        held = [x for path, x in weights.items() if not path.endswith(".lora_scale")]  # a constant
        assert not self.bfloat16 or all(x.dtype == jnp.bfloat16 for x in held)
        self.versions[cluster.version] = weights
        self.check_samples(cluster.version, groups, rows)
        run = Rollouts(
            groups=groups,
            weights=self.weights,
            sampled=[np.asarray(row.sampled, bool) for row in rows],
            sampler=sampler,
            behaviour=[x - np.asarray(row.kept_logps, np.float64) for x, row in zip(sampler, rows, strict=True)],
            old=sampler if self.algorithm.get("old_logps") == "sampler" else [one.logps for one in old],
            entropy=[one.entropy for one in old],
            ref=[one.logps for one in ref],
            teacher=self.taught(rows) if "teachers" in self.stage else none,
            values=self.values(cluster, rows) if self.algorithm["kind"] == "ppo" else none,
        )
        assert dict(rollouts.weights) == self.weights
        for group, totals in zip(groups, total_PG, strict=True):
            expected = [total_reward(sample, self.weights) for sample in group]
            np.testing.assert_allclose(totals, expected, rtol=1e-5, atol=1e-6)
        kept = sorted(self.kept(groups), key=lambda group: group[0].group)
        self.steps.append(
            Step(version=cluster.version, run=dataclasses.replace(run, groups=kept), rows=rows, record={})
        )

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward by its name, as the configuration has it."""
        given = self.stage["rewards"]
        named = {one.get("name") or one["fn"].rsplit(":", 1)[1]: one.get("weight", 1.0) for one in given}
        return {**named, "env": 1.0} if "agent" in self.stage or "env" in self.stage else named

    def sample(self, sample: Any, rewards: dict[str, float], first: int) -> Sample:
        """A sample, whose rows begin with this number. Without an environment it is one turn."""
        turns = [(first + n, t.start, t.end, t.reward or 0.0) for n, t in sample.turns_in_time]
        if not turns:
            places = np.flatnonzero(sample.sampled)
            turns = [(first, int(places[0]), int(places[-1]) + 1, 0.0)]
        row, _, end, _ = turns[-1]
        ends = {*self.stage["sampling"]["stop_token_ids"], 258, 260}
        cut = sample.rows[row - first].tokens[end - 1] not in ends
        assert cut == (sample.stop == "length"), (cut, sample.stop, turns, [row.tokens for row in sample.rows])
        return Sample(
            group=sample.group,
            number=sample.sample,
            rewards=rewards,
            rows=range(first, first + len(sample.rows)),
            cut=cut,
            turns=turns,
        )

    def check_samples(self, version: int, groups: Sequence[Sequence[Sample]], rows: Sequence[Any]) -> None:
        """Samples are those of weights that are as old as they may be, end at the first stop token, and are drawn from
        prompts that are not solved yet where the curriculum wants these alone."""
        ahead = self.stage.get("asynchronous", {"max_staleness": 0})
        oldest = max(version - ahead["max_staleness"], 0)
        flying = "in_flight" in ahead
        for row in rows:
            drawn = {number for number, x in zip(row.versions, row.sampled, strict=True) if x}
            assert drawn <= set(range(oldest, version + 1)) if flying else drawn <= {oldest}, (drawn, version)
        if not flying:
            assert self.actor is not None
            made = self.actor.stats(self.versions[oldest], rows)
            gap = [one.logps[np.asarray(row.sampled, bool)] for one, row in zip(made, rows, strict=True)]
            told = [np.asarray(row.logps)[np.asarray(row.sampled, bool)] for row in rows]
            apart = np.abs(np.concatenate(gap) - np.concatenate(told))
            limit = 0.05 if self.bfloat16 else 0.01 if self.rounded else 1e-4
            assert apart.mean() < limit, f"sampler and trainer differ by {apart}"
        ends = {*self.stage["sampling"]["stop_token_ids"], 258, 260}
        flat = [sample for group in groups for sample in group]
        for sample in flat:
            for row, start, end, _ in sample.turns:
                said = rows[row].tokens[start:end]
                assert not ends & set(said[:-1]), said
                full = len(said) == self.stage["sampling"]["max_tokens"] or end == self.stage["row_tokens"]
                assert said[-1] in ends or full, said
                assert all(rows[row].sampled[start:end])
            paid = sum(reward for *_, reward in sample.turns)
            if not np.isnan(sample.rewards.get("env", np.nan)):
                np.testing.assert_allclose(sample.rewards["env"], paid, rtol=1e-6)
            places = sum(end - start for _, start, end, _ in sample.turns)
            assert places == sum(sum(rows[row].sampled) for row in sample.rows)
        self.check_scores(groups, rows)
        if "grammar" in self.stage["sampling"]:
            # Whole turns are in its language, with the stop token behind them.
            turns = [rows[row].tokens[start:end] for sample in flat for row, start, end, _ in sample.turns]
            texts = [bytes(list(turn[:-1])) for turn in turns if turn[-1] in ends]
            regex = self.stage["sampling"]["grammar"]["regex"]
            assert all(re.fullmatch(regex.encode(), text) for text in texts), texts
        if "curriculum" in self.stage and not ahead["max_staleness"]:
            self.check_curriculum({rows[group[0].rows[0]].example.index: group for group in groups})

    def check_curriculum(self, groups: Mapping[int, Sequence[Sample]]) -> None:
        """Prompts of groups have pass rates below 0.6, unless none has, by the groups before: half of the new share and
        half of the rate before."""
        solved = {index for index, rate in self.rates.items() if rate >= 0.6}
        assert not solved & groups.keys() or len(solved) == 6, (groups.keys(), self.rates)
        for index, group in groups.items():
            share = np.mean([total_reward(sample, self.weights) > 0.5 for sample in group])
            self.rates[index] = (self.rates[index] + share) / 2 if index in self.rates else share

    def check_scores(self, groups: Sequence[Sequence[Sample]], rows: Sequence[Any]) -> None:
        """A reward model's score of a sample is that of the last token of its last row, where they have one
        template."""
        samples = [sample for group in groups for sample in group if "model" in sample.rewards]
        if not samples or self.model["chat_template"] != "short.jinja":
            return
        model, weights = loaded(self.teachers[0] / "reward")
        scores = PlainModel(model, 1.0).stats(weights, [unrouted(rows[sample.rows[-1]]) for sample in samples])
        expected = [one.scores[-1] for one in scores]
        np.testing.assert_allclose([s.rewards["model"] for s in samples], expected, rtol=1e-3, atol=1e-5)

    def check_evaluations(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Mean rewards of greedy answers to all prompts, before each step: the share of the answer below 128, and 1. Of
        one turn, by the same arithmetic as the sampler's. With teachers evaluations sample as training does."""
        assert self.actor is not None
        others = {"env", "agent", "teachers"} & self.stage.keys() or "grammar" in self.stage["sampling"]
        if others or self.rounded or list(self.weights) != ["low"] or self.model["chat_template"] != "short.jinja":
            return
        prompts = [[259, ord("u"), *f"{n}?".encode(), 260, 259, ord("a")] for n in range(1, 7)]
        ends = {*self.stage["sampling"]["stop_token_ids"], 258, 260}
        for weights, line in zip(self.versions.values(), told, strict=False):
            answers: list[list[int]] = [[] for _ in prompts]
            for _ in range(self.stage["sampling"]["max_tokens"]):
                texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
                # The token after the last one is the best at the place behind it.
                stats = self.actor.stats(weights, [Text([*text, 0]) for text in texts])
                for answer, one in zip(answers, stats, strict=True):
                    if not ends & set(answer):
                        answer.append(int(one.best[-1]))
            expected = np.mean([1.0 + sum(t < 128 for t in answer) / len(answer) for answer in answers])
            np.testing.assert_allclose(line["eval/reward"], expected, rtol=1e-5)

    @property
    def rounded(self) -> bool:
        """True if the sampler or the model computes in fewer bits."""
        return self.bfloat16 or bool({"quantize", "cache_dtype"} & self.stage.get("rollout", {}).keys())

    def kept(self, groups: Sequence[Sequence[Sample]]) -> list[Sequence[Sample]]:
        """Groups to learn from: those with different rewards where that is wanted, or all if none has them."""
        totals = [[total_reward(sample, self.weights) for sample in group] for group in groups]
        mixed = [bool(np.nanmax(one) - np.nanmin(one) > 1e-6) for one in totals]
        if "refill" in self.stage:
            return [group for group, useful in zip(groups, mixed, strict=True) if useful]
        if self.algorithm["filter"] == "mixed" and any(mixed):
            return [group for group, useful in zip(groups, mixed, strict=True) if useful]
        return list(groups)

    def follow(self, now: dict[str, np.ndarray]) -> None:
        """Move the reference."""
        moving = self.stage.get("reference", {})
        if self.reference is None:
            self.reference = now
        elif "refresh_every" in moving:
            share = moving.get("mixup", 1.0)
            self.reference = {path: share * x + (1 - share) * self.reference[path] for path, x in now.items()}

    def taught(self, rows: Sequence[Any]) -> list[np.ndarray]:
        """Log-probabilities of each row's teacher."""
        of_teachers = []
        for folder in self.teachers:
            model, weights = loaded(folder)
            of_teachers.append(PlainModel(model, self.temperature).stats(weights, rows))
        several = "teacher_column" in self.stage
        numbers = [int(row.example.row["who"][1:]) if several else 0 for row in rows]
        return [of_teachers[number][n].logps for n, number in enumerate(numbers)]

    def values(self, cluster: Any, rows: Sequence[Any]) -> list[np.ndarray]:
        trainer = cluster.critic.trainer
        if self.critic is None:
            self.critic = PlainModel(trainer.model, 1.0)
        return [one.values for one in self.critic.stats(on_host(trainer.weights), [unrouted(row) for row in rows])]

    def step(self, trainer: Trainer, batch: Batch, update: Callable[[], Any]) -> Any:
        """Look at an update of actor or critic."""
        of_critic = trainer.model.config.scalar_head
        model, step = self.critic if of_critic else self.actor, self.steps[-1]
        assert model is not None
        before = on_host(trainer.weights)
        rows = [unrouted(row) for row in step.rows] if of_critic else step.rows
        stats = model.stats(before, rows)
        told = update()
        seen = Update(
            batch=batch,
            stats=stats,
            before=before,
            after=on_host(trainer.weights),
            loss=told["loss"].value(),
            grad_norm=float(told["grad_norm"]),
            skipped=float(told["update_skipped"]) > 0,
        )
        (step.critic_updates if of_critic else step.updates).append(seen)
        return told

    def end(self, result: Any) -> None:
        """Take note of what a step tells of its samples."""
        self.steps[-1].record.update(
            ((sample.group, sample.sample), (float(result.rewards.total_PG[p, g]), float(result.advantages_PG[p, g])))
            for p, group in enumerate(result.groups_P)
            for g, sample in enumerate(group)
        )

    def check(self) -> None:
        """Everything that the run did is the oracle's: samples of each update, advantages, losses, gradients, updates
        of the weights, and what the record has."""
        coarse = 0.1 if self.bfloat16 else 0.0
        actor = OptimizerReference(self.stage["optimizer"], coarse)
        of_critic = {"learning_rate": 1e-5, **self.algorithm.get("critic", {}).get("optimizer", {})}
        critic = OptimizerReference(of_critic, coarse)
        entropy_coef, latest = self.algorithm["entropy_coef"], 0.0
        target = self.algorithm["entropy_target"]
        for step in self.steps:
            run = step.run
            samples = [s for group in run.groups for s in group if is_learned(s, run, self.algorithm)]
            advantages, returns = self.credit(step, samples)
            self.check_record(step)
            algorithm = dict(self.algorithm)
            if target is not None:  # arXiv:2505.22312: the bonus acts while the entropy is at most its target
                algorithm["entropy_coef"] = entropy_coef if latest <= target else 0.0
            parts = self.parts(step, samples)
            entropies = []
            for part, update in zip(parts, step.updates, strict=True):
                self.check_credit(step, update.batch, advantages, part)
                if part:
                    self.check_update(step, update, part, advantages, algorithm, actor)
                    entropies += [update.stats[row].entropy[run.sampled[row]] for s in part for row in s.rows]
            if target is not None and entropies:
                latest = float(np.concatenate(entropies).mean())
                change = self.algorithm["entropy_step"] * (1 if latest < target else -1)
                entropy_coef = max(0.0, entropy_coef + change)
            for part, update in zip(parts, step.critic_updates, strict=self.algorithm["kind"] == "ppo"):
                if part:
                    self.check_critic(step, update, part, returns, critic)

    def credit(self, step: Step, samples: Sequence[Sample]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Advantages and, of a critic, returns of each token."""
        run = step.run
        coef = self.stage.get("teacher_coef", 1.0) if "teachers" in self.stage else None
        if self.algorithm["kind"] == "ppo":
            advantages, returns = critic_credit(run, samples, self.algorithm)
        else:
            advantages = returns = credit_of_tokens(run, self.algorithm, coef)
        if self.algorithm["top_entropy"] is not None and samples:
            learned = [row for s in samples for row in s.rows]
            every = [one.copy() for one in advantages]
            least = keep_highest_entropies(advantages, learned, run, self.algorithm["top_entropy"])
            # First tokens of a group have one entropy: where it is the least, rounding tells which are kept.
            told = {tokens: (u.batch, n, at) for u in step.updates for tokens, at, n in segments(u.batch)}
            for row in learned:
                tied = run.sampled[row] & (np.abs(run.entropy[row] - least) < 1e-5)
                if tied.any():
                    batch, number, place = told[step.tokens[row]]
                    kept = np.asarray(batch.advantages)[number, place] != 0
                    advantages[row][tied] = np.where(kept, every[row], 0.0)[tied]
        return advantages, returns

    def check_record(self, step: Step) -> None:
        """Reward and advantage that the record has of each sample; NaN of those without."""
        advantages, _ = sample_advantages(step.run, self.algorithm)
        expected = dict.fromkeys(step.record, np.nan)
        for group, of_group in zip(step.run.groups, advantages, strict=True):
            expected |= {(s.group, s.number): a for s, a in zip(group, of_group, strict=True)}
            for sample in group:
                reward, _ = step.record[sample.group, sample.number]
                np.testing.assert_allclose(reward, total_reward(sample, step.run.weights), rtol=1e-5)
        for key, (_, advantage) in step.record.items():
            np.testing.assert_allclose(np.nan_to_num(advantage), np.nan_to_num(expected[key]), rtol=1e-3, atol=1e-3)

    def parts(self, step: Step, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Samples of each update: each epoch passes over every part of the groups once, whatever the order."""
        updates, epochs = self.stage.get("updates", 1), self.stage.get("update_epochs", 1)
        assert len(step.updates) == updates * epochs
        each = [[step.run.groups[i] for i in some] for some in np.array_split(np.arange(len(step.run.groups)), updates)]
        learned = {id(sample) for sample in samples}
        parts = [[s for group in some for s in group if id(s) in learned] for some in each]
        texts = [Counter(step.tokens[row] for s in part for row in s.rows) for part in parts]
        made: list[list[Sample]] = []
        for epoch in range(epochs):
            left = list(range(updates))
            for update in step.updates[epoch * updates : (epoch + 1) * updates]:
                seen = Counter(tokens for tokens, _, _ in segments(update.batch))
                alike = [number for number in left if texts[number] == seen]
                assert alike, (seen, [texts[number] for number in left])
                assert epoch or alike[0] == left[0], "the first epoch goes in order"
                left.remove(alike[0])
                made.append(parts[alike[0]])
        return made

    def check_credit(self, step: Step, batch: Batch, credit: list[np.ndarray], part: Sequence[Sample]) -> None:
        """Each sampled token is learned from, with the oracle's advantage and what the reference says of it: a KL near
        0 shows little of that in the loss. Equal rows may be of samples with different rewards."""
        rows = [row for sample in part for row in sample.rows]
        for tokens, place, number in segments(batch):
            got = np.asarray(batch.advantages)[number, place]
            weight = np.asarray(batch.loss_weight)[number, place]
            alike = [row for row in rows if step.tokens[row] == tokens]
            assert weight.tolist() == step.run.sampled[alike[0]].tolist()
            near = [np.allclose(got, credit[row], rtol=self.tolerance, atol=self.tolerance) for row in alike]
            assert any(near), (got, [credit[row] for row in alike])
            if batch.ref_logps is not None:
                mask, ref = step.run.sampled[alike[0]], np.asarray(batch.ref_logps)[number, place]
                atol = 0.1 if self.bfloat16 else 2e-4
                np.testing.assert_allclose(ref[mask], step.run.ref[alike[0]][mask], atol=atol, err_msg="reference")

    @property
    def tolerance(self) -> float:
        return 0.03 if self.bfloat16 else 2e-3

    def check_update(
        self,
        step: Step,
        update: Update,
        part: Sequence[Sample],
        credit: list[np.ndarray],
        algorithm: Mapping[str, Any],
        optimizer: OptimizerReference,
    ) -> None:
        """Loss of the actor, its gradient, and the update of its weights."""
        held = [one.logps for one in update.stats]
        entropy = [one.entropy for one in update.stats]
        at: dict[str, Any] = {"held": held, "algorithm": algorithm}
        loss = functools.partial(policy_loss_reference, step.run, part, credit)
        np.testing.assert_allclose(
            update.loss, loss(held, entropy, **at), rtol=self.tolerance, atol=self.tolerance / 50, err_msg="loss"
        )
        learned = {row for sample in part for row in sample.rows}
        masks = [x & (row in learned) for row, x in enumerate(step.run.sampled)]
        cotangents = {
            "logps": gradient_reference(lambda new: loss(new, entropy, **at), held, masks),
            "entropy": [np.zeros(len(x)) for x in held],
        }
        if algorithm["entropy_coef"]:
            cotangents["entropy"] = gradient_reference(lambda new: loss(held, new, **at), entropy, masks)
        assert self.actor is not None
        # A critic may learn alone at first, and equal rewards teach nothing.
        warm = step.version >= algorithm.get("critic", {}).get("warmup", 0)
        largest = max(np.abs(credit[row]).max() for row in learned)
        skipped = False if warm and largest > 1e-5 else None if warm and largest > 1e-8 else True
        gradient = self.actor.gradient(update.before, step.rows, cotangents)
        changes = self.check_gradient(update, gradient, optimizer, skipped=skipped)
        if optimizer.qk_clip is not None and changes:
            self.check_clip(step, update, part, changes, optimizer)

    def check_critic(
        self,
        step: Step,
        update: Update,
        part: Sequence[Sample],
        returns: list[np.ndarray],
        optimizer: OptimizerReference,
    ) -> None:
        """Loss of the critic, its gradient, and the update of its weights."""
        values = [one.values for one in update.stats]

        def loss(values: Sequence[np.ndarray]) -> float:
            return value_loss_reference(step.run, part, returns, values, self.algorithm["value_clip"])

        np.testing.assert_allclose(
            update.loss, loss(values), rtol=self.tolerance, atol=self.tolerance / 50, err_msg="value loss"
        )
        learned = {row for sample in part for row in sample.rows}
        masks = [x & (row in learned) for row, x in enumerate(step.run.sampled)]
        assert self.critic is not None
        rows = [unrouted(row) for row in step.rows]
        gradient = self.critic.gradient(update.before, rows, {"values": gradient_reference(loss, values, masks)})
        self.check_gradient(update, gradient, optimizer, skipped=False)

    def check_clip(
        self,
        step: Step,
        update: Update,
        part: Sequence[Sample],
        changes: Mapping[str, np.ndarray],
        optimizer: OptimizerReference,
    ) -> None:
        """Products of each head's queries and keys after an update: scaled by what its largest logit was above the
        limit."""
        after = {path: update.before[path] + change for path, change in changes.items()}
        texts = [step.tokens[row] for sample in part for row in sample.rows]
        largest = np.max([largest_logits(update.before, text, self.model["init"]) for text in texts], axis=0)
        limit = optimizer.qk_clip
        assert limit is not None
        factors = np.minimum(1.0, limit / np.maximum(largest, limit))
        expected = query_key_products(after, self.model["init"]) * factors[:, None, None]
        made = query_key_products(update.after, self.model["init"])
        error = optimizer.tolerance * np.abs(expected).max()
        np.testing.assert_allclose(made, expected, rtol=0.05, atol=error)

    def check_gradient(
        self, update: Update, gradient: dict[str, np.ndarray], optimizer: OptimizerReference, *, skipped: bool | None
    ) -> dict[str, np.ndarray]:
        """Norm of a gradient, and the weights after its update; returns their changes before any clip of attention.
        `skipped`: whether there is none; None: rounding decides."""
        norm = np.sqrt(sum(np.square(x).sum() for x in gradient.values()))
        np.testing.assert_allclose(
            update.grad_norm, norm, rtol=5 * self.tolerance, atol=self.tolerance / 50, err_msg="norm of the gradient"
        )
        if norm < NO_GRADIENT:
            gradient = {path: np.zeros_like(x) for path, x in gradient.items()}
        before = {path: update.before[path].astype(np.float64) for path in gradient}
        assert skipped is None or update.skipped == skipped
        if update.skipped:
            assert all(np.array_equal(update.before[path], update.after[path]) for path in gradient)
            return {}
        expected = optimizer.update(before, gradient)
        if 0 < update.grad_norm < NO_GRADIENT:
            return {}  # Adam makes a whole step of it, in a direction that differences do not tell
        compared = [path for path in before if not (optimizer.qk_clip and path.endswith(SCALED))]
        moved = {path: update.after[path].astype(np.float64) - before[path] for path in compared}
        # Without numbers whose gradient is not clear: the sign of a first update is that of rounding there.
        least = 0.1 if self.bfloat16 else 1e-3
        clear = {path: np.abs(gradient[path]) >= least * np.abs(gradient[path]).max() for path in compared}
        size = np.sqrt(sum(np.square(expected[path][clear[path]]).sum() for path in compared))
        error = np.sqrt(sum(np.square((moved[path] - expected[path])[clear[path]]).sum() for path in compared))
        # What is stored is the master rounded to 8 bits, before and after.
        held = np.sqrt(sum(np.square(before[path][clear[path]]).sum() for path in compared))
        most = optimizer.tolerance * size + (held / 2**8 if self.bfloat16 else 0.0)
        assert error <= most, f"update of the weights: {error / size:.3g} of it is wrong"
        return expected


def unrouted(row: Any) -> Any:
    """Row without the actor's experts."""
    return row if row.experts is None else dataclasses.replace(row, experts=None)


def segments(batch: Batch) -> Iterator[tuple[tuple[int, ...], slice, int]]:
    """Tokens, place and row of each sequence of a batch."""
    for row, ids in enumerate(np.asarray(batch.segments)):
        for number in np.unique(ids[ids > 0]):
            where = np.flatnonzero(ids == number)
            place = slice(int(where[0]), int(where[-1]) + 1)
            yield tuple(np.asarray(batch.tokens)[row, place].tolist()), place, row


@functools.cache
def loaded(folder: Path) -> tuple[Decoder, dict[str, np.ndarray]]:
    model = load_model(folder, dtype=jnp.float32)
    return model, on_host(ModelWeights(model).read())
