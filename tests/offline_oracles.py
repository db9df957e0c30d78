"""Oracles of offline stages: rows by hand from the data, losses and optimizers by textbook and papers' formulas.

A formula takes the array module first: NumPy gives a loss in float64, JAX the gradient of the same plain formula on
full log-probabilities. Arrays are [N, T] of N whole sequences, each by itself, with weight 0 behind the last; a unit
is one sequence, or two that follow each other: an answer and the one that it is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

BEGIN, EOS, TURN, END = 257, 258, 259, 260
"""Tokens of the byte tokenizer beside its bytes: around a text, and around a turn."""
CHOSEN, REJECTED, OTHER = 1, -1, 2
SIDES = ("chosen", "rejected")
Message = Mapping[str, str]
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Labelled:
    """A whole sequence with the loss weight of each token."""

    tokens: tuple[int, ...]
    weight: tuple[float, ...]
    role: int = 0
    """Of its answer: chosen (or desirable), rejected, or the answer to another prompt."""
    first: int = 0
    """Place of the first token of the answer."""

    def cut(self, length: int) -> Labelled:
        return replace(self, tokens=self.tokens[:length], weight=self.weight[:length])


@dataclass(frozen=True)
class Unit:
    """Sequences that belong together, and what their row says beside them."""

    sequences: tuple[Labelled, ...]
    shares: tuple[float, ...] = (1.0,)
    """Weight of each teacher."""
    margin: float = 0.0
    labels: tuple[int, ...] = ()
    """Of the steps of a process reward, in order."""

    @property
    def key(self) -> tuple[tuple[int, ...], ...]:
        return tuple(one.tokens for one in self.sequences)


# Rows. A turn is written as its mark, the first letter of its role, its bytes and its end.


def conversation(messages: Sequence[Message], *, first: int, rewriting: bool) -> list[Labelled]:
    """Turns with loss on what the assistant says from message `first` on. A template that rewrites earlier answers
    makes a sequence of each turn."""
    if rewriting:
        made = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant" and turn >= first:
                before = [{**one, "content": "-"} if one["role"] == "assistant" else one for one in messages[:turn]]
                made += conversation([*before, message], first=turn, rewriting=False)
        return made
    tokens: list[int] = []
    weight: list[float] = []
    for number, message in enumerate(messages):
        body = [*message["content"].encode(), END]
        learned = message["role"] == "assistant" and number >= first
        tokens += [TURN, ord(message["role"][0]), *body]
        weight += [0.0, 0.0, *[float(learned)] * len(body)]
    return [Labelled(tuple(tokens), tuple(weight), first=weight.index(1.0))]


def plain(prompt: str, completion: str) -> Labelled:
    """A text behind another, without a template."""
    before, after = [BEGIN, *prompt.encode()], [*completion.encode(), EOS]
    weight = [0.0] * len(before) + [1.0] * len(after)
    return Labelled((*before, *after), tuple(weight), first=len(before))


def with_loss_on_all(one: Labelled) -> Labelled:
    """The first token is predicted by nothing."""
    return replace(one, weight=(0.0, *[1.0] * (len(one.tokens) - 1)))


def sequences_of_row(row: Fields, dataset: Fields, fields: Fields, *, rewriting: bool) -> list[Labelled]:
    """Sequences of a row of SFT or distillation, before they are fitted."""
    if "text" in row:
        return [with_loss_on_all(Labelled((BEGIN, *row["text"].encode(), EOS), ()))]
    if dataset.get("chat") is False:
        made = [plain(row["prompt"], row["completion"])]
    else:
        said = row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]
        first = 0 if "messages" in row else len(row["prompt"])
        if fields.get("last_turn_only"):
            first = max(number for number, one in enumerate(said) if one["role"] == "assistant")
        made = conversation(said, first=first, rewriting=rewriting)
    return [with_loss_on_all(one) for one in made] if fields.get("train_on_prompt") else made


def fitted(one: Labelled, fields: Fields) -> list[Labelled]:
    """A sequence as `overlong` leaves it."""
    length, how = fields["row_tokens"], fields.get("overlong", "error")
    if len(one.tokens) <= length:
        return [one]
    assert how != "error", f"{len(one.tokens)} tokens"
    if how == "split":
        # The last token of a part is the context of the next, in which it has no loss.
        starts = range(0, len(one.tokens) - 1, length - 1)
        return [with_loss_on_all(Labelled(one.tokens[at : at + length], ())) for at in starts]
    short = one.cut(length)
    return [short] if how == "truncate" and any(short.weight) else []


def units_of_sequences(datasets: Sequence[tuple[Fields, Sequence[Fields]]], fields: Fields, **how: bool) -> list[Unit]:
    """Units of a pass over all datasets of SFT, distillation or a drafter."""
    units = []
    for dataset, rows in datasets:
        for row in rows:
            shares = (1.0,)
            if fields.get("teacher_column"):
                told = row[fields["teacher_column"]]
                told = told if isinstance(told, Mapping) else {told: 1.0}
                shares = tuple(told.get(teacher["name"], 0.0) for teacher in fields["teachers"])
            for one in sequences_of_row(row, dataset, fields, **how):
                units += [Unit((part,), shares) for part in fitted(one, fields)]
    return units


def common(sequences: Sequence[Labelled]) -> int:
    """Tokens with which all begin, without the last before an answer."""
    most = min(one.first - 1 for one in sequences)
    alike = [len({one.tokens[at] for one in sequences}) == 1 for at in range(most)]
    return alike.index(False) if False in alike else most


def fitted_pair(sequences: Sequence[Labelled], fields: Fields, *, share: bool) -> tuple[Labelled, ...] | None:
    """Two sequences as they fit into one row, whose common beginning may be in it once; None if they do not. The
    longer is cut to what the other leaves, or both to a half."""
    room = fields["row_tokens"] + (common(sequences) if share else 0)
    lengths = [len(one.tokens) for one in sequences]
    if sum(lengths) <= room:
        return tuple(sequences)
    how = fields.get("overlong", "error")
    assert how != "error", lengths
    if how == "drop":
        return None
    half = room // len(sequences)
    longest = max(half, room - min(lengths)) if len(sequences) == 2 and min(lengths) < half else half
    short = [one.cut(longest) for one in sequences]
    return tuple(short) if all(any(one.weight) for one in short) else None


def answer(prompt: Sequence[Message], said: Sequence[Message], role: int) -> Labelled:
    (one,) = conversation([*prompt, *said], first=len(prompt), rewriting=False)
    return replace(one, role=role)


def prompted(prompt: Sequence[Message]) -> tuple[int, ...]:
    """Tokens of a prompt with the beginning of an answer."""
    (one,) = conversation([*prompt, {"role": "assistant", "content": ""}], first=len(prompt), rewriting=False)
    return one.tokens[:-1]


def sampled(tokens: tuple[int, ...], first: int, role: int) -> Labelled:
    """A sequence that was sampled from the token `first` on."""
    return Labelled(tokens, (*[0.0] * first, *[1.0] * (len(tokens) - first)), role, first)


REWARDS: dict[str, Callable[[Sequence[int]], float]] = {
    "low": lambda tokens: 1.0 + sum(token < 128 for token in tokens) / max(len(tokens), 1),
    "short": lambda tokens: 1.0 + 1.0 / (1 + sum(token % 2 for token in tokens)),
}
"""Rewards of `tests.pairs.CODE`."""


def units_of_pairs(rows: Sequence[Fields], fields: Fields, *, share: bool, whole: bool) -> list[Unit]:
    """Units of chosen and rejected answers. `whole`: the prompt of the chosen one has loss too (ORPO)."""
    units = []
    for row in rows:
        pair = [answer(row["prompt"], row[side], role) for side, role in (("chosen", 1), ("rejected", -1))]
        if whole:
            pair[0] = with_loss_on_all(pair[0])
        made = fitted_pair(pair, fields, share=share)
        if made is not None and made[0].tokens != made[1].tokens:
            units.append(Unit(made, margin=float(row.get("margin") or 0.0)))
    return units


def units_of_labels(rows: Sequence[Fields], fields: Fields, *, share: bool, others: bool) -> list[Unit]:
    """Units of answers with a label. `others`: each beside the next answer of another prompt that fits (KTO)."""
    if "chosen" in rows[0]:
        # Both answers of a pair, each side by itself.
        sides = [
            [{"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"} for row in rows]
            for side in SIDES
        ]
        return [unit for side in sides for unit in units_of_labels(side, fields, share=share, others=others)]
    answers = [answer(row["prompt"], row["completion"], CHOSEN if row["label"] else REJECTED) for row in rows]
    units = []
    for number, one in enumerate(answers):
        made: Sequence[Labelled] = [one]
        if others:
            prompt = one.tokens[: one.first]
            further = [answers[(number + step) % len(answers)] for step in range(1, len(answers))]
            further = [other for other in further if other.tokens[: other.first] != prompt]
            beside = []
            for other in further:
                said = other.tokens[other.first :]
                weight = (*[0.0] * len(prompt), *[1.0] * len(said))
                beside.append([one, Labelled((*prompt, *said), weight, OTHER, len(prompt))])
            drop = {**fields, "overlong": "drop"}
            made = next((two for two in beside if fitted_pair(two, drop, share=share)), beside[0])
        kept = fitted_pair(made, fields, share=share)
        if kept is not None:
            units.append(Unit(kept))
    return units


def units_of_steps(rows: Sequence[Fields], fields: Fields) -> list[Unit]:
    """Units of labelled steps, a line each; the last token of a step has its label."""
    units = []
    for row in rows:
        tokens = [*prompted(row["prompt"])]
        weight = [0.0] * len(tokens)
        for text in row["completions"]:
            tokens += [*text.encode(), *b"\n"]
            weight += [0.0] * len(text.encode()) + [1.0]
        labels = tuple(CHOSEN if label else REJECTED for label in row["labels"])
        kept = fitted_pair([Labelled(tuple(tokens), tuple(weight))], fields, share=False)
        if kept is not None:
            units.append(Unit(kept, labels=labels[: int(sum(kept[0].weight))]))
    return units


# Losses: `x` is NumPy or JAX's.


class Seen(NamedTuple):
    """What a model says of N sequences [T tokens each], and what is compared with it."""

    logps: Any
    """Log-probability of each token, 0 for the first."""
    logits: Any
    """[N, T, V]: of the distribution that predicts each token."""
    weight: Any
    answer: Any
    """1 for tokens of the answer, else 0."""
    roles: Any
    """[N]."""
    ref: Any = None
    """Log-probabilities of the reference."""
    teachers: Any = None
    """[K, N, T, V]: logits of each teacher."""
    taught_logps: Any = None
    """[K, N, T]: of the tokens, by each teacher."""
    shares: Any = None
    """[N, K]."""
    margins: Any = None
    """[N / 2]."""
    labels: Any = None
    """[N, T]: of steps."""
    scores: Any = None
    """Of a reward model."""
    hidden: Any = None
    """[N, T, D]: hidden states of a layer, at the token that predicts the next."""
    taught: Any = None
    """[N, T, E]: those of the teacher."""
    projection: Any = None
    """[D, E]."""
    blocks: Any = None
    """[4, M]: sequence, place of the newest token, number of hidden states that are read, and 1 for a block that there
    is, of the blocks of a drafter."""
    weights: Any = None
    """Parameters of a drafter by name, and the table of tokens, `embedding`."""
    embedded: Any = None
    """[N, T, D]."""


class Value(NamedTuple):
    """Loss of a batch, and the metrics that are told with it."""

    loss: Any
    metrics: dict[str, Any]


def log_softmax(x: Any, logits: Any) -> Any:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - x.log(x.exp(shifted).sum(-1, keepdims=True))


def log_sigmoid(x: Any, value: Any) -> Any:
    return -x.logaddexp(0.0 * value, -value)


def sigmoid(x: Any, value: Any) -> Any:
    return x.exp(log_sigmoid(x, value))


def constant(x: Any, value: Any) -> Any:
    """A value that has no gradient."""
    if x is np:
        return value
    import jax

    return jax.lax.stop_gradient(value)


def mean(values: Any, weight: Any) -> Any:
    return (values * weight).sum() / weight.sum()


def sft(x: Any, seen: Seen, fields: Fields) -> Value:
    """Mean of -log p over the tokens with loss; smoothed labels, arXiv:1512.00567 section 7; DFT, arXiv:2508.05629."""
    full = log_softmax(x, seen.logits)
    metrics = {"nll": mean(-seen.logps, seen.weight), "entropy": mean(-(x.exp(full) * full).sum(-1), seen.weight)}
    e = fields.get("label_smoothing", 0.0)
    if fields.get("loss") == "dft":
        return Value(mean(-constant(x, x.exp(seen.logps)) * seen.logps, seen.weight), metrics)
    return Value(mean(-(1 - e) * seen.logps - e * full.mean(-1), seen.weight), metrics)


def settings_of(loss: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Kinds and settings of a loss as written in the configuration."""
    given = {"kind": loss} if isinstance(loss, str) else dict(loss)
    kind = given.pop("kind")
    return ((kind,) if isinstance(kind, str) else tuple(kind)), given


