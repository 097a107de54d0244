# SPDX-License-Identifier: Apache-2.0
"""Files that others wrote: opened only where reading them ends, and JSON that is checked once, before it is used.

A check is a function that gives the value as it is to be used, or raises Mismatch. Checks of lists and objects are made
of those of their values:

    LAYOUT = record({"name": string}, {"bytes": number(low=0.0)})      a key that has to be there, and one that may be
    layouts = parsed(read_json(path), list_of(LAYOUT), path)
    AnyrankError: plan.json: [3].bytes: got "many", expected a number from 0 on
"""

from __future__ import annotations

import json
import math
import os
import stat
import typing

from anyrank._errors import AnyrankError, path_name
from anyrank._names import MOST_NAMES, unfolded_count
from anyrank._terminal import printable

_T = typing.TypeVar("_T")
Check = typing.Callable[[typing.Any], _T]
Json = typing.Dict[str, typing.Any]

MOST_DEPTH = 64  # of objects and lists in each other: what a run records of itself has less than 10
MOST_SHOWN = 60  # characters of a value in a message
LARGEST = 1e100  # of a number that is computed with: sums and products of such numbers stay finite
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # as JSON of the command has them
_KINDS = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"),
          (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))


# --- files ------------------------------------------------------------------------------------------------------------


def open_file(path: str | os.PathLike[str]) -> typing.BinaryIO:
    """Opens a regular file. Errors: AnyrankError for one that cannot be opened, and for pipes, sockets, devices and
    directories, which may have no end or never begin."""
    name = path_name(path)
    try:
        # Without a writer, opening a pipe would wait for one.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise AnyrankError(f"{name}: {_unopened(name) or error.strerror}") from None
    kind = kind_of(os.fstat(descriptor).st_mode)
    if kind:
        os.close(descriptor)
        raise AnyrankError(f"{name}: {kind}, expected a file")
    return open(descriptor, "rb")


def kind_of(mode: int) -> str:
    """Returns what exists instead of a regular file; "" if it is a regular file."""
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), "")


def _unopened(name: str) -> str:
    """Why a file that cannot be opened is of no use, if the system's reason does not say so, as of a socket."""
    try:
        kind = kind_of(os.stat(name).st_mode)
    except OSError:
        return ""
    return f"{kind}, expected a file" if kind else ""


def read_file(path: str | os.PathLike[str]) -> bytes:
    with open_file(path) as file:
        try:
            return file.read()
        except OSError as error:
            raise AnyrankError(f"{path_name(path)}: {error.strerror}") from None


def read_json(path: str | os.PathLike[str], constants: bool = False) -> typing.Any:
    """Reads JSON from a file. Errors: AnyrankError, which names the file."""
    return parse_json(read_file(path), path_name(path), constants)


def parse_json(data: bytes | str, place: str, constants: bool = False) -> typing.Any:
    """JSON as RFC 8259 has it, at most MOST_DEPTH deep. place: of the text, for messages. constants: it may have NaN
    and Infinity as Python writes them."""
    try:
        content = data if isinstance(data, str) else data.decode("utf-8")
        strict: Json = {} if constants else {"parse_constant": _no_constant, "parse_float": _finite}
        value = json.loads(content, **strict)
    except UnicodeDecodeError as error:
        raise AnyrankError(f"{place}: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise AnyrankError(f"{place}: not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise AnyrankError(_too_deep(place)) from None
    except ValueError as error:  # a constant, or an integer of thousands of digits
        raise AnyrankError(f"{place}: not JSON that can be read: {error}") from None
    if _depth(value) > MOST_DEPTH:
        raise AnyrankError(_too_deep(place))
    return value


def _depth(value: typing.Any) -> int:
    depth, level = 0, [value] if isinstance(value, (dict, list)) else []
    while level:
        depth += 1
        level = [item for node in level for item in (node.values() if isinstance(node, dict) else node)
                 if isinstance(item, (dict, list))]
    return depth


def _too_deep(place: str) -> str:
    return f"{place}: objects and lists in each other more than {MOST_DEPTH} deep"


def _no_constant(word: str) -> typing.NoReturn:
    raise ValueError(f"JSON has no {word}")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:20]} is beyond the largest number of 64 bits")
    return value


# --- checks -----------------------------------------------------------------------------------------------------------


