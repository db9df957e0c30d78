"""Samples of prompts with pictures: what the sampler read is what is learned from, scored, kept and resumed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from PIL import Image

from posttrain.cluster.reference import Reference
from posttrain.config import ImageSection
from posttrain.data.chat import Renderer
from posttrain.data.pictures import PictureError, Pictures
from posttrain.data.prompt_images import PromptImages
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.environments.conversation import Environments
from posttrain.environments.types import Reply
from posttrain.errors import ConfigError
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import single_device_mesh
from posttrain.reward.model import ModelReward
from posttrain.reward.types import Rewards
from posttrain.rl.assemble import assemble, assemble_pairs, sample_rows
from posttrain.rl.by_hand import make_examples
from posttrain.rl.collector import QueuedGroup, QueuedWave, fields_of, packed, trajectory_of, unpacked
from posttrain.rl.sampler import IssuedGroup
from posttrain.rl.store import Recorded, TrajectoryStore, read_record
from posttrain.rollout.records import read_pictures, read_rollouts, read_tokens
from posttrain.rollout.trajectory import Example, Group, Trajectory
from posttrain.rollout.types import Completion, SamplingParams
from posttrain.runtime.event_loop import run_async
from posttrain.runtime.user_calls import UserCalls
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.weights.load import load_model
from posttrain.weights.save import save_model
from posttrain.weights.scalar_head import add_scalar_head
from tests.tiny import sgd

ROW, NEW = 128, 6
IMAGE = {"type": "image"}


def drawn(seed: int, size: tuple[int, int] = (40, 50)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


class World:
    """A tiny checkpoint, two prompts with two pictures each and one of text, and two samples of each."""

    def __init__(self, checkpoint: Path, folder: Path):
        fields = json.loads((checkpoint / "config.json").read_text())
        self.tokenizer: Tokenizer = load_tokenizer(str(checkpoint)).for_images(fields, str(checkpoint), ImageSection())
        self.renderer, self.folder, self.checkpoint = Renderer(self.tokenizer, True), folder, checkpoint
        for seed in range(2):
            drawn(seed).save(folder / f"{seed}.png")
        names = [[str(folder / f"{n}.png") for n in order] for order in ([0, 1], [1, 0])]
        holes = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "or"}, IMAGE]}]
        rows = [*({"prompt": holes, "images": pair} for pair in names), {"prompt": [{"role": "user", "content": "Hi"}]}]
        self.examples = make_examples(rows, self.tokenizer)
        model = load_model(checkpoint, dtype=jnp.float32, vision="frozen")
        self.trainer = Trainer(model, SFTLoss(), sgd(0.1), TrainSettings(temperature=1.0, max_grad_norm=1.0))
        self.groups: list[Group] = [[self.sample(p, g) for g in range(2)] for p in range(3)]

    def sample(self, p: int, g: int) -> Trajectory:
        """The same tokens for each prompt, so that only pictures differ."""
        example = self.examples[p]
        tokens = [*example.prompt_tokens, *np.random.default_rng(g).integers(32, 126, NEW + g).tolist()]
        return self.trajectory(example, tokens, len(example.prompt_tokens), example.images, group=p, sample=g)

    def trajectory(
        self, example: Example, tokens: list[int], prompt: int, images: PromptImages | None, *, group: int, sample: int
    ) -> Trajectory:
        zeros = [0.0] * len(tokens)
        return Trajectory(
            group=group,
            example=example,
            sample=sample,
            messages=[*example.messages, {"role": "assistant", "content": "x"}],
            text="x",
            tokens=tokens,
            sampled=[number >= prompt for number in range(len(tokens))],
            logps=zeros,
            kept_logps=zeros,
            truncation_logps=zeros,
            stop="length",
            versions=[-1 if number < prompt else 0 for number in range(len(tokens))],
            images=images,
        )

    def logps(self, samples: Sequence[Trajectory], num_rows: int) -> list[np.ndarray]:
        batch, where = sample_rows(samples, row_tokens=ROW, num_rows=num_rows)
        found = np.asarray(self.trainer.stats(batch).logps)
        return [found[row, span][np.asarray(one.sampled)] for one, (row, span) in zip(samples, where, strict=True)]


@pytest.fixture(scope="module", params=["gemma3", pytest.param("qwen2_5_vl", marks=pytest.mark.thorough)])
def world(request: pytest.FixtureRequest, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(shared / "goldens" / "vision" / request.param, tmp_path_factory.mktemp("pictures"))


def test_packed_samples_are_those_alone(world: World) -> None:
    """Prompts that differ in the order of their pictures do not share; those of a group are encoded once in a row."""
    samples = [sample for group in world.groups for sample in group]
    together = world.logps(samples, 6)
    for one, found in zip(samples, together, strict=True):
        if one.images is not None:
            (alone,) = world.logps([one], 6)
            assert_allclose(found, alone, atol=2e-4)
    assert np.abs(together[0] - together[2]).max() > 1e-3
    batch, where = sample_rows(samples[:2], row_tokens=ROW, num_rows=6)
    assert samples[0].images is not None and {span.row for span in where} == {0}
    assert int((np.asarray(batch.patch_images)[0] > 0).sum()) == sum(i.num_patches for i in samples[0].images.images)


def test_batches_of_a_step_have_the_pictures(world: World) -> None:
    ones = np.ones((3, 2), np.float32)
    batch = assemble(world.groups, ones, ones > 0, like=world.groups[2][0], row_tokens=ROW, num_rows=6)
    images = (np.asarray(batch.images) > 0).sum()
    assert images == 2 * sum((one.images.numbers > 0).sum() for one in world.examples if one.images is not None)
    assert not np.asarray(batch.loss_weight)[np.asarray(batch.images) > 0].any()
    text = assemble(world.groups[2:], ones[:1], ones[:1] > 0, like=world.groups[0][0], row_tokens=ROW, num_rows=6)
    assert not text.has_images


def test_kept_features_give_the_same_log_probabilities(world: World) -> None:
    """To actor and reference, whose programs read no patches; and the frozen tower runs once for each picture."""
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0, image_cache_bytes=2**20)
    model = load_model(world.checkpoint, dtype=jnp.float32, vision="frozen")
    trainer = Trainer(model, SFTLoss(), sgd(0.1), settings)
    batch, _ = sample_rows([one for group in world.groups for one in group], row_tokens=ROW, num_rows=6)
    encoded = trainer.encoded(batch)
    assert encoded.encoded is not None and trainer._programs.read_by_the_step(encoded).patches is None
    expected = world.trainer.logps(batch)
    for one in (encoded, batch):
        assert_allclose(trainer.logps(one), expected, atol=1e-5)
        assert_allclose(Reference(trainer).logps(one), expected, atol=1e-5)
    assert trainer._towers is not None
    metrics, _ = trainer._towers.counted()
    assert metrics == {"images/encoded": 2.0, "images/hit_rate": 0.0}


@pytest.mark.thorough
def test_reward_models_see_the_pictures_of_samples(world: World, tmp_path: Path) -> None:
    """Of sampled tokens as the head scores them, together as alone; of messages in a template of their own; and a model
    of text scores none of these samples."""
    scored = load_model(world.checkpoint, dtype=jnp.float32, vision="frozen")
    add_scalar_head(scored, seed=0)
    save_model(scored, tmp_path / "seeing", tokenizer=world.tokenizer)
    save_model(load_model(tmp_path / "seeing", vision="none"), tmp_path / "blind", tokenizer=world.tokenizer)
    reward = loaded_reward(world, tmp_path / "seeing")
    samples = [group[0] for group in world.groups]
    found: list[Any] = reward(samples)
    batch, where = sample_rows(samples, row_tokens=ROW, num_rows=3)
    tokens, positions, segments = map(jnp.asarray, (batch.tokens, batch.positions, batch.segments))
    hidden, *_ = scored.forward(tokens, positions, segments, images=scored.images_of(batch))
    heads = np.asarray(scored.scores(hidden))
    assert_allclose(found, [heads[row, span.stop - 1] for row, span in where], atol=1e-4)
    assert abs(float(found[0]) - float(found[1])) > 1e-4  # the same pictures in another order
    alone: list[Any] = [reward([one])[0] for one in samples]
    assert_allclose(alone, found, atol=1e-4)

    blind = loaded_reward(world, tmp_path / "blind")(samples)
    assert [isinstance(one, ValueError) for one in blind] == [True, True, False]
    assert "reads text alone, and the sample has pictures" in str(blind[0])

    template = tmp_path / "seeing" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# its own #}")
    own: list[Any] = loaded_reward(world, tmp_path / "seeing")(samples)
    assert not any(isinstance(one, ValueError) for one in own) and abs(float(own[0]) - float(own[1])) > 1e-4


def loaded_reward(world: World, path: Path) -> ModelReward:
    reward = ModelReward(str(path), "last", "reward_model")
    reward.load(single_device_mesh(), world.renderer, 3)
    return reward


@pytest.mark.thorough
def test_pairs_share_the_pictures_of_their_prompt(world: World) -> None:
    pairs = [(group[0], group[1]) for group in world.groups]
    found = []
    for share in (True, False):
        batch = assemble_pairs(pairs, row_tokens=2 * ROW, num_rows=3, groups_P=world.groups, share_prompts=share)
        logps, roles = np.asarray(world.trainer.stats(batch).logps), np.asarray(batch.roles)
        found.append(np.sort(logps[roles != 0]))
    assert_allclose(found[0], found[1], atol=2e-4)


def resumed(world: World, queue: dict[int, list[QueuedWave]]) -> Group:
    state = packed(queue)
    arrays = state.pop("tokens")
    again = unpacked({**json.loads(json.dumps(state)), "tokens": arrays}, world.examples.__getitem__, world.tokenizer)
    group = again[1][0].groups[0].group
    assert group is not None
    return group


def test_samples_ahead_are_resumed_with_their_pictures(world: World) -> None:
    """Of prompts, of environments and of tools; and a picture that has changed since is refused."""
    first = world.groups[0][0]
    asked = {"role": "user", "content": [{**IMAGE, "image": drawn(5)}]}
    talked = converse(world, Talk(asked))
    issued = IssuedGroup(number=0, example=world.examples[0], version=0)
    queue = {1: [QueuedWave(groups=[QueuedGroup(issued=issued, group=[first, talked])])]}
    for one, again in zip([first, talked], resumed(world, queue), strict=True):
        assert one.images is not None and again.images is not None
        assert one.images.digests == again.images.digests and list(one.tokens) == list(again.tokens)
        assert again.images.padded(ROW).tolist() == one.images.padded(ROW).tolist()
        assert [type(m["content"]) for m in again.messages] == [type(m["content"]) for m in one.messages]
    sent = pickle.loads(pickle.dumps(fields_of(talked)))
    there = trajectory_of(sent, {0: world.examples[0]}).images
    assert there is not None and talked.images is not None and there.digests == talked.images.digests
    again = resumed(world, queue)[0]
    drawn(9).save(world.folder / "0.png")
    with pytest.raises(PictureError, match="has other pixels than before; restore its file"):
        sample_rows([again], row_tokens=ROW, num_rows=1)
    drawn(0).save(world.folder / "0.png")


class Talk:
    """Two turns; the answer to the first has a picture."""

    def __init__(self, asked: dict[str, Any]):
        self.asked, self.turns = asked, 0

    def reply(self, message: Any) -> Reply:
        self.turns += 1
        return Reply(messages=[self.asked], done=self.turns == 2, reward=1.0)


def converse(world: World, env: Talk) -> Trajectory:
    read: list[PromptImages | None] = []

    async def generate(tokens: Sequence[int], params: SamplingParams, images: PromptImages | None) -> Completion:
        read.append(images)
        end = world.tokenizer.stop_ids[-1]
        return Completion(
            tokens=(65, end),
            logps=(-1.0, -1.0),
            kept_logps=(0.0, 0.0),
            truncation_logps=(0.0, 0.0),
            stop="stop",
            weights_versions=(0, 0),
        )

    environments = Environments(
        make=lambda row: env,
        args={},
        max_turns=4,
        row_tokens=ROW,
        split_turns=False,
        unfinished=0.0,
        calls=UserCalls("env.fn", timeout_s=20.0, concurrency=4),
        tool_format=None,
    )
    params = SamplingParams(max_tokens=NEW, temperature=1.0, stop_token_ids=world.tokenizer.stop_ids, key=(0, 0))
    made = run_async(
        environments.converse(
            world.examples[0],
            group=0,
            sample=1,
            seed=0,
            renderer=world.renderer,
            params_of=lambda _: params,
            generate=generate,
        )
    )
    environments.close()
    assert made.error is None, made.error
    assert [0 if one is None else len(one.images) for one in read] == [2, 3]
    return made


def test_answers_of_an_environment_have_pictures(world: World) -> None:
    """They are the images of the sample's tokens, and have no loss."""
    made = converse(
        world, Talk({"role": "user", "content": [{**IMAGE, "image": drawn(5)}, {"type": "text", "text": "?"}]})
    )
    assert made.images is not None
    there = made.images.padded(len(made.tokens)) > 0
    assert (np.asarray(made.tokens)[there] == world.tokenizer.image_id).all()
    assert not np.asarray(made.sampled)[there].any() and "[image]?" in made.shown
    first, other = (
        converse(world, Talk({"role": "user", "content": [{**IMAGE, "image": drawn(seed)}]})) for seed in (5, 6)
    )
    found = [world.logps([one], 6)[0] for one in (first, other)]
    assert_allclose(found[0][:2], found[1][:2], atol=1e-5)
    assert np.abs(found[0][2:] - found[1][2:]).max() > 1e-3


