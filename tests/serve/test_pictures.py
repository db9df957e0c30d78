"""Pictures in requests of the server."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import openai
import pytest

from posttrain.data.tokenizer import load_tokenizer
from posttrain.generation import generate, seeing, without_padding
from posttrain.serve.body import Body, Refused, chat_ask
from posttrain.serve.chat import ResponseRequest
from posttrain.serve.model import Limits, Served
from posttrain.weights.load import load_model
from tests.serve.serving import listening
from tests.tiny import tiny_model

MODEL, PICTURE = "tiny/model", "data:image/png;base64,AAAA"


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ("http://a/b.png", "nothing is fetched, and no file is read"),
        ("/etc/passwd", "nothing is fetched, and no file is read"),
        ({"url": PICTURE, "detail": "low"}, "image_url has .*detail"),
        ("data:image/png;base64,!", "is damaged"),
        (None, "a picture is sent as"),
    ],
)
def test_pictures_are_data_urls(sent: Any, words: str) -> None:
    parts = [{"type": "image_url", "image_url": sent}]
    with pytest.raises(Refused, match=words) as refused:
        chat_ask(Body({"model": MODEL, "messages": [{"role": "user", "content": parts}]}))
    assert refused.value.status == 400 and refused.value.param == "messages"
    fields = sent if isinstance(sent, dict) else {"url": sent}
    item = {"type": "input_image", "image_url": fields["url"], "detail": fields.get("detail", "auto")}
    with pytest.raises(Refused, match=words) as refused:
        ResponseRequest(Body({"model": MODEL, "input": [{"role": "user", "content": [item]}]}))
    assert refused.value.param == "input"


def test_a_text_model_takes_none() -> None:
    tokenizer = load_tokenizer("bytes")
    sizes: dict[str, Any] = {"slots": 1, "max_length": 64, "cache_tokens": None, "decode_steps": 2}
    model = without_padding(tiny_model(max_positions=64), tokenizer)
    limits = Limits(queue=1, timeout_s=1.0)
    served = Served.of(model, tokenizer, name=MODEL, tool_format="hermes", limits=limits, **sizes)
    ask = chat_ask(
        Body({"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": PICTURE}]}]})
    )
    with pytest.raises(Refused, match="takes no pictures"):
        asyncio.run(served.chat(ask))


@pytest.mark.thorough
def test_pictures_are_seen_as_in_python(shared: Path) -> None:
    """In chats and responses; two pictures have two answers, and a damaged one is refused by name."""
    folder = shared / "goldens" / "vision" / "qwen3_vl"
    model, plain = load_model(folder, vision="frozen"), load_tokenizer(folder)
    seen = seeing(model, plain)
    limits = Limits(queue=8, timeout_s=60.0)
    sizes: dict[str, Any] = {"slots": 2, "max_length": 256, "cache_tokens": None, "decode_steps": 5}
    served = Served.of(without_padding(model, seen), seen, name=MODEL, tool_format="hermes", limits=limits, **sizes)
    files = [folder / "images" / f"{number}.png" for number in range(2)]
    with listening(served) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:

        def asked(picture: str) -> str:
            parts: Any = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "What?"}]
            said: Any = [{"role": "user", "content": parts}]
            done = client.chat.completions.create(model=MODEL, messages=said, temperature=0, max_tokens=8)
            items: Any = [
                {"type": "input_image", "image_url": picture, "detail": "auto"},
                {"type": "input_text", "text": "What?"},
            ]
            given: Any = [{"role": "user", "content": items}]
            response = client.responses.create(model=MODEL, input=given, temperature=0, max_output_tokens=8)
            assert response.output_text == done.choices[0].message.content
            assert done.usage is not None and done.usage.prompt_tokens > 20
            return response.output_text

        answers = []
        for file in files:
            data = file.read_bytes()
            parts = [{"type": "image", "path": str(file)}, {"type": "text", "text": "What?"}]
            (expected,) = generate(model, plain, [{"role": "user", "content": parts}], max_new_tokens=8)
            answers.append(asked(f"data:image/png;base64,{base64.b64encode(data).decode()}"))
            assert answers[-1] == expected
        assert answers[0] != answers[1]
        whole = base64.b64encode(files[0].read_bytes()[:300]).decode()
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[0\]"):
            asked(f"data:image/png;base64,{whole}")
        with pytest.raises(openai.BadRequestError, match="detail"):
            client.chat.completions.create(
                model=MODEL,
                messages=[
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}}],
                    }
                ],
            )
    served.engine.close()
