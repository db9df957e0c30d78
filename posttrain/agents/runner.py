"""Rollouts by agents: an agent is run for each sample, a function or a command in a child process, and what its session
recorded becomes the trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, Any

from posttrain.agents.server import MODEL, Opened, Sessions
from posttrain.agents.session import REFUSED, Branch, FormatOf, Session
from posttrain.config import RLSection
from posttrain.config.locator import callable_of
from posttrain.config.secrets import with_secrets
from posttrain.data.chat import Renderer
from posttrain.data.messages import pictures_in
from posttrain.data.pictures import Pictures, data_url
from posttrain.data.prompt_images import PromptImages
from posttrain.data.tokenizer import Tokenizer
from posttrain.data.turns import check_turns
from posttrain.environments.conversation import (
    NEEDS_CHAT,
    Generate,
    accepted_keywords,
    check_keywords,
    named_keywords,
    role_patterns,
)
from posttrain.errors import ConfigError, RunError
from posttrain.rollout.trajectory import Example, SampleEnd, Stop, Trajectory, sample_end
from posttrain.rollout.types import SamplingParams, Transcript
from posttrain.runtime.user_calls import CallTimeout, UserCalls
from posttrain.sandbox.run import GRACE_S, start
from posttrain.serve.app import check_installed
from posttrain.tools.formats import make_format
from posttrain.user_code import describe_error, number_of

GIVEN = ("base_url", "api_key", "model", "seed", "row", "messages")
"""Keywords that an agent's function may name, beside dataset columns and `args`."""
MAX_CAUSES = 8
"""Maximum number of exceptions in a chain that are read."""
OUTPUT_BYTES = 64 * 1024
"""Part of the end of stdout and stderr that is kept, each."""
ROW_BYTES = 100 * 1024
"""Maximum number of bytes of a variable with the keywords; the system takes 128 KiB."""
NO_DEADLINE_S = 1e9
"""Deadline of the supervisor, which is told when to end."""
PIPE_S, POLL_S = 1.0, 0.005
"""Seconds that output may stay open after the end of a command, and between two looks at its supervisor."""


