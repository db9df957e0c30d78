"""Causes of stages that train on given texts: SFT, preferences, reward models, distillation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.config import DistillSection, PreferenceSection, SequenceSection
from posttrain.data.chat import Renderer
from posttrain.data.format import TokenizedExample, loss_on, tokenize_example, use_chat
from posttrain.data.tokenizer import Tokenizer
from posttrain.diagnosis.causes import Cause, Check
from posttrain.diagnosis.evidence import Evidence, nan_mean
from posttrain.errors import ConfigError

NUM_TOKENIZED = 256
"""Rows that are tokenized: a share among them is known to 0.06."""
LEAST_ROWS = 20
"""Least rows from which a share is told."""
UNLEARNED = 0.5
"""Share of rows without a token with loss from which most of the data is not learned from."""
CUT = 0.25
"""Share of rows whose answers lose their ends: a model that sees a quarter cut learns not to stop."""
NO_END = 0.02
"""Share of rows with a trained end below which the end is not learned; a healthy dataset has 1."""
PROMPT_LOSS = 0.7
"""Share of the tokens with loss that stand in prompts, from which the answers are a minor part of the loss."""
COPIES = 4.0
"""Times that the same row stands in the data on average. Draws with replacement from a small task give up to 2."""
LEAKED = 0.1
"""Share of held-out rows that the training data holds; single ones coincide in short tasks."""
UNMOVED = 0.004
"""Relative change of the held-out loss, on the same texts, of a model that has not moved. Runs that learn or forget
anything change it by more than 0.02."""
TINY_PATH = 1e-4
"""Sum of the learning rates: Adam moves no weight by more, and weights are of the order of 0.02."""
UNMOVED_MARGIN = 0.01
"""Reward margin that a preference stage has gained: at beta 0.1 a tenth of a nat between the two answers."""
RISE = 1.3
"""Ratio of the training loss at the end to that at the start, of a model that was destroyed."""
LEAST_RISE = 0.1
"""Nats that this rise has at least, which losses near 0 have by chance."""
JUMP = 1.4
"""Ratio of the largest loss of a reward model to that at the start, near log 2: its weights have jumped."""
STILL_ERRS = 0.2
"""Loss of a reward model, a third of log 2, that is left to learn."""
DEAD = 0.1
"""Share of the first gradient's norm that a model with such a loss has left only if its units are dead."""
SKIPPED = 0.3
"""Share of updates with gradients that are not finite."""
EQUAL_PAIRS = 0.2
"""Share of pairs with the same answer twice, which teach nothing."""
PREFERRED = 0.98
"""Share of held-out pairs, and of those of a batch, that are told apart; the others are errors of labels."""
SURE_APART = 3.0
"""Nats per token by which a model likes the chosen answer better before it is trained: the other is no text of its."""
SATURATED_LOSS = 0.05
"""Loss of pairs with a margin of 3, whose gradient is a twentieth of that at the start."""
FALLEN = 0.5
"""Nats per token that the chosen answers have lost: each token has 0.6 of its probability."""
ALIKE = 0.6
"""Share of the rejected answers' loss of likelihood that the chosen ones lose too, when the model knows neither."""
LEAST_FALLEN = 2.0
"""Nats that a whole chosen answer has lost at least."""
CONTRADICTIONS = 0.2
"""Share of prompts with several pairs whose pairs contradict each other; mistakes of annotators give half of it."""
CHANCE = 0.6
"""Accuracy on training pairs up to which labels look random, over hundreds of pairs."""
FORGOTTEN = 0.5
"""Nats per token that a student loses on its text by following its teacher; one that is only less sure costs 0.1."""


@dataclass(frozen=True)
class TrainedTexts:
    """Lengths, tokens with loss and ends of some rows of a dataset, before rows are cut."""

    num_rows: int
    unlearned: float
    """Share of rows of which no token with loss fits."""
    cut: float
    """Share of rows that lose tokens with loss."""
    lost: float
    """Share of the tokens with loss that are cut off."""
    ended: float
    """Share of rows whose end has loss, where nothing is cut."""
    prompt_share: float
    """Share of the tokens with loss that stand in prompts."""
    longest: int
    """Length in tokens that holds 95 % of the rows."""


