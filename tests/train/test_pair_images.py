"""Pairs and labelled answers on pictures: one encoding of a prompt's, shared prompts and rows without any effect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from PIL import Image

from posttrain.batch import Batch
from posttrain.cluster.reference_cache import with_reference_of_all
from posttrain.config import DatasetSection, ImageSection, MeshSection, PreferenceSection
from posttrain.data.image_rows import Arrays
from posttrain.data.pair_examples import ComparisonBatches, NumberedRows, PairExamples, all_rows
from posttrain.data.pipeline import renderer_of
from posttrain.data.sources import load_rows
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError
from posttrain.losses.preference import PreferenceLoss
from posttrain.losses.reward_model import BradleyTerryLoss
from posttrain.mesh import make_mesh
from posttrain.metrics import to_host
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.weights.load import load_model
from posttrain.weights.scalar_head import add_scalar_head
from tests.often import often
from tests.tiny import sgd

IMAGE = {"type": "image"}


def drawn(seed: int, size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


def pair(*images: str, prompt: Any = "Which?", chosen: str = "The left.", rejected: str = "No.") -> dict[str, Any]:
    return {"images": list(images), "prompt": prompt, "chosen": chosen, "rejected": rejected}


HOLES = [{"role": "user", "content": [IMAGE, {"type": "text", "text": " or "}, IMAGE]}]
ROWS = [
    pair("0.png"),
    pair(),
    pair("1.png", "0.png", prompt=HOLES),
    pair("1.png", chosen="The right one."),
    pair("0.png", "1.png", prompt=HOLES, rejected="Both."),
]


class Setting:
    """A tiny checkpoint, a trainer of it, and rows beside their pictures."""

    def __init__(self, folder: Path, checkpoint: Path):
        self.folder, self.checkpoint = folder, checkpoint
        for number, size in enumerate([(40, 50), (60, 30)]):
            drawn(number, size).save(folder / f"{number}.png")
        fields = json.loads((checkpoint / "config.json").read_text())
        small = ImageSection(max_soft_tokens=70 if checkpoint.name == "gemma4" else None)
        self.row_tokens = 512 if checkpoint.name == "gemma4" else 256
        self.tokenizer: Tokenizer = load_tokenizer(str(checkpoint)).for_images(fields, str(checkpoint), small)
        model = load_model(checkpoint, dtype=jnp.float32, vision="frozen")
        self.trainer = Trainer(model, PreferenceLoss(), sgd(0.1), TrainSettings(temperature=1.0, max_grad_norm=1.0))

    def units(
        self, rows: Sequence[Mapping[str, Any]], *, kind: Any = "pairs", share: bool = False, **section: Any
    ) -> PairExamples:
        file = self.folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset = DatasetSection(path=str(file))
        loaded = load_rows(dataset)
        fields = {"dataset": dataset, "row_tokens": self.row_tokens, "batch_rows": 4, **section}
        return PairExamples(
            section=PreferenceSection(**fields),
            dataset=dataset,
            rows=loaded,
            renderer=renderer_of(loaded, dataset, self.tokenizer),
            kind=kind,
            share_prompts=share,
        )

    def logps(self, rows: NumberedRows) -> dict[int, np.ndarray]:
        """Log-probabilities of each unit's tokens with loss."""
        found = np.asarray(self.trainer.stats(rows.batch).logps)
        weights = np.asarray(rows.batch.loss_weight)
        numbers = np.unique(rows.units[weights > 0])
        return {int(one): found[(rows.units == one) & (weights > 0)] for one in numbers}


@pytest.fixture(
    scope="module",
    params=[
        "gemma3",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen2_5_vl", "qwen3_vl", "mistral3", "gemma4")),
    ],
)
def setting(request: pytest.FixtureRequest, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("pairs"), shared / "goldens" / "vision" / request.param)


def patches_of(batch: Batch) -> int:
    return int((np.asarray(batch.patch_images) > 0).sum())


def test_shared_prompts_and_packing_change_nothing(setting: Setting) -> None:
    """And a prompt's pictures are encoded once, for both answers and whether or not the prompt is shared."""
    (apart,) = all_rows(setting.units(ROWS))
    (together,) = all_rows(setting.units(ROWS, share=True))
    alone = {}
    for number, row in enumerate(ROWS):
        if row["images"]:
            (one,) = all_rows(setting.units([row], packing=False))
            alone[number] = setting.logps(one)[0]
    assert patches_of(apart.batch) == patches_of(together.batch)
    counts = [len(unit.get("patches", ())) for unit in map(setting.units(ROWS), range(5)) if unit is not None]
    assert counts[1] == 0 and sum(counts) == patches_of(apart.batch)
    unshared, shared = setting.logps(apart), setting.logps(together)
    for number in range(len(ROWS)):
        assert_allclose(shared[number], unshared[number], atol=2e-4, err_msg=str(number))
        assert_allclose(alone.get(number, unshared[number]), unshared[number], atol=2e-4, err_msg=str(number))


