"""Secrets in the configuration: which names and URLs hold them, and arguments whose values come from the environment.

`config.yaml` and trackers show all that a configuration holds, so it holds none.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from posttrain.errors import ConfigError

SECRET = re.compile(r"(?:^|_)(?:API_?KEYS?|KEY|TOKEN|SECRETS?|PASSWORDS?|PASSWD|PWD|CREDENTIALS?|AUTHORIZATION)$")
"""Ends of names that hold secrets, in capitals."""
SPECIAL_TOKEN = re.compile(r"(?:^|_)(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK|STOP|START|END|IMAGE|VIDEO|AUDIO)_TOKEN$")
"""Ends of names of a tokenizer's tokens, which are none."""
SIGNATURE = re.compile(r"(?:^|_)(?:SIG|SIGNATURE|AUTH|ACCESS_?KEY_?ID)$")
"""Ends of further names in the query of a URL that gives access to whoever has it."""
ADDRESS = re.compile(r"(?:[\w.-]+=)?([A-Za-z][A-Za-z0-9+.-]*://\S+)")
"""Text that is one URL, also as the value of an option or variable."""
SHOWN = "config.yaml and trackers would show this secret"
WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]")
FROM_ENV = "_env"
"""End of the name of an argument whose value is the name of an environment variable."""


def names_secret(name: str) -> bool:
    """Tell whether a variable or an argument of this name holds a secret.

    >>> [names_secret(name) for name in ("OPENAI_API_KEY", "judgeToken", "X-Api-Key", "eos_token", "monkey")]
    [True, True, True, False, False]
    """
    words = WORD_BORDER.sub("_", name).upper()
    return SECRET.search(words) is not None and SPECIAL_TOKEN.search(words) is None


def from_environment(name: str) -> str | None:
    """Name of the argument that `name` takes from the environment: `api_key` of `api_key_env`; None for others."""
    base = name.removesuffix(FROM_ENV)
    return base if base != name and names_secret(base) else None


def with_secrets(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with the values of environment variables in place of their names, in mappings and lists too.

    ConfigError for a variable that is not set.
    """
    return {_argument(name): _value(name, value) for name, value in args.items()}


def argument_names(args: Mapping[str, Any]) -> list[str]:
    """Names of the arguments that a function is called with."""
    return [_argument(name) for name in args]


def _argument(name: str) -> str:
    return from_environment(name) or name if isinstance(name, str) else name


def _value(name: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        return with_secrets(value)
    if isinstance(value, list | tuple):
        return [_value(None, item) for item in value]
    if value is None or not isinstance(name, str) or from_environment(name) is None:
        return value
    if value not in os.environ:
        raise ConfigError(f"args.{name}={value}: no such environment variable is set; set it where the run starts")
    return os.environ[value]


def without_secrets(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a function; ValueError for a secret among them, and for one from the environment that names no
    variable."""
    for place, name, value in _named(args):
        if from_environment(name) is not None:
            if value is not None and (not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_]\w*", value, re.ASCII)):
                raise ValueError(f"{place} must be the name of an environment variable, or null")
            if from_environment(name) in _siblings(args, place):
                raise ValueError(f"{place} gives the argument that {place.removesuffix(FROM_ENV)} gives; remove one")
        elif names_secret(name) and _holds_text(value):
            raise ValueError(
                f"{place}: {SHOWN}; set it in the run's environment, and give "
                f"{name}{FROM_ENV}: VARIABLE, from which the argument {name} gets its value; if it is no secret, give "
                "the argument another name"
            )
    return args


def without_named_secrets(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that no function gets, such as those of a model's `config.json`; ValueError for a secret among them."""
    for place, name, value in _named(fields):
        if names_secret(name) and _holds_text(value):
            raise ValueError(f"{place}: {SHOWN}, which nothing here needs; remove it")
    return fields


def check_urls(value: Any, place: str = "") -> None:
    """ValueError for a URL among texts, lists and mappings that holds a secret: a password, or a key in its query."""
    if isinstance(value, str):
        if (found := secret_in_url(value)) is not None:
            raise ValueError(
                f"{place}: {SHOWN}, the {found} of a URL; give the address without it, and the secret by the "
                "environment: api_key_env of a teacher, NAME_env: VARIABLE among args, or the variables that the store "
                "or hub reads"
            )
    elif isinstance(value, Mapping):
        for name, item in value.items():
            check_urls(item, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            check_urls(item, f"{place}[{number}]")


def secret_in_url(text: str) -> str | None:
    """Name of the secret that a text holds if it is a URL; None for others.

    >>> secret_in_url("https://ann:pw@host/v1"), secret_in_url("s3://rows/a.jsonl?X-Amz-Signature=1a2b")
    ('password', "parameter 'X-Amz-Signature'")
    >>> secret_in_url("abfss://rows@account.dfs.core.windows.net/a"), secret_in_url("http://host:8000/v1?page=2")
    (None, None)
    """
    address = ADDRESS.fullmatch(text)
    if address is None:
        return None
    try:
        url = urlsplit(address[1])
    except ValueError:  # brackets that are no address
        return None
    user, at, _ = url.netloc.rpartition("@")
    _, colon, password = user.partition(":")
    # A name alone is a user of git or a container of a store; of a web server it is a token.
    if at and (password if colon else user and url.scheme.lower() in ("http", "https")):
        return "password" if colon else "user"
    for name, value in parse_qsl(url.query):
        if value and (names_secret(name) or SIGNATURE.search(WORD_BORDER.sub("_", name).upper())):
            return f"parameter {name!r}"
    return None


def _named(value: Any, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Place, name and value of each entry of mappings, at any depth."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            at = f"{place}.{name}" if place else str(name)
            yield at, str(name), item
            yield from _named(item, at)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _named(item, f"{place}[{number}]")


def _siblings(args: Mapping[str, Any], place: str) -> set[str]:
    """Places' last names beside this one."""
    folder, _, _ = place.rpartition(".")
    return {name for at, name, _ in _named(args) if at.rpartition(".")[0] == folder}


def _holds_text(value: Any) -> bool:
    return bool(value) if isinstance(value, str) else isinstance(value, list | tuple) and any(map(_holds_text, value))


def secret_in_command(command: tuple[str, ...]) -> str | None:
    """Option, or URL, of a command that gives a secret, which other users of the machine and trackers would see; None
    without one."""
    for word, following in itertools.pairwise((*command, "-")):
        name, equals, value = word.partition("=")
        option = name.lstrip("-")
        given = value if equals else "" if following.startswith("-") or not name.startswith("-") else following
        if given and names_secret(option):
            return name
        if any(map(secret_in_url, word.split())):
            return "a URL"
    return None
