"""Data pipelines: endless, resumable streams of packed SFT batches and of prompts, and a single pass for evaluation."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from posttrain.batch import Batch
from posttrain.config import DatasetSection, DistillSection, Locator, OfflineSection, SequenceSection, SFTSection
from posttrain.data.chat import Renderer
from posttrain.data.cuts import Cut, cut_of
from posttrain.data.files import check_rows, listed
from posttrain.data.format import (
    TokenizedExample,
    check_columns,
    loss_on,
    tokenize_example,
    training_conversation,
    use_chat,
)
from posttrain.data.image_rows import ImageRows, PictureSource, image_arrays, keys_of, picture_digests, with_images
from posttrain.data.messages import pictures_in
from posttrain.data.packing import Overlong, PackedBatches, Window, fit_to_row, sequence, to_batch
from posttrain.data.pictures import Picture
from posttrain.data.sources import Arrays, RowError, Rows, Sequences, load_rows, picked, with_all_columns
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.runtime.files import digest

State = dict[str, Any]


@runtime_checkable
class RowTargets(Protocol):
    """Per-token training targets, such as a teacher's, packed together with the tokens of a row."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Names of arrays that are token sequences of their own."""
        ...

    def lengths(self, row_tokens: int) -> dict[str, int]:
        """Packed row length of each array from `arrays`."""
        ...

    def arrays(self, dataset: int, row: Mapping[str, Any], sequences: Sequences) -> Sequences:
        """Targets of the sequences made from a row of dataset `dataset`."""
        ...

    def batch(self, batch: Batch, rows: Mapping[str, np.ndarray]) -> Batch:
        """Add the targets of packed rows to a batch."""
        ...


class Stream:
    """Iterator whose state identifies its data, so that it cannot be resumed on other data."""

    def __init__(self, iterator: Any, identity: Mapping[str, Any], datasets: Sequence[Rows] = ()) -> None:
        self._iterator = iterator
        self._identity = dict(identity)
        self._datasets = datasets

    def state(self) -> State:
        """Position of the stream, as JSON types: what was consumed, not what was prefetched. With the rows of each
        dataset that were left out so far for a picture, if there are any."""
        left_out = [sorted(rows.bad_images) for rows in self._datasets]
        position = {"position": self._iterator.get_state(), "identity": dict(self._identity)}
        return position | ({"bad_images": left_out} if any(left_out) else {})

    def restore(self, state: State) -> None:
        """Resume from `state`. Raises `ConfigError` if data, seed or row layout have changed."""
        saved = state["identity"]
        for name, value in self._identity.items():
            before = saved.get(name)
            if before != value:
                raise ConfigError(
                    f"cannot resume: {name} was {before!r} when the checkpoint was written and is {value!r} now; "
                    "restore it, or start a new run with another output folder"
                )
        if "bad_images" in state:
            for rows, left_out in zip(self._datasets, state["bad_images"], strict=True):
                rows.bad_images.update(left_out)
        self._iterator.set_state(state["position"])


class SFTBatches(Stream):
    """Endless host batches of `batch_rows` rows; every epoch holds each row of a dataset once, in a new order.

    `mixed`: rows of `section.mix`; datasets are sampled in proportion to their weights.
    `targets`: teacher targets of the rows.
    """

    def __init__(
        self,
        section: SequenceSection,
        rows: Rows,
        renderer: Renderer,
        *,
        seed: int,
        mixed: Sequence[tuple[Rows, Renderer]] = (),
        targets: RowTargets | None = None,
    ) -> None:
        import grain

        streams: list[Any] = []
        parts: dict[str, list[str]] = {}
        sources = list(zip(section.datasets, [(rows, renderer), *mixed], strict=True))
        for number, (dataset, source) in enumerate(sources):
            tokenize = row_tokenizer(section, dataset, *source, targets, number)
            require_one(source[0], tokenize, section.row_tokens)
            of_one = rows_identity(section, dataset, *source) | {"tokens": token_fingerprint(source[0], tokenize)}
            for name, value in of_one.items():
                parts.setdefault(name, []).append(value)
            streams.append(order(len(source[0]), shuffle=dataset.shuffle, seed=seed + number).map(tokenize))
        self._targets = targets
        window = window_of(section, section.datasets)
        identity = {
            **{name: ", ".join(values) for name, values in parts.items()},
            **rendering_identity(renderer),
            "seed": seed,
            "shuffle": section.dataset.shuffle,
            "batch_rows": section.batch_rows,
            "row_tokens": section.row_tokens,
            "packing": section.packing,
            "overlong": section.overlong,
            "window": str(window),
        }
        weights = [dataset.weight for dataset in section.datasets]
        stream = streams[0] if len(streams) == 1 else grain.MapDataset.mix(streams, weights)
        epoch = sum(map(len, datasets := [rows, *(others for others, _ in mixed)]))
        images = images_of(section, {number: (one, *source) for number, (one, source) in enumerate(sources)})
        super().__init__(_packed(section, stream, epoch, window, targets, images), identity, datasets)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return _finished(next(self._iterator), self._targets)