@pytest.mark.parametrize(
    ("kind", "share"), often([("pairs", False), ("pairs", True), ("answers_and_others", True)], ("pairs", False))
)
def test_pairs_with_bad_pictures_are_left_out(setting: Setting, kind: str, share: bool) -> None:
    """Whole pairs: one found by the header of its picture, one when it is decoded; the others are as without them."""
    content = (setting.folder / "0.png").read_bytes()
    (setting.folder / "header.png").write_bytes(content[:10])
    (setting.folder / "end.png").write_bytes(content[:-40])
    bad = [pair("header.png", prompt="Where?"), pair("0.png", "end.png", prompt=HOLES)]
    units = setting.units([ROWS[0], *bad, *ROWS[1:]], kind=kind, share=share, on_bad_image="drop", packing=False)
    rows = [one for one in all_rows(units) if np.asarray(one.batch.segments).any()]
    assert units.rows.bad_images == {1, 2}
    expected = list(all_rows(setting.units(ROWS, kind=kind, share=share, packing=False)))

    def sequences(batches: list[NumberedRows]) -> list[list[int]]:
        tokens = [row[row > 0].tolist() for one in batches for row in np.asarray(one.batch.tokens)]
        return [row for row in tokens if row]

    assert sequences(rows) == sequences(expected)
    with pytest.raises(ConfigError, match="row 1: "):
        list(all_rows(setting.units([ROWS[0], *bad], kind=kind)))


@pytest.mark.thorough
def test_scores_without_weight_do_not_see_their_pictures(setting: Setting) -> None:
    """A reward model learns the same with other pixels in the pictures of a pair that has no part in the loss, on eight
    devices and on one, with features kept and in the step."""
    (rows,) = all_rows(replace(setting.units(ROWS, packing=False, batch_rows=8), margins=True))
    batch = rows.batch
    there = rows.units == 2
    masked = replace(
        batch,
        loss_weight=np.where(there, 0, batch.loss_weight).astype(np.float32),
        roles=np.where(there, 0, np.asarray(batch.roles)).astype(np.int32),
    )
    pixels = np.array(masked.patches)
    pixels[there.any(axis=1)] ^= 85
    other = replace(masked, patches=pixels)
    found = []
    for taken, limit, mesh in (
        (masked, 0, None),
        (other, 2**20, None),
        (other, 2**20, make_mesh(MeshSection(fsdp=8))),
        (batch, 0, None),
    ):
        model = load_model(setting.checkpoint, dtype=jnp.float32, vision="frozen")
        add_scalar_head(model, seed=0)
        settings = TrainSettings(temperature=1.0, max_grad_norm=1e9, image_cache_bytes=limit)
        trainer = Trainer(model, BradleyTerryLoss(), sgd(0.1), settings, mesh=mesh)
        loss = to_host(trainer.step(taken))["loss"]
        found.append({"loss": np.asarray(loss), **{path: np.asarray(w) for path, w in trainer.params.items()}})
    for changed in found[1:3]:
        for path, weight in found[0].items():
            assert_allclose(changed[path], weight, atol=1e-5, err_msg=path)
    assert abs(float(found[3]["loss"]) - float(found[0]["loss"])) > 1e-6, "the pair counts where it has weight"


def test_swapped_pictures_are_another_prompt(setting: Setting) -> None:
    (rows,) = all_rows(setting.units(ROWS))
    (swapped,) = all_rows(setting.units([*ROWS[:2], pair("0.png", "1.png", prompt=HOLES), *ROWS[3:]]))
    before, after = setting.logps(rows), setting.logps(swapped)
    assert np.abs(before[2] - after[2]).max() > 1e-3
    assert_allclose(before[4], after[4], atol=2e-4)


