"""Guess the number: after each wrong guess the policy is told whether the secret is higher or lower.

Three guesses find every number from 1 to 7 by binary search; a policy that guesses at random finds 37 % of them.
"""

from __future__ import annotations

import random
from typing import Any

from posttrain.data.chat import Message
from posttrain.environments.types import Reply

PROMPT = "1-7?"


class Guess:
    """Environment with a secret number from 1 to 7, the same for all samples of a group."""

    def __init__(self, seed: int, guesses: int = 3):
        self.secret = random.Random(seed).randint(1, 7)
        self.guesses = guesses
        self.made = 0

    def reply(self, message: Message) -> Reply:
        """Answer a guess: reward 1 for the secret, 0 if no guess is left."""
        self.made += 1
        text = str(message["content"]).strip()
        guess = int(text) if text.isdecimal() and len(text) < 3 else None
        if guess == self.secret:
            return Reply(done=True, reward=1.0)
        if guess is None or self.made == self.guesses:
            return Reply(done=True, reward=0.0, metrics={"no_number": float(guess is None)})
        return Reply(messages=[{"role": "user", "content": "+" if self.secret > guess else "-"}])


def prompts(*, count: int) -> list[dict[str, Any]]:
    """Rows with the prompt; the secret is drawn by the environment."""
    return [{"prompt": [{"role": "user", "content": PROMPT}]} for _ in range(count)]


def games(*, count: int, seed: int, listening: float = 0.5) -> list[dict[str, Any]]:
    """Conversations to learn the rules from, in which a share `listening` of the players guess only what is still
    possible, and the others anything.

    With less to listen for, some seeds learn no more than that guesses are numbers, and RL has nothing to begin from.
    """
    draw = random.Random(seed)
    return [{"messages": _game(draw, listens=draw.random() < listening)} for _ in range(count)]


def _game(draw: random.Random, *, listens: bool) -> list[Message]:
    secret, least, most = draw.randint(1, 7), 1, 7
    messages: list[Message] = [{"role": "user", "content": PROMPT}]
    for _ in range(3):
        guess = draw.randint(least, most) if listens else draw.randint(1, 7)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret:
            break
        least, most = (max(least, guess + 1), most) if secret > guess else (least, min(most, guess - 1))
        messages.append({"role": "user", "content": "+" if secret > guess else "-"})
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]
