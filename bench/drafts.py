"""Speed with drafted tokens beside that without, in pairs of batches of the same samples.

    PYTHONPATH=. python bench/drafts.py [--model FOLDER] [--larger] [--draft KIND] [--rows 1 8 32] [--drafts N]
                                        [--temperature T] [--pairs N] [--text KIND] [--always] [--parts]

Without `--draft` a model of one layer and a tenth of the story model's size is distilled from it first, over stories
that it wrote itself, half of them greedily; `--draft block` trains a block drafter of as many parameters over the same
stories, and `--draft block=FOLDER` takes one; `--draft ngram` drafts from what prompt and sample have repeated.
`--larger`: for a model of 17 times the size, trained first over stories that the story model wrote.
`--text`: openings of stories, or `repeats`, one sentence four times. `--always`: also where drafts do not pay; without
it the engine chooses, and a warm-up of as many batches as pairs lets it measure both ways.

Each pair is a batch without drafts and one with them, whose tokens must be equal; ratios are of one core's CPU time,
on which other work has least influence. `--parts`: microseconds of a pass of the model over one token of each row and
over a round's, of the draft model's pass, and of the draws.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import posttrain as pt
from posttrain.data.tokenizer import load_tokenizer
from posttrain.models.cache import empty_cache
from posttrain.models.decoder import Decoder
from posttrain.rollout.drafting import Speculation
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.sampling import Sampling, Tables, sample
from posttrain.rollout.types import Completion, SamplingParams
from posttrain.weights.drafter import read_drafter
from posttrain.weights.load import load_model

LENGTH, OPENING, NEW = 256, 8, 192
"""Positions of a row, tokens of a prompt, and new ones."""
WRITTEN = 1600
"""Stories that the draft model reads."""
DRAFT = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.08,
    "tie_word_embeddings": True,
}
LARGER = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 680,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
TIMES = 100
"""Passes of a measured program."""


class Bench:
    def __init__(self, path: Path, text: Path):
        self.path, self.model = path, load(path)
        self.tokenizer = load_tokenizer(path)
        self.stories = [json.loads(line)["text"] for line in text.read_text().splitlines()]

    def prompts(self, count: int, first: int, kind: str) -> list[list[int]]:
        """Openings of stories, the last ones of the file where `first` is 0."""
        texts = [self.stories[-1 - (first + i) % len(self.stories)] for i in range(count)]
        if kind == "repeats":
            texts = [" ".join([text.split(".")[0] + "."] * 4) for text in texts]
        ids = [[1, *self.tokenizer.hf.encode(text[:200], add_special_tokens=False)] for text in texts]
        return ids if kind == "repeats" else [one[:OPENING] for one in ids]

    def engine(self, rows: int, speculation: Speculation | None) -> NativeEngine:
        options = {"slots": rows, "max_length": LENGTH, "decode_steps": 32, "tokenizer_decode": None}
        return NativeEngine(self.model, speculation=speculation, **options)  # type: ignore[arg-type]

    def written(self) -> list[dict[str, str]]:
        """Stories of the model."""
        prompts = self.prompts(WRITTEN, 100, "stories")
        each = [settings(float(i % 2), 7, i, LENGTH - 1 - len(prompt)) for i, prompt in enumerate(prompts)]
        return self.texts(prompts, self.engine(32, None).generate_all(prompts, each))

    def larger(self, folder: Path) -> Path:
        """Folder of a larger model, trained over stories that this one draws."""
        engine, rows = self.engine(32, None), []
        for length in range(2, 7):
            prompts = [prompt[:length] for prompt in self.prompts(WRITTEN, 100, "stories")]
            each = [settings(1.0, 1000 + length, i, LENGTH - 1 - length) for i in range(WRITTEN)]
            rows += self.texts(prompts, engine.generate_all(prompts, each))
        init = {"tokenizer": str(self.path), "init": LARGER}
        optimizer = {"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 40}
        sizes = {"overlong": "truncate", "row_tokens": LENGTH, "batch_rows": 16, "num_steps": 450}
        pt.SFT(init, dataset=rows, output=folder, seed=0, optimizer=optimizer, **sizes).fit()
        return folder / "0-sft" / "model"

    def texts(self, prompts: Sequence[Sequence[int]], written: Sequence[Completion]) -> list[dict[str, str]]:
        return [
            {"text": self.tokenizer.hf.decode([*prompt[1:], *one.tokens], skip_special_tokens=True)}
            for prompt, one in zip(prompts, written, strict=True)
        ]

    def speculation(self, draft: str | None, tokens: int, folder: Path) -> Speculation:
        """Source of drafts, trained if `draft` names no folder."""
        common: dict[str, Any] = {"output": folder, "seed": 0, "overlong": "truncate", "row_tokens": LENGTH}
        common["optimizer"] = {"learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 20}
        if draft == "ngram":
            return Speculation(tokens=tokens)
        if draft is not None and draft.startswith("block"):
            path = draft.partition("=")[2]
            if not path:
                run = pt.Drafter(str(self.path), dataset=self.written(), tokens=tokens, num_steps=2000, **common)
                run.fit()
            return Speculation(tokens=tokens, block=read_drafter(path or folder))
        if draft is None:
            init = {"tokenizer": str(self.path), "init": DRAFT}
            rows = {"dataset": self.written(), "batch_rows": 16, "num_steps": 500}
            pt.Distill(init, teacher=str(self.path), **rows, **common).fit()
        return Speculation(tokens=tokens, model=load(Path(draft) if draft else folder / "0-distill" / "model"))

    def pairs(self, speculation: Speculation, rows: int, arguments: argparse.Namespace) -> str:
        plain, drafting = self.engine(rows, None), self.engine(rows, speculation)
        drafter = drafting._runner.drafter
        assert drafter is not None
        if arguments.always:
            drafter.pace.choose = lambda rows: True  # type: ignore[method-assign]

        def batch(engine: NativeEngine, number: int) -> tuple[float, list[tuple[int, ...]]]:
            prompts = self.prompts(rows, number * rows, arguments.text)
            each = [settings(arguments.temperature, number, i, NEW) for i in range(rows)]
            start = time.process_time()
            found = engine.generate_all(prompts, each)
            return time.process_time() - start, [tuple(one.tokens) for one in found]

        for number in range(2 if arguments.always else arguments.pairs):
            for engine in (plain, drafting):
                batch(engine, 50 + number)
        drafter.take_totals()
        taken: list[tuple[float, float]] = []
        for number in range(arguments.pairs):
            (without, expected), (with_drafts, found) = batch(plain, number), batch(drafting, number)
            assert found == expected, "drafts changed the tokens"
            taken.append((without, with_drafts))
        totals = drafter.take_totals()
        ratios = sorted(without / with_drafts for without, with_drafts in taken)
        without, with_drafts = (rows * NEW / min(times) for times in zip(*taken, strict=True))
        return (
            f"{rows:>5}{without:>14,.0f}{with_drafts:>13,.0f}"
            f"{statistics.median(ratios):>7.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            f"{totals.speculated / max(totals.rounds, 1):>12.2f}{totals.accepted / max(totals.drafted, 1):>10.2f}"
            f"{totals.speculated / max(totals.tokens, 1):>7.2f}"
        )

    def parts(self, draft: Decoder | None, rows: int, drafts: int) -> dict[str, float]:
        """Microseconds."""
        logits = 3 * jax.random.normal(jax.random.key(0), (rows, self.model.config.vocab_size))
        many = jnp.repeat(logits, drafts + 1, axis=0)
        found = {
            "one token": passes(self.model, rows, 1),
            f"{drafts + 1} tokens": passes(self.model, rows, drafts + 1),
            "a draw": draws(logits),
            f"{drafts + 1} draws": draws(many),
        }
        return found if draft is None else found | {"a draft": passes(draft, rows, 1)}


def settings(temperature: float, number: int, index: int, tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=temperature, key=(number, index), stop_token_ids=())


def load(path: Path) -> Decoder:
    return load_model(path, dtype=jnp.dtype(jnp.float32), compute_dtype=jnp.dtype(jnp.float32))


def passes(model: Decoder, rows: int, length: int) -> float:
    """Passes with the head, of which each reads what the one before drew."""
    graph, state = nnx.split(model)

    def program(state: nnx.State) -> jax.Array:
        decoder = nnx.merge(graph, state).for_decoding()
        ones, places = jnp.ones((rows, length), jnp.int32), jnp.arange(length, dtype=jnp.int32)[None]

        def body(index: int, carry: tuple) -> tuple:
            tokens, cache = carry
            hidden, cache, _ = decoder.forward(tokens, index + places + jnp.zeros_like(ones), ones, cache)
            return jnp.argmax(decoder.logits(hidden), axis=-1).astype(jnp.int32), cache

        cache = empty_cache(decoder.config, rows, LENGTH, jnp.dtype(jnp.float32))
        return jax.lax.fori_loop(0, TIMES, body, (ones, cache))[0]

    return microseconds(program, state)


def draws(logits: jax.Array) -> float:
    rows, vocab = logits.shape
    sampling = Sampling.of(
        [settings(1.0, 0, i, 1) for i in range(rows)], [[1]] * rows, [1] * rows, max_length=LENGTH, tables=Tables(vocab)
    )

    def program(logits: jax.Array) -> jax.Array:
        def body(index: int, tokens: jax.Array) -> jax.Array:
            moved = logits + 1e-9 * tokens[:, None]
            return sample(moved, jnp.full(rows, index, jnp.int32), sampling, None).tokens

        return jax.lax.fori_loop(0, TIMES, body, jnp.zeros(rows, jnp.int32))

    return microseconds(program, logits)


def microseconds(program: Callable[..., jax.Array], *arguments: object) -> float:
    """Of one of `TIMES`, for the fastest of twenty calls."""
    compiled, best = jax.jit(program).lower(*arguments).compile(), float("inf")
    for _ in range(20):
        start = time.process_time()
        compiled(*arguments).block_until_ready()
        best = min(best, time.process_time() - start)
    return best / TIMES * 1e6


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("../shared/models/stories260k"))
    parser.add_argument("--stories", type=Path, default=Path("../shared/data/text/tinystories_v2gpt4_train_head.jsonl"))
    parser.add_argument(
        "--draft", help="ngram, block, block=FOLDER, or the folder of a draft model; by default one is trained"
    )
    parser.add_argument("--larger", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--text", choices=["stories", "repeats"], default="stories")
    parser.add_argument("--always", action="store_true")
    parser.add_argument("--parts", action="store_true")
    arguments = parser.parse_args(given)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    bench = Bench(arguments.model, arguments.stories)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.larger:
            bench = Bench(bench.larger(Path(folder) / "larger"), arguments.stories)
        speculation = bench.speculation(arguments.draft, arguments.drafts, Path(folder) / "draft")
        print(f"load average {os.getloadavg()[0]:.1f}, temperature {arguments.temperature}, drafts {arguments.drafts}")
        print(" rows  tokens/CPU s  with drafts  times  (pairs)         per pass  accepted  share")
        for rows in arguments.rows:
            print(bench.pairs(speculation, rows, arguments), flush=True)
            if arguments.parts:
                parts = bench.parts(speculation.model, rows, arguments.drafts)
                print(
                    "       " + ", ".join(f"{name} {value:,.0f}" for name, value in parts.items()) + " us", flush=True
                )


if __name__ == "__main__":
    main()