class Mismatch(Exception):
    """A value is not what is expected; keys: where it is, from the inside out."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.keys: list[str | int] = []

    def place(self) -> str:
        words = (f"[{key}]" if isinstance(key, int) else f".{printable(key, MOST_SHOWN)}"
                 for key in reversed(self.keys))
        return "".join(words).lstrip(".")


def parsed(value: typing.Any, check: Check[_T], source: str | os.PathLike[str]) -> _T:
    """Checks a value and returns it converted. source: whose value it is, for the message. Errors: AnyrankError."""
    try:
        return check(value)
    except Mismatch as error:
        place = error.place()
        raise AnyrankError(f"{os.fspath(source)}: {f'{place}: ' if place else ''}{error}") from None


def mismatch(value: typing.Any, expected: str) -> Mismatch:
    return Mismatch(f"got {_shown(value)}, expected {expected}")


def _shown(value: typing.Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return printable(json.dumps(value, ensure_ascii=False), MOST_SHOWN)


def anything(value: typing.Any) -> typing.Any:
    return value


def string(value: typing.Any) -> str:
    if isinstance(value, str):
        return value
    raise mismatch(value, "a string")


def flag(value: typing.Any) -> bool:
    if isinstance(value, bool):
        return value
    raise mismatch(value, "true or false")


def _span(low: float | None, high: float | None) -> str:
    words = [f"from {low}" if low is not None else "", f"to {high}" if high is not None else ""]
    return " ".join(filter(None, words)) + (" on" if high is None and low is not None else "")


def integer(low: int | None = None, high: int | None = None) -> Check[int]:
    def check(value: typing.Any) -> int:
        if type(value) is int and (low is None or value >= low) and (high is None or value <= high):
            return value
        raise mismatch(value, f"an integer {_span(low, high)}".rstrip())
    return check


def number(low: float = -LARGEST, high: float = LARGEST, words: bool = False) -> Check[float]:
    """Returns a check for finite numbers. words: also accepts "NaN", "Infinity" and "-Infinity"."""
    def check(value: typing.Any) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
            return value
        if words and isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        bounds = _span(low if low > -LARGEST else None, high if high < LARGEST else None)
        raise mismatch(value, f"a number {bounds}".rstrip() + (', "NaN" or "Infinity"' if words else ""))
    return check


def nullable(check: Check[_T]) -> Check[_T | None]:
    return lambda value: None if value is None else check(value)


def list_of(check: Check[_T], length: int | None = None) -> Check[list[_T]]:
    def check_list(value: typing.Any) -> list[_T]:
        if not isinstance(value, list):
            raise mismatch(value, "a list")
        if length is not None and len(value) != length:
            raise mismatch(value, f"a list of {length}")
        found: list[_T] = []
        try:
            for item in value:
                found.append(check(item))
        except Mismatch as error:
            error.keys.append(len(found))
            raise
        return found
    return check_list


def map_of(check: Check[_T], key: Check[typing.Any] = string) -> Check[dict[str, _T]]:
    """Returns a check for objects whose keys the writer chooses; key: the check of each value."""
    def check_map(value: typing.Any) -> dict[str, _T]:
        if not isinstance(value, dict):
            raise mismatch(value, "an object")
        found: dict[str, _T] = {}
        for name, item in value.items():
            try:
                key(name)
                found[name] = check(item)
            except Mismatch as error:
                error.keys.append(name)
                raise
        return found
    return check_map


def record(required: typing.Mapping[str, Check[typing.Any]],
           optional: typing.Mapping[str, Check[typing.Any]] | None = None) -> Check[Json]:
    """Returns a check for objects with these keys. An optional key with null is dropped. Other keys are kept as they
    are."""
    checks = {**required, **{key: nullable(check) for key, check in (optional or {}).items()}}

    def check_record(value: typing.Any) -> Json:
        if not isinstance(value, dict):
            raise mismatch(value, "an object")
        missing = next((key for key in required if key not in value), None)
        if missing is not None:
            raise Mismatch(f'has no "{missing}"')
        found = dict(value)
        for key, check in checks.items():
            try:
                if key in value:
                    found[key] = check(value[key])
            except Mismatch as error:
                error.keys.append(key)
                raise
        return {key: item for key, item in found.items() if item is not None or key not in (optional or {})}
    return check_record


def folded_names(value: typing.Any) -> list[str]:
    """Checks a list of names, which may be folded, and which unfold to a limited number."""
    names = list_of(string)(value)
    count = sum(map(unfolded_count, names))
    if count > MOST_NAMES:
        raise Mismatch(f"has {count} names, expected at most {MOST_NAMES}")
    return names


def step_key(value: typing.Any) -> str:
    """Checks a step number used as a key."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 15:
        return value
    raise mismatch(value, "the number of a step as the key")