class AgentFailed(Exception):
    """Failure of an agent; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Agents:
    """Agents of a stage, and the sessions in which they talk to the policy."""

    run: Callable[..., Any] | Sequence[str]
    """Function of the keywords that it names, or a command."""
    args: Mapping[str, Any]
    sessions: Sessions
    unfinished: float | None
    """Reward of a sample whose agent gives none after a request beyond the limits; None: none."""
    calls: UserCalls
    max_turns: int
    max_rows: int
    row_tokens: int
    split_turns: bool
    tool_format: FormatOf | None
    forces_calls: bool
    """See `Session`."""

    @classmethod
    def of(cls, section: RLSection, tokenizer: Tokenizer, sessions: Sessions) -> Agents:
        """Make the agents of a stage with `agent`. ConfigError for a function that cannot be imported, and a program
        that does not exist."""
        agent = section.agent
        assert agent is not None
        if agent.fn is None and shutil.which(agent.command[0]) is None:
            raise ConfigError(f"agent.command: there is no program {agent.command[0]!r}")
        return cls(
            run=callable_of(agent.fn, "agent.fn") if agent.fn is not None else tuple(agent.command),
            args=agent.args if agent.fn is None else with_secrets(agent.args),
            sessions=sessions,
            unfinished=None if agent.unfinished == "drop" else agent.unfinished,
            calls=UserCalls("agent", timeout_s=agent.timeout_s, concurrency=agent.concurrency),
            max_turns=agent.max_turns,
            max_rows=agent.rows,
            row_tokens=section.sequence_tokens,
            split_turns=agent.split_turns,
            tool_format=partial(make_format, section.tool_format, tokenizer),
            forces_calls=section.weighs_samples and section.rollout.engine is None,
        )

    def check(self, renderer: Renderer, examples: Sequence[Example], *, keep_thinking: bool) -> None:
        """ConfigError without the server's packages, for columns that are missing, and for a template that changes
        earlier turns."""
        check_installed("agents", "agent")
        if callable(self.run):
            check_keywords(self.run, self.args, list(examples[0].row), GIVEN, "agent")
        if not self.split_turns:
            check_turns(renderer, role_patterns(examples), ("user",), tools=None, keep_thinking=keep_thinking)
        elif not renderer.chat:
            raise ConfigError(f"agent.split_turns: {NEEDS_CHAT}")

    async def converse(
        self,
        example: Example,
        *,
        group: int,
        sample: int,
        seed: int,
        renderer: Renderer,
        params_of: Callable[[int], SamplingParams],
        generate: Generate,
    ) -> Trajectory:
        """Run the agent of one sample. Its failure ends the sample with that `stop`; one of the engine is raised."""
        failures: list[BaseException] = []

        async def watched(tokens: Sequence[int], wanted: SamplingParams, images: PromptImages | None) -> Any:
            try:
                return await generate(tokens, wanted, images)
            except Exception as error:
                failures.append(error)
                raise

        session = Session(
            renderer=renderer,
            params_of=params_of,
            generate=watched,
            row_tokens=self.row_tokens,
            max_turns=self.max_turns,
            max_rows=self.max_rows,
            split_turns=self.split_turns,
            tool_format=self.tool_format,
            forces_calls=self.forces_calls,
        )
        opened = self.sessions.open(session)
        failed: Stop | None = None
        error: str | None = None
        reward: float | None = None
        metrics: dict[str, float] = {}
        try:
            reward, metrics = outcome_of(await self._run(example, opened, seed))
        except CallTimeout as failure:
            failed, error = "env_timeout", f"agent: {failure}"
        except RunError:
            raise
        except Exception as failure:
            if not _names_refusal(session, failure):
                failed, error = "env_error", f"agent: {_described(failure)}"
        finally:
            self.sessions.end(opened)
        if failures:
            raise failures[0]
        if failed is None and not session.answered:
            codes = ", ".join(session.refusals)
            why = f"all its requests were refused ({codes})" if codes else "it ended without a request to the policy"
            failed, error = "env_error", f"agent: {why}"
        end = _end_of(session, finished=reward is not None, failure=failed)
        if end.limit is not None:
            reward = self.unfinished
        return _trajectory(session, example, group, sample, end=end, error=error, reward=reward, metrics=metrics)

    def close(self) -> None:
        """Stop the server, and end idle threads."""
        self.sessions.close()
        self.calls.close()

    async def _run(self, example: Example, opened: Opened, seed: int) -> Any:
        row, messages = _sent(example)
        keywords = {"row": row, "messages": messages, "seed": seed, **row, **self.args}
        keywords |= {"base_url": opened.base_url, "api_key": opened.api_key, "model": MODEL}
        if not callable(self.run):
            command = self.run
            return await self.calls.bound(lambda: run_command(command, opened=opened, keywords=keywords))
        return await self.calls.call(self.run, **named_keywords(accepted_keywords(self.run), keywords))


def _end_of(session: Session, *, finished: bool, failure: Stop | None) -> SampleEnd:
    """End of the sample of a session: that of its last turn, unless a request after it was beyond a limit."""
    refusal, answered = session.refused_last, session.answered
    reached = REFUSED[refusal.code] if refusal is not None else answered[-1].reached if answered else None
    last: Stop = answered[-1].stop if answered else "stop"
    return sample_end(last, reached=reached, finished=finished, failure=failure)


def _names_refusal(session: Session, failure: BaseException) -> bool:
    """Tell whether an agent failed because its last request was beyond a limit: its error, or a cause, says so."""
    refusal = session.refused_last
    if refusal is None:
        return False
    said: list[str] = []
    one: BaseException | None = failure
    while one is not None and len(said) < MAX_CAUSES:
        said += [str(one), getattr(one, "said", "")]
        one = one.__cause__ or one.__context__
    return refusal.code in " ".join(said)


def outcome_of(result: Any) -> tuple[float | None, dict[str, float]]:
    """Reward and metrics from what an agent returned: None, a number, or a mapping with `reward` and metrics."""
    outcome = dict(result) if isinstance(result, Mapping) else {"reward": result}
    numbers: dict[str, float] = {}
    for name, value in outcome.items():
        number = number_of(value)
        if number is not None and math.isfinite(number):
            numbers[name] = number
        elif value is not None:
            raise AgentFailed(f"it returned {name}={value!r}; give a finite number or None")
    return numbers.pop("reward", None), numbers


def _described(failure: Exception) -> str:
    return str(failure) if isinstance(failure, AgentFailed | CommandFailed) else describe_error(failure)


def _trajectory(
    session: Session,
    example: Example,
    group: int,
    sample: int,
    *,
    end: SampleEnd,
    error: str | None,
    reward: float | None,
    metrics: Mapping[str, float],
) -> Trajectory:
    """Trajectory with a row for each branch, in the order of their last turns: the reward is that of the last one."""
    branches = session.answered
    if branches and reward is not None:
        branches[-1].transcript.reward(reward)
    empty = Branch(
        transcript=Transcript(example.prompt_tokens, example.images), messages=list(example.messages), tools=None
    )
    rows = [
        Trajectory(
            group=group,
            example=_prompt_of(branch, example),
            sample=sample,
            messages=branch.messages,
            text=str(branch.messages[-1].get("content") or ""),
            stop=end.stop,
            limit=end.limit,
            error=error,
            **branch.transcript.columns(),
        )
        for branch in branches or [empty]
    ]
    counted = {f"refused_{code}": float(count) for code, count in session.refusals.items()}
    return replace(rows[0], metrics={**metrics, **counted, "rows": float(len(branches))}, more=rows[1:])


def _prompt_of(branch: Branch, example: Example) -> Example:
    """Example whose messages are those that the agent began with."""
    roles = [message["role"] for message in branch.messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    turns = branch.transcript.turns
    tokens = branch.transcript.tokens[: turns[0].start] if turns else branch.transcript.tokens
    images = branch.transcript.images
    images = None if images is None else images.cut(len(tokens))
    return replace(example, messages=branch.messages[:first], prompt_tokens=tokens, images=images)


def _sent(example: Example) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Row and messages as an agent gets them: pictures of messages are parts as it sends them, and the column `images`
    has their `data:` URLs."""
    row, messages = dict(example.row), [dict[str, Any](message) for message in example.messages]
    if isinstance(row.get("images"), Pictures):
        row["images"] = [data_url(picture) for picture in pictures_in(example.messages)]
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = [
                {"type": "image_url", "image_url": {"url": data_url(part["image"])}} if "image" in part else part
                for part in message["content"]
            ]
    return row, messages


