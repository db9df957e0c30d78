"""Calls of a test into the program that it tests, each in a sandbox of its own: only plain data crosses, and the test
compares it on its own side, where the program has no object, no memory and no exit code."""

from __future__ import annotations

import builtins
import importlib
import io
import json
import os
import sys
import types
from contextlib import redirect_stdout

TYPE_CHECKING = False  # without the import of typing
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any, NoReturn

MAX_LINE = 1 << 26
"""Maximum number of bytes of a message."""
BIG = 1 << 62
"""Integers from here on cross as hexadecimal text."""
CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset,
}  # fmt: skip
TEXTS = {"Fraction": "fractions", "Decimal": "decimal", "date": "datetime", "time": "datetime", "datetime": "datetime"}
"""Further classes whose values cross, as text, and their modules."""


def bases() -> Iterator[tuple[type, Callable[[Any], Any]]]:
    """Classes of plain values with the form in which they and values of their subclasses cross."""
    yield bool, bool
    yield int, lambda x: int.__int__(x) if -BIG < int.__int__(x) < BIG else ["int", int.__format__(x, "x")]
    yield float, lambda x: ["float", float.hex(x)]
    yield complex, lambda x: ["complex", float.hex(x.real), float.hex(x.imag)]
    yield str, str.__str__
    yield bytes, lambda x: ["bytes", bytes.hex(x)]
    yield bytearray, lambda x: ["bytearray", bytearray.hex(x)]
    yield range, lambda x: ["range", x.start, x.stop, x.step]


LIBRARIES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas"}
"""Modules that a test finds under these names if the program has them, as those of the standard library, its own."""
OWN_NAMES = frozenset(vars(builtins))
"""Names that a program cannot change for its test."""