def trained_texts(evidence: Evidence) -> TrainedTexts | None:
    """Lengths and masks of rows as the stage makes them; None where they cannot be made again, as with pictures."""
    section, tokenizer, rows = evidence.section, evidence.tokenizer, evidence.rows
    if not isinstance(section, SequenceSection) or len(section.datasets) > 1 or tokenizer is None:
        return None
    if len(rows) < LEAST_ROWS:
        return None
    chosen = [rows[int(place)] for place in np.linspace(0, len(rows) - 1, min(len(rows), NUM_TOKENIZED))]
    try:
        renderer = Renderer(tokenizer, use_chat(section.dataset, tokenizer, list(chosen[0])))
        on = loss_on(section)
        made = [tokenize_example(row, section.dataset, renderer, on) for row in chosen]
        answers = made if on != "all" else [tokenize_example(r, section.dataset, renderer, "answers") for r in chosen]
    except (ConfigError, KeyError, TypeError, ValueError):
        return None
    return _measure(made, answers, section, tokenizer)


def _measure(
    made: Sequence[Sequence[TokenizedExample]],
    answers: Sequence[Sequence[TokenizedExample]],
    section: SequenceSection,
    tokenizer: Tokenizer,
) -> TrainedTexts:
    cuts = section.overlong in ("truncate", "drop")
    unlearned, cut, ended = 0, 0, 0
    total, kept, of_prompts = 0, 0, 0
    lengths = []
    for sequences, plain in zip(made, answers, strict=True):
        # A row may be several sequences; it is cut if any of them is, and teaches if any of them does.
        row_total, row_kept = 0, 0
        for one in sequences:
            mask = np.asarray(one.loss_mask)
            whole = len(mask) > section.row_tokens
            fits = mask if not (cuts and whole) else mask[: section.row_tokens if section.overlong == "truncate" else 0]
            row_total += int(mask.sum())
            row_kept += int(fits.sum())
            lengths.append(len(mask))
        unlearned += row_kept == 0
        cut += row_kept < row_total
        stops = [np.isin(one.tokens, tokenizer.stop_ids) & np.asarray(one.loss_mask) for one in sequences]
        ended += any(bool(stop.any()) for stop in stops)
        of_prompts += row_total - sum(int(np.asarray(one.loss_mask).sum()) for one in plain)
        total, kept = total + row_total, kept + row_kept
    number = len(made)
    return TrainedTexts(
        num_rows=number,
        unlearned=unlearned / number,
        cut=cut / number,
        lost=1 - kept / max(total, 1),
        ended=ended / number,
        prompt_share=of_prompts / max(total, 1),
        longest=int(np.percentile(lengths, 95)),
    )


# --- masks, cuts, templates -------------------------------------------------------------------------------------------


def mask_empty(evidence: Evidence) -> Cause | None:
    """Rows whose answers do not fit, so that nothing of them is learned."""
    texts = trained_texts(evidence)
    if texts is None or texts.unlearned < UNLEARNED:
        return None
    section = evidence.section
    return Cause(
        name="mask_empty",
        summary=f"{texts.unlearned:.0%} of the rows have no token with loss: their answers do not fit, or are empty",
        evidence=[
            f"95 % of {texts.num_rows} rows have up to {texts.longest} tokens; row_tokens={section.row_tokens}",
            f"{texts.lost:.0%} of the tokens of answers are left out",
        ],
        advice=f"raise row_tokens to {texts.longest} or more, or shorten the prompts",
        explains=("rows_cut", "end_never_trained", "mask_full"),
    )


