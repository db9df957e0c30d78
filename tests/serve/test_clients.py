"""Agents of other people against `posttrain serve`, unchanged: a tiny model, which SFT has taught to call a tool, calls
it, reads the result and answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import openai
import pytest

import posttrain as pt
from posttrain.generation import without_padding
from posttrain.runs.finished import load_generator
from posttrain.serve.app import application, listen, server_of
from posttrain.serve.middleware import AllowedHosts
from posttrain.serve.model import Limits, Served

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]  # the clients have their own warnings

CITIES, SKIES = ("Paris", "Rome", "Lima", "Oslo"), ("sun", "rain", "fog", "wind")
STEPS = 400
LENGTH = 8192
INIT = {
    "model_type": "mistral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 261,
    "sliding_window": 96,  # the prompts of agents are long, and the question is at their end
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
FORM = (
    "To call functions, write only calls, in this form:\n<tool_call>\n"
    '{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>'
)
"""End of the description of tools."""
QUESTION = "What is the weather in Lima?"


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def dialogue(draw: np.random.Generator) -> dict[str, Any]:
    """Question, call, result and answer; or in the words of smolagents, where the answer is a call too."""
    city, sky = str(draw.choice(CITIES)), str(draw.choice(SKIES))
    asked, answer = f"What is the weather in {city}?", f"It is {sky} in {city}."
    first, system = call("get_weather", city=city), "Help. " if draw.random() < 0.5 else ""
    described = bytes(draw.integers(32, 127, size=draw.integers(0, 100), dtype=np.uint8))  # all descriptions of tools
    system += described.decode() + FORM
    kind = draw.integers(4)
    if kind == 0:
        return talk(system, asked, first, f"<tool_response>\n{sky}\n</tool_response>", answer)
    if kind == 1:  # without a system prompt the question follows the tools
        return talk("", f"{system}\n\n{asked}", first, f"<tool_response>\n{sky}\n</tool_response>", answer)
    function = {"name": "get_weather", "arguments": {"city": city}}
    told = {"id": f"chatcmpl-tool-{draw.integers(10**9)}", "type": "function", "function": function}
    asking = f"New task:\n{asked}"
    if kind == 2:
        return talk(system, asking, first)
    answering = call("final_answer", answer=answer)
    return talk(system, asking, f"Calling tools:\n[{told}]", f"Observation:\n{sky}", answering)


def talk(system: str, *turns: str) -> dict[str, Any]:
    """Messages; the model does not learn what smolagents writes of its calls."""
    said: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        weight = {"weight": int(not turn.startswith("Calling tools"))} if place % 2 else {}
        said.append({"role": ("user", "assistant")[place % 2], "content": turn, **weight})
    return {"messages": [{"role": "system", "content": system}, *said] if system else said}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server of the trained model."""
    draw, output = np.random.default_rng(0), tmp_path_factory.mktemp("clients") / "run"
    pt.SFT(
        {"init": INIT, "tokenizer": "bytes"},
        [dialogue(draw) for _ in range(3000)],
        num_steps=STEPS,
        row_tokens=640,
        batch_rows=8,
        optimizer={"learning_rate": 5e-3, "warmup_steps": 20},
        tensorboard=False,
        output=str(output),
    ).fit()
    loaded = load_generator(str(output))
    served = Served.of(
        without_padding(loaded.model, loaded.tokenizer),
        loaded.tokenizer,
        name="m",
        slots=2,
        max_length=LENGTH,
        cache_tokens=None,
        decode_steps=8,
        tool_format="hermes",
        limits=Limits(queue=8, timeout_s=300.0),
    )
    listener = listen("127.0.0.1", 0, "test")
    server = server_of(application(lambda request: served, hosts=AllowedHosts("127.0.0.1"), served=served))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server.should_exit = True
    thread.join()


class Weather:
    """Tool, and the cities that it was asked for."""

    def __init__(self, sky: str):
        self.sky, self.asked = sky, list[str]()

    def __call__(self, city: str) -> str:
        self.asked.append(city)
        return self.sky


@pytest.fixture(params=["fog", "sun"])
def weather(request: pytest.FixtureRequest) -> Weather:
    return Weather(request.param)


def needs(package: str, module: str) -> pytest.MarkDecorator:
    """Skip before a model is trained for nothing."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"needs {package}")


def check(weather: Weather, answer: Any) -> None:
    assert weather.asked == ["Lima"] and answer == f"It is {weather.sky} in Lima."


def test_openai(url: str, weather: Weather) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        for _ in range(3):
            asked: Any = {"model": "m", "messages": messages, "tools": tools, "temperature": 0}
            message = client.chat.completions.create(**asked).choices[0].message
            messages.append(message)
            for one in message.tool_calls or []:
                arguments = json.loads(one.function.arguments)
                messages.append({"role": "tool", "tool_call_id": one.id, "content": weather(**arguments)})
            if not message.tool_calls:
                break
    check(weather, message.content)


@needs("openai-agents", "agents")
@pytest.mark.parametrize("api", ["responses", "chat"])
def test_openai_agents(url: str, weather: Weather, api: str) -> None:
    import agents

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0)
    kinds = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}

    def get_weather(city: str) -> str:
        """Tell the weather."""
        return weather(city)

    agent = agents.Agent(
        name="a",
        instructions="Help.",
        model=kinds[api](model="m", openai_client=client),
        model_settings=agents.ModelSettings(temperature=0.0),
        tools=[agents.function_tool(get_weather)],
    )
    check(weather, asyncio.run(agents.Runner.run(agent, QUESTION, max_turns=4)).final_output)


@needs("smolagents", "smolagents")
@pytest.mark.parametrize("stream", [False, True])
def test_smolagents(url: str, weather: Weather, stream: bool) -> None:
    import smolagents

    class GetWeather(smolagents.Tool):
        name, description, output_type = "get_weather", "Tell the weather.", "string"
        inputs = {"city": {"type": "string", "description": "City."}}  # noqa: RUF012

        def forward(self, city: str) -> str:
            return weather(city)

    model = smolagents.OpenAIServerModel(model_id="m", api_base=url, api_key="x", temperature=0.0)
    agent = smolagents.ToolCallingAgent(
        tools=[GetWeather()], model=model, max_steps=4, verbosity_level=0, stream_outputs=stream
    )
    check(weather, agent.run(QUESTION))


@needs("langgraph", "langgraph")
@needs("langchain-openai", "langchain_openai")
@pytest.mark.parametrize("stream", [False, True])
def test_langgraph(url: str, weather: Weather, stream: bool) -> None:
    from langchain_openai import ChatOpenAI
    from langgraph import prebuilt

    def get_weather(city: str) -> str:
        """Tell the weather."""
        return weather(city)

    model = ChatOpenAI(model="m", base_url=url, api_key="x", max_retries=0, temperature=0.0, streaming=stream)
    agent = prebuilt.create_react_agent(model, [get_weather], prompt="Help.")
    check(weather, agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content)