class Ratios(NamedTuple):
    """Log-ratios [N] of chosen and rejected answers, after an f-divergence (`c`, `r`) and before it."""

    c: Any
    r: Any
    chosen: Any
    rejected: Any
    lengths: tuple[Any, Any]
    policy: Any
    """Log-probability of chosen minus rejected answers."""
    valid: Any
    settings: Mapping[str, Any]

    @property
    def delta(self) -> Any:
        return self.settings["beta"] * (self.c - self.r)

    @property
    def per_token(self) -> Any:
        return self.c / self.lengths[0] - self.r / self.lengths[1]


def swapped(x: Any, value: Any, e: float) -> Any:
    """-log sigmoid of a margin whose sign is wrong with probability e: cDPO, https://ericmitchell.ai/cdpo.pdf."""
    return -(1 - e) * log_sigmoid(x, value) - e * log_sigmoid(x, -value)


def exo(x: Any, o: Ratios) -> Any:
    """KL of both softmaxes of a pair, arXiv:2402.00856 eq. 16."""
    e = o.settings["label_smoothing"]
    p = sigmoid(x, o.delta)
    return p * (log_sigmoid(x, o.delta) - math.log(1 - e)) + (1 - p) * (log_sigmoid(x, -o.delta) - math.log(e))


def robust(x: Any, o: Ratios) -> Any:
    """arXiv:2403.00409 eq. 12."""
    e = o.settings["label_smoothing"]
    return (-(1 - e) * log_sigmoid(x, o.delta) + e * log_sigmoid(x, -o.delta)) / (1 - 2 * e)


