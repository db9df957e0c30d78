"""Distillation losses: equal to TRL's, the same in any packing, and the same from a teacher's best ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import Batch, TopK
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.kernels.logits.divergence import Divergence, divergence, divergence_gradient
from posttrain.kernels.logits.token_stats import Teacher, token_stats, top_k
from posttrain.losses.distill import DistillLoss
from posttrain.losses.sft import SFTLoss
from posttrain.tree import replace

VOCAB = 17


def totals(student: jax.Array, teacher: Any, cases: Any, counts: np.ndarray, logits: Any = lambda x: x) -> Any:
    """The sum of the divergence over what counts, and its gradient, of each kind that cases have."""
    keys = {(case["args"]["beta"], case["args"]["temperature"]) for case in cases}

    def total(student: jax.Array, key: tuple[float, float]) -> jax.Array:
        found = divergence(logits(student), jnp.asarray(teacher), Divergence(beta=key[0], temperature=key[1]))
        return jnp.sum(jnp.where(counts, found, 0.0))

    return jax.jit(lambda s: {key: jax.value_and_grad(total)(s, key) for key in keys})(student)


def test_goldens_of_gkd(golden: Callable[..., Any]) -> None:
    """TRL's `generalized_jsd_loss` with its gradients; the reductions divide the same sum by other numbers."""
    data = golden("gkd")
    cases = [case for case in data.cases if case["name"].startswith("gkd_")]
    assert len(cases) == 25
    counts = data.arrays["in/labels"] != -100
    student, teacher = (jnp.asarray(data.arrays[f"in/{who}_logits"], jnp.float32) for who in ("student", "teacher"))
    found = totals(student, teacher, cases, counts)
    for case in cases:
        args = case["args"]
        value, grad = found[args["beta"], args["temperature"]]
        divisors = {"sum": 1, "mean": counts.sum() * VOCAB, "batchmean": args["num_items_in_batch"] or counts.sum()}
        divisor = divisors[args["reduction"]]
        np.testing.assert_allclose(value / divisor, case["loss"], rtol=1e-5)
        np.testing.assert_allclose(
            grad / divisor, data.arrays[f"out/{case['name']}/dstudent"], rtol=1e-4, atol=1e-6 / divisor
        )


@pytest.mark.parametrize("cap", [None, 3.0])
def test_goldens_of_the_distillation_trainer(golden: Callable[..., Any], cap: float | None) -> None:
    """From hidden states and two heads; the student's logits may have a soft cap."""
    data = golden("gkd")
    cases = [c for c in data.cases if c["name"].startswith("distill_")]
    cases = [c for c in cases if c["args"]["student_final_logit_softcapping"] == cap]
    assert len(cases) == (6 if cap is None else 3)
    arrays = {name: jnp.asarray(array, jnp.float32) for name, array in data.arrays.items() if name.startswith("in/")}
    counts = np.asarray(data.arrays["in/completion_mask"], bool)

    def logits(hidden: jax.Array) -> jax.Array:
        out = hidden @ arrays["in/student_lm_head"].T
        return out if cap is None else cap * jnp.tanh(out / cap)

    taught = arrays["in/teacher_hidden"] @ arrays["in/teacher_lm_head"].T
    found = totals(arrays["in/student_hidden"], taught, cases, counts, logits)
    for case in cases:
        value, grad = found[case["args"]["beta"], case["args"]["temperature"]]
        np.testing.assert_allclose(value / counts.sum(), case["loss"], rtol=1e-5)
        expected = data.arrays[f"out/{case['name']}/dstudent_hidden"]
        np.testing.assert_allclose(grad / counts.sum(), expected, rtol=1e-3, atol=1e-5)


LENGTH, DIM, TEACHER_DIM = 12, 6, 5
LENGTHS = (5, 7, 3, 9)


@pytest.fixture(scope="module")
def problem() -> dict[str, Any]:
    """Four sequences in rows of their own, with a student's and two teachers' hidden states and heads."""
    draw = np.random.default_rng(0)
    shape = (len(LENGTHS), LENGTH)
    segments = (np.arange(LENGTH)[None] < np.asarray(LENGTHS)[:, None]).astype(np.int32)
    weight = segments * (np.arange(LENGTH)[None] > 1) * draw.choice([0.0, 0.5, 1.0], shape)
    return {
        "tokens": draw.integers(0, VOCAB, shape).astype(np.int32),
        "segments": segments,
        "loss_weight": weight.astype(np.float32),
        "student": draw.normal(size=(*shape, DIM)).astype(np.float32),
        "teacher": draw.normal(size=(*shape, TEACHER_DIM)).astype(np.float32),
        "other": draw.normal(size=(*shape, TEACHER_DIM)).astype(np.float32),
        "shares": draw.dirichlet((1, 1), shape).astype(np.float32),
        "head": draw.normal(size=(DIM, VOCAB)).astype(np.float32),
        "teacher_head": draw.normal(size=(TEACHER_DIM, VOCAB + 3)).astype(np.float32),
    }