class Prompts(Stream):
    """Endless indices into `kept`; every epoch holds each one once, in a new order.

    `kept`: numbers of the rows to train on, by default all. `pictures`: those of the prompts.
    """

    def __init__(
        self,
        section: DatasetSection,
        rows: Rows,
        *,
        seed: int,
        kept: Sequence[int] | None = None,
        pictures: Sequence[Picture] = (),
    ) -> None:
        import grain

        kept = range(len(rows)) if kept is None else kept
        identity = {
            **prompts_identity(section, rows, pictures),
            "prompts": f"{len(kept):,} rows, {_digest(json.dumps(list(kept)))}",
            "seed": seed,
            "shuffle": section.shuffle,
        }
        numbers = order(len(kept), shuffle=section.shuffle, seed=seed)
        # Computing a number is cheaper than passing it between threads.
        super().__init__(
            iter(numbers.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))), identity
        )

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return int(next(self._iterator))


def make_batches(
    rows: str | Path | Iterable[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    batch_rows: int,
    row_tokens: int,
    seed: int | None,
    prompt: str | None = None,
    completion: str | None = None,
    system: str | None = None,
    chat: bool | None = None,
    packing: bool = True,
    train_on_prompt: bool = False,
    overlong: Overlong = "error",
    on_bad_image: Literal["error", "drop"] = "error",
) -> Iterator[Batch]:
    """Make batches of rows [batch_rows, row_tokens] for a loop of one's own, as an SFT stage does: rendered by the chat
    template, with loss on completions and assistant turns, and packed.

    `rows`: dicts in memory, or a path or hub id of a dataset; the other keywords are those of `DatasetSection` and of
    SFT. `seed`: order of the rows; the batches are endless `SFTBatches`, epoch after epoch, which have `state()` and
    `restore()`. None: a single pass in their own order, as for an evaluation, whose last batch has empty rows.
    ConfigError for columns that are missing, and for rows longer than `row_tokens`; a warning for what is odd, such as
    pictures beside a tokenizer without them.
    """
    named = isinstance(rows, str | Path)
    dataset = DatasetSection(
        path=Locator(str(rows) if named else "rows"), prompt=prompt, completion=completion, system=system, chat=chat
    )
    loaded = load_rows(dataset) if isinstance(rows, str | Path) else _in_memory(listed(rows))
    section = SFTSection(
        dataset=dataset,
        batch_rows=batch_rows,
        row_tokens=row_tokens,
        packing=packing,
        train_on_prompt=train_on_prompt,
        overlong=overlong,
        on_bad_image=on_bad_image,
    )
    loaded.remarks.tell = warnings.warn
    renderer = renderer_of(loaded, dataset, tokenizer)
    if seed is None:
        return eval_batches(section, dataset, loaded, renderer)
    return SFTBatches(section, loaded, renderer, seed=seed)


def renderer_of(rows: Rows, dataset: DatasetSection, tokenizer: Tokenizer) -> Renderer:
    """Renderer of a dataset, whose remarks are among the notes of the rows. ConfigError for missing columns."""
    chat = use_chat(dataset, tokenizer, rows.columns)
    check_columns(rows.table[rows.start], dataset, chat=chat)
    return Renderer(tokenizer, chat, remarks=rows.remarks)


def _in_memory(rows: list[Any]) -> Rows:
    if not rows:
        raise ConfigError("rows: there is none; give at least one")
    return Rows("rows", with_all_columns(check_rows(rows, "rows")), 0, len(rows))


def eval_batches(
    section: SequenceSection, dataset: DatasetSection, rows: Rows, renderer: Renderer, targets: RowTargets | None = None
) -> Iterator[Batch]:
    """Iterate once over a dataset in fixed order; the last batch is filled with empty rows."""
    import grain

    tokenize = row_tokenizer(section, dataset, rows, renderer, targets, len(section.datasets))
    require_one(rows, tokenize, section.row_tokens)
    examples = grain.MapDataset.range(len(rows)).map(tokenize)
    window = Window.of(packing=section.packing, ordered=False, batch_rows=section.batch_rows)
    images = images_of(section, {len(section.datasets): (dataset, rows, renderer)})
    for batch in _packed(section, examples, len(rows), window, targets, images):
        yield _finished(batch, targets)


def _finished(rows: Mapping[str, np.ndarray], targets: RowTargets | None) -> Batch:
    return to_batch(rows) if targets is None else targets.batch(to_batch(rows), rows)


def fingerprint(section: DatasetSection, rows: Rows) -> str:
    """Identity of a dataset: the last part of the source's name, the number of rows, a digest of all that they hold,
    and the commit of one on the hub."""
    commit = "" if rows.revision is None else f", revision {rows.revision}"
    return f"{Path(section.path).name}, {len(rows):,} rows, {rows.content}{commit}"


def rows_identity(section: SequenceSection, dataset: DatasetSection, rows: Rows, renderer: Renderer) -> dict[str, str]:
    """Digest of all that the rows of a dataset hold, and for a model of pictures of those that they show, by part."""
    identity = {"dataset": fingerprint(dataset, rows)}
    if renderer.tokenizer.has_images:
        pictures = pictures_of(dataset, rows, renderer)._replace(drop=drops_bad_images(section, dataset))
        identity["pictures"] = rows.known(("pictures", repr(dataset), pictures.drop), lambda: pictures.fingerprint)
    return identity


def prompts_identity(section: DatasetSection, rows: Rows, pictures: Sequence[Picture]) -> dict[str, str]:
    """Digest of all that the rows of a dataset hold, and of the pictures of their prompts, by part."""
    contents = [picture.digest for picture in pictures]
    seen = {"pictures": f"{len(pictures):,}, {_digest(' '.join(contents))}"} if pictures else {}
    return {"dataset": fingerprint(section, rows), **seen}


def rendering_identity(renderer: Renderer) -> dict[str, str]:
    """Identity of the tokenizer and the chat template of a stream, by part."""
    parts = renderer.tokenizer.identity
    return {name: value for name, value in parts.items() if renderer.chat or name != "chat template"}


def token_fingerprint(rows: Rows, tokenize: Callable[[int], Sequences]) -> str:
    """Hash of the tokenised sequences of up to 64 rows, which depend on tokenizer, template and columns."""
    sequences = [one for index in picked(len(rows)) for one in tokenize(index)]
    return _digest(
        json.dumps([None if m is None else [m["tokens"].tolist(), m["loss_weight"].tolist()] for m in sequences])
    )


def _digest(text: str) -> str:
    return digest(text)


def order(count: int, *, shuffle: bool, seed: int) -> Any:
    """Endless numbers below `count`, epoch after epoch; with `shuffle` each is a new permutation."""
    import grain

    numbers = grain.MapDataset.range(count)
    # Grain seeds epoch e with seed + e: neighbouring seeds would share epochs if they were not hashed first.
    spread = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big")
    return (numbers.shuffle(seed=spread) if shuffle else numbers).repeat()


def window_of(section: OfflineSection, datasets: Sequence[DatasetSection]) -> Window:
    """Packing window of training rows; unshuffled datasets keep their order."""
    ordered = not all(dataset.shuffle for dataset in datasets)
    return Window.of(packing=section.packing, ordered=ordered, batch_rows=section.batch_rows)


def _packed(
    section: SequenceSection,
    examples: Any,
    epoch: int,
    window: Window,
    targets: RowTargets | None,
    images: ImageRows | None,
) -> PackedBatches:
    lengths = dict.fromkeys(("tokens", "loss_weight"), section.row_tokens)
    return PackedBatches(
        examples,
        epoch=epoch,
        window=window,
        batch_rows=section.batch_rows,
        lengths=lengths if targets is None else lengths | targets.lengths(section.row_tokens),
        numbered=("tokens", *(() if targets is None else targets.tokens)),
        row_patches=0 if images is None else images.row_patches,
        images=images,
    )


def images_of(
    section: SequenceSection, sources: Mapping[int, tuple[DatasetSection, Rows, Renderer]]
) -> ImageRows | None:
    """Maker of the image arrays of batches. `sources`: datasets by their numbers in the array `source`."""
    tokenizer = next(iter(sources.values()))[2].tokenizer
    pictures = {
        number: pictures_of(*source)._replace(drop=drops_bad_images(section, source[0]))
        for number, source in sources.items()
    }
    return ImageRows.of(section, tokenizer, pictures)


def drops_bad_images(section: OfflineSection, dataset: DatasetSection) -> bool:
    """Tell whether rows of a dataset with pictures that cannot be read are left out."""
    return section.on_bad_image == "drop" and dataset is not section.eval_dataset


def pictures_of(dataset: DatasetSection, rows: Rows, renderer: Renderer) -> PictureSource:
    """Pictures of training rows."""

    def pictures(row: Mapping[str, Any]) -> list[Picture]:
        prompt, answer, _ = training_conversation(row, dataset, renderer)
        return pictures_in([*prompt, *answer])

    return PictureSource(rows, pictures)


def row_tokenizer(
    section: SequenceSection,
    dataset: DatasetSection,
    rows: Rows,
    renderer: Renderer,
    targets: RowTargets | None = None,
    number: int = 0,
) -> Callable[[int], Sequences]:
    """Function from a row number to its sequences; None for one that is dropped as too long.

    Readers with equal arguments share tokenised rows. `number`: dataset number for `targets`.
    """

    loss, drop = loss_on(section), drops_bad_images(section, dataset)

    def make(index: int) -> Sequences:
        try:
            with rows.named(index) as row:
                sequences: Sequences = []
                cut = Cut()
                for example in tokenize_example(row, dataset, renderer, loss):
                    parts = fit_to_row(example, section.row_tokens, section.overlong)
                    made = [None if one is None else fitted_sequence(one) for one in parts]
                    if len(made) == 1:
                        kept = None if made[0] is None else len(made[0]["tokens"])
                        lost = cut_of([len(example.tokens)], [kept])
                        cut = Cut(*(a + b for a, b in zip(cut, lost, strict=True)))
                    sequences += made
                if any(cut):
                    cuts[index] = cut
                return sequences
        except RowError as error:
            if drop and rows.leaves_out(index, error):
                return [None]
            raise

    def fitted_sequence(one: TokenizedExample) -> dict[str, np.ndarray] | None:
        if one.images is None or one.grids is None:
            return sequence(one)
        tokenizer = renderer.tokenizer
        return with_images(sequence(one), image_arrays(tokenizer.images, one.images, one.grids), section, tokenizer)

    def sourced(index: int, sequences: Sequences) -> Sequences:
        # Sequences are shared by readers that give the dataset other numbers.
        files: Arrays = {}
        if isinstance(section, DistillSection) and section.cache is not None and _have_images(sequences):
            with rows.named(index) as row:
                pictures = pictures_of(dataset, rows, renderer).pictures(row)
                files["files"] = picture_digests(pictures)
        return [
            one | files | {"source": keys_of(one["grids"], number, index)}
            if one is not None and "images" in one
            else one
            for one in sequences
        ]

    key = sequences_key(section, dataset, renderer)
    cuts = rows.cuts.setdefault(key, {})
    sequences = rows.sequences(key, make)

    def tokenize(index: int) -> Sequences:
        example = sequences(index)
        example = sourced(index, example) if _have_images(example) else example
        if targets is None:
            return example
        with rows.named(index) as row:
            more = targets.arrays(number, row, example)
        return [None if one is None else one | (added or {}) for one, added in zip(example, more, strict=True)]

    return tokenize


def sequences_key(section: SequenceSection, dataset: DatasetSection, renderer: Renderer) -> Hashable:
    """Key of all that the sequences of a dataset depend on beside its rows."""
    fitting = (section.row_tokens, section.overlong, section.row_patches, drops_bad_images(section, dataset))
    return (repr(dataset), renderer, loss_on(section), *fitting)


def _have_images(sequences: Sequences) -> bool:
    return any(one is not None and "images" in one for one in sequences)


def require_one(rows: Rows, tokenize: Callable[[int], Sequences], row_tokens: int) -> None:
    """Raise ConfigError if all rows are dropped: an endless stream over them would never yield."""
    if all(one is None for index in range(len(rows)) for one in tokenize(index)):
        raise ConfigError(
            f"every row of {rows.name} is dropped as longer than row_tokens={row_tokens}; raise row_tokens"
            if len(rows.bad_images) < len(rows)
            else f"every row of {rows.name} has a picture that cannot be read"
        )