def rows_cut(evidence: Evidence) -> Cause | None:
    """Rows whose answers lose their ends."""
    texts = trained_texts(evidence)
    if texts is None or texts.cut < CUT:
        return None
    section = evidence.section
    return Cause(
        name="rows_cut",
        summary=f"{texts.cut:.0%} of the rows lose a part of their answer to row_tokens={section.row_tokens}",
        evidence=[
            f"of {texts.num_rows} rows tokenized, 95 % have up to {texts.longest} tokens",
            f"{texts.lost:.0%} of the tokens with loss are left out, ends of answers among them",
        ],
        advice=f"row_tokens={texts.longest} or more; or overlong: drop, if few rows are so long",
        explains=("end_never_trained",),
    )


def end_never_trained(evidence: Evidence) -> Cause | None:
    """Answers of which no end is trained: the model does not learn to stop."""
    texts = trained_texts(evidence)
    if texts is None or texts.ended > NO_END:
        return None
    stops = (
        []
        if evidence.tokenizer is None
        else evidence.tokenizer.hf.convert_ids_to_tokens([*evidence.tokenizer.stop_ids])
    )
    return Cause(
        name="end_never_trained",
        summary="the end of an answer is never trained: the model will not stop",
        evidence=[
            f"{texts.ended:.0%} of {texts.num_rows} rows have a stop token ({', '.join(map(str, stops))}) with loss",
        ],
        advice="let the chat template end assistant turns with a stop token inside of its generation block, or name "
        "the token that it writes in model.stop_tokens",
    )


def mask_full(evidence: Evidence) -> Cause | None:
    """Loss on prompts that outweighs that on answers."""
    texts = trained_texts(evidence)
    if texts is None or texts.prompt_share < PROMPT_LOSS:
        return None
    return Cause(
        name="mask_full",
        summary=f"{texts.prompt_share:.0%} of the loss is on prompts (train_on_prompt), the answers are the rest",
        evidence=[f"{texts.num_rows} rows tokenized; loss {_span(evidence, 'loss')}"],
        advice="train_on_prompt=false, so that the loss is that of answers",
    )


def template_missing(evidence: Evidence) -> Cause | None:
    """A model of conversations that is trained on plain texts."""
    section, source = evidence.section, evidence.source_tokenizer
    # Plain texts taught to a model of plain texts, and a template taught to it, are usual.
    if source is None or source.form is None or not source.form.chat or not evidence.rows:
        return None
    columns = list(evidence.rows[0])
    if "text" in columns or "messages" in columns:
        return None
    try:
        chat = use_chat(section.dataset, source, columns)
    except ConfigError:
        return None
    if chat:
        return None
    start = evidence.column("loss")
    return Cause(
        name="wrong_template",
        summary="the model was trained with a chat template, and this stage trains it without",
        evidence=[
            "its tokenizer says that its prompts were conversations; dataset.chat is "
            f"{str(section.dataset.chat).lower()}",
            f"loss {start[0]:.3g} at the first step" if len(start) else "no step yet",
        ],
        advice="remove dataset.chat, or set it to true",
        explains=("rate_too_large", "likelihood_falls"),
    )


# --- the same rows twice ----------------------------------------------------------------------------------------------


def _key(row: Mapping[str, Any]) -> str:
    """Text of all that a row teaches."""
    names = ("prompt", "messages", "text", "completion", "chosen", "rejected", "label")
    taught = {name: row[name] for name in names if name in row}
    return json.dumps(taught or dict(row), sort_keys=True, default=str)


def held_out_leaks(evidence: Evidence) -> Cause | None:
    """Held-out rows that the training data holds."""
    if not evidence.rows or len(evidence.held_out_rows) < LEAST_ROWS:
        return None
    trained = {_key(row) for row in evidence.rows}
    leaked = [row for row in evidence.held_out_rows if _key(row) in trained]
    share = len(leaked) / len(evidence.held_out_rows)
    if share < LEAKED:
        return None
    return Cause(
        name="held_out_leaks",
        summary=f"{share:.0%} of the held-out rows are training rows: the evaluation measures what is known by heart",
        evidence=[
            f"{len(leaked):,} of {len(evidence.held_out_rows):,} rows, such as {_shown(leaked[0])}",
            f"held-out loss {_held_out_span(evidence, 'loss')}",
        ],
        advice="take the held-out rows from other data, by a rule that no duplicate passes (a digest of the prompt)",
    )


