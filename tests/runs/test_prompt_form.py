"""Form of the prompts on which a model was trained: saved with it, and the default of what comes after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

import posttrain as pt
from posttrain.config import DatasetSection
from posttrain.data.chat import Renderer
from posttrain.data.format import prompt_conversation, training_conversation, use_chat
from posttrain.data.tokenizer import PromptForm, load_tokenizer
from posttrain.errors import ConfigError
from posttrain.runs.finished import load_generator
from posttrain.stages.inputs import form_notes, prompt_form
from tests.stages.runs import INIT, few_devices

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "1+1="}
TURNS = [ASKED, {"role": "assistant", "content": "2"}]


def low(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 3) for text in completions]


def sft(model: Any, rows: list[dict[str, Any]], output: Path, **changes: Any) -> pt.RunResult:
    small = {"num_steps": 1, "batch_rows": 2, "row_tokens": 64, "tensorboard": False}
    return pt.SFT(model=model, dataset=rows, output=str(output), **{**small, **changes}).fit()


def test_later_stages_render_as_the_model_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of plain prompts is sampled from with plain prompts, though its tokenizer has a template. Red before:
    every reward was 0."""
    plain = [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(4)]
    with few_devices(1):
        trained = sft({"init": INIT, "tokenizer": "bytes"}, plain, tmp_path / "plain", chat=False).model_path
        assert load_tokenizer(trained).form == PromptForm(chat=False)
        assert "chat_template" in (trained / "tokenizer_config.json").read_text()
        assert transformers.AutoTokenizer.from_pretrained(trained).chat_template
        sampled = pt.RL(
            model=str(trained),
            dataset=[{"prompt": row["prompt"]} for row in plain],
            rewards=[low],
            output=str(tmp_path / "rl"),
            num_steps=1,
            prompts_per_step=2,
            group_size=2,
            row_tokens=32,
            tensorboard=False,
            sampling={"max_tokens": 2},
        ).fit()
        told = capsys.readouterr().out
        assert "prompts are plain text, as the model was trained" in " ".join(told.split())
        assert {row["prompt"] for row in sampled.samples} <= {row["prompt"] for row in plain}
        assert load_tokenizer(sampled.model_path).form == PromptForm(chat=False)

        # Conversations need a template: the run says so, and the model is one of chats from then on.
        chats = sft(str(trained), [{"messages": [SYSTEM, *TURNS]}] * 4, tmp_path / "chats")
        said = " ".join(capsys.readouterr().out.split())
        assert "rendered with the chat template, and the model was trained without it; dataset.chat=false" in said
        assert load_tokenizer(chats.model_path).form == PromptForm(chat=True, system="Be brief.")
        assert chats.load_tokenizer().system == load_generator(str(tmp_path / "chats")).tokenizer.system == "Be brief."
        model, tokenizer = chats.load_model(), chats.load_tokenizer()
        (done,) = pt.complete(model, tokenizer, "1+1=", max_new_tokens=1)
        assert list(done.prompt_tokens) == Renderer(tokenizer, True).prompt([SYSTEM, ASKED])
        (as_given,) = pt.complete(model, tokenizer, [ASKED], max_new_tokens=1)
        assert list(as_given.prompt_tokens) == Renderer(tokenizer, True).prompt([ASKED])


@pytest.mark.fast
def test_prompts_without_a_system_message_begin_with_that_of_the_training() -> None:
    """Of prompts to sample from; rows that are trained on, and prompts with their own, stay as they are."""
    tokenizer = load_tokenizer("bytes").with_form(PromptForm(chat=True, system="Be brief."))
    section = DatasetSection(path="rows.jsonl")
    other = {"role": "system", "content": "Be long."}

    def roles(row: dict[str, Any], *, trained: bool = False) -> list[str]:
        renderer = Renderer(tokenizer, use_chat(section, tokenizer, list(row)))
        read = training_conversation if trained else prompt_conversation
        prompt = read(row, section, renderer).prompt
        return [str(message["content"]) for message in prompt]

    assert roles({"prompt": "1+1="}) == ["Be brief.", "1+1="]
    assert roles({"prompt": [other, ASKED]}) == ["Be long.", "1+1="]
    assert roles({"prompt": "1+1=", "completion": "2"}, trained=True) == ["1+1="]


@pytest.mark.fast
def test_the_form_is_that_of_all_rows() -> None:
    """Texts of pretraining have none; datasets that differ have no common one."""
    tokenizer = load_tokenizer("bytes")

    def read(chat: bool, *conversations: list[Any]) -> Renderer:
        renderer = Renderer(tokenizer, chat)
        for messages in conversations:
            renderer.prompt(messages) if chat else renderer.completion("1+1=", "2")
        return renderer

    texts = Renderer(tokenizer, False)
    texts.text("once upon a time")
    assert texts.form is None and prompt_form([texts]) is None
    brief, plain = read(True, [SYSTEM, ASKED], [SYSTEM, ASKED]), read(False, [])
    assert prompt_form([brief, texts]) == PromptForm(True, "Be brief.") and prompt_form([plain]) == PromptForm(False)
    assert prompt_form([brief, read(True, [ASKED])]) == PromptForm(True) and prompt_form([brief, plain]) is None
    assert read(True, [SYSTEM, ASKED], [ASKED], [SYSTEM, ASKED]).form == PromptForm(True)
    (note,) = form_notes(tokenizer.with_form(brief.form), PromptForm(True), [])
    assert "the model was trained after the system message 'Be brief.', and these prompts have none" in note
    assert form_notes(tokenizer.with_form(brief.form), brief.form, []) == form_notes(tokenizer, plain.form, []) == []
    without = load_tokenizer("bytes")
    without.hf.chat_template = None
    (note,) = form_notes(without, plain.form, [])
    assert "no chat template: prompts are plain text, and generate, chat and serve will render them so too" in note
    assert form_notes(without.with_form(PromptForm(False)), plain.form, []) == form_notes(without, None, []) == []


@pytest.mark.fast
def test_the_form_is_saved_with_the_tokenizer(tmp_path: Path) -> None:
    """Also over an older one; another template has none."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.with_form(PromptForm(chat=False)).save(tmp_path / "plain")
    plain = load_tokenizer(tmp_path / "plain")
    assert not plain.chats and plain.chat_template == tokenizer.chat_template and plain.system is None
    plain.with_form(None).save(tmp_path / "none")
    assert load_tokenizer(tmp_path / "none").form is None
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert plain.with_chat_template(tmp_path / "own.jinja").chats
    with pytest.raises(ConfigError, match="has messages of roles system, user"):
        Renderer(plain, plain.chats).prompt([SYSTEM, ASKED])