@pytest.mark.thorough
def test_answers_of_kto_keep_the_pictures_of_their_prompt(setting: Setting) -> None:
    """Of prompts that differ in their pictures alone, one is another prompt of the other."""
    labelled = [
        {"image": name, "prompt": "Which?", "completion": text, "label": True}
        for name, text in (("0.png", "One."), ("1.png", "Two of."))
    ]
    units = setting.units(labelled, kind="answers_and_others", share=True)
    unit = units(0)
    assert unit is not None and set(unit["roles"].tolist()) == {0, 1, 2} and len(unit["grids"]) == 1
    assert units.prompt(0) != units.prompt(1)
    (rows,) = all_rows(units)
    (plain,) = all_rows(setting.units(labelled, kind="answers"))
    first = setting.logps(plain)[0]
    assert_allclose(setting.logps(rows)[0][: len(first)], first, atol=2e-4)


@pytest.mark.thorough
def test_reference_values_are_of_their_pictures(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(setting.folder / "cache"))
    known = with_reference_of_all(setting.units(ROWS, share=True), setting.trainer, {}, setting.folder)
    (rows,) = all_rows(known)
    expected = np.asarray(setting.trainer.stats(rows.batch).logps)
    weighted = np.asarray(rows.batch.loss_weight) > 0
    assert_allclose(np.asarray(rows.batch.ref_logps)[weighted], expected[weighted], atol=1e-5)
    unit = known(0)
    assert unit is not None and known.ref_logps is not None
    assert np.isnan(known.ref_logps(0, {**unit, "files": unit["files"] + 1})).all(), "another picture is not scored"


def test_a_changed_picture_is_another_dataset(setting: Setting) -> None:
    state = ComparisonBatches(setting.units(ROWS), seed=0).state()
    drawn(7, (40, 50)).save(setting.folder / "0.png")
    changed = ComparisonBatches(setting.units(ROWS), seed=0)
    drawn(0, (40, 50)).save(setting.folder / "0.png")
    with pytest.raises(ConfigError, match="cannot resume: pictures was"):
        changed.restore(state)


def test_a_unit_is_never_cut_inside_a_picture(setting: Setting) -> None:
    """With weight on the prompt too, so that its beginning alone could be learned from."""
    row = {"image": "0.png", "prompt": "Which?", "completion": "The left.", "label": True}

    def cut(**section: Any) -> Arrays | None:
        return replace(setting.units([row], kind="answers", **section), weigh_prompts=True)(0)

    whole = cut()
    assert whole is not None
    places = np.flatnonzero(whole["images"])
    inside, behind = int(places[0]) + 1, int(places[-1]) + 1
    assert cut(row_tokens=inside, overlong="truncate") is None
    kept = cut(row_tokens=behind, overlong="truncate")
    assert kept is not None and len(kept["tokens"]) == behind and not kept["loss_weight"][places].any()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {
                "chosen": [
                    {"role": "user", "content": [{**IMAGE, "path": "0.png"}]},
                    {"role": "assistant", "content": "a"},
                ],
                "rejected": [
                    {"role": "user", "content": [{**IMAGE, "path": "1.png"}]},
                    {"role": "assistant", "content": "b"},
                ],
            },
            "share no message",
        ),
        (pair("0.png", prompt=HOLES), "is image 2 of the messages, and the row has 1"),
        (pair("0.png", "1.png", "0.png", prompt=HOLES), "the counts must be the same"),
        (
            pair(
                chosen=[
                    {"role": "assistant", "content": "a"},
                    {"role": "user", "content": [{**IMAGE, "path": "0.png"}]},
                    {"role": "assistant", "content": "c"},
                ],
                rejected=[{"role": "assistant", "content": "b"}],
            ),
            "an answer holds a picture in a later message",
        ),
    ],
)
def test_pictures_out_of_place_are_refused(setting: Setting, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        setting.units([row])(0)


def test_implicit_prompts_have_pictures(setting: Setting) -> None:
    """The columns of TRL without a prompt: both sides hold it, with its holes."""
    sides = {
        name: [*HOLES, {"role": "assistant", "content": text}] for name, text in (("chosen", "a"), ("rejected", "b"))
    }
    implicit = setting.units([{"images": ["0.png", "1.png"], **sides}])(0)
    explicit = setting.units([pair("0.png", "1.png", prompt=HOLES, chosen="a", rejected="b")])(0)
    assert implicit is not None and explicit is not None
    for name in ("tokens", "images", "image_rows"):
        np.testing.assert_array_equal(implicit[name], explicit[name])


def test_without_a_tower_pictures_are_refused(setting: Setting) -> None:
    units = setting.units(ROWS)
    blind = replace(units.renderer.tokenizer, tower=False)
    with pytest.raises(ConfigError, match=r"model\.vision=none loads no tower"):
        replace(units, renderer=renderer_of(units.rows, units.dataset, blind))(0)
