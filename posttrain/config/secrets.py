"""Secrets in the configuration: which names hold them, and arguments whose values come from the environment."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator

from posttrain.config.base import Arguments
from posttrain.errors import ConfigError

SECRET = re.compile(r"(?:^|_)(?:API_?KEYS?|KEY|TOKEN|SECRETS?|PASSWORDS?|PASSWD|CREDENTIALS?|AUTHORIZATION)$")
"""Ends of names that hold secrets, in capitals."""
WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]")
FROM_ENV = "_env"
"""End of the name of an argument whose value is the name of an environment variable."""


def names_secret(name: str) -> bool:
    """Tell whether a variable or an argument of this name holds a secret.

    >>> [names_secret(name) for name in ("OPENAI_API_KEY", "judgeToken", "X-Api-Key", "max_tokens", "monkey")]
    [True, True, True, False, False]
    """
    return SECRET.search(WORD_BORDER.sub("_", name).upper()) is not None


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


def _without_secrets(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments; ValueError for a secret among them, and for one from the environment that names no variable."""
    for place, name, value in _named(args):
        if from_environment(name) is not None:
            if value is not None and (not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_]\w*", value, re.ASCII)):
                raise ValueError(f"{place} must be the name of an environment variable, or null")
            if from_environment(name) in _siblings(args, place):
                raise ValueError(f"{place} gives the argument that {place.removesuffix(FROM_ENV)} gives; remove one")
        elif names_secret(name) and _holds_text(value):
            raise ValueError(
                f"{place}: config.yaml and trackers would show this secret; set it in the run's environment, and give "
                f"{name}{FROM_ENV}: VARIABLE, from which the argument {name} gets its value; if it is no secret, give "
                "the argument another name"
            )
    return args


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
    """Option of a command that gives a secret, which other users of the machine and trackers would see; None without
    one."""
    for word, following in itertools.pairwise((*command, "-")):
        name, equals, value = word.partition("=")
        option = name.lstrip("-")
        given = value if equals else "" if following.startswith("-") or not name.startswith("-") else following
        if given and names_secret(option):
            return name
    return None


FunctionArguments: TypeAlias = Annotated[Arguments, AfterValidator(_without_secrets)]
"""Keywords for functions of users. A secret is `NAME_env: VARIABLE`, and stands in no file of the run."""
