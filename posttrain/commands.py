"""Commands that generate, chat, serve, evaluate and examine rewards, and completion of words in a shell."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.errors import ConfigError
from posttrain.tracking.console import print_lines

if TYPE_CHECKING:
    from posttrain.config import Drafts
    from posttrain.data.grammar import Grammar
    from posttrain.data.tokenizer import Tokenizer
    from posttrain.generation import Generated


GeneratorName = Annotated[
    str, typer.Argument(metavar="MODEL|RUN", help="A folder in Hugging Face layout, a hub id, or a run's folder.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum number of new tokens; by default 128, or what the context allows."),
]
FrequencyPenalty = Annotated[float, typer.Option(help="Subtracted from logits, times the token's count in the text.")]
LogitBias = Annotated[list[str] | None, typer.Option(help="TOKEN=NUMBER, such as 13=-inf; may be repeated.")]
AllowedToken = Annotated[list[int] | None, typer.Option(help="Token id that may be sampled; may be repeated.")]
GrammarText = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND[=VALUE]",
        help="Structured output: json_object, json_schema=FILE (or JSON), regex=PATTERN, or choice=TEXT, repeatable. "
        "A model may think before it, unless --chat-template-args switch that off.",
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(help="Use the chat template; by default as the run's data, else if the tokenizer has one."),
]
TemplateArgs = Annotated[
    str | None, typer.Option(help="Variables of the chat template as JSON, such as '{\"enable_thinking\": false}'.")
]
Messages = Annotated[
    bool, typer.Option("--messages", help="Prompts are conversations: JSON lists of role and content.")
]
Logprobs = Annotated[int | None, typer.Option(min=0, help="Print JSON with this number of most probable tokens.")]
PromptLogprobs = Annotated[
    bool, typer.Option("--prompt-logprobs", help="Print JSON with the prompt's log-probabilities.")
]


Images = Annotated[list[str] | None, typer.Option("--image", help="Picture before each prompt; may be repeated.")]


def _drafts(text: str) -> Drafts:
    from posttrain.config.rollout import drafts_of

    try:
        return drafts_of(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


Speculative = Annotated[
    Any,
    typer.Option(
        parser=_drafts,
        metavar="ngram|draft=MODEL|block=DRAFTER[:TOKENS]",
        help="Speculative decoding, the same tokens: from what the text repeats, by a smaller model, or "
        "by a block drafter; as rollout.speculative. TOKENS: drafted for each pass, by default 4, or all of a block.",
    ),
]


def generate(
    model: GeneratorName,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; without any, one per line of stdin.")] = None,
    adapter: Annotated[str | None, typer.Option(help="PEFT's adapter of the model: a folder or a hub id.")] = None,
    family: Annotated[str | None, typer.Option(help="A Python file with the model's family, as model.family.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    min_p: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens in the text become less likely.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Subtracted from the logits of tokens in the text.")] = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    stop_token: Annotated[list[int] | None, typer.Option(help="Stop token id; may be repeated.")] = None,
    special_tokens: Annotated[bool, typer.Option("--special-tokens", help="Keep special tokens in the text.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after end-of-sequence tokens.")] = False,
    logit_bias: LogitBias = None,
    allowed_token: AllowedToken = None,
    grammar: GrammarText = None,
    image: Images = None,
    n: Annotated[int, typer.Option("-n", "--samples", min=1, help="Completions per prompt.")] = 1,
    seed: Annotated[int | None, typer.Option(help="By default drawn from the system.")] = None,
    chat: Chat = None,
    chat_template_args: TemplateArgs = None,
    messages: Messages = False,
    logprobs: Logprobs = None,
    prompt_logprobs: PromptLogprobs = False,
    speculative: Speculative = None,
) -> None:
    """Print completions of each prompt; without a chat template (or with `--no-chat`) after the prompt itself."""
    from posttrain.generation import complete, with_pictures
    from posttrain.runs.finished import load_generator

    loaded = load_generator(model, adapter=adapter, family=family)
    texts = prompts or [line.rstrip("\n") for line in sys.stdin]
    answers = complete(
        loaded.model,
        loaded.tokenizer,
        with_pictures(_conversations(texts) if messages else texts, image or []),
        max_new_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        **_choices(logit_bias or [], allowed_token or [], grammar or []),
        stop=stop or [],
        stop_token_ids=stop_token or [],
        skip_special_tokens=not special_tokens,
        ignore_eos=ignore_eos,
        n=n,
        seed=seed,
        chat=(chat := (messages or loaded.tokenizer.chats) if chat is None else chat),
        chat_template_args=_template_args(chat_template_args),
        top_logps=logprobs or 0,
        prompt_logps=prompt_logprobs,
        speculative=speculative,
    )
    _print(answers, [""] if chat else texts, loaded.tokenizer, recorded=prompt_logprobs or logprobs is not None)


def _print(answers: Sequence[Generated], before: Sequence[str], tokenizer: Tokenizer, *, recorded: bool) -> None:
    """Print each answer after its share of the texts before, or as JSON with its probabilities."""
    for number, answer in enumerate(answers):
        text = before[number * len(before) // len(answers)]
        print(json.dumps(answer.record(tokenizer.decode)) if recorded else f"{text}{answer.text}")


AdapterNames = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=FOLDER: a PEFT adapter beside the model, which requests name; several times. FOLDER alone: "
        "the model has it."
    ),
]
AdapterCount = Annotated[
    int | None, typer.Option(min=1, help="Adapters beside the model at once; by default those given.")
]
AdapterRank = Annotated[
    int | None, typer.Option(min=1, help="Largest rank of one; by default of those given, else 16.")
]
LoadsAdapters = Annotated[bool, typer.Option(help="Clients may load and drop adapters: POST /v1/load_lora_adapter.")]

AllowedHost = Annotated[
    list[str] | None, typer.Option(help="Another name of this server in requests, as behind a proxy; repeatable.")
]
AllowedOrigin = Annotated[
    list[str] | None,
    typer.Option(help="A site whose pages may ask, such as http://localhost:3000, or *; repeatable."),
]
MaxLength = Annotated[
    int | None, typer.Option(min=2, help="Tokens of prompt and answer; by default the model's, at most 4096.")
]
CacheTokens = Annotated[int | None, typer.Option(min=1, help="Tokens in the cache; by default enough for all slots.")]
ReadTimeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds for a request to arrive, and for a client to read on; see the page.")
]
MaxLogprobs = Annotated[int, typer.Option(min=1, help="Log-probabilities of an answer: tokens times alternatives.")]


def serve(
    model: GeneratorName,
    adapter: AdapterNames = None,
    adapter_slots: AdapterCount = None,
    adapter_rank: AdapterRank = None,
    load_adapters: LoadsAdapters = False,
    family: Annotated[str | None, typer.Option(help="A Python file with the model's family, as model.family.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need --api-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="POSTTRAIN_API_KEY", help="Key that requests send.")] = None,
    allowed_host: AllowedHost = None,
    allowed_origin: AllowedOrigin = None,
    name: Annotated[str | None, typer.Option(help="Name of the model in requests; by default MODEL|RUN.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Samples that are decoded at once.")] = 32,
    max_length: MaxLength = None,
    cache_tokens: CacheTokens = None,
    decode_steps: Annotated[int, typer.Option(min=1, help="Tokens of a sample between two looks at requests.")] = 8,
    max_queue: Annotated[int, typer.Option(min=0, help="Samples that wait for a slot; more are refused.")] = 1024,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for an answer.")] = 600.0,
    read_timeout: ReadTimeout = 30.0,
    max_connections: Annotated[int, typer.Option(min=1, help="Connections at once; more are refused.")] = 2048,
    max_body: Annotated[float, typer.Option(min=0.01, help="MiB of a request.")] = 64.0,
    max_pixels: Annotated[float, typer.Option(min=0.01, help="Million pixels of a request's pictures.")] = 128.0,
    max_logprobs: MaxLogprobs = 1 << 20,
    chat_template: Annotated[str | None, typer.Option(help="A file or a name, as model.chat_template.")] = None,
    tool_format: Annotated[str, typer.Option(help="Format of tool calls, as tool_format of RL.")] = "auto",
    warm_up: Annotated[bool, typer.Option(help="Compile all programs first, not each when it is needed.")] = True,
    speculative: Speculative = None,
) -> None:
    """Serve a model by the OpenAI API: completions, chats, responses, with streaming and tools, until interrupted."""
    from posttrain.generation import without_padding
    from posttrain.rollout.adapters import slots_for
    from posttrain.runs.finished import load_generator
    from posttrain.runtime.xla import enable_compile_cache
    from posttrain.serve import app
    from posttrain.serve.admission import ConnectionLimits, RequestLimits
    from posttrain.serve.middleware import AllowedHosts
    from posttrain.serve.model import Limits, Served

    enable_compile_cache()
    app.check_installed("serve", "serve")
    if api_key is None and host not in app.LOOPBACK:
        raise ConfigError(f"serve: --host {host} lets others ask; give --api-key, or POSTTRAIN_API_KEY, as well")
    listener = app.listen(host, port, "serve")
    beside, own = _adapters(adapter or [])
    loaded = load_generator(model, adapter=own, family=family)
    tokenizer = _with_template(loaded.tokenizer, chat_template)
    served = Served.of(
        without_padding(loaded.model, tokenizer),
        tokenizer,
        name=name or model,
        slots=slots,
        max_length=max_length,
        cache_tokens=cache_tokens,
        decode_steps=decode_steps,
        tool_format=tool_format,
        limits=Limits(
            queue=max_queue,
            timeout_s=timeout,
            request=RequestLimits(pixels=round(max_pixels * 1e6), logprobs=max_logprobs),
        ),
        adapters=slots_for(beside.values(), adapter_slots, adapter_rank, loads=load_adapters),
        speculative=speculative,
    )
    for adapter_name, folder in beside.items():
        served.add_adapter(adapter_name, folder)
    if warm_up:
        served.warm_up()
    app.serve(
        served,
        listener,
        api_key,
        hosts=AllowedHosts(host, allowed_host or []),
        origins=allowed_origin or [],
        max_body=round(max_body * 2**20),
        connections=ConnectionLimits(count=max_connections, read_s=read_timeout),
        loads=load_adapters,
    )


def _with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    from posttrain.config.locator import Locator
    from posttrain.weights.locate import with_template

    return tokenizer if template is None else with_template(tokenizer, Locator(template), "serve: --chat-template")


def _adapters(given: Sequence[str]) -> tuple[dict[str, str], str | None]:
    """Adapters beside the model by name, and that of the model itself. ConfigError for names given twice."""
    named = [one.partition("=")[::2] for one in given if "=" in one]
    alone = [one for one in given if "=" not in one]
    if len(alone) > 1 or len({name for name, _ in named}) < len(named):
        raise ConfigError("serve: --adapter: give each NAME=FOLDER a name of its own, and at most one without a name")
    return dict(named), alone[0] if alone else None


def _template_args(text: str | None) -> dict[str, Any]:
    """Parse the arguments of the chat template. ConfigError unless they are a JSON object."""
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(f"--chat-template-args: {text!r} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--chat-template-args: {text!r} must be a JSON object")
    return found


def _grammar(texts: list[str]) -> Grammar | None:
    """Make the grammar of `--grammar`. ConfigError for several kinds, and for a grammar that is not understood."""
    from posttrain.config import GrammarSection
    from posttrain.data.grammar import Grammar

    pairs = [text.partition("=")[::2] for text in texts]
    kinds, values = {kind for kind, _ in pairs}, [value for _, value in pairs]
    if not pairs:
        return None
    if len(kinds) > 1 or (kinds != {"choice"} and len(pairs) > 1):
        raise ConfigError(f"--grammar: {', '.join(texts)}: use one of them; only choice=TEXT may be repeated")
    readers: dict[str, Callable[[str], Any]] = {"json_object": lambda _: True, "json_schema": _schema}
    (kind,) = kinds
    value = values if kind == "choice" else readers.get(kind, str)(values[0])
    try:
        return Grammar.of(GrammarSection(**{kind: value}))
    except ValueError as error:
        raise ConfigError(f"--grammar: {str(error).removeprefix('sampling.grammar: ')}") from error


def _schema(text: str) -> Any:
    """Parse a JSON schema or read it from its file. ConfigError for what is neither."""
    try:
        return json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--grammar: json_schema={text[:60]} is neither JSON of an object nor its file ({error})"
        ) from error


def _conversations(texts: list[str]) -> list[Any]:
    """Parse conversations. ConfigError for invalid JSON."""
    found = []
    for text in texts:
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError as error:
            example = '[{"role": "user", "content": "Hello"}]'
            raise ConfigError(f"--messages: {text[:60]!r} is not JSON ({error}); write {example}") from error
    return found


def _choices(biases: list[str], tokens: list[int], grammar: list[str]) -> dict[str, Any]:
    """Settings of the tokens that may be sampled."""
    return {"logit_bias": _biases(biases), "allowed_token_ids": tokens or None, "grammar": _grammar(grammar)}


def _biases(texts: list[str]) -> dict[int, float]:
    """Parse logit biases. ConfigError unless written as TOKEN=NUMBER."""
    try:
        return {int(token): float(bias) for token, bias in (text.split("=") for text in texts)}
    except ValueError as error:
        raise ConfigError(f"generate: --logit-bias: {error}; write it as TOKEN=NUMBER, such as 13=-5") from error


def chat(
    model: GeneratorName,
    system: Annotated[str | None, typer.Option(help="System message; by default that of the run's data.")] = None,
    tools: Annotated[
        list[str] | None, typer.Option(help="FILE.py (its public functions), FILE.py:NAME, none; default: the run's.")
    ] = None,
    tool_format: Annotated[str | None, typer.Option(help="Format of calls, as tool_format of RL.")] = None,
    history: Annotated[
        Path | None, typer.Option(help="JSONL of messages: read if it is there, written after each answer.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="PEFT's adapter of the model: a folder or a hub id.")] = None,
    family: Annotated[str | None, typer.Option(help="A Python file with the model's family, as model.family.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer; by default what is left.")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of the whole chat; by default the model's, at most 4096.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    min_p: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens in the text become less likely.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="By default drawn from the system.")] = None,
    template: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template; by default as for generate.")
    ] = None,
    chat_template_args: TemplateArgs = None,
    speculative: Speculative = None,
    page: Annotated[bool, typer.Option("--page", help="On a local page, with pictures and calls.")] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Of the page; by default any free one.")] = None,
) -> None:
    """Talk to a model in the terminal, or over a pipe, a message per line; /help there lists commands."""
    from posttrain.chat import Chat, Terminal, tools_from
    from posttrain.runs.finished import load_generator
    from posttrain.runtime.xla import enable_compile_cache
    from posttrain.view.chat import hold, listener_of

    listener = listener_of(page, port)
    enable_compile_cache()
    talk = Chat(
        tools=tools_from(tools) if tools else None,
        chat_template_args=_template_args(chat_template_args),
        generator=load_generator(model, adapter=adapter, family=family),
        tool_format=tool_format,
        max_length=max_length,
        max_new_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop or [],
        seed=seed,
        chat=template,
        speculative=speculative,
    )
    with closing(talk):
        talk.begin(talk.system if system is None else system)
        if listener is None:
            Terminal(talk, history=history).run()
        else:
            hold(talk, listener, title=model, history=history)


def evaluate(
    model: GeneratorName,
    data: Annotated[str | None, typer.Option(help="A dataset, as dataset.path; by default the run's held-out.")] = None,
    rewards: Annotated[
        list[str] | None,
        typer.Option("--reward", help="FILE:FUNCTION; may be repeated. By default those of the run."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Template of the prompt, as dataset.prompt.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of rows; by default all.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples per prompt.")] = 1,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer; by default at most 512.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="By default that of the run's evaluations, else 0 (greedy).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the samples.")] = 0,
    adapter: Annotated[str | None, typer.Option(help="PEFT's adapter of the model: a folder or a hub id.")] = None,
    family: Annotated[str | None, typer.Option(help="A Python file with the model's family, as model.family.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write intervals, values and samples as JSON.")] = None,
) -> None:
    """Mean of each reward over held-out prompts, with its 95 % interval."""
    from posttrain.config import DatasetSection, Locator, RewardSection, SamplingSection
    from posttrain.runs import evaluate as recipe
    from posttrain.runs.finished import load_generator
    from posttrain.runtime.xla import enable_compile_cache

    enable_compile_cache()
    dataset, functions, sampling = recipe.of_run(model)
    if data is not None:
        dataset = DatasetSection(path=Locator(data), prompt=prompt, shuffle=False)
    elif prompt is not None:
        raise ConfigError("evaluate: --prompt is for --data")
    functions = [RewardSection(fn=Locator(one)) for one in rewards] if rewards else functions
    if dataset is None or not functions:
        raise ConfigError(
            f"evaluate: give {'--data' if dataset is None else '--reward'}; only a run of a stage with rewards and "
            "eval_dataset has its own"
        )
    changes = {"limit": limit} if limit is not None else {}
    given = {"max_tokens": max_tokens, "temperature": temperature}
    before = {} if sampling is None else {name: getattr(sampling, name) for name in sampling.model_fields_set}
    chosen = {"temperature": 0.0, **before, **{name: value for name, value in given.items() if value is not None}}
    found = recipe.evaluate(
        load_generator(model, adapter=adapter, family=family),
        dataset.model_copy(update=changes),
        functions,
        recipe.EvaluationSettings(samples=samples, sampling=SamplingSection(**chosen), seed=seed),
    )
    print_lines(repr(found).splitlines())
    if write is not None:
        write.write_text(json.dumps(found.record(), indent=1, ensure_ascii=False), encoding="utf-8")


def reward(
    functions: Annotated[
        list[str] | None, typer.Argument(metavar="FILE:FUNCTION...", help="Such as rewards/gsm8k.py:correct.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="A dataset, as dataset.path.")] = None,
    config: Annotated[
        str | None, typer.Option(help="A YAML file whose first stage with rewards gives the dataset and functions.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Template of the prompt, as dataset.prompt.")] = None,
    answer: Annotated[str | None, typer.Option(help="Column with the right answer; by default found by name.")] = None,
    golden: Annotated[
        str | None, typer.Option(help="Template of a golden answer, such as '<answer>{answer}</answer>'.")
    ] = None,
    rows: Annotated[int, typer.Option(min=2, help="Number of rows.")] = 16,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to score all completions once.")] = 5.0,
    keywords: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Keyword of the functions; repeatable.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Score samples of this model too: a folder or a hub id.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the values as a pytest file, to keep.")] = None,
) -> None:
    """Examine reward functions before training: right, wrong, empty and absurd answers. Exit code 1 with findings."""
    from posttrain.runs import reward_lab as lab

    settings = lab.LabSettings(
        num_rows=rows,
        timeout_s=timeout,
        answer=answer,
        golden=golden,
        args=lab.read_args(keywords or []),
        model=model,
        write=write,
    )
    found = lab.examine(functions or [], lab.dataset_of(data, prompt), config, settings)
    print_lines(found.lines)
    if not found.passed:
        raise typer.Exit(1)


def complete_config(incomplete: str) -> list[str]:
    """YAML files that the text begins: of the current folder, and below a folder that it names or `configs`."""
    from posttrain.config.locator import Locator

    folder = incomplete.rpartition("/")[0] or "configs"
    here = sorted(path.name for path in Path().glob("*.y*ml"))
    found = Locator(folder).found
    below = [] if found is None else sorted(found.rglob("*.y*ml"))
    names = [*here, *(f"{folder}/{path.relative_to(found).as_posix()}" for path in below if found is not None)]
    return [name for name in names if name.startswith(incomplete)]


def complete_override(ctx: Any, incomplete: str) -> list[tuple[str, str]]:
    """`key=value` of the configuration in `ctx`, Typer's context, with its present value or each that it can have.

    Bash splits words at `=`: after one, the values alone. A configuration with a mistake has none.
    """
    from posttrain.config.describe import assignments

    config, typed = ctx.params.get("config"), list(ctx.params.get("overrides") or [])
    if not config:
        return []
    if typed and typed[-1] == "=":
        typed.pop()
    after = typed[-1] if typed and "=" not in typed[-1] else None
    start = incomplete if after is None else f"{after}={incomplete}"
    try:
        found = [(word, text) for word, text in assignments(config, start) if word.startswith(start)]
    except ConfigError:
        return []
    return found if after is None else [(word.partition("=")[2], text) for word, text in found]