def discopop(x: Any, o: Ratios) -> Any:
    """arXiv:2406.08414 eq. 5."""
    share = sigmoid(x, o.delta / o.settings.get("temperature", 0.05))
    return -(1 - share) * log_sigmoid(x, o.delta) + share * x.exp(-o.delta)


def optimal_transport(x: Any, first: Any, second: Any, o: Ratios) -> Any:
    """Sorted values against sorted values, arXiv:2406.05882."""
    last = [x.sort(x.where(o.valid > 0, one, 1e9)) for one in (first, second)]
    inside = x.arange(o.valid.shape[0]) < o.valid.sum()
    margin = o.settings["beta"] * x.where(inside, last[0] - last[1], 0.0)
    # In the places of the first valid pairs, whichever they are.
    return x.where(inside, swapped(x, margin, o.settings["label_smoothing"]), 0.0)


DPO: dict[str, Callable[[Any, Ratios], Any]] = {
    **dict.fromkeys(("sigmoid", "dpo"), lambda x, o: swapped(x, o.delta, o.settings["label_smoothing"])),
    "sigmoid_norm": lambda x, o: swapped(x, o.settings["beta"] * o.per_token, o.settings["label_smoothing"]),
    "hinge": lambda x, o: x.maximum(1 - o.delta, 0.0),
    "ipo": lambda x, o: (o.per_token - 1 / (2 * o.settings["beta"])) ** 2,
    "exo_pair": exo,
    "nca_pair": lambda x, o: (
        -log_sigmoid(x, o.settings["beta"] * o.chosen)
        - (log_sigmoid(x, -o.settings["beta"] * o.chosen) + log_sigmoid(x, -o.settings["beta"] * o.rejected)) / 2
    ),
    "robust": robust,
    "bco_pair": lambda x, o: (
        -log_sigmoid(x, o.settings["beta"] * o.chosen) - log_sigmoid(x, -o.settings["beta"] * o.rejected)
    ),
    "sppo_hard": lambda x, o: (
        (o.chosen - 1 / (2 * o.settings["beta"])) ** 2 + (o.rejected + 1 / (2 * o.settings["beta"])) ** 2
    ),
    "aot": lambda x, o: optimal_transport(x, o.policy, o.policy - (o.chosen - o.rejected), o),
    "aot_unpaired": lambda x, o: optimal_transport(x, o.chosen, o.rejected, o),
    "apo_zero": lambda x, o: (
        1 - sigmoid(x, o.settings["beta"] * o.chosen) + sigmoid(x, o.settings["beta"] * o.rejected)
    ),
    "apo_down": lambda x, o: sigmoid(x, o.settings["beta"] * o.chosen) + 1 - sigmoid(x, o.delta),
    "discopop": discopop,
}
"""arXiv:2305.18290 eq. 7 (sigmoid), 2411.15124, 2305.10425 (hinge), 2310.12036 eq. 17 per token (ipo), 2402.05369
(nca), 2404.04656 (bco), 2405.00675 (sppo), 2408.06266 (apo)."""