def duplicates(evidence: Evidence) -> Cause | None:
    """Few rows, each many times: they are learned by heart."""
    rows = evidence.rows
    if len(rows) < LEAST_ROWS:
        return None
    distinct = len({_key(row) for row in rows})
    copies = len(rows) / distinct
    if copies < COPIES:
        return None
    return Cause(
        name="duplicates",
        summary=f"each row stands {copies:.0f} times in the data: {distinct:,} different ones are learned by heart",
        evidence=[
            f"{distinct:,} different rows of {len(rows):,}",
            f"training loss {_span(evidence, 'loss')}; held-out loss {_held_out_span(evidence, 'loss')}",
        ],
        advice="remove the copies, and count the passes by num_epochs",
    )


# --- learning rates ---------------------------------------------------------------------------------------------------


def rate_too_large(evidence: Evidence) -> Cause | None:
    """A model that is worse on its own training data at the end than at the start."""
    skipped = evidence.mean("update_skipped")
    if skipped >= SKIPPED:
        how = f"{skipped:.0%} of the updates were left out, as their gradients were not finite"
        return _destroyed(evidence, how)
    loss, part = evidence.column("loss"), evidence.part
    if len(loss) < 2 * part or not math.isfinite(float(loss[0])):
        return None
    start, end = float(loss[0]), nan_mean(loss[-part:])
    rises = math.isnan(end) or (end > RISE * start and end - start > LEAST_RISE)
    if not rises:
        return None
    return _destroyed(evidence, f"the training loss rose from {start:.3g} to {end:.3g}")


def _destroyed(evidence: Evidence, how: str) -> Cause:
    loss, gradients, rate = evidence.column("loss"), evidence.column("grad_norm"), _rate(evidence)
    worst = int(np.nanargmax(loss)) if np.isfinite(loss).any() else 0
    return Cause(
        name="rate_too_large",
        summary=f"the model was destroyed: {how}",
        evidence=[
            f"loss {loss[worst]:.3g} at step {evidence.steps[worst]['step']}, learning_rate up to {rate:.3g}",
            f"grad_norm {gradients[0]:.3g} at first, {np.nanmax(gradients):.3g} at most",
            f"held-out loss {_held_out_span(evidence, 'loss')}",
        ],
        advice=f"optimizer.learning_rate={rate / 30:.0e} or lower, from the model before this stage",
        explains=("likelihood_falls", "noisy_data"),
    )


def preference_rate_too_large(evidence: Evidence) -> Cause | None:
    """A policy that forgot both answers: the chosen one is less likely than by drawing tokens at random, and has lost
    about as much as the rejected one."""
    tokens, chosen = _answer_tokens(evidence, "chosen"), _moved(evidence, "logps/chosen")
    rejected = _moved(evidence, "logps/rejected")
    if tokens is not None and chosen is not None and rejected is not None and evidence.tokenizer is not None:
        before, after = (value / tokens for value in chosen)
        chance = -math.log(evidence.tokenizer.num_ids)
        alike = chosen[0] - chosen[1] > ALIKE * (rejected[0] - rejected[1])
        if after < chance < before and alike:
            how = f"chosen answers have {after:.3g} nats a token, {before:.3g} before; by chance it is {chance:.3g}"
            return _destroyed(evidence, how)
    return rate_too_large(evidence)


def reward_model_rate_too_large(evidence: Evidence) -> Cause | None:
    """A reward model whose loss jumped, and which has no gradient left although it still errs: its units are dead."""
    loss, gradients, part = evidence.column("loss"), evidence.column("grad_norm"), evidence.part
    if len(loss) >= 2 * part and np.isfinite(loss).all():
        worst, end, left = float(loss.max()), nan_mean(loss[-part:]), nan_mean(gradients[-part:])
        if worst > JUMP * float(loss[0]) and end > STILL_ERRS and left < DEAD * float(gradients[0]):
            how = f"the loss jumped from {loss[0]:.3g} to {worst:.3g}, and at {end:.3g} its gradient has vanished"
            return _destroyed(evidence, how)
    return rate_too_large(evidence)


