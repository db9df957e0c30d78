"""The engine that decodes with the trainer's own model: scheduler, runner, and the asynchronous front of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax import Array

from posttrain.config import IMAGE_CACHE_MIB, CacheDtype, RolloutQuantize, RolloutSection, SamplerTensor
from posttrain.data.grammar import Constraint, GrammarCompiler
from posttrain.data.prompt_images import PromptImages
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.kernels.platform import platform_of
from posttrain.models.config import check_recording
from posttrain.models.decoder import Decoder
from posttrain.rollout.adapters import Adapters, AdapterSlots, SlotArrays
from posttrain.rollout.decode_weights import Loaded, choose_placement, device_memory
from posttrain.rollout.dispatch import Dispatch, DispatchOutcome, deliver
from posttrain.rollout.drafting import DraftTotals, Speculation
from posttrain.rollout.programs import Expected
from posttrain.rollout.request import Request
from posttrain.rollout.runner import Runner
from posttrain.rollout.scheduler import Counts, Plan, Scheduler
from posttrain.rollout.types import Call, Completion, Decode, NewTokens, SamplingParams
from posttrain.rollout.vision import check_images, image_options
from posttrain.runtime.profiler import span
from posttrain.runtime.xla import trim_host_memory
from posttrain.tracking.console import progress_bar
from posttrain.weights.quantize import Copies
from posttrain.weights.state import ADAPTER, ModelWeights, Weights


class NativeEngine:
    """Samples from a `Decoder` in this process, whose arrays it shares; with `quantize` from a copy in 8 bits, with
    `merge_lora` from one with the adapter merged.

    A completion depends on its prompt, its parameters and the weights; batch, slot and schedule change its
    log-probabilities by rounding only. `slots` requests decode at once, at most `decode_steps` tokens per dispatch; on
    a mesh their number is rounded up, so that every shard of the rows has as many.
    `cache_tokens`: positions of keys and values in all, by default enough for `slots` sequences of `max_length`; what
    is not in use keeps prefixes for later requests. Where decoding works on rows, as on CPU, a copy of what they hold
    comes on top, and one of the layers' weights where they are cut out of stacks, both only while samples run. So does
    a copy of the weights that are split otherwise than `tensor` says (`rollout.tensor` of the configuration).
    `adapters`: room for LoRA adapters, one for each request that names one, see `load_adapter`.
    Programs are compiled at the first request of each shape, or by `warm_up`.

    `tokenizer`: of grammars, which draw one token per dispatch; rows beside them draw several, see `fair_length`.
    `speculation`: draft several tokens and judge them in one forward pass, except beside grammars and where it does not
    pay; samples are the same up to rounding.

    ValueError for a request that can never run. Log-probabilities that are not finite, and a tokenizer that raises at
    a stop string, fail the request that they happen to; an error on the device every request then in the engine.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        slots: int,
        max_length: int,
        decode_steps: int,
        tokenizer_decode: Decode | None,
        tokenizer: Tokenizer | None = None,
        version: int = 0,
        record_routing: bool = False,
        quantize: RolloutQuantize = "none",
        merge_lora: bool = False,
        cache_tokens: int | None = None,
        tensor: SamplerTensor = "auto",
        adapters: AdapterSlots | None = None,
        cache_dtype: CacheDtype = "compute",
        speculation: Speculation | None = None,
        image_cache_mib: int = IMAGE_CACHE_MIB,
    ):
        _check_sizes(model, slots=slots, max_length=max_length, decode_steps=decode_steps)
        if record_routing:
            check_recording(model.config)
        self.max_length, self.decode_steps = max_length, decode_steps
        self._decode_text = tokenizer_decode
        self._grammars = None if tokenizer is None else GrammarCompiler(tokenizer, model.config.vocab_size)
        self._prepared: dict[tuple[tuple[int, int], tuple[int, ...]], Constraint | None] = {}
        if merge_lora and not any(ADAPTER in path for path in ModelWeights(model).dims()):
            raise ConfigError("rollout.merge_lora: the model has no adapter to merge; remove the option")
        self._copies = Copies(quantize) if quantize != "none" or merge_lora else None
        self._adapters = Adapters(adapters) if adapters is not None else None
        self._model = model
        weights = self._weights_of(model)
        self._placement = choose_placement(tensor, *weights, device_memory(), slots=slots)
        self._loaded = Loaded.of(*weights, version, self._placement)
        self._runner = Runner.of(
            self._loaded,
            slots=slots,
            max_length=max_length,
            steps=decode_steps,
            record=record_routing,
            cache_tokens=cache_tokens,
            adapters=adapters is not None,
            kind=cache_dtype,
            speculation=speculation,
            **image_options(model.config, tokenizer, image_cache_mib),
        )
        shapes = self._runner.shapes
        self.slots = shapes.slots * shapes.lanes
        self._scheduler = Scheduler(
            slots=self.slots,
            lanes=shapes.lanes,
            blocks=self._runner.blocks,
            max_length=max_length,
            steps=decode_steps,
            window=self._runner.window,
        )
        self.programs = self._runner.programs
        self._compilations = 0, 0.0
        self._driver: asyncio.Task[None] | None = None
        # One for good: each thread allocates from memory of its own, and what a program has freed serves no other.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout")
        self._paused = self._closed = False

    @classmethod
    def of(
        cls, model: Decoder, tokenizer: Tokenizer, section: RolloutSection, *, slots: int, max_length: int
    ) -> NativeEngine:
        """Make the engine of a section. `slots`: default of `rollout.slots`."""
        return cls(
            model,
            slots=section.slots or slots,
            max_length=max_length,
            decode_steps=section.decode_steps,
            tokenizer_decode=tokenizer.decode,
            tokenizer=tokenizer,
            record_routing=section.record_routing,
            quantize=section.quantize,
            merge_lora=section.merge_lora,
            cache_tokens=section.cache_tokens,
            speculation=Speculation.of(section.speculative, model, tokenizer),
            tensor=section.tensor,
            cache_dtype=section.cache_dtype,
            image_cache_mib=section.image_cache_mib,
        )

    def step(self) -> bool:
        """One trip to the device; False when there was nothing to do."""
        with span("rollout/schedule"):
            plan = self._scheduler.plan()
            if plan is None:
                return False
            dispatch = self._runner.prepare(plan, self._loaded)
        outcome = self._runner.run(dispatch)
        self._finish(plan, dispatch, outcome)
        return True

    def _finish(self, plan: Plan, dispatch: Dispatch, outcome: DispatchOutcome) -> None:
        """Hand the new tokens over, and free what those hold that are done or have failed."""
        with span("rollout/deliver"):
            ended = deliver(dispatch, outcome, self._scheduler.holds, self._decode_text)
            self._runner.note(plan, dispatch, outcome, self._scheduler.holds)
            self._scheduler.settle(plan)
        for row in plan.decode:
            if self._scheduler.holds(row):
                row.request.tell()
        for row, reason in ended.done:
            self._scheduler.release(row)
            row.request.finish(reason)
        for row, error in ended.failed:
            self._scheduler.release(row)
            row.request.fail(error)
        if any(isinstance(error, FloatingPointError) for _, error in ended.failed):
            # Even masked, a NaN in a block would spoil who uses it next; the others read their tokens again.
            self._scheduler.restart()
            self._runner.reset()

    async def decode(self, images: PromptImages) -> None:
        """Decode pictures, which `generate` does too. PictureError for one that cannot be."""
        if loading := self._runner.images.load(images):
            await asyncio.gather(*map(asyncio.wrap_future, loading))

    async def prepare(
        self, prompt: Sequence[int], params: SamplingParams, *, images: PromptImages | None = None
    ) -> None:
        """Decode the pictures and compile the grammar of a call that follows before new weights. `generate` does so
        too, but submits at once what is prepared: such calls, made together, begin together."""
        if images is not None:
            await self.decode(images)
        if params.grammar is not None:
            made = await asyncio.to_thread(self._constraint, prompt, params)
            self._prepared[params.key, tuple(prompt)] = made

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        images: PromptImages | None = None,
        partial: Completion | None = None,
        on_tokens: Callable[[NewTokens], None] | None = None,
    ) -> Completion:
        """One completion, which goes on with what is `partial` of it. Cancelling it frees its slot and its blocks.

        `images`: pictures of the prompt. `on_tokens`: called in the event loop with the tokens of each dispatch,
        `partial`'s with the first; it must not raise.
        """
        self._check_loop()
        if images is not None:
            await self.decode(images)
        constraint = None
        if params.grammar is not None:
            constraint = self._prepared.pop((params.key, tuple(prompt)), None)
            if constraint is None:
                # A grammar may take seconds to compile, and the tokens of a vocabulary to be read for the first one.
                constraint = await asyncio.to_thread(self._constraint, prompt, params)
        request = self._submit(Call(prompt, params, partial, images), constraint)
        request.on_tokens = on_tokens
        self._start_driver()
        return await asyncio.wrap_future(request.future)

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[Completion]:
        """A completion of each prompt, without asyncio: also where an event loop already runs, as in a notebook.
        `images`: pictures of each prompt.

        RuntimeError while `generate` is at work, and while the engine is paused.
        """
        if self._scheduler.busy:
            raise RuntimeError("generate_all: the engine is generating already; wait for that, or await generate")
        if self._paused:
            raise RuntimeError("generate_all: the engine is paused; call resume() first")
        requests: list[Request] = []
        try:
            of_each = [None] * len(prompts) if images is None else images
            self._runner.images.load_all(of_each)
            calls = zip(prompts, params, of_each, strict=True)
            requests.extend(self._submit(Call(*call[:2], images=call[2])) for call in calls)
            while self.step():
                pass
        except BaseException:
            self._scheduler.drain()
            raise
        finally:
            self.programs.rest()
        return [request.future.result() for request in requests]

    def update_weights(self, model: Decoder, version: int) -> None:
        """Use the model's present arrays from the next dispatch on; samples under way go on with their cache.

        Await `drain()` before the old arrays change for samples of one version each, `pause()` to change them at all
        while samples are under way. ValueError for a model of another configuration.
        """
        if model.config != self._loaded.source.model.config:
            raise ValueError("update_weights: the model's configuration differs from the engine's; make a new engine")
        if self._copies is not None and self._driver is None:
            # Idle, so that the old copy makes room for the new one.
            self._loaded = replace(self._loaded, arrays={})
        self._loaded = Loaded.of(*self._weights_of(model), version, self._placement)
        self._scheduler.forget()
        self._runner.forget()
        self._prepared.clear()
        # A tower that was trained, and that of another model, sees other features in the same pictures.
        if model is not self._model or ModelWeights(model).tower_training[0] != "frozen":
            self._runner.images.kept.forget_features()
        self._model = model

    def update_drafter(self, weights: Mapping[str, Array]) -> None:
        """Draft with copies of these arrays of the block drafter from the next dispatch on."""
        assert self._runner.drafter is not None
        self._runner.drafter.update(weights)

    def load_adapter(
        self, name: str, adapter: str | Path | SlotArrays, *, text_name: Callable[[str], str | None] | None = None
    ) -> None:
        """Load a PEFT adapter for requests that name it (`SamplingParams.adapter`), also while others run. `adapter`:
        its folder, or what `read_adapter` has read of it; `text_name`: of a multimodal family's `Wrapper`. ConfigError
        for one that cannot be beside others, ValueError for a name that is taken, and where no slot is free.
        """
        new = adapter if isinstance(adapter, dict) else self.read_adapter(name, adapter, text_name=text_name)
        busy = {request.adapter.slot for request in self._scheduler.requests() if request.adapter is not None}
        arrays: Any = self._loaded.arrays
        self._loaded = replace(self._loaded, arrays=arrays | self._with_adapters.load(name, new, busy))

    def read_adapter(
        self, name: str, folder: str | Path, *, text_name: Callable[[str], str | None] | None = None
    ) -> SlotArrays:
        """Read an adapter for `load_adapter`, whose other part is short; in any thread."""
        arrays: Any = self._loaded.arrays
        return self._with_adapters.read(name, folder, arrays, text_name)

    def drop_adapter(self, name: str) -> None:
        """Start no more requests of an adapter; those that have come end with it. ValueError for an unknown name."""
        self._with_adapters.drop(name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return () if self._adapters is None else self._adapters.names

    @property
    def _with_adapters(self) -> Adapters:
        if self._adapters is None:
            raise ValueError("the engine has no slots for adapters; make it with adapters=AdapterSlots(...)")
        return self._adapters

    def forget_prompts(self) -> None:
        """Clear the prefix cache and the counts of `metrics`: later samples are those of an engine that has sampled
        nothing under its weights."""
        self._scheduler.forget()
        self._runner.forget()
        self.take_counts()
        self._runner.take_seconds()
        self._runner.images.metrics()

    def release_cache(self) -> None:
        """Free the cache's memory, and with it all prefixes, until the next request; nothing while samples run."""
        if not self._scheduler.busy:
            self._scheduler.forget()
            self._runner.forget()
            self._runner.reset()

    def abort(self, keys: Collection[tuple[int, int]] | None = None) -> int:
        """End requests with what they have, all or those with these sampling keys; how many there were."""
        gone = {r for r in self._scheduler.requests() if keys is None or r.params.key in keys}
        self._end(gone)
        return len(gone)

    def _end(self, gone: Set[Request]) -> None:
        self._scheduler.remove(gone)
        for request in gone:
            request.finish("abort")

    async def pause(self) -> None:
        """Start no more dispatches. When it returns the device is idle and the weights may change."""
        self._paused = True
        if self._driver is not None:
            await asyncio.wait({self._driver})

    async def drain(self) -> None:
        """Let those who have begun end, also after `pause`, then pause: those who wait begin under the weights of then.

        RuntimeError where `pause` or `resume` is called meanwhile.
        """
        self._scheduler.admitting, self._paused = False, False
        while not self._scheduler.drained:
            self._start_driver()
            if self._driver is None or self._scheduler.admitting:
                raise RuntimeError("drain: pause() or resume() was called before it was done")
            await asyncio.wait({self._driver})
        await self.pause()

    def resume(self) -> None:
        """Go on after `pause` or `drain`."""
        self._paused, self._scheduler.admitting = False, True
        if self._scheduler.busy:
            self._start_driver()

    def warm_up(self, expected: Sequence[Expected], *, rereads: bool = True) -> None:
        """Compile all programs that any schedule of such requests may need, with a progress bar.

        `rereads`: samples may be resumed (`partial`), or run beside one whose log-probabilities are not finite;
        where the cache is too small for `slots` whole sequences all are read again now and then, whatever is said here.
        RuntimeError while the engine is at work.
        """
        if self._scheduler.busy:
            raise RuntimeError("warm_up: the engine is generating; warm it up before the first request")
        examples = self._runner.examples(expected, rereads=rereads or self._scheduler.may_preempt)
        drafts = self._runner.draft_examples(expected)
        with progress_bar("compiling the rollout engine's programs", len(examples) + len(drafts)) as advance:
            self._runner.warm_up(self._loaded, examples, drafts, advance)
        trim_host_memory(platform_of(self._loaded.source.model.compute.mesh))

    def metrics(self) -> dict[str, float]:
        """Since the last call, but for the number of programs; blocks as a share of all that there are. A late
        compilation is one while samples waited for it: none after `warm_up`. `copy_mib`: weights of its own over all
        devices; `layout_mib`: those that a device holds in another layout while samples run. With drafts see
        `Drafter.metrics`, with images `PromptCache.metrics`."""
        counts, drafts = self.take_counts()
        (late, compile_s), programs = self._compilations, self.programs
        self._compilations = programs.num_late, programs.compile_s
        return {
            "rollout/prefix_hit_rate": counts.shared_tokens / max(counts.prompt_tokens, 1),
            "rollout/preemptions": float(counts.preemptions),
            "rollout/cache_peak": counts.peak_blocks / self._scheduler.num_blocks,
            "rollout/programs": float(len(programs)),
            "rollout/compile_s": programs.compile_s - compile_s,
            "rollout/late_compilations": float(programs.num_late - late),
            "rollout/layout_mib": programs.layout_bytes / 2**20,
            "rollout/copy_mib": self._copies.own_bytes / 2**20 if self._copies is not None else 0.0,
        } | {**self._runner.draft_metrics(drafts), **self._runner.images.metrics(), **self._runner.take_seconds()}

    def take_counts(self) -> tuple[Counts, DraftTotals]:
        """Counters of prompts, shared prefixes, preemptions and drafts since the last call, or that of `metrics`."""
        return self._scheduler.take_counts(), self._runner.take_draft_totals()

    def close(self) -> None:
        """End every request with what it has, as `abort`; later ones raise RuntimeError."""
        self._closed = True
        for request in self._scheduler.drain():
            request.finish("abort")
        self._runner.close()

    def arrays(self) -> list[Array]:
        """Arrays that the engine holds, those shared with the trainer too: weights, copies in other layouts, cache."""
        loaded: Any = self._loaded.arrays
        return [*loaded.values(), *self.programs.arrays(), *self._runner.arrays()]

    def under_way(self) -> list[Call]:
        """All requests, running or waiting, with what is sampled of them, which `generate` can continue (`partial`)."""
        return [
            Call(
                request.prompt,
                request.params,
                request.completion("abort") if request.started else None,
                request.images,
            )
            for request in self._scheduler.requests()
        ]

    @property
    def num_free(self) -> int:
        """Slots without a request."""
        return self._scheduler.num_free

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._scheduler.waiting)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that running requests hold."""
        return self._scheduler.num_used_blocks

    def _weights_of(self, model: Decoder) -> tuple[ModelWeights, Weights]:
        source = ModelWeights(model)
        weights = (source, source.read()) if self._copies is None else self._copies(model)
        return weights if self._adapters is None else self._adapters.attached(*weights)

    def _submit(self, call: Call, constraint: Constraint | None = None) -> Request:
        """Request of a call. `constraint`: that of its grammar, if it was made beforehand."""
        prompt, params, partial, images = call
        if self._closed:
            raise RuntimeError("the engine is closed")
        if len(prompt) == 0:
            raise ValueError("generate: the prompt is empty; it needs at least one token, for instance BOS")
        config = self._loaded.source.model.config
        vocab_size = config.vocab_size
        params.check_vocabulary(vocab_size)
        whole = () if images is None else check_images(config, prompt, images, drafts=self._runner.has_draft_model)
        text = prompt if images is None else images.texts(prompt)
        if min(text) < 0 or max(text) >= vocab_size:
            raise ValueError(
                f"generate: the prompt's token ids go from {min(text)} to {max(text)}; "
                f"the model's go from 0 to {vocab_size - 1}"
            )
        if len(prompt) + params.max_tokens > self.max_length:
            raise ValueError(
                f"generate: a prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} need "
                f"{len(prompt) + params.max_tokens} positions, more than the engine's max_length={self.max_length}; "
                "shorten one or raise the other"
            )
        if params.stop and self._decode_text is None:
            raise ValueError(f"generate: stop={params.stop!r} needs an engine with tokenizer_decode")
        adapter = None if params.adapter is None else self._with_adapters.of(params.adapter)
        request = Request(
            prompt=tuple(prompt),
            params=params,
            constraint=constraint or self._constraint(prompt, params),
            adapter=adapter,
            images=images,
            whole=whole,
        )
        if partial is not None:
            request.resume(partial)
        self._scheduler.submit(request)
        return request

    def _constraint(self, prompt: Sequence[int], params: SamplingParams) -> Constraint | None:
        if params.grammar is None:
            return None
        if self._grammars is None:
            raise ValueError(f"generate: grammar={params.grammar.kind} needs an engine with tokenizer")
        params.check_vocabulary(self._grammars.vocab_size)
        within = params.choices(self._grammars.vocab_size)
        return self._grammars.start(params.grammar, prompt, params.ends, within)

    def _check_loop(self) -> None:
        """Adopt a new event loop when the driver's own is closed. RuntimeError while another one is in use."""
        if self._driver is None or self._driver.get_loop() is asyncio.get_running_loop():
            return
        if not self._driver.get_loop().is_closed():
            raise RuntimeError("generate: the engine is generating in another event loop; make one engine for each")
        self._driver = None
        self._scheduler.drain()

    def _start_driver(self) -> None:
        if self._driver is None and not self._paused:
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """`step` while there is work: bookkeeping on the event loop, waiting for the device in a thread."""
        loop = asyncio.get_running_loop()
        try:
            while not self._paused and (plan := self._scheduler.plan()) is not None:
                with span("rollout/schedule"):
                    dispatch = self._runner.prepare(plan, self._loaded)
                self._finish(plan, dispatch, await loop.run_in_executor(self._thread, self._runner.run, dispatch))
        except Exception as error:
            for request in self._scheduler.drain():
                request.fail(error)
        except asyncio.CancelledError:
            for request in self._scheduler.drain():
                request.future.cancel()
            raise
        finally:
            self._driver = None
            self.programs.rest()


def _check_sizes(model: Decoder, *, slots: int, max_length: int, decode_steps: int) -> None:
    for name, value in {"slots": slots, "decode_steps": decode_steps}.items():
        if value < 1:
            raise ValueError(f"rollout: {name}={value} must be at least 1")
    if max_length > model.config.max_positions:
        raise ValueError(
            f"rollout: max_length={max_length} must not exceed the model's max_positions={model.config.max_positions}"
        )