def laid_out(problem: dict[str, Any], layout: Sequence[Sequence[int]], rows: int = len(LENGTHS)) -> dict[str, Any]:
    """These sequences in these rows, and empty rows, so that most problems have one shape."""
    made = dict(problem)
    for name, array in problem.items():
        if array.shape[:2] == (len(LENGTHS), LENGTH):
            made[name] = np.zeros((rows, *array.shape[1:]), array.dtype)
            for row, numbers in enumerate(layout):
                start = 0
                for segment, number in enumerate(numbers, start=1):
                    place = slice(start, start := start + LENGTHS[number])
                    made[name][row, place] = array[number, : LENGTHS[number]] * (segment if name == "segments" else 1)
    return made


KIND, LOSS = Divergence(beta=0.3, temperature=1.5), DistillLoss(cross_entropy=0.25)


@cache
def program(kind: Divergence, loss: DistillLoss, live: tuple[str, ...]) -> Callable[..., Any]:
    def run(p: dict[str, Any], said: Sequence[TopK]) -> Any:
        teachers = [*said, *(Teacher(lambda x: x @ p["teacher_head"], p[who]) for who in live)]
        shares = p["shares"] if len(teachers) == 2 else None
        batch = Batch(
            tokens=p["tokens"],
            positions=jnp.zeros_like(p["tokens"]),
            segments=p["segments"],
            loss_weight=p["loss_weight"],
            teacher_weights=shares,
        )

        def total(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, Any]:
            stats = token_stats(
                lambda x: x @ head,
                hidden,
                batch.tokens,
                batch.segments,
                temperature=1.0,
                vocab_size=VOCAB,
                only=batch.loss_weight > 0,
                terms=Terms(divergence=kind),
                teachers=teachers,
                teacher_weights=shares,
            )
            output = loss(stats, batch)
            return jnp.asarray(output.loss.total), output

        (_, output), grads = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(p["student"], p["head"])
        return output, grads

    return jax.jit(run)


def distilled(p: dict[str, Any], *teachers: str | TopK, kind: Divergence = KIND, loss: DistillLoss = LOSS) -> Any:
    """Output of the loss and the gradient of its total by hidden states and head; live teachers have names."""
    live = tuple(one for one in teachers if isinstance(one, str))
    return program(kind, loss, live)(p, [one for one in teachers if not isinstance(one, str)])


BOTH = ("teacher", "other")


