"""An observer of offline stages: what a trainer is given and what it makes of it, against `tests.offline_oracles`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from safetensors.numpy import load_file

from posttrain.batch import Batch
from posttrain.models.activations import HIDDEN, Taps
from posttrain.models.decoder import Decoder
from posttrain.models.layers import param
from posttrain.models.quant import Quantized
from posttrain.runtime.xla import Recent
from posttrain.train.trainer import Trainer
from posttrain.weights.load import init_model, random_weights
from posttrain.weights.lora import sites
from posttrain.weights.state import ModelWeights
from tests import offline_oracles as oracles
from tests import optimizer_oracles as updates
from tests.offline_oracles import TURN, Labelled, Seen, Unit
from tests.pairs import rows_of_datasets, teacher_fields
from tests.stages.runs import lines

ROWS, TOKENS, VOCAB = 32, 64, 261
"""Shape in which models read sequences, each in a row of its own; one program serves all runs."""
SCALE = 2.0
"""Scale of an adapter without `alpha`."""
Arrays = Mapping[str, np.ndarray]
PROGRAMS = Recent[Any](8)


class Outputs(NamedTuple):
    """What a model says of sequences, [N, T] each."""

    logits: Any
    """[N, T, V]: of the distribution that predicts each token."""
    logps: Any
    scores: Any
    hidden: Any
    """Output of the first layer at the token before each."""
    routers: Any
    """Sums over tokens and MoE layers of the balance and of the squared log-partitions of routers."""


def shifted(values: Any) -> Any:
    """Values of each token at the token after it."""
    return jnp.concatenate([jnp.zeros_like(values[:, :1]), values[:, :-1]], 1)


def read(structure: ModelWeights, weights: Mapping[str, Any], tokens: Any, lengths: Any, noise: Any) -> Outputs:
    """Outputs of a model on whole sequences, without a mesh, packing or chunks of logits."""
    model = plain(structure.bind({path: weights[path] for path in structure.dims()}))
    model.compute = replace(model.compute, mesh=None)
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    segments = (places < lengths[:, None]).astype(jnp.int32)
    taps = Taps(layers={HIDDEN: frozenset({0})})
    hidden, routing, features, _ = model.features(tokens, places, segments, taps, noise=noise)
    routers = jnp.zeros(2) if routing is None else jnp.stack([routing.stats.balance.sum(), routing.stats.z.sum()])
    if model.drafter is not None:
        nothing = jnp.zeros(tokens.shape)
        return Outputs(nothing, nothing, nothing, hidden.astype(jnp.float32), routers)
    if model.config.scalar_head:
        nothing = jnp.zeros(tokens.shape)
        return Outputs(nothing, nothing, model.scores(hidden), nothing, routers)
    logits = shifted(model.logits(hidden).astype(jnp.float32)[..., :VOCAB])
    logps = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]
    inside = (places > 0) & (segments > 0)
    seen = shifted(features[0][HIDDEN].astype(jnp.float32))
    return Outputs(logits, jnp.where(inside, logps, 0.0), jnp.zeros(tokens.shape), seen, routers)


def plain(model: Decoder) -> Decoder:
    """Model whose matrices are plain ones: W + 2 A B with an adapter of the default scale (arXiv:2106.09685), and of
    4-bit codes what they stand for."""
    if not any(".adapters." in path or path.endswith(".codes") for path in ModelWeights(model).dims()):
        return model
    for site in sites(model).values():
        matrix, adapter = site.matrix, site.owner.adapters.pop(site.name, None)
        if isinstance(matrix, Quantized):
            value = updates.of_nf4(jnp, matrix.codes[...], matrix.scales[...].astype(jnp.float32))
        else:
            value = matrix[...]
        if adapter is not None:
            value = value.astype(jnp.float32) + SCALE * (adapter.lora_a[...] @ adapter.lora_b[...])
        setattr(site.owner, site.name, param(value, matrix.get_metadata("dims"), "kernel"))
    return model


class Outside:
    """A model read from outside."""

    def __init__(self, model: Decoder):
        self.structure = ModelWeights(model).outline()

    def __call__(self, weights: Arrays, sequences: Sequence[Labelled]) -> Outputs:
        """Outputs in float64."""
        run = PROGRAMS.of(
            ("read", self.structure.graph), lambda: jax.jit(lambda *given: read(self.structure, *given, None))
        )
        found = run(dict(weights), *laid_out(sequences)[:2])
        return Outputs(*(np.asarray(x, np.float64) for x in found))


def laid_out(sequences: Sequence[Labelled]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, lengths, weights, places of answers, and roles."""
    assert len(sequences) <= ROWS, len(sequences)
    tokens = np.zeros((ROWS, TOKENS), np.int32)
    weight = np.zeros((ROWS, TOKENS), np.float32)
    answer = np.zeros((ROWS, TOKENS), np.float32)
    lengths, roles = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
    for row, one in enumerate(sequences):
        size = len(one.tokens)
        tokens[row, :size] = one.tokens
        weight[row, :size] = one.weight
        answer[row, one.first : size] = 1.0
        lengths[row], roles[row] = size, one.role
    return tokens, lengths, weight, answer, roles


