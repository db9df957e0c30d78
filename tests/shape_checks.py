"""Checks of the types and shapes in signatures, each made at the first call of its function.

A process of the suite calls a small part of the package; to make all checks takes longer than to import it. A test that
runs each time checks the first calls of a function: all of them cost a seventh of the suite, and thorough tests check
them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import TypeCheckError

check_all = jaxtyping.jaxtyped
check = beartype(conf=BeartypeConf(violation_type=TypeCheckError))


test = 0
limit: int | None = None


def begin(first_calls: int | None) -> None:
    """Another test, which checks so many calls of each function; None: all."""
    global test, limit
    test, limit = test + 1, first_calls


def install(package: str) -> None:
    """Check every function and dataclass of the package that is imported from now on."""
    jaxtyping.jaxtyped = check_at_first_call  # which the import hook puts before each definition
    jaxtyping.install_import_hook(package, "beartype.beartype")


def check_at_first_call(target: Any = None, *, typechecker: Any = None) -> Any:
    """Stands for `jaxtyped`, whose work on a function waits here until it is called."""
    if target is None:
        return check_at_first_call
    if inspect.isfunction(target):
        return waiting(target)
    if isinstance(target, classmethod | staticmethod):
        return type(target)(waiting(target.__func__))
    if isinstance(target, property):
        return property(*(part and waiting(part) for part in (target.fget, target.fset, target.fdel)))
    if dataclasses.is_dataclass(target) and "__init__" in vars(target):
        target.__init__ = waiting(target.__init__)
    return target


def waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    checked: Callable[..., Any] | None = None
    shapes = True
    seen, calls = 0, 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checked, shapes, seen, calls
        if seen != test:
            seen, calls = test, 0
        calls += 1
        if limit is not None and calls > limit:
            return function(*args, **kwargs)
        if checked is None:
            shapes = has_shapes(function)
            # A generator's parameters are checked when it begins, out of the context below.
            later = shapes and inspect.isgeneratorfunction(inspect.unwrap(function))
            checked = check_all(function, typechecker=check) if later else checked_function(function)
        if not shapes:
            return checked(*args, **kwargs)
        with check_all("context"):  # in which a dimension has one size
            return checked(*args, **kwargs)

    return call


SHAPES: dict[types.CodeType, bool] = {}


def has_shapes(function: Any) -> bool:
    """Whether an annotation is of an array: the others have no dimensions, and a context costs more than they do."""
    code = inspect.unwrap(function).__code__
    if code not in SHAPES:
        SHAPES[code] = any(is_shaped(resolve(hint, function)) for hint in function.__annotations__.values())
    return SHAPES[code]


def is_shaped(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(is_shaped(part) for part in (hint if isinstance(hint, list | tuple) else typing.get_args(hint)))


MADE: dict[tuple[str, types.CodeType], Any] = {}
"""Checks of local functions, which are defined again at each call of the function around them."""


def checked_function(function: Any) -> Any:
    """The function with its checks, which are made once for all closures of one code."""
    if "<locals>" not in function.__qualname__ or hasattr(function, "__wrapped__"):
        return check(resolved(function))
    key = function.__module__, function.__code__
    made = MADE.get(key)
    # Beartype gives its wrapper the function, and all that it checks with, as defaults of keywords.
    if made is None or "__beartype_func" not in (made.__kwdefaults__ or {}):
        made = MADE[key] = check(resolved(function))
        return made
    same = types.FunctionType(made.__code__, made.__globals__, made.__name__, made.__defaults__, made.__closure__)
    same.__kwdefaults__ = made.__kwdefaults__ | {"__beartype_func": function}
    return same


def resolved(function: Any) -> Any:
    """The function with annotations that are types; `Any` where a name is only imported for type checkers."""
    same = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    functools.update_wrapper(same, function)
    del same.__wrapped__
    same.__kwdefaults__ = function.__kwdefaults__
    same.__annotations__ = {name: resolve(hint, function) for name, hint in function.__annotations__.items()}
    return same


def resolve(hint: Any, function: Any) -> Any:
    holder = types.SimpleNamespace(__annotations__={"value": hint})
    try:
        return typing.get_type_hints(holder, function.__globals__, include_extras=True)["value"]
    except Exception:
        return Any