class Peer:
    """One side of the conversation. `serves`: it answers all requests of the other side, else only calls of functions
    that it has given away."""

    def __init__(self, read: int, write: int, serves: bool):
        self._read, self._write, self._serves = os.fdopen(read, "rb"), os.fdopen(write, "wb"), serves
        self._given: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._made: dict[int, Remote] = {}
        self._errors: dict[str, type[Exception]] = {}
        self._bases = tuple(bases())

    def encode(self, value: Any) -> Any:
        """Form of a value in JSON."""
        kind = type(value)
        if value is None or value is Ellipsis:
            return None if value is None else ["ellipsis"]
        for base, form in self._bases:
            if issubclass(kind, base):
                return form(value)
        for name in CONTAINERS:
            base = getattr(builtins, name)
            if issubclass(kind, base):
                return [name, *(self.encode(one) for one in base.__iter__(value))]
        if issubclass(kind, dict):
            return ["dict", *([self.encode(key), self.encode(one)] for key, one in dict.items(value))]
        if kind.__name__ in TEXTS and kind.__module__ == TEXTS[kind.__name__]:
            return ["text", kind.__name__, str(value) if kind.__module__ != "datetime" else value.isoformat()]
        if kind.__name__ == "deque" and kind.__module__ == "collections":
            return ["deque", *(self.encode(one) for one in value)]
        if kind.__module__ == "numpy" and kind.__name__ != "ndarray" and hasattr(value, "item"):
            return self.encode(value.item())
        if kind is Remote:
            return ["own", object.__getattribute__(value, "_id")]
        if not self._serves and not callable(value):
            raise TypeError(f"a {kind.__name__} cannot be given to the program; give it plain values")
        number = self._numbers.setdefault(id(value), len(self._given))
        self._given += [value] if number == len(self._given) else []
        return ["remote", number]

    def decode(self, form: Any, trusted: bool = False) -> Any:
        """Value of a form; `trusted`: methods of an object may be called."""
        if not isinstance(form, list):
            return form
        name, *rest = form
        if name in CONTAINERS:
            return CONTAINERS[name](map(self.decode, rest))
        match name:
            case "int":
                return int(rest[0], 16)
            case "float":
                return float.fromhex(rest[0])
            case "complex":
                return complex(*map(float.fromhex, rest))
            case "bytes" | "bytearray":
                return getattr(builtins, name).fromhex(rest[0])
            case "range":
                return range(*map(int, rest))
            case "ellipsis":
                return ...
            case "dict":
                return {self.decode(key): self.decode(value) for key, value in rest}
            case "text":
                kind = getattr(importlib.import_module(TEXTS[rest[0]]), rest[0])
                return kind.fromisoformat(rest[1]) if TEXTS[rest[0]] == "datetime" else kind(rest[1])
            case "deque":
                return importlib.import_module("collections").deque(map(self.decode, rest))
            case "own":
                return self._given[rest[0]]
        return self._made[rest[0]] if rest[0] in self._made else Remote(self, int(rest[0]), trusted)

    def ask(self, what: str, *values: Any, trusted: bool = False, **named: Any) -> Any:
        """Ask the other side, and answer what it asks meanwhile. Exceptions of the program are raised here."""
        self._send(["ask", what, [self.encode(one) for one in values], self.encode(named)])
        while True:
            message = self._receive()
            if message[0] == "ask":
                self._answer(*message[1:])
                continue
            try:
                kind, form, changed, text = message
                value = self.decode(form, trusted)
                after = [self.decode(one) for one in changed]
            except Exception as error:
                leave(f"the program answers with what is no value: {error!r}"[:500])
            sys.stdout.write(str(text))
            if kind == "error":
                raise self._error(value)
            if what == "call":
                for before, one in zip(values[1], after, strict=False):
                    _change(before, one)
            return value

    def serve(self, names: Mapping[str, Any]) -> None:
        """Answer until the other side ends. `names`: of the program."""
        self._names = names
        while True:
            self._answer(*self._receive()[1:])

    def _answer(self, what: str, forms: Sequence[Any], named: Any) -> None:
        out, changed = io.StringIO(), []
        try:
            values, keywords = [self.decode(form) for form in forms], self.decode(named)
            if not self._serves and what != "call":
                raise TypeError(f"{what} is not answered by a test")
            with redirect_stdout(out):
                result = getattr(self, f"_{what}")(*values, **keywords)
            changed = [self.encode(one) for one in values[1]] if what == "call" else []
            reply = ["value", self.encode(result), changed, out.getvalue()]
        except BaseException as error:
            mro = [kind.__name__ for kind in type(error).__mro__]
            reply = ["error", ["list", *mro, _text_of(error)], [], out.getvalue()]
        self._send(reply)

    # What the side of the program does.
    def _modules(self, name: str) -> list[Any]:
        names = vars(importlib.import_module(name)) if name else self._names
        return [(key, *self._entry(value)) for key, value in list(names.items()) if not key.startswith("__")]

    def _entry(self, value: Any) -> tuple[str, Any]:
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        if isinstance(value, type) and issubclass(value, Exception):
            return "error", [kind.__name__ for kind in value.__mro__]
        return "value", value

    def _call(self, function: Any, args: list[Any], keywords: dict[str, Any]) -> Any:
        return function(*args, **keywords)

    def _get(self, value: Any, name: str) -> Any:
        return getattr(value, name)

    def _set(self, value: Any, name: str, new: Any) -> None:
        setattr(value, name, new)

    def _operator(self, name: str, *values: Any) -> Any:
        if name == "next":
            return [next(values[0])]
        functions: Mapping[str, Any] = {**vars(importlib.import_module("operator")), **vars(builtins)}
        return functions[name](*values)

    def namespace(self, module: str, test: str) -> dict[str, Any]:
        """Names of the program or of one of its modules, as a test of this text sees them."""
        found: dict[str, Any] = {}
        for name, kind, value in self.ask("modules", module, trusted=True):
            known = value if kind == "module" else LIBRARIES.get(name, name)
            if name in OWN_NAMES:
                continue
            library = known in LIBRARIES.values() or str(known).partition(".")[0] in sys.stdlib_module_names
            if library and (kind == "module" or f"{name}." in test):
                found[name] = importlib.import_module(known)
            elif kind == "error":
                base = self._error([*value[1:], ""]).__class__
                found[name] = self._errors[name] = type(name, (base,), {})
            elif kind == "value":
                if type(value) is Remote:
                    object.__setattr__(value, "_trusted", True)
                    object.__setattr__(value, "_makes", name[:1].isupper())
                found[name] = value
        return found

    def _error(self, described: Any) -> Exception:
        """Exception of the nearest class that both sides have."""
        *names, text = described
        for name in names:
            kind = self._errors.get(name) or getattr(builtins, str(name), None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                return kind(text) if not issubclass(kind, UnicodeError) else ValueError(text)
        return RuntimeError(f"{names[:1]}: {text}")

    def _send(self, message: Any) -> None:
        try:
            self._write.write(json.dumps(message).encode() + b"\n")
            self._write.flush()
        except BrokenPipeError:
            leave("the other side has ended")

    def _receive(self) -> Any:
        try:
            line = self._read.readline(MAX_LINE)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError, MemoryError):
            message = None
        if not isinstance(message, list) or len(message) != 4:
            leave("the program has ended, or answers with no message")
        return message