def rate_too_small(evidence: Evidence) -> Cause | None:
    """A model that has not moved."""
    if len(evidence.steps) < 2 * evidence.part or evidence.mean("update_skipped") >= SKIPPED:
        return None
    held_out = _held_out_pair(evidence, "loss")
    path = float(np.nansum(evidence.column("learning_rate")))
    change = evidence.change("loss")
    if held_out is not None:
        before, after = held_out
        unmoved = abs(after - before) <= UNMOVED * abs(before)
        seen = f"held-out loss {before:.4g} -> {after:.4g} on the same texts"
    else:
        # Without texts that are measured twice only a path too short for any weight is a sign.
        unmoved = path < TINY_PATH and change is not None and abs(change.z) < 3
        seen = f"training loss {change}"
    if not unmoved or evidence.mean("grad_norm") == 0:
        return None
    rate = _rate(evidence)
    return Cause(
        name="rate_too_small",
        summary=f"the model has not moved in {len(evidence.steps)} steps at learning_rate={rate:.3g}",
        evidence=[seen, f"grad_norm {evidence.mean('grad_norm'):.3g}; the rates of all steps add up to {path:.2g}"],
        advice=f"optimizer.learning_rate={rate * 30:.0e} to {rate * 1000:.0e}, or more steps",
    )


# --- preferences and reward models ------------------------------------------------------------------------------------


def pairs_equal(evidence: Evidence) -> Cause | None:
    """Pairs of the same answer twice."""
    pairs = [row for row in evidence.rows if "chosen" in row and "rejected" in row]
    if len(pairs) < LEAST_ROWS:
        return None
    equal = [row for row in pairs if _same(row["chosen"], row["rejected"])]
    share = len(equal) / len(pairs)
    if share < EQUAL_PAIRS:
        return None
    return Cause(
        name="pairs_equal",
        summary=f"{share:.0%} of the pairs have the same answer twice, and teach nothing",
        evidence=[f"{len(equal):,} of {len(pairs):,} pairs, such as {_shown(equal[0])}"],
        advice="remove them, or look at what makes chosen and rejected answers of one source",
        explains=("rate_too_small",),
    )


def pairs_saturated(evidence: Evidence) -> Cause | None:
    """Pairs that were told apart before, so that they teach nothing."""
    accuracy, loss = evidence.column("rewards/accuracies"), evidence.column("loss")
    part = evidence.part
    if len(loss) < 2 * part:
        return None
    end = nan_mean(loss[-part:])
    early = nan_mean(accuracy[1 : 1 + max(part, 1)])
    if not (end < SATURATED_LOSS and early >= PREFERRED):
        return None
    chosen, rejected = evidence.column("logps/chosen"), evidence.column("logps/rejected")
    tokens = _answer_tokens(evidence, "rejected")
    if np.isfinite(chosen[:1]).any() and tokens is not None:
        # A reward model has no opinion before; a policy has.
        apart = float(chosen[0] - rejected[0]) / tokens
        if apart < SURE_APART:
            return None
        seen = f"before training the chosen answers had {apart:.1f} nats per token more than the rejected ones"
    elif isinstance(evidence.section, PreferenceSection):
        return None
    else:
        seen = f"accuracy {early:.0%} within the first {part} steps"
    gradients = evidence.column("grad_norm")
    return Cause(
        name="pairs_saturated",
        summary=f"the pairs are too easy: accuracy {early:.0%} after {part} steps, loss {end:.2g} at the end",
        evidence=[seen, f"grad_norm {gradients[0]:.2g} at first, {nan_mean(gradients[-part:]):.2g} at the end"],
        advice="pairs whose rejected answers the model itself would give: sample them from it (online_preference)",
    )