class Whole(NamedTuple):
    """A whole sequence of a batch: its row, and the places of its tokens."""

    row: int
    places: np.ndarray


def wholes(batch: Batch) -> Iterator[Whole]:
    """Sequences of a batch, in order; of one with a parent the parent's tokens are its first."""
    segments = np.asarray(batch.segments)
    for row, ids in enumerate(segments):
        of_segment = {number: np.flatnonzero(ids == number) for number in np.unique(ids[ids > 0])}
        parents = np.zeros_like(ids) if batch.parents is None else np.asarray(batch.parents)[row]
        for number, places in of_segment.items():
            assert np.array_equal(places, np.arange(places[0], places[-1] + 1)), "a sequence lies in one piece"
            parent = int(parents[places[0]])
            assert (parents[places] == parent).all()
            if parent:
                yield Whole(row, np.concatenate([of_segment[parent], places]))
            elif number not in parents:
                yield Whole(row, places)


class Update(NamedTuple):
    """One update as the trainer was given it."""

    batch: Batch
    before: Arrays
    """All parameters."""
    after: Arrays
    noise: np.ndarray | None
    """[B, T, D] on embeddings."""


class Observer:
    """Looks at the updates of an offline stage from outside."""

    def __init__(self, file: Path):
        written = yaml.safe_load(file.read_text())
        self.fields: dict[str, Any] = written["stages"][0]
        self.kind: str = self.fields["kind"]
        self.model: dict[str, Any] = written["model"]
        self.seed: int = written["seed"]
        self.updates: list[Update] = []
        self.trainer: Trainer | None = None
        self.data = rows_of_datasets()
        self.out = file.parent / "out"
        self.evaluated: list[list[Batch]] = []
        """Batches of each evaluation of sequences."""
        self.groups: list[list[list[tuple[tuple[int, ...], int]]]] = []
        """Samples of each prompt of each online step: tokens, and place of the first that was sampled."""
        self.logps: list[list[np.ndarray]] = []
        """Log-probabilities with which the samples of each online step were drawn, [T] each."""

    def step(self, trainer: Trainer, batch: Batch, step: Callable[[], Any]) -> Any:
        """Run an update, and keep what it was given and what it left."""
        self.trainer = trainer
        before = copied(trainer.weights)
        noise = self.noise(trainer, batch) if self.fields.get("noise_alpha") else None
        told = step()
        self.updates.append(Update(batch, before, copied(trainer.params), noise))
        return told

    @staticmethod
    def noise(trainer: Trainer, batch: Batch) -> np.ndarray:
        """Noise that the next update puts on the embeddings of each row."""
        micro, _ = trainer._micro_batches(batch)
        keys = trainer._objective.keys(jnp.uint32(trainer.step_number), micro).noise
        each = [trainer._objective._noise(*one) for one in zip(keys, micro.segments, strict=True)]
        return np.concatenate(each)[: batch.shape[0]]

    # Rows.

    def units(self, dataset: Mapping[str, Any] | None = None, **changes: Any) -> list[Unit]:
        """Units of one pass over the training data, or over another dataset. `changes`: fields in place of the
        stage's."""
        fields = {**self.fields, **changes}
        datasets = [fields["dataset"], *fields.get("mix", [])] if dataset is None else [dataset]
        rows = [(one, self.data[Path(one["path"]).stem]) for one in datasets]
        if self.kind in ("sft", "distill", "drafter"):
            rewriting = self.model.get("chat_template") == "rewriting.jinja"
            return oracles.units_of_sequences(rows, fields, rewriting=rewriting)
        ((_, only),) = rows
        kinds, _ = oracles.settings_of(
            fields.get("loss", "bradley_terry" if self.kind == "reward_model" else "sigmoid")
        )
        mixture = "num_experts" in self.model["init"]
        share = fields.get("share_prompts", "auto")
        share = not mixture if share == "auto" else share
        if kinds == ("process",):
            return oracles.units_of_steps(only, fields)
        if kinds[0] in ("kto", "apo_zero_unpaired"):
            others = kinds[0] == "kto"
            return oracles.units_of_labels(only, fields, share=share and others, others=others)
        whole = kinds == ("orpo",)
        return oracles.units_of_pairs(only, fields, share=share and not whole, whole=whole)

    def units_in(self, batch: Batch, known: Mapping[Any, Unit]) -> Iterator[tuple[Unit, list[Whole]]]:
        """Units of a batch, by the tokens of their sequences."""
        size = max((len(unit.sequences) for unit in known.values()), default=1)
        every = list(wholes(batch))
        assert len(every) % size == 0
        for first in range(0, len(every), size):
            places = every[first : first + size]
            assert len({one.row for one in places}) == 1, "a unit is in one row"
            key = tuple(tuple(np.asarray(batch.tokens)[one].tolist()) for one in places)
            assert key in known, f"no row is {key}"
            yield known[key], places

    def known(self, batch: Batch) -> dict[Any, Unit]:
        """Units that a batch may hold, by the tokens of their sequences."""
        if self.kind == "online_preference":
            return {unit.key: unit for groups in self.groups for unit in self.ranked(groups)}
        if not self.fields.get("on_policy"):
            return {unit.key: unit for unit in self.units()}
        # What is sampled behind a prompt is the answer; the row of the prompt says whose it is.
        prompts = self.prompts()
        known = {}
        for one in wholes(batch):
            tokens = tuple(np.asarray(batch.tokens)[one].tolist())
            first = len(tokens) - 1 - tokens[::-1].index(TURN) + 2
            assert tokens[:first] in prompts, "a sample is of no prompt"
            known[tokens,] = replace(prompts[tokens[:first]], sequences=(oracles.sampled(tokens, first, 0),))
        return known

    def prompts(self) -> dict[tuple[int, ...], Unit]:
        """Rows by the prompts behind which the student samples: the answers in the data, which may be too long for a
        row, are not read."""
        units = self.units(row_tokens=TOKENS)
        return {unit.sequences[0].tokens[: unit.sequences[0].first]: unit for unit in units}

    def ranked(self, groups: Sequence[Sequence[tuple[tuple[int, ...], int]]]) -> Iterator[Unit]:
        """Best and worst sample of each prompt by the rewards; none where all have one reward, or are the same."""
        names = [one["fn"].partition(":")[2] for one in self.fields["rewards"]]
        for group in groups:
            answers = [tokens[first:] for tokens, first in group]
            values = [sum(oracles.REWARDS[name](one) for name in names) for one in answers]
            best, worst = (values.index(end(values)) for end in (max, min))
            if values[best] > values[worst] and answers[best] != answers[worst]:
                yield Unit(tuple(oracles.sampled(*group[at], role) for at, role in ((best, 1), (worst, -1))))

    def check_online(self, told: Sequence[Mapping[str, float]]) -> None:
        """The best and the worst sample of each prompt are compared, once; prompts come as often as each other."""
        count = Counter[Any]()
        for groups, drawn, update, line in zip(self.groups, self.logps, self.updates, told, strict=True):
            pairs = list(self.ranked(groups))
            found = list(self.units_in(update.batch, {unit.key: unit for unit in pairs}))
            assert Counter(unit.key for unit, _ in found) == Counter(unit.key for unit in pairs)
            for unit, places in found:
                self.check_unit(update.batch, unit, places)
            assert len(groups) == self.fields["prompts_per_step"]
            close(line["frac_ties"], 1 - len(pairs) / len(groups), "frac_ties", 1e-6)
            for group in groups:
                prompts = {tokens[:first] for tokens, first in group}
                assert len(prompts) == 1 and len(group) == self.fields["group_size"]
                count.update(prompts)
            self.check_sampler(update.before, [one for group in groups for one in group], drawn)
        expected = [oracles.prompted(row["prompt"]) for row in self.data["chat"]]
        assert set(count) <= set(expected)
        assert max(count.values()) - min(count[prompt] for prompt in expected) <= 1

    def check_sampler(
        self, weights: Arrays, samples: Sequence[tuple[tuple[int, ...], int]], drawn: Sequence[np.ndarray]
    ) -> None:
        """Samples are drawn by these weights. A sampler that rounds weights or its cache is near, and not the same."""
        assert self.trainer is not None
        logps = Outside(self.trainer.model)(weights, [oracles.sampled(*one, 0) for one in samples]).logps
        apart = np.concatenate(
            [abs(drawn[n][first:] - logps[n, first : len(tokens)]) for n, (tokens, first) in enumerate(samples)]
        )
        if {"quantize", "cache_dtype"} & self.fields.get("rollout", {}).keys():
            assert apart.mean() < 0.1 and apart.max() > 1e-4, (apart.mean(), apart.max())
        else:
            assert apart.max() < (0.2 if self.model.get("dtype") == "bfloat16" else 1e-3), apart.max()

    def check_samples(self) -> None:
        """A batch holds a sample of each of the next prompts; all of them come as often."""
        count = Counter[Any]()
        for batch, before, *_ in self.updates:
            found = list(self.units_in(batch, self.known(batch)))
            assert len(found) == self.fields["batch_rows"]
            assert batch.sampler_logps is not None
            drawn = [np.asarray(batch.sampler_logps)[at] for _, (at,) in found]
            self.check_sampler(before, [(one.tokens, one.first) for unit, _ in found for one in unit.sequences], drawn)
            for unit, places in found:
                self.check_unit(batch, unit, places)
                (one,) = unit.sequences
                answer = one.tokens[one.first :]
                assert len(answer) <= self.fields["sampling"]["max_tokens"]
                ends = [token in self.fields["sampling"]["stop_token_ids"] for token in answer]
                assert not any(ends[:-1]) and (ends[-1] or len(answer) == self.fields["sampling"]["max_tokens"])
                count[one.tokens[: one.first]] += 1
        prompts = self.prompts()
        assert max(count.values()) - min(count[prompt] for prompt in prompts) <= 1

    def check_rows(self) -> None:
        """Each row is in the batches as often as it should be, with the weights, positions and roles that the oracle
        makes of it."""
        units = self.units()
        known = {unit.key: unit for unit in units}
        every, count = Counter(unit.key for unit in units), Counter[Any]()
        for batch, *_ in self.updates:
            filled = np.zeros(batch.shape, bool)
            per_row, sizes = Counter[int](), []
            for unit, places in self.units_in(batch, known):
                self.check_unit(batch, unit, places)
                count[unit.key] += 1
                sizes.append(tokens_of(unit))
                per_row[places[0].row] += 1
                for one in places:
                    filled[one] = True
            assert np.array_equal(filled, np.asarray(batch.segments) > 0)
            assert not np.asarray(batch.loss_weight)[~filled].any()
            assert all(per_row[row] for row in range(batch.shape[0])), "the stream is endless, and no row is empty"
            if not self.fields.get("packing", True):
                assert set(per_row.values()) == {1}
            elif sum(sorted(sizes)[:2]) <= self.fields["row_tokens"]:
                assert max(per_row.values()) > 1, "two that fit have rows of their own"
        passes = [count[key] / number for key, number in every.items()]
        assert np.ceil(max(passes)) - np.floor(min(passes)) <= 1, f"a row is seen more often than others: {passes}"

    def check_unit(self, batch: Batch, unit: Unit, places: Sequence[Whole]) -> None:
        """Arrays of a unit. What two sequences share has no weight, and no role."""
        for number, (one, at) in enumerate(zip(unit.sequences, places, strict=True)):
            np.testing.assert_array_equal(np.asarray(batch.positions)[at], np.arange(len(one.tokens)))
            np.testing.assert_array_equal(np.asarray(batch.loss_weight)[at], one.weight)
            learned = np.asarray(one.weight) * (np.arange(len(one.tokens)) >= one.first)
            if batch.roles is not None:
                role = np.zeros(len(one.tokens), np.int32) + one.role
                if unit.labels:
                    role[learned > 0] = unit.labels
                np.testing.assert_array_equal(np.asarray(batch.roles)[at], np.where(learned > 0, role, 0))
            if batch.margins is not None:
                np.testing.assert_allclose(
                    np.asarray(batch.margins)[at], np.where((learned > 0) & (number == 0), unit.margin, 0.0)
                )
            if batch.teacher_weights is not None:
                got = np.asarray(batch.teacher_weights)[at]
                np.testing.assert_allclose(got, np.broadcast_to(np.asarray(unit.shares, np.float32), got.shape))

    # Losses.

    def seen(self, occurrences: Sequence[Unit], before: Arrays) -> dict[str, Any]:
        """Constants of the loss on these units."""
        sequences = [one for unit in occurrences for one in unit.sequences]
        *_, weight, answer, roles = laid_out(sequences)
        made: dict[str, Any] = {"weight": weight, "answer": answer, "roles": roles}
        size = len(occurrences[0].sequences)
        margins = np.zeros(ROWS // size)
        margins[: len(occurrences)] = [unit.margin for unit in occurrences]
        made["margins"] = margins
        labels = np.zeros(weight.shape)
        for row, unit in enumerate(occurrences):
            if unit.labels:
                labels[row][weight[row] > 0] = unit.labels
        made["labels"] = labels
        assert self.trainer is not None
        if self.kind in ("preference", "online_preference"):
            # The model at the start of the stage, whatever has been learnt since.
            made["ref"] = Outside(self.trainer.model)(self.updates[0].before, sequences).logps
        if self.kind == "distill":
            shares = np.zeros((ROWS, len(self.fields["teachers"])))
            shares[: len(sequences)] = [unit.shares for unit in occurrences]
            taught = [self.taught(one, sequences) for one in self.fields["teachers"]]
            made |= {"shares": shares, "teachers": np.stack([one.logits for one in taught])}
            made["taught_logps"] = np.stack([one.logps for one in taught])
            if "hidden" in self.fields.get("features", {}):
                made |= {"taught": taught[0].hidden, "projection": before["matching.0.projection"]}
        return made

    def blocks(self, batch: Batch, found: Sequence[tuple[Unit, Sequence[Whole]]]) -> np.ndarray:
        """Blocks of a drafter [4, M]: they cover each row without a gap, from a place that its tokens choose. One of
        eight reads fewer hidden states than the window has."""
        size, window = self.fields["tokens"], self.fields["window"]
        owners = {(at.row, int(p)): (n, k) for n, (_, (at,)) in enumerate(found) for k, p in enumerate(at.places)}
        made = []
        for row, tokens in enumerate(np.asarray(batch.tokens)):
            for number in range(-(-len(tokens) // size)):
                sequence, place = owners.get((row, int(tokens.sum()) % size + size * number), (0, -1))
                most = number // 8 % (window + 1) if number % 8 == 0 else window
                made.append((sequence, max(place, 0), max(min(place, most), 0), place >= 0))
        return np.asarray(made).T

    def taught(self, teacher: Mapping[str, Any], sequences: Sequence[Labelled]) -> Outputs:
        model = init_model(**teacher_fields(Path(teacher["path"]).name))
        return Outside(model)(copied(ModelWeights(model).read()), sequences)

    def check_losses(self, told: Sequence[Mapping[str, float]]) -> None:
        """Loss, metrics and norm of the gradient of each update are the oracle's."""
        assert self.trainer is not None
        first = self.updates[0].before
        section = self.fields["optimizer"]
        averages: list[Arrays] = []
        parameters = updates.Parameters(
            {path: first[path] for path in self.trainer.params}, section, self.fields["num_steps"]
        )
        for update, line in zip(self.updates, told, strict=True):
            found = list(self.units_in(update.batch, self.known(update.batch)))
            occurrences = [unit for unit, _ in found]
            noise = None
            if update.noise is not None:
                noise = np.zeros((ROWS, TOKENS, update.noise.shape[-1]), np.float32)
                for row, at in enumerate(one for _, places in found for one in places):
                    noise[row, : len(at.places)] = update.noise[at]
                    updates.check_noise(update.noise[at], self.fields["noise_alpha"])
                assert len(np.unique(noise[noise != 0])) > 0.9 * np.count_nonzero(noise), "drawn for each row and step"
            if not occurrences:  # no sample is better than another
                continue
            blocks = self.blocks(update.batch, found) if self.kind == "drafter" else None
            value, gradient = self.value(occurrences, update.before, noise, blocks)
            close(line["loss"], value.loss, "loss", self.tolerance)
            for name, expected in value.metrics.items():
                close(line[name], expected, name, self.tolerance)
            of_loss = {name for name in line if name.startswith(("rewards/", "logps/", "distill/", "calibration/"))}
            of_functions = {"rewards/invalid", "rewards/errors", "rewards/timeouts"}
            of_functions |= {name for name in of_loss if name.count("/") > 1}
            assert of_loss - of_functions <= value.metrics.keys(), of_loss - value.metrics.keys()
            norm = np.sqrt(sum(float((g**2).sum()) for g in gradient.values()))
            close(line["grad_norm"], norm, "grad_norm", 10 * self.tolerance)
            heads = None
            if "qk_clip" in section:
                sequences = [unit.sequences[0] for unit in occurrences]
                size = self.model["init"]["head_dim"]
                heads = updates.clip_of_heads(update.before, sequences, noise, section["qk_clip"], size)
                assert min(heads) < 1, "the limit clips nothing"
            self.check_update(parameters, update, gradient, heads)
            averages.append(dict(parameters.average))
        self.check_evaluations(averages)
        self.check_model(parameters)

    def check_evaluations(self, averages: Sequence[Arrays]) -> None:
        """Loss and metrics of the held-out rows are the oracle's at the beginning and after each update."""
        dataset = self.fields.get("eval_dataset")
        if dataset is None or self.fields.get("on_policy"):
            return
        units, blocks = self.units(dataset), None
        if self.kind == "drafter":
            (batch,) = self.evaluated[0]
            found = list(self.units_in(batch, {unit.key: unit for unit in units}))
            units, blocks = [unit for unit, _ in found], self.blocks(batch, found)
        told = [line for line in lines(self.out) if "eval/loss" in line]
        assert [line["step"] for line in told] == [*range(len(self.updates) + 1)]
        for line in told:
            step = line["step"]
            weights = {**self.updates[0].before, **(self.updates[step - 1].after if step else {})}
            if step and "ema" in self.fields["optimizer"]:
                weights |= {path: one.astype(np.float32) for path, one in averages[step - 1].items()}
            value, _ = self.value(units, weights, None, blocks)
            rtol = 5 * self.tolerance if "ema" in self.fields["optimizer"] else self.tolerance
            for name, expected in {"loss": value.loss, **value.metrics}.items():
                # A loss of all pairs together is evaluated without the routers.
                if self.kind not in ("preference", "reward_model") or not name.startswith("moe/"):
                    close(line[f"eval/{name}"], expected, f"eval/{name}", rtol)

    def check_parameters(self) -> None:
        """What is trained is the model, or both factors of an adapter on each matrix of the layers with the head of a
        reward model; what is not trained are the weights that the seed draws, or the nearest codes of them."""
        assert self.trainer is not None
        before, trained = self.updates[0].before, set(self.trainer.params)
        beside = {path for path in before if path.startswith(("matching.", "score."))}
        if self.kind == "drafter":
            assert trained == {path for path in before if path.startswith("drafter.")}
            return
        if "lora" not in self.model:
            assert trained == set(before)
            return
        factors = {path for path in before if path.endswith((".lora_a", ".lora_b"))}
        assert trained == factors | beside, trained ^ (factors | beside)
        config, compute = self.trainer.model.config, self.trainer.model.compute
        outline, draw = random_weights(
            config, replace(compute, mesh=None), jnp.dtype(self.model.get("dtype", "float32")), "none"
        )
        drawn, _ = draw(jnp.uint32(self.seed))
        for path in ModelWeights(outline).dims().keys() - beside:
            want = np.asarray(drawn[path], np.float64)
            base, _, name = path.rpartition(".")
            in_layers = path.startswith("stages.") and want.ndim > 2 and ".router." not in path
            assert not in_layers or f"{base}.adapters.{name}.lora_a" in factors, path
            if path in before:
                np.testing.assert_array_equal(np.asarray(before[path], np.float64), want, err_msg=path)
                continue
            codes, scales = before[f"{path}.codes"], np.asarray(before[f"{path}.scales"], np.float64)
            tiles = np.abs(want.reshape(*scales.shape[:-1], -1, scales.shape[-1]))
            np.testing.assert_allclose(scales, tiles.max(-2), rtol=2**-8)
            apart = np.abs(updates.of_nf4(np, codes, scales) - want).reshape(tiles.shape)
            # Half of the widest gap of the codes.
            assert (apart <= 0.16 * scales[..., None, :]).all(), path

    def check_update(
        self, parameters: updates.Parameters, update: Update, gradient: Arrays, heads: Sequence[float] | None
    ) -> None:
        """Parameters move as the optimizer's oracle moves them. Numbers without a clear gradient are left out: the sign
        of Adam's first updates is that of rounding there."""
        narrow = self.narrow
        if not narrow:
            # From where the trainer is, so that an update is compared by itself.
            parameters.values = {path: np.asarray(update.before[path], np.float64) for path in gradient}
        before = dict(parameters.values)
        parameters.update(gradient)
        if heads is not None:
            # Whatever of it is the queries' and what the keys': each head's logits shrink by its factor.
            paths = [f"stages.0.blocks.0.attention.{name}.kernel" for name in "qk"]
            size = self.model["init"]["head_dim"]
            factors = []
            for path in paths:
                width = parameters.values[path].shape[-1]
                parts = [np.s_[..., start : start + size] for start in range(0, width, size)]
                factors.append([ratio(update.after[path][part], parameters.values[path][part]) for part in parts])
                parameters.values[path] = parameters.values[path] * np.repeat(factors[-1], size)
            of_keys = np.repeat(factors[1], len(factors[0]) // len(factors[1]))
            np.testing.assert_allclose(of_keys * factors[0], heads, rtol=0.02)
        apart, size, held = [], [], []
        for path, old in before.items():
            clear = np.abs(gradient[path]) > (0.1 if narrow else 1e-3) * np.abs(gradient[path]).max()
            expected = parameters.values[path][clear]
            apart.append(np.linalg.norm(np.asarray(update.after[path], np.float64)[clear] - expected))
            size.append(np.linalg.norm(expected - old[clear]))
            held.append(np.linalg.norm(expected))
        if narrow:
            # All together, whose signs of gradients differ in some. What is stored is the master rounded to 8 bits.
            apart, size, held = ([np.linalg.norm(one)] for one in (apart, size, held))
        for path, one, whole, stored in zip(before, apart, size, held, strict=not narrow):
            most = self.tolerance_of_updates * whole + (stored / 2**8 if narrow else 1e-12)
            assert one <= most, f"{path}: an update is {one:.2g} away from the oracle's, at most {most:.2g}"

    @property
    def narrow(self) -> bool:
        """Whether the model is held in bfloat16."""
        return bool(self.model.get("dtype") == "bfloat16")

    @property
    def tolerance_of_updates(self) -> float:
        section = self.fields["optimizer"]
        if self.narrow:
            return 0.3
        return 0.1 if section.get("moments", "float32") != "float32" or "cache" in self.fields else 0.01

    def check_model(self, parameters: updates.Parameters) -> None:
        """The saved model is that of the last update, or the average of all."""
        if self.kind == "drafter":
            return
        expected = parameters.average if "ema" in self.fields["optimizer"] else self.updates[-1].after
        (file,) = self.out.glob("*/model/model.safetensors")
        saved = load_file(file)
        for name, path in (("model.embed_tokens.weight", "embed.embedding"), ("model.norm.weight", "final_norm.scale")):
            if path not in parameters.values:
                continue
            got = saved[name].astype(np.float64)
            if self.narrow:
                # By the whole: the sign of Adam's first updates is that of rounding where there is no clear gradient.
                moved = expected[path] - self.updates[0].before[path]
                most = self.tolerance_of_updates * np.linalg.norm(moved) + np.linalg.norm(expected[path]) / 2**8
                assert np.linalg.norm(got - expected[path]) <= most, path
            else:
                np.testing.assert_allclose(got, expected[path], rtol=1e-2, atol=1e-4)

    @property
    def tolerance(self) -> float:
        """Relative; a cache has 16 bits."""
        if self.narrow:
            return 3e-2
        return 2e-3 if "cache" in self.fields else 2e-4

    def check(self) -> None:
        """What was trained on, what it cost, and what it changed are the oracle's."""
        told = [line for line in lines(self.out) if "grad_norm" in line]
        assert len(told) == len(self.updates) == self.fields["num_steps"]
        self.check_parameters()
        if self.kind == "online_preference":
            self.check_online(told)
        elif self.fields.get("on_policy"):
            self.check_samples()
        else:
            self.check_rows()
        self.check_losses(told)

    def value(
        self,
        occurrences: Sequence[Unit],
        before: Arrays,
        noise: np.ndarray | None,
        blocks: np.ndarray | None = None,
    ) -> tuple[oracles.Value, dict[str, np.ndarray]]:
        """Loss and metrics of these units in float64, and the gradient."""
        assert self.trainer is not None
        kind, fields, structure = self.kind, self.fields, ModelWeights(self.trainer.model).outline()
        constants = self.seen(occurrences, before)
        if blocks is not None:
            constants["blocks"] = blocks
        sequences = [one for unit in occurrences for one in unit.sequences]
        tokens, lengths, *_ = laid_out(sequences)
        trained = {path: before[path] for path in self.trainer.params}

        def router_loss(sums: Any, lengths: Any) -> Any:
            """Means over tokens, of one MoE layer."""
            router = fields.get("router", {})
            return (router.get("balance_coef", 0.0) * sums[0] + router.get("z_coef", 0.0) * sums[1]) / lengths.sum()

        def of_drafter(weights: Any, hidden: Any, tokens: Any) -> dict[str, Any]:
            """What a drafter's loss reads beside its constants."""
            table, names = weights["embed.embedding"], [path for path in weights if path.startswith("drafter.")]
            own = {path.rpartition(".")[2]: weights[path] for path in names}
            return {"hidden": hidden, "weights": {**own, "embedding": table}, "embedded": table[tokens]}

        def loss(trained: Any, frozen: Any, constants: Any, tokens: Any, lengths: Any, noise: Any) -> Any:
            weights = {**frozen, **trained}
            out = read(structure, weights, tokens, lengths, noise)
            matched = (
                {"hidden": out.hidden, "projection": weights["matching.0.projection"]} if "taught" in constants else {}
            )
            matched = of_drafter(weights, out.hidden, tokens) if kind == "drafter" else matched
            seen = Seen(out.logps, out.logits, scores=out.scores, **{**constants, **matched})
            return oracles.LOSSES[kind](jnp, seen, fields).loss + router_loss(out.routers, lengths), out

        names = (
            "tokens",
            "window",
            "layers",
            "router",
            "loss",
            "beta",
            "temperature",
            "cross_entropy",
            "features",
            "label_smoothing",
            "top_k",
        )
        key = (kind, json.dumps({name: fields.get(name) for name in names}), structure.graph, *sorted(trained))
        run = PROGRAMS.of(key, lambda: jax.jit(jax.grad(loss, has_aux=True)))
        wide = {path: np.asarray(x, np.float32) for path, x in trained.items()}
        frozen = {path: x for path, x in before.items() if path not in trained}
        given = {name: np.asarray(x, np.float32) for name, x in constants.items()}
        gradient, out = run(wide, frozen, given, tokens, lengths, noise)
        logits, logps, scores, hidden, routers = (np.asarray(x, np.float64) for x in out)
        matched = {"hidden": hidden} if "taught" in constants else {}
        if kind == "drafter":
            exact = {path: np.asarray(one, np.float64) for path, one in before.items()}
            matched = of_drafter(exact, hidden, tokens)
        value = oracles.LOSSES[kind](np, Seen(logps, logits, scores=scores, **{**constants, **matched}), fields)
        if "router" in fields:
            value.metrics["moe/balance_loss"], value.metrics["moe/z_loss"] = routers / lengths.sum()
        return value, {path: np.asarray(g, np.float64) for path, g in gradient.items()}


def ratio(one: np.ndarray, other: np.ndarray) -> float:
    """Factor by which arrays differ at best."""
    return float((one * other).sum() / (other**2).sum())


def tokens_of(unit: Unit) -> int:
    return sum(len(one.tokens) for one in unit.sequences)


def copied(weights: Mapping[str, Any]) -> Arrays:
    return {path: np.array(x) for path, x in weights.items()}


def close(got: float, expected: Any, name: str, rtol: float) -> None:
    """Compare two numbers, or one with its bounds."""
    if isinstance(expected, tuple):
        # Policy and reference of 8 bits are further apart before the first update than later ones move them.
        assert rtol > 0.01 or expected[0] - rtol <= got <= expected[1] + rtol, (name, got, expected)
        return
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=rtol / (100 if rtol < 0.01 else 3), err_msg=name)
