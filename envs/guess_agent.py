"""Guess the number, played by an agent with a loop of its own: nothing but the `openai` client."""

from __future__ import annotations

import random

import httpx
from openai import OpenAI

PROMPT = "1-7?"
GUESSES = 3
CONNECTIONS = httpx.Client(limits=httpx.Limits(max_connections=64))
"""Connections that all games share: making a client takes longer than a game."""


def play(base_url: str, api_key: str, model: str, seed: int) -> float:
    """Play one game; returns 1.0 if the number from 1 to 7 is found in three guesses, else 0.0."""
    client = OpenAI(base_url=base_url, api_key=api_key, http_client=CONNECTIONS)
    secret = random.Random(seed).randint(1, 7)
    messages = [{"role": "user", "content": PROMPT}]
    for _ in range(GUESSES):
        answer = client.chat.completions.create(model=model, messages=messages)
        text = (answer.choices[0].message.content or "").strip()
        if not text.isdecimal() or len(text) > 2:
            return 0.0
        if int(text) == secret:
            return 1.0
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "+" if secret > int(text) else "-"})
    return 0.0


if __name__ == "__main__":  # as a command, in a child process
    import json
    import os

    row = json.loads(os.environ["POSTTRAIN_ROW"])
    url, secret_key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    print(json.dumps({"reward": play(url, secret_key, row["model"], row["seed"])}))
