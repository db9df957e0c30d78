"""HTTP teacher: the most probable tokens of given token ids from a vLLM or SGLang server, with retries."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Float

from posttrain.batch import NO_ID, Batch, TopK
from posttrain.config import TeacherSection
from posttrain.errors import ConfigError, RunError
from posttrain.kernels.logits.softmax import NO_LOGIT

ATTEMPTS = 5
FIRST_WAIT_S = 0.5
"""Before the second attempt; twice as long before each one after."""
AGAIN = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed."""
LEAST_TAIL = 1e-9
"""Least tail mass, for a tail that is rounding error."""

Said = tuple[Mapping[int, float], float]
"""Log-probabilities at one position: of the most probable ids, and of the token itself."""


class ServedTeacherError(RunError):
    """Failed or invalid answer of a teacher server; the step is not computed."""


class ServedTeacher:
    """Teacher at the server `section.url`: top-k of host rows. `num_ids`: size of the student's vocabulary.

    Answers are at temperature 1. ConfigError where the server refuses a request, ServedTeacherError where it fails.
    """

    def __init__(self, section: TeacherSection, *, num_ids: int, k: int):
        assert section.url is not None
        self._section, self._num_ids, self._k = section, num_ids, k
        self._model = section.model or section.path
        self._headers = {"Content-Type": "application/json"}
        if section.api_key_env is not None:
            key = os.environ.get(section.api_key_env)
            if key is None:
                raise ConfigError(f"teachers: api_key_env={section.api_key_env}: no such environment variable is set")
            self._headers["Authorization"] = f"Bearer {key}"

    def at(self, temperature: float) -> ServedTeacher:
        """Return this teacher: the configuration refuses other temperatures than 1."""
        assert temperature == 1.0, temperature
        return self

    def top_k(self, batch: Batch) -> TopK:
        """Top-k at each token with loss; zeros elsewhere."""
        shape = batch.shape
        ids, logps = np.zeros((*shape, self._k), np.int32), np.zeros((*shape, self._k), np.float32)
        tail, token_logps = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for at, candidates in self._ask(batch, self._k):
            ids[at], logps[at], tail[at] = _best(candidates[0], self._k, self._num_ids)
            token_logps[at] = candidates[1]
        return TopK(ids=ids, logps=logps, tail=tail, scaled_tail=tail, token_logps=token_logps)

    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Log-probabilities of the tokens with loss; 0 elsewhere."""
        found = np.zeros(batch.shape, np.float32)
        for at, (_, logp) in self._ask(batch, 1):
            found[at] = logp
        return found

    def _ask(self, batch: Batch, k: int) -> list[tuple[tuple[int, int], Said]]:
        """Position and candidates of each token with loss; one request per sequence that has any."""
        segments, counts = np.asarray(batch.segments), np.asarray(batch.loss_weight) != 0
        sequences = []
        for row, number in sorted({(int(r), int(segments[r, t])) for r, t in np.argwhere(counts & (segments > 0))}):
            places = np.flatnonzero(segments[row] == number)
            sequences.append((row, places, np.asarray(batch.tokens)[row, places].tolist()))
        with ThreadPoolExecutor(max_workers=self._section.concurrency) as pool:
            answers = pool.map(lambda sequence: self._of(sequence[2], k), sequences)
            return [
                ((row, int(place)), candidates[n])
                for (row, places, _), candidates in zip(sequences, answers, strict=True)
                for n, place in enumerate(places)
                if counts[row, place] and n > 0
            ]

    def _of(self, tokens: Sequence[int], k: int) -> Sequence[Said]:
        """Log-probabilities of each token given those before it; empty for the first."""
        ask, read = (_sglang_request, _read_sglang) if self._section.server == "sglang" else (_vllm_request, _read_vllm)
        path, body = ask(self._model, tokens, k)
        answer = self._post(f"{str(self._section.url).rstrip('/')}/{path}", body)
        try:
            candidates = read(answer, tokens)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ServedTeacherError(
                f"teacher {self._section.title}: {self._section.url} gave no log-probabilities of the prompt as "
                f"{self._section.server} does ({type(error).__name__}: {error})"
            ) from error
        if len(candidates) != len(tokens):
            raise ServedTeacherError(
                f"teacher {self._section.title}: {self._section.url} scored {len(candidates)} of {len(tokens)} tokens"
            )
        return candidates

    def _post(self, url: str, body: Mapping[str, Any]) -> Any:
        last = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            request = urllib.request.Request(url, json.dumps(body).encode(), self._headers)
            try:
                with urllib.request.urlopen(request, timeout=self._section.timeout_s) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                with error:
                    answer = " ".join(error.read(500).decode(errors="replace").split())
                    last = f"HTTP {error.code}: {answer}"
                if error.code not in AGAIN:
                    raise ConfigError(
                        f"teachers: {url} refused the request ({last}); see its name of the model, its key and its "
                        "limit of log-probabilities (vLLM: --max-logprobs)"
                    ) from error
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                last = f"{type(error).__name__}: {error}"
        raise ServedTeacherError(f"teacher {self._section.title}: {url} failed {ATTEMPTS} times; the last: {last}")


def _vllm_request(model: str, tokens: Sequence[int], k: int) -> tuple[str, dict[str, Any]]:
    """docs.vllm.ai, vllm.entrypoints.openai.completion.protocol: the completions of an OpenAI server, and of vLLM's own
    `prompt_logprobs`, by token id."""
    return "completions", {
        "model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k,
    }  # fmt: skip


def _read_vllm(answer: Any, tokens: Sequence[int]) -> list[Said]:
    entries = answer["choices"][0]["prompt_logprobs"][1:]
    found: list[Said] = [({}, 0.0)]
    for token, entry in zip(tokens[1:], entries, strict=True):
        logps = {int(number): _logp(one["logprob"]) for number, one in entry.items()}
        found.append((logps, logps[token]))
    return found


def _sglang_request(model: str, tokens: Sequence[int], k: int) -> tuple[str, dict[str, Any]]:
    """docs.sglang.ai, native API: its OpenAI endpoint names tokens by text, which may stand for several ids."""
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    return "generate", {
        "input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0,
        "top_logprobs_num": k,
    }  # fmt: skip


def _read_sglang(answer: Any, tokens: Sequence[int]) -> list[Said]:
    info = answer["meta_info"]
    found: list[Said] = [({}, 0.0)]
    of_tokens, best = info["input_token_logprobs"][1:], info["input_top_logprobs"][1:]
    for token, own, entry in zip(tokens[1:], of_tokens, best, strict=True):
        if own[1] != token:
            raise ValueError(f"it scored token {own[1]} in place of {token}")
        found.append(({int(one[1]): _logp(one[0]) for one in entry}, _logp(own[0])))
    return found


def _logp(value: Any) -> float:
    number = float(value)
    if not -1e31 < number < 1e-3:
        raise ValueError(f"{value} is no log-probability")
    return min(number, 0.0)


def _best(candidates: Mapping[int, float], k: int, num_ids: int) -> tuple[np.ndarray, np.ndarray, float]:
    """The k most probable ids, their log-probabilities, and the log of the remaining mass."""
    order = sorted(candidates, key=lambda number: -candidates[number])[:k]
    ids, logps = np.full(k, NO_ID, np.int32), np.full(k, NO_LOGIT, np.float32)
    for place, number in enumerate(order):
        if number < num_ids:
            ids[place], logps[place] = number, candidates[number]
    left = 1.0 - float(np.exp([candidates[number] for number in order]).sum())
    return ids, logps, float(np.log(max(left, LEAST_TAIL)))