def test_records_have_each_picture_once(world: World, tmp_path: Path) -> None:
    """As the model sees it; the run browser shows one token in place of its tokens."""
    rewards = Rewards(total_PG=np.ones((3, 2)), parts_PG={}, errors=[], metrics={}, extras={})
    recorded = Recorded(
        before=0,
        step=1,
        version=0,
        groups_P=world.groups,
        rewards=rewards,
        advantages_PG=np.ones((3, 2)),
        roles_PG=None,
    )
    with TrajectoryStore(tmp_path, keep=2, start=0) as store:
        store.write(recorded)
    file = tmp_path / "00000001.parquet"
    pictures = [read_pictures(file, p, 0) for p in range(3)]
    assert pictures[0] == pictures[1][::-1] and pictures[2] == [] and len(list(tmp_path.glob("pictures/*"))) == 2
    images = world.examples[0].images
    assert images is not None
    settings, grid = images.policy.settings, images.grids[0]
    with Image.open(pictures[0][0]) as seen:
        assert seen.size == (grid.columns * settings.unit, grid.rows * settings.unit)
    (sequence,), whole = read_tokens(file)[0, 0], world.groups[0][0]
    shown = sequence.tokens.tolist()
    assert shown.count(world.tokenizer.image_id) == 2 and sequence.sampled.sum() == NEW
    assert len(whole.tokens) - len(shown) == (images.numbers > 0).sum() - 2
    assert len(read_rollouts(file)) == 6
    with pytest.raises(ConfigError, match="its samples have pictures, which only the run itself and view read"):
        read_record(tmp_path, 1)


def test_pictures_are_decoded_when_asked_for(world: World) -> None:
    images = world.examples[0].images
    assert images is not None
    pictures = Pictures([one.picture for one in images.images])
    sent = pickle.loads(pickle.dumps(pictures))
    assert len(sent) == 2 and len(sent[:1]) == 1 and not sent._decoded
    assert [one.size for one in sent] == [(50, 40), (50, 40)] and sent[0].mode == "RGB"