def likelihood_falls(evidence: Evidence) -> Cause | None:
    """Both answers lose likelihood: the model prefers the chosen one by writing neither."""
    tokens = _answer_tokens(evidence, "chosen")
    chosen, rejected = _moved(evidence, "logps/chosen"), _moved(evidence, "logps/rejected")
    if tokens is None or chosen is None or rejected is None:
        return None
    chosen_before, chosen_after = chosen
    rejected_before, rejected_after = rejected
    fall = chosen_before - chosen_after
    if fall / tokens < FALLEN or fall < LEAST_FALLEN or rejected_after >= rejected_before:
        return None
    return Cause(
        name="likelihood_falls",
        summary=f"the chosen answers lose likelihood too: {chosen_before:.3g} -> {chosen_after:.3g} nats an answer",
        evidence=[
            f"{fall / tokens:.2g} nats a token; rejected answers {rejected_before:.3g} -> {rejected_after:.3g}",
            f"entropy {_span(evidence, 'entropy')}, accuracy {_span(evidence, 'rewards/accuracies')}",
        ],
        advice="loss: {kind: [sigmoid, sft], weights: [1, 0.1]}, a larger beta, or a lower learning_rate",
    )


def preference_rate_too_small(evidence: Evidence) -> Cause | None:
    """A policy whose answers are as likely as at the start."""
    margins = evidence.column("rewards/margins")
    part = evidence.part
    if len(margins) < 2 * part or not np.isfinite(margins).any():
        return rate_too_small(evidence)
    gained = nan_mean(margins[-part:]) - float(margins[0])
    # Losses with a reference begin with a margin of 0; others are measured by their held-out loss.
    if abs(float(margins[0])) > 1e-3:
        return rate_too_small(evidence)
    if abs(gained) > UNMOVED_MARGIN or evidence.mean("update_skipped") >= SKIPPED:
        return None
    rate = _rate(evidence)
    return Cause(
        name="rate_too_small",
        summary=f"the policy has not moved in {len(evidence.steps)} updates at learning_rate={rate:.3g}",
        evidence=[
            f"reward margin {gained:.2g} at the end, of a loss that begins at a margin of 0",
            f"grad_norm {evidence.mean('grad_norm'):.3g}; loss {_span(evidence, 'loss')}",
        ],
        advice=f"optimizer.learning_rate={rate * 30:.0e} to {rate * 1000:.0e}, or more steps",
    )


def contradictory_pairs(evidence: Evidence) -> Cause | None:
    """Pairs of the same prompt that say the opposite of each other."""
    seen: dict[str, set[tuple[str, str]]] = {}
    for row in evidence.rows:
        if "chosen" in row and "rejected" in row and not _same(row["chosen"], row["rejected"]):
            sides = (_text(row["chosen"]), _text(row["rejected"]))
            seen.setdefault(_text(row.get("prompt", "")), set()).add(sides)
    several = {prompt: pairs for prompt, pairs in seen.items() if len(pairs) > 1}
    against = [prompt for prompt, pairs in several.items() if any((b, a) in pairs for a, b in pairs)]
    accuracy = nan_mean(evidence.column("rewards/accuracies")[-evidence.part :])
    if len(several) < LEAST_ROWS or len(against) < CONTRADICTIONS * len(several) or not accuracy < PREFERRED:
        return None
    return Cause(
        name="noisy_data",
        summary=f"{len(against):,} prompts have pairs that contradict each other: chosen here is rejected there",
        evidence=[
            f"{len(against) / len(several):.0%} of the prompts with different pairs, such as {against[0][:60]!r}",
            f"accuracy on training pairs {accuracy:.0%} at the end",
        ],
        advice="look at these rows: labels at random, or two annotators of different minds; keep what both agree on",
        explains=("rate_too_small",),
    )


# --- distillation -----------------------------------------------------------------------------------------------------