def test_packed_is_apart(problem: dict[str, Any]) -> None:
    """With two teachers that share every token."""
    apart, (hidden, head) = distilled(problem, *BOTH)
    together, (packed_hidden, packed_head) = distilled(laid_out(problem, [[0, 1], [2, 3]], rows=2), *BOTH)
    assert apart.metrics.keys() == together.metrics.keys() >= {"nll", "distill/kl", "distill/teacher_nll"}
    for a, b in [(apart.loss, together.loss), *((apart.metrics[n], together.metrics[n]) for n in apart.metrics)]:
        np.testing.assert_allclose((a.total, a.weight), (b.total, b.weight), rtol=1e-5)
    np.testing.assert_allclose(head, packed_head, rtol=1e-4, atol=1e-5)
    for index, length in enumerate(LENGTHS):
        start = LENGTHS[index - 1] if index % 2 else 0
        moved = packed_hidden[index // 2, start : start + length - 1]
        np.testing.assert_allclose(hidden[index, : length - 1], moved, rtol=1e-4, atol=1e-5)


def test_rows_apart_add_up(problem: dict[str, Any]) -> None:
    """Any split into micro-batches is the whole."""
    whole, (_, head) = distilled(problem, *BOTH)
    parts = [distilled(laid_out(problem, [[number]]), *BOTH) for number in range(4)]
    loss = sum((output.loss for output, _ in parts[1:]), parts[0][0].loss)
    np.testing.assert_allclose((whole.loss.total, whole.loss.weight), (loss.total, loss.weight), rtol=1e-5)
    np.testing.assert_allclose(head, sum(grads[1] for _, grads in parts), rtol=1e-4, atol=1e-5)


@partial(jax.jit, static_argnames=("k", "temperature"))
def best(hidden: Any, head: Any, tokens: Any, only: Any = None, *, k: int, temperature: float) -> TopK:
    return top_k(lambda x: x @ head, hidden, tokens, k=k, temperature=temperature, vocab_size=VOCAB, only=only)


def said_by(p: dict[str, Any], who: str, k: int, temperature: float) -> TopK:
    return best(p[who], p["teacher_head"][:, :VOCAB], p["tokens"], k=k, temperature=temperature)


def test_all_ids_say_what_the_teacher_says(problem: dict[str, Any]) -> None:
    """Best ids as many as there are tokens but one: what is left is one token, so nothing is lost."""
    said = [said_by(problem, who, VOCAB - 1, KIND.temperature) for who in BOTH]
    live = {**problem, "teacher_head": problem["teacher_head"][:, :VOCAB]}
    expected, grads = distilled(live, *BOTH)
    found, found_grads = distilled(live, *said)
    assert expected.metrics.keys() == found.metrics.keys()
    for name, mean in expected.metrics.items():
        np.testing.assert_allclose(found.metrics[name].total, mean.total, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(found.loss.total, expected.loss.total, rtol=1e-4)
    for a, b in zip(found_grads, grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("outside", [False, True])
def test_metrics_are_at_temperature_1(problem: dict[str, Any], outside: bool) -> None:
    """Perplexities of student and teacher, and the KL, whatever the temperature of the divergence."""
    live = {**problem, "teacher_head": problem["teacher_head"][:, :VOCAB]}
    student = np.asarray(jax.nn.log_softmax(live["student"] @ live["head"]))[:, :-1]
    teacher = np.asarray(jax.nn.log_softmax(live["teacher"] @ live["teacher_head"]))[:, :-1]
    weight, targets = problem["loss_weight"][:, 1:], problem["tokens"][:, 1:, None]
    divergences = set()
    for temperature in (0.7, 2.0):
        kind = Divergence(beta=1.0, temperature=temperature)
        taught = said_by(live, "teacher", VOCAB - 1, temperature) if outside else "teacher"
        metrics = distilled(live, taught, kind=kind)[0].metrics
        for who, log_p in (("student", student), ("teacher", teacher)):
            nll = -np.sum(weight * np.take_along_axis(log_p, targets, -1)[..., 0])
            np.testing.assert_allclose(metrics[f"distill/{who}_nll"].total, nll, rtol=1e-4, err_msg=who)
        kl = np.sum(weight * np.sum(np.exp(teacher) * (teacher - student), axis=-1))
        np.testing.assert_allclose(metrics["distill/kl"].total, kl, rtol=1e-4)
        divergences.add(round(float(metrics["distill/divergence"].total), 3))
    assert len(divergences) == 2


def test_best_ids_are_found_only_where_they_are_wanted(problem: dict[str, Any]) -> None:
    given, wanted = [problem[name] for name in ("teacher", "teacher_head", "tokens")], problem["loss_weight"] > 0
    found = [jax.tree.leaves(best(*given, only, k=3, temperature=2.0)) for only in (wanted, None)]
    for some, whole in zip(*found, strict=True):
        np.testing.assert_allclose(some[wanted], whole[wanted], rtol=1e-5)
        assert not np.asarray(some)[~wanted].any()


def test_few_ids_bound_from_below(problem: dict[str, Any]) -> None:
    logits = jnp.asarray(problem["student"] @ problem["head"])[:, :-1]
    teacher = jnp.asarray(problem["teacher"] @ problem["teacher_head"][:, :VOCAB])[:, :-1]
    said = [jax.tree.map(lambda x: x[:, 1:], said_by(problem, "teacher", k, 1.0)) for k in (1, 4, VOCAB - 1)]
    for beta in (0.0, 0.5, 1.0):
        kind = Divergence(beta=beta, temperature=1.0)
        every = jax.jit(lambda kinds, kind=kind: [divergence(logits, x, kind) for x in kinds])
        few, some, all_of_them, whole = map(np.asarray, every([*said, teacher]))
        assert (few < some + 1e-6).all() and (some < all_of_them + 1e-6).all()
        assert float(few.sum()) < 0.9 * float(some.sum()) < 0.9 * float(all_of_them.sum())
        np.testing.assert_allclose(all_of_them, whole, rtol=1e-4, atol=1e-6)


def test_an_id_that_the_student_lacks_is_none(problem: dict[str, Any]) -> None:
    """Places of a record that stand for no id change nothing."""
    said = said_by(problem, "teacher", 4, 1.0)
    none = np.full((*said.ids.shape[:2], 3), 2**31 - 1, np.int32)
    more = replace(
        said,
        ids=jnp.concatenate([said.ids, none], axis=-1),
        logps=jnp.pad(said.logps, ((0, 0), (0, 0), (0, 3)), constant_values=-1e30),
    )
    (a, of_a), (b, of_b) = (distilled(problem, x) for x in (said, more))
    np.testing.assert_allclose(a.loss.total, b.loss.total, rtol=1e-6)
    np.testing.assert_allclose(of_a[1], of_b[1], rtol=1e-5, atol=1e-6)


def test_a_teacher_equal_to_the_student_pulls_nothing(problem: dict[str, Any]) -> None:
    same = {**problem, "teacher_head": problem["head"], "teacher": problem["student"]}
    output, grads = distilled(same, "teacher", loss=DistillLoss(cross_entropy=0.0))
    assert abs(float(output.loss.total)) < 1e-4 and max(float(jnp.abs(g).max()) for g in grads) < 1e-5
    assert abs(output.metrics["distill/kl"].value()) < 1e-5
    np.testing.assert_allclose(output.metrics["nll"].value(), output.metrics["distill/teacher_nll"].value(), 1e-5)


def test_a_teacher_without_a_share_may_say_anything(problem: dict[str, Any]) -> None:
    """Tokens that no teacher speaks of have cross-entropy alone, and do not count in the divergence."""
    shares = np.zeros((*problem["tokens"].shape, 2), np.float32)
    shares[:2, :, 0] = 1.0
    broken = {**problem, "shares": shares, "other": np.full_like(problem["other"], np.nan)}
    output, grads = distilled(broken, *BOTH)
    assert np.isfinite(output.loss.total) and all(np.isfinite(g).all() for g in grads)
    weight = problem["loss_weight"]
    assert output.metrics["distill/kl"].weight == weight[:2].sum() < output.loss.weight == weight.sum()


def test_errors() -> None:
    with pytest.raises(ValueError, match="cross_entropy=1"):
        DistillLoss(cross_entropy=1.0)
    with pytest.raises(ValueError, match="beta=1.5"):
        Divergence(beta=1.5, temperature=1.0)
    with pytest.raises(ValueError, match="temperature=0"):
        Divergence(beta=0.5, temperature=0.0)
    zeros = jnp.zeros((1, 4), jnp.int32)
    batch = Batch(tokens=zeros, positions=zeros, segments=zeros + 1, loss_weight=jnp.ones((1, 4)))
    stats = token_stats(lambda x: x, jnp.zeros((1, 4, 3)), zeros, zeros + 1, temperature=1.0, vocab_size=3)
    with pytest.raises(ValueError, match="stats.divergence is None"):
        DistillLoss(cross_entropy=0.0)(stats, batch)
    with pytest.raises(ValueError, match="needs stats.mean_logps"):
        SFTLoss(label_smoothing=0.1)(stats, batch)
    terms = Terms(divergence=KIND)
    with pytest.raises(ValueError, match="with 0 teachers"):
        token_stats(lambda x: x, jnp.zeros((1, 4, 3)), zeros, zeros, temperature=1.0, vocab_size=3, terms=terms)


def test_a_smaller_vocabulary_is_padded() -> None:
    draw = np.random.default_rng(0)
    student, teacher = (jnp.asarray(draw.normal(size=(1, 2, n)), jnp.float32) for n in (5, 3))
    kind = Divergence(beta=0.0, temperature=1.0)
    log_t, log_s = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    expected = jnp.sum(jnp.exp(log_t) * (log_t - log_s[..., :3]), axis=-1)
    np.testing.assert_allclose(divergence(student, teacher, kind), expected, rtol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_the_gradient_is_the_one_by_the_library(problem: dict[str, Any], beta: float) -> None:
    """From whole logits and from best ids, with a certain and an impossible token, and an id that the student lacks."""
    student = jnp.asarray(problem["student"] @ problem["head"])[:, 1:].at[:, 0, 3].add(60.0)
    student = student.at[:, :, 5].set(-1e30)
    live = jnp.asarray(problem["teacher"] @ problem["teacher_head"])[:, :-1, :VOCAB].at[:, :, 5].set(-jnp.inf)
    best = jax.tree.map(lambda x: x[:, 1:], said_by(problem, "teacher", 4, 1.5))
    best = replace(best, ids=jnp.where(best.ids == 5, VOCAB + 1, best.ids))
    kind = Divergence(beta=beta, temperature=1.5)

    def both(student: jax.Array) -> Any:
        by_library = [jax.grad(lambda z, t=t: divergence(z, t, kind).sum())(student) for t in (live, best)]
        return [divergence_gradient(student, t, kind) for t in (live, best)], by_library

    for found, expected in zip(*jax.jit(both)(student), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert float(jnp.abs(found).max()) > 0.01 and not found[..., 5].any()