def diverged(x: Any, ratio: Any, settings: Mapping[str, Any]) -> Any:
    """f'(ratio) of an f-divergence, arXiv:2309.16240 table 1, shifted to 0 where policy and reference agree."""
    kind = settings.get("divergence", "reverse_kl")
    if kind == "forward_kl":
        return 1 - x.exp(-ratio)
    if kind == "js_divergence":
        return math.log(2) + log_sigmoid(x, ratio)
    a = settings.get("alpha")
    return ratio if a is None else (x.exp((a - 1) * ratio) - 1) / (a - 1)


def sums_of_answers(seen: Seen, values: Any, tail: Any = 1.0) -> Any:
    return (seen.weight * seen.answer * tail * values).sum(-1)


def tails(x: Any, seen: Seen, factor: float) -> Any:
    """Factor of the tokens of an answer beyond the length of the shorter one, arXiv:2409.06411."""
    counted = seen.weight * seen.answer
    lengths = counted.sum(-1)
    shorter = x.repeat(x.minimum(lengths[0::2], lengths[1::2]), 2)
    return x.where(x.cumsum(counted, -1) <= shorter[:, None], 1.0, factor)


def nll_of_chosen(seen: Seen) -> Any:
    return mean(-seen.logps, seen.weight * (seen.roles == CHOSEN)[:, None])