class Remote:
    """Object of the other side. Only the test compares: an object of the program equals nothing but itself, and methods
    are called only of what the test has named or made by a class, whose name begins with a capital."""

    def __init__(self, peer: Peer, number: int, trusted: bool):
        for name, value in {"_peer": peer, "_id": number, "_trusted": trusted, "_makes": False}.items():
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        peer, trusted, makes = (object.__getattribute__(self, name) for name in ("_peer", "_trusted", "_makes"))
        if peer._serves:
            return peer.ask("call", self, list(args), keywords)
        if not trusted:
            raise TypeError("methods of a value that the program has returned are not called")
        result = peer.ask("call", self, list(args), keywords, trusted=makes)
        if makes and type(result) is Remote:
            peer._made[object.__getattribute__(result, "_id")] = result
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        trusted = object.__getattribute__(self, "_trusted")
        return object.__getattribute__(self, "_peer").ask("get", self, name, trusted=trusted)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_peer").ask("set", self, name, value)

    def __instancecheck__(self, other: Any) -> bool:
        return type(other) is Remote and self._operate("isinstance", other, self) is True

    def __eq__(self, other: Any) -> bool:
        return self is other or (self._made(other) and self._operate("eq", self, other) is True)

    def __hash__(self) -> int:
        return int(object.__getattribute__(self, "_id"))

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        inner = self._operate("iter", self)
        while True:
            try:
                (value,) = self._operate("next", inner) if type(inner) is Remote else (next(inner),)
            except StopIteration:
                return
            yield value

    def __next__(self) -> Any:
        return self._operate("next", self)[0]

    def __len__(self) -> int:
        return int(self._operate("len", self))

    def __getitem__(self, key: Any) -> Any:
        return self._operate("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._operate("setitem", self, key, value)

    def __repr__(self) -> str:
        return str(self._operate("repr", self))

    def __str__(self) -> str:
        return str(self._operate("str", self))

    def __add__(self, other: Any) -> Any:
        return self._operate("add", self, other, trusted=True) if self._made(other) else NotImplemented

    def __sub__(self, other: Any) -> Any:
        return self._operate("sub", self, other, trusted=True) if self._made(other) else NotImplemented

    def __mul__(self, other: Any) -> Any:
        return self._operate("mul", self, other, trusted=True) if self._made(other) else NotImplemented

    def __lt__(self, other: Any) -> Any:
        return self._operate("lt", self, other) if self._made(other) else NotImplemented

    def _made(self, other: Any) -> bool:
        """Tell whether the test has made both objects."""
        return type(other) is Remote and all(object.__getattribute__(one, "_trusted") for one in (self, other))

    def _operate(self, name: str, *values: Any, trusted: bool = False) -> Any:
        return object.__getattribute__(self, "_peer").ask("operator", name, *values, trusted=trusted)


class Modules:
    """Finder of the program's modules for imports of the test."""

    def __init__(self, peer: Peer, names: Sequence[str]):
        self._peer, self._names = peer, names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec: Any = type(importlib.__spec__)
        return spec(name, self) if name in self._names else None

    def create_module(self, spec: Any) -> None:
        """Leave the module to the import system."""

    def exec_module(self, module: Any) -> None:
        vars(module).update(self._peer.namespace(module.__name__, ""))


def leave(why: str) -> NoReturn:
    """End this side at once, as a failure that no code of it can catch."""
    try:
        print(why, file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception:
        return ""


def _change(before: Any, after: Any) -> None:
    """Give an argument the content that the program has left in it."""
    if type(before) is not type(after) or before == after:
        return
    if isinstance(before, list | bytearray):
        before[:] = after
    elif isinstance(before, dict | set):
        before.clear()
        before.update(after)
