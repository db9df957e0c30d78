"""Checks of the types and shapes in signatures, each made at the first call of its function.

A process of the suite calls a small part of the package; to make all checks takes longer than to import it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping

check_now = jaxtyping.jaxtyped


def install(package: str) -> None:
    """Check every function and dataclass of the package that is imported from now on."""
    jaxtyping.jaxtyped = check_at_first_call  # which the import hook puts before each definition
    jaxtyping.install_import_hook(package, "beartype.beartype")


def check_at_first_call(*, typechecker: Any) -> Callable[[Any], Any]:
    """`jaxtyped`, whose work on a function waits until it is called."""

    def decorate(target: Any) -> Any:
        if inspect.isfunction(target):
            return waiting(target)
        if isinstance(target, classmethod | staticmethod):
            return type(target)(decorate(target.__func__))
        if isinstance(target, property):
            return property(*(part and decorate(part) for part in (target.fget, target.fset, target.fdel)))
        if inspect.isclass(target):
            if dataclasses.is_dataclass(target) and "__init__" in vars(target):
                target.__init__ = decorate(target.__init__)
            return target
        return check_now(target, typechecker=typechecker)

    def waiting(function: Callable[..., Any]) -> Callable[..., Any]:
        checked: Callable[..., Any] | None = None

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            nonlocal checked
            if checked is None:
                checked = check_now(function, typechecker=typechecker)
            return checked(*args, **kwargs)

        return call

    return decorate