def preference(x: Any, seen: Seen, fields: Fields) -> Value:
    """Mean over pairs, or over labelled answers."""
    kinds, given = settings_of(fields.get("loss", "sigmoid"))
    if kinds[0] in ("kto", "apo_zero_unpaired"):
        return kto(x, seen, kinds[0], given)
    settings = {"beta": 0.1, "label_smoothing": 0.0, **given}
    tail = tails(x, seen, settings["tail_weight"]) if "tail_weight" in settings else 1.0
    sums, lengths = sums_of_answers(seen, seen.logps, tail), (seen.weight * seen.answer).sum(-1)
    chosen, rejected, valid = sums[0::2], sums[1::2], (lengths[0::2] > 0) * 1.0
    sizes = (x.maximum(lengths[0::2], 1.0), x.maximum(lengths[1::2], 1.0))
    averages = chosen / sizes[0], rejected / sizes[1]
    metrics = {"logps/chosen": mean(chosen, valid), "logps/rejected": mean(rejected, valid)}
    if kinds[0] not in DPO and kinds[0] != "sft":
        return free_of_reference(x, seen, kinds[0], given, (chosen, rejected), averages, valid, metrics)
    ref = sums_of_answers(seen, seen.ref, tail)
    ratios = chosen - ref[0::2], rejected - ref[1::2]
    moved = [diverged(x, ratio, settings) for ratio in ratios]
    o = Ratios(*moved, *ratios, sizes, chosen - rejected, valid, settings)
    share = 1.0
    if settings.get("use_weighting"):
        full = log_softmax(x, seen.logits)
        aligned = sums_of_answers(seen, seen.logps - x.log(x.exp(2 * full).sum(-1)))
        share = constant(x, x.exp(aligned[0::2] / sizes[0] + aligned[1::2] / sizes[1]))
    total = 0.0
    for kind, weight in zip(kinds, settings.get("weights") or [1.0] * len(kinds), strict=True):
        if kind == "sft":
            metrics["nll"] = nll_of_chosen(seen)
            total = total + weight * metrics["nll"]
        elif kind.startswith("aot"):
            total = total + weight * DPO[kind](x, o).sum() / valid.sum()
        else:
            total = total + weight * mean(share * DPO[kind](x, o), valid)
    return Value(total, {**metrics, **rewards(*(settings["beta"] * ratio for ratio in ratios), valid)})


