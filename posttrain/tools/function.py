"""Tools made of typed Python functions: schema from signature and docstring, deadline, size limit, errors as text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_type_hints

from posttrain.config import Locator, ToolSection
from posttrain.config.locator import callable_of
from posttrain.config.secrets import with_secrets
from posttrain.data.sources import with_paths
from posttrain.errors import ConfigError, RunError, did_you_mean
from posttrain.runtime.user_calls import CallTimeout, UserCalls
from posttrain.tools.types import argument_error, failed, has_pictures, result_text
from posttrain.user_code import import_transformers


class FunctionTool:
    """Tool of a typed Python function with a docstring in Google's format, as transformers' `get_json_schema` reads it.

    A function runs in a new thread, where it cannot be killed; a coroutine function runs in an event loop of the tool's
    own, and is cancelled at the deadline. Calls run concurrently.
    """

    def __init__(
        self, function: Callable[..., Any], *, timeout_s: float, max_chars: int, args: Mapping[str, Any] | None = None
    ):
        """`args`: keyword arguments of the function that are no part of the schema."""
        self._function, self._timeout_s, self._max_chars = function, timeout_s, max_chars
        self._args = dict(args or {})
        self._schema = function_schema(function, self._args)
        self._calls = UserCalls(f"tool {self.name}", timeout_s=timeout_s)

    @classmethod
    def of(cls, section: ToolSection) -> FunctionTool:
        """Make the tool of a section with a function. ConfigError for one that cannot be a tool."""
        function = callable_of(section.fn, "tools.fn")
        at = section.fn if isinstance(section.fn, Locator) else Locator("tools")
        args = with_paths(function, at, with_secrets(section.args))
        return cls(function, timeout_s=section.timeout_s, max_chars=section.max_chars, args=args)

    @property
    def name(self) -> str:
        return str(self._schema["function"]["name"])

    @property
    def schema(self) -> Mapping[str, Any]:
        return self._schema

    async def __call__(self, arguments: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """Call the function. Invalid arguments, exceptions, a result that is no JSON and a passed deadline give a
        `FailedCall`. RunError if too many calls have hung."""
        fault = argument_error(arguments, self._schema["function"]["parameters"])
        if fault is not None:
            return failed(fault, self._max_chars)
        try:
            result = await self._calls.call(self._function, **arguments, **self._args)
            if has_pictures(result):
                return [
                    {**part, "text": result_text(part["text"], self._max_chars)} if part["type"] == "text" else part
                    for part in result
                ]
            return result_text(result, self._max_chars)
        except CallTimeout:
            return failed(f"{self.name} took longer than {self._timeout_s:g} seconds", self._max_chars)
        except RunError:
            raise
        except Exception as error:
            return failed(f"{type(error).__name__}: {error}", self._max_chars)

    def close(self) -> None:
        """Cancel coroutines; threads end by themselves."""
        self._calls.close()


def function_schema(function: Callable[..., Any], hidden: Collection[str] = ()) -> Mapping[str, Any]:
    """Make the schema of a function without its `hidden` parameters. ConfigError without a docstring, for a parameter
    without a type that JSON has or without a line under `Args:`, and for a hidden one that the function does not have.
    """
    templates = import_transformers("utils.chat_template_utils")
    name = getattr(function, "__name__", type(function).__name__)
    parameters = inspect.signature(function).parameters
    for key, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"tools: {name} takes *{key}, which has no schema; name its parameters one by one")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"tools: {name} has positional-only parameters, but models name arguments; remove the /")
    for key in hidden:
        if key not in parameters:
            raise ConfigError(f"tools.args: {name} takes no argument {key!r}{did_you_mean(key, parameters)}")
    try:
        schema = templates.get_json_schema(_without(function, hidden))
    except (templates.DocstringParsingException, templates.TypeHintParsingException, NameError, TypeError) as error:
        reason = " ".join(" ".join(map(str, error.args)).split())
        raise ConfigError(
            f"tools: {name} has no schema: {reason}; give every parameter a type, and a line under `Args:` in the "
            "function's docstring"
        ) from error
    return {"type": "function", "function": schema["function"]}


def _without(function: Callable[..., Any], hidden: Collection[str]) -> Callable[..., Any]:
    """Description of a function without its hidden parameters, with its types resolved."""

    def described() -> None: ...

    signature = inspect.signature(function)
    visible = [parameter for key, parameter in signature.parameters.items() if key not in hidden]
    described.__name__ = getattr(function, "__name__", type(function).__name__)
    described.__doc__ = inspect.getdoc(function)
    hints = get_type_hints(function)
    described.__annotations__ = {key: hint for key, hint in hints.items() if key not in hidden}
    described.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
    return described