def teacher_of_other_text(evidence: Evidence) -> Cause | None:
    """A teacher that does not know the text: the student comes nearer to it and forgets what it knew."""
    text, loss = _moved(evidence, "nll"), evidence.column("loss")
    if not isinstance(evidence.section, DistillSection) or text is None or len(loss) < 2 * evidence.part:
        return None
    before, after = text
    end = nan_mean(loss[-evidence.part :])
    if after - before < FORGOTTEN or not end < float(loss[0]):
        return None
    return Cause(
        name="teacher_of_other_text",
        summary=f"the teacher does not know this text: the student's own loss on it rises, {before:.3g} -> {after:.3g} "
        "nats a token, while it comes nearer to the teacher",
        evidence=[
            f"divergence {loss[0]:.3g} -> {end:.3g} nats a token",
            f"entropy of the student {_span(evidence, 'entropy')}",
        ],
        advice="render the text as the teacher was trained (dataset.chat, model.chat_template), or take another "
        "teacher; posttrain evaluate gives its loss on this text",
    )


# --- words and numbers ------------------------------------------------------------------------------------------------


def _rate(evidence: Evidence) -> float:
    """Largest learning rate of the stage so far."""
    rates = evidence.column("learning_rate")
    return float(np.nanmax(rates)) if np.isfinite(rates).any() else math.nan


def _span(evidence: Evidence, name: str) -> str:
    values = evidence.column(name)
    return f"{values[0]:.3g} -> {nan_mean(values[-evidence.part :]):.3g}" if len(values) else "unknown"


def _held_out_pair(evidence: Evidence, name: str) -> tuple[float, float] | None:
    """First and last value of a held-out metric; None without two of them."""
    values = [line[f"eval/{name}"] for line in evidence.evaluations if f"eval/{name}" in line]
    return (float(values[0]), float(values[-1])) if len(values) > 1 else None


def _held_out_span(evidence: Evidence, name: str) -> str:
    pair = _held_out_pair(evidence, name)
    return "unknown" if pair is None else f"{pair[0]:.3g} -> {pair[1]:.3g}"


def _moved(evidence: Evidence, name: str) -> tuple[float, float] | None:
    """Held-out metric before and after, or that of training at its start and end."""
    held_out = _held_out_pair(evidence, name)
    if held_out is not None:
        return held_out
    change = evidence.change(name)
    return None if change is None else (change.before, change.after)


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _same(one: Any, other: Any) -> bool:
    return _text(one) == _text(other)


def _answer_tokens(evidence: Evidence, side: str) -> float | None:
    """Mean number of tokens of an answer, its end included; None without texts."""
    tokenizer = evidence.tokenizer
    texts = [row[side] for row in evidence.rows[:NUM_TOKENIZED] if isinstance(row.get(side), str)]
    if tokenizer is None or not texts:
        return None
    return float(np.mean([len(tokenizer.encode(text)) + 1 for text in texts]))


def _shown(row: Mapping[str, Any], length: int = 100) -> str:
    shown = json.dumps({k: v for k, v in row.items() if k != "images"}, ensure_ascii=False, default=str)
    return shown if len(shown) <= length else f"{shown[:length]}..."


_OF_DATA: tuple[Check, ...] = (mask_empty, rows_cut, end_never_trained, mask_full)
SFT_CAUSES: tuple[Check, ...] = (
    *_OF_DATA,
    template_missing,
    rate_too_large,
    duplicates,
    held_out_leaks,
    rate_too_small,
)
PREFERENCE_CAUSES: tuple[Check, ...] = (
    template_missing,
    preference_rate_too_large,
    pairs_equal,
    contradictory_pairs,
    pairs_saturated,
    likelihood_falls,
    duplicates,
    held_out_leaks,
    preference_rate_too_small,
)
REWARD_MODEL_CAUSES: tuple[Check, ...] = (
    template_missing,
    reward_model_rate_too_large,
    pairs_equal,
    contradictory_pairs,
    pairs_saturated,
    duplicates,
    held_out_leaks,
    rate_too_small,
)
DISTILL_CAUSES: tuple[Check, ...] = (
    *_OF_DATA,
    rate_too_large,
    teacher_of_other_text,
    duplicates,
    held_out_leaks,
    rate_too_small,
)