def rewards(chosen: Any, rejected: Any, valid: Any) -> dict[str, Any]:
    """Metrics of the rewards of pairs. Before the first update policy and reference agree up to rounding, which then
    decides who is preferred: accuracies are between two bounds."""
    return {
        "rewards/chosen": mean(chosen, valid),
        "rewards/rejected": mean(rejected, valid),
        "rewards/margins": mean(chosen - rejected, valid),
        "rewards/accuracies": (
            mean((chosen - rejected > 1e-5) * 1.0, valid),
            mean((chosen - rejected > -1e-5) * 1.0, valid),
        ),
    }


def free_of_reference(
    x: Any,
    seen: Seen,
    kind: str,
    given: Mapping[str, Any],
    sums: tuple[Any, Any],
    averages: tuple[Any, Any],
    valid: Any,
    metrics: dict[str, Any],
) -> Value:
    """CPO, arXiv:2401.08417; SimPO, arXiv:2405.14734 eq. 6, with alpha AlphaPO, arXiv:2501.03884; ORPO,
    arXiv:2403.07691 eq. 6 and 7."""
    e, nll = given.get("label_smoothing", 0.0), nll_of_chosen(seen)
    metrics = {**metrics, "nll": nll}
    if kind == "orpo":
        beta = given.get("beta", 0.1)
        odds = [one - x.log(-x.expm1(x.minimum(one, -1e-7))) for one in averages]
        ratio = log_sigmoid(x, odds[0] - odds[1])
        metrics |= {"log_odds_chosen": mean(odds[0] - odds[1], valid), "log_odds_ratio": mean(ratio, valid)}
        told = rewards(beta * averages[0], beta * averages[1], valid)
        return Value(nll + mean(-beta * ratio, valid), metrics | told)
    if kind == "simpo":
        beta, alpha = given.get("beta", 2.0), given.get("alpha", 0.0)
        each = [(1 - x.exp(-alpha * one)) / alpha if alpha else one for one in averages]
        loss = swapped(x, beta * (each[0] - each[1]) - given.get("gamma", 1.0), e)
        loss = mean(loss, valid) + given.get("nll_coef", 0.0) * nll
        return Value(loss, metrics | rewards(beta * each[0], beta * each[1], valid))
    beta = given.get("beta", 0.1)
    values = averages if kind == "cpo_ipo" else sums
    delta = values[0] - values[1]
    if kind == "cpo":
        loss = swapped(x, beta * delta, e)
    else:
        loss = (delta - 1 / (2 * beta)) ** 2 if kind == "cpo_ipo" else x.maximum(1 - beta * delta, 0.0)
    told = rewards(beta * values[0], beta * values[1], valid)
    return Value(mean(loss, valid) + given.get("nll_coef", 1.0) * nll, metrics | told)


def kto(x: Any, seen: Seen, kind: str, given: Mapping[str, Any]) -> Value:
    """arXiv:2402.01306 eq. 8, the KL from answers to other prompts; without it APO-zero, arXiv:2408.06266."""
    beta = given.get("beta", 0.1)
    logps = sums_of_answers(seen, seen.logps)
    ratios = logps - sums_of_answers(seen, seen.ref)
    there = (seen.weight * seen.answer).sum(-1) > 0
    good, bad, others = ((seen.roles == role) & there for role in (CHOSEN, REJECTED, OTHER))
    kl = 0.0
    if kind == "kto":
        kl = constant(x, x.maximum(mean(ratios, others * 1.0), 0.0))
    value = x.where(good, sigmoid(x, beta * (ratios - kl)), sigmoid(x, beta * (kl - ratios)))
    weight = good * given.get("desirable_weight", 1.0) + bad * given.get("undesirable_weight", 1.0)
    loss = (weight * (1 - value)).sum() / (good | bad).sum()
    metrics = {"kl": kl} if kind == "kto" else {}
    for name, which in (("chosen", good), ("rejected", bad)):
        metrics |= {f"rewards/{name}": mean(beta * ratios, which * 1.0), f"logps/{name}": mean(logps, which * 1.0)}
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return Value(loss, metrics)