class CommandFailed(Exception):
    """Command that ended with an error; the message is one line, `said` its error output."""

    def __init__(self, message: str, said: str):
        super().__init__(message)
        self.said = said


async def run_command(command: Sequence[str], *, opened: Opened, keywords: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run a command to its end, and then end all that it has started, in sessions of their own or not; cancelling ends
    it at once.

    Its environment has `OPENAI_BASE_URL`, `OPENAI_API_KEY`, and `keywords` as JSON in the file
    `POSTTRAIN_ROW_FILE` and, if they are at most 100 KiB, in `POSTTRAIN_ROW`. Returns the JSON object in the last line
    of its output; None without one. CommandFailed for an exit code.
    """
    with _environment(opened, json.dumps(keywords, default=str)) as environment:
        job = {
            "argv": list(command),
            "python": None,
            "timeout_s": NO_DEADLINE_S,
            "may_fork": True,
            "confined": False,
            "peer": None,
        }
        process, report = start(job, stdin=subprocess.DEVNULL, folder=None, environment=environment)
        stdout, stderr, said = bytearray(), bytearray(), bytearray()
        assert process.stdout is not None and process.stderr is not None
        pipes = {process.stdout: stdout, process.stderr: stderr, os.fdopen(report, "rb"): said}
        *outputs, reported = [asyncio.ensure_future(_tail(pipe, kept)) for pipe, kept in pipes.items()]
        try:
            await reported
            await asyncio.wait(outputs, timeout=PIPE_S)
        finally:
            await _end(process)
            for reader in (*outputs, reported):
                reader.cancel()
            await asyncio.gather(*outputs, reported, return_exceptions=True)
    code = marshal.loads(bytes(said))["code"] if said else None
    if code != 0:
        text = (stderr.strip() or stdout.strip()).decode(errors="replace")
        last = text.splitlines()[-1:]
        why = "its supervisor was killed" if code is None else f"exit code {code}"
        raise CommandFailed(f"{why}{f': {last[0][:200]}' if last else ''}", text)
    return _last_object(stdout.decode(errors="replace"))


@contextlib.contextmanager
def _environment(opened: Opened, row: str) -> Iterator[dict[str, str]]:
    with tempfile.NamedTemporaryFile("w", prefix="posttrain-row-", suffix=".json", encoding="utf-8") as file:
        file.write(row)
        file.flush()
        yield {
            **{name: value for name, value in os.environ.items() if name != "POSTTRAIN_ROW"},
            "OPENAI_BASE_URL": opened.base_url,
            "OPENAI_API_KEY": opened.api_key,
            "POSTTRAIN_ROW_FILE": file.name,
            **({"POSTTRAIN_ROW": row} if len(row) <= ROW_BYTES else {}),
            # The devices belong to the trainer.
            "JAX_PLATFORMS": "cpu",
        }


async def _tail(pipe: IO[bytes], kept: bytearray) -> None:
    """Read a pipe to its end, and keep its last bytes."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    try:
        while part := await reader.read(1 << 16):
            kept += part
            del kept[:-OUTPUT_BYTES]
    finally:
        transport.close()


async def _end(process: subprocess.Popen[bytes]) -> None:
    """End a supervisor with all that it has started."""
    process.terminate()
    for _ in range(round(GRACE_S / POLL_S)):
        if process.poll() is not None:
            return
        await asyncio.sleep(POLL_S)
    process.kill()
    process.wait()


def _last_object(text: str) -> dict[str, Any] | None:
    lines = text.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