def reward_model(x: Any, seen: Seen, fields: Fields) -> Value:
    """Bradley-Terry of the scores of last tokens, arXiv:2203.02155 eq. 1, with margins (2307.09288 eq. 2) and centred
    (2312.09244 eq. 2); or cross-entropy of the score at the last token of each step, arXiv:2305.20050."""
    kinds, given = settings_of(fields.get("loss", "bradley_terry"))
    if kinds[0] == "process":
        signed = seen.scores * seen.labels
        right, wrong = seen.weight * (seen.labels > 0), seen.weight * (seen.labels < 0)
        return Value(
            mean(-log_sigmoid(x, signed), seen.weight),
            {
                "rewards/accuracies": mean((signed > 0) * 1.0, seen.weight),
                "rewards/chosen": mean(seen.scores, right),
                "rewards/rejected": mean(seen.scores, wrong),
                "rewards/margins": mean(seen.scores, right) - mean(seen.scores, wrong),
                "calibration/brier": mean((1 - sigmoid(x, signed)) ** 2, seen.weight),
            },
        )
    last = seen.weight * (x.cumsum(seen.weight, -1) == seen.weight.sum(-1, keepdims=True))
    score = (last * seen.scores).sum(-1)
    chosen, rejected, valid = score[0::2], score[1::2], (seen.weight.sum(-1) > 0)[0::2] * 1.0
    loss = -log_sigmoid(x, chosen - rejected - seen.margins)
    loss = loss + given.get("center_coef", 0.0) * (chosen + rejected) ** 2
    metrics = rewards(chosen, rejected, valid)
    metrics["calibration/brier"] = mean((1 - sigmoid(x, chosen - rejected)) ** 2, valid)
    return Value(mean(loss, valid), metrics)


def divergence(x: Any, student: Any, teacher: Any, beta: float) -> Any:
    """GKD, arXiv:2306.13649 eq. 1, of log-probabilities: forward KL with beta 0, reverse with 1, else the generalised
    Jensen-Shannon divergence."""
    if beta == 0:
        return (x.exp(teacher) * (teacher - student)).sum(-1)
    if beta == 1:
        return (x.exp(student) * (student - teacher)).sum(-1)
    middle = x.log(beta * x.exp(teacher) + (1 - beta) * x.exp(student))
    parts = beta * x.exp(teacher) * (teacher - middle) + (1 - beta) * x.exp(student) * (student - middle)
    return parts.sum(-1)


def coarse(x: Any, logits: Any, best: Any, temperature: float) -> Any:
    """Log-probabilities of the ids `best` [N, T, k] one by one, then of all others together."""
    full = log_softmax(x, logits / temperature)
    named = x.take_along_axis(full, best, -1)
    inside = (x.arange(full.shape[-1])[None, None, None] == best[..., None]).any(-2)
    others = x.log((x.exp(full) * ~inside).sum(-1, keepdims=True))
    return x.concatenate([named, others], -1)


def distill(x: Any, seen: Seen, fields: Fields) -> Value:
    """(1 - c) divergence + c nll, arXiv:2306.13649, over the tokens with loss, each teacher by its share in a row; with
    `features` the distance of hidden states, arXiv:1909.10351."""
    beta, temperature, c = (
        fields.get(name, value) for name, value in (("beta", 0.0), ("temperature", 1.0), ("cross_entropy", 0.0))
    )
    k = fields.get("top_k")

    def apart(beta: float, temperature: float) -> Any:
        total = 0.0
        for number, teacher in enumerate(seen.teachers):
            if k is None:
                both = [log_softmax(x, one / temperature) for one in (seen.logits, teacher)]
            else:
                best = x.argsort(-teacher, -1)[..., :k]
                both = [coarse(x, one, best, temperature) for one in (seen.logits, teacher)]
            total = total + seen.shares[:, number][:, None] * divergence(x, *both, beta)
        return total

    covered = seen.weight * seen.shares.sum(-1)[:, None]
    each = apart(beta, temperature)
    metrics = {
        **sft(x, seen, {}).metrics,
        "distill/divergence": (seen.weight * each).sum() / covered.sum(),
        "distill/kl": (seen.weight * apart(0.0, 1.0)).sum() / covered.sum(),
        "distill/student_nll": mean(-seen.logps, covered),
        "distill/teacher_nll": -(seen.weight * (seen.shares.T[..., None] * seen.taught_logps).sum(0)).sum()
        / covered.sum(),
    }
    if fields.get("teacher_column"):
        metrics["distill/covered_tokens"] = covered.sum() / seen.weight.sum()
    metrics["distill/student_perplexity"] = x.exp(metrics["distill/student_nll"])
    metrics["distill/teacher_perplexity"] = x.exp(metrics["distill/teacher_nll"])
    loss = mean((1 - c) * each - c * seen.logps, seen.weight)
    if seen.hidden is not None:
        settings = fields["features"]["hidden"]
        matched = seen.hidden @ seen.projection
        if settings.get("loss", "cosine") == "cosine":
            # Nothing stands before the first token.
            squares = [(one**2).sum(-1) for one in (matched, seen.taught)]
            norms = [x.sqrt(x.where(one > 0, one, 1.0)) for one in squares]
            distance = 1 - (matched * seen.taught).sum(-1) / (norms[0] * norms[1])
        else:
            distance = ((matched - seen.taught) ** 2).mean(-1)
        metrics["distill/hidden"] = mean(distance, seen.weight)
        loss = loss + settings.get("weight", 1.0) * metrics["distill/hidden"]
    return Value(loss, metrics)


PLACE_DECAY, NORM = 0.8, 1e-6


def drafter(x: Any, seen: Seen, fields: Fields) -> Value:
    """KL(target || drafter) of each place of a block, a later one with less weight, arXiv:2602.06036. Places attend to
    the block and to what the newest hidden states of the target are projected to."""
    w, window, size = seen.weights, fields["window"], fields["tokens"]

    def normed(value: Any) -> Any:
        return value / x.sqrt((value**2).mean(-1, keepdims=True) + NORM)

    row, start, known, there = (one.astype(int) for one in seen.blocks)
    back = x.arange(-window, 0)
    places = x.maximum(start[:, None] + back[None], 0)
    read = (back[None] >= -known[:, None])[..., None]
    before = x.where(read, normed(seen.hidden[row[:, None], places]) @ w["hidden"] + w["ages"][None], 0.0)
    first = normed(seen.embedded[row, start]) @ w["token"] + before[:, -1]
    state = first[:, None] + w["places"][None]
    visible = x.concatenate([read[..., 0], x.ones((len(row), size + 1), bool)], 1)[:, None]
    for layer in range(fields.get("layers", 1)):
        own = {name.removesuffix(f"_{layer}"): one for name, one in w.items() if name.endswith(f"_{layer}")}
        value = normed(state) * own["attention_norm"][None, None]
        every = x.concatenate([before, value], 1)
        # One head, a quarter of the width.
        scores = (value @ own["q"]) @ (every @ own["k"]).swapaxes(1, 2) / math.sqrt(own["q"].shape[-1])
        share = x.exp(log_softmax(x, x.where(visible, scores, -1e9)))
        state = state + share @ (every @ own["v"]) @ own["o"]
        value = normed(state) * own["mlp_norm"][None, None]
        gate = value @ own["gate"]
        state = state + (gate * sigmoid(x, gate) * (value @ own["up"])) @ own["down"]
    state = normed(state[:, 1:]) * w["final_norm"][None, None]
    # The token before each place, its hidden state, and the token itself.
    earlier = x.minimum(start[:, None] + x.arange(size)[None], seen.weight.shape[1] - 2)
    follows = normed(seen.embedded[row[:, None], earlier]) @ w["follows_in"] @ w["follows_out"]
    draft = log_softmax(x, state @ w["embedding"].T + follows)
    target = log_softmax(x, seen.hidden[row[:, None], earlier] @ w["embedding"].T)
    inside = (start[:, None] + x.arange(1, size + 1)[None] < seen.weight.shape[1]) & (there[:, None] > 0)
    weight = x.where(inside, seen.weight[row[:, None], earlier + 1], 0.0)
    # Behind the end of a sequence there is nothing to draft; its length is where the weights of its answer end.
    kl = (x.exp(target) * (target - draft)).sum(-1)
    overlap = x.minimum(x.exp(target), x.exp(draft)).sum(-1)
    reached = x.cumprod(overlap, -1)
    blocks = weight[:, 0].sum()
    metrics = {
        "drafter/kl": mean(kl, weight),
        "drafter/overlap": mean(overlap[:, 0], weight[:, 0]),
        "drafter/length": 1 + (reached * weight).sum() / blocks,
    }
    return Value(mean(kl, weight * PLACE_DECAY ** x.arange(size)[None]), metrics)


LOSSES: dict[str, Callable[[Any, Seen, Fields], Value]] = {
    "sft": sft,
    "preference": preference,
    "online_preference": preference,
    "reward_model": reward_model,
    "distill": distill,
    "drafter": drafter,
}
