# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments of Python as words of the command line, by the command's own table of options."""

from __future__ import annotations

import difflib
import inspect
import operator
import os
import typing

try:
    from anyrank._options import OPTIONS, Option
except ModuleNotFoundError as missing:
    raise ImportError("the package has no table of options, which building the command makes: run ./quickstart in the "
                      "sources, or install the wheel") from missing


def option_words(command: str, options: typing.Mapping[str, object]) -> list[str]:
    """["--tp=2", "--sp"] for tp=2, sp=True. None, and False where True gives the option, leave it out.

    Errors: TypeError for an option that the command does not have, with the likely one, and for a value of another
    type. Values themselves are the command's to judge.
    """
    table = OPTIONS[command]
    words = []
    for name, value in options.items():
        if name not in table:
            near = (
                difflib.get_close_matches(name, table, 1)
                or [candidate for candidate in table if candidate.startswith(name)][:1]
            )
            hint = f"; did you mean {near[0]}?" if near else f"; help(anyrank.{command}) lists them"
            raise TypeError(f"anyrank.{command}() got an unexpected keyword argument {name!r}{hint}")
        if value is not None:
            words += _words(command, name, table[name], value)
    return words


def _words(command: str, name: str, option: Option, value: typing.Any) -> list[str]:
    dashed = "--" + name.replace("_", "-")
    try:
        if _is_bool(value):
            if option.type not in ("bool", "Optional"):
                raise TypeError
            return [dashed] if value else []
        if option.type == "Texts" and not isinstance(value, str):
            return [f"{dashed}={_text(text)}" for text in value]
        return [f"{dashed}={_OF[option.type](value) if option.type in _OF else _text(value)}"]
    except TypeError:
        right = "a path" if option.type == "Path" else option.type.replace("typing.", "")
        raise TypeError(f"anyrank.{command}(): {name}={value!r}: expected {_RIGHT.get(option.type, right)}, got "
                        f"{type(value).__name__}") from None


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool") and hasattr(value, "dtype")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(value: object) -> str:
    """Returns the shortest text of the same float; an integer as it is."""
    if isinstance(value, (str, bytes)):
        raise TypeError
    try:
        return str(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        return repr(float(value))  # type: ignore[arg-type]


def _list(value: typing.Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return ",".join(_number(number) for number in value)
    return _number(value)


def _switch(value: object) -> typing.NoReturn:
    raise TypeError


def _sized(value: object) -> str:
    return value if isinstance(value, str) else str(operator.index(value))  # type: ignore[arg-type]


_OF: dict[str, typing.Callable[[typing.Any], str]] = {
    "bool": _switch,
    "int": lambda value: str(operator.index(value)),
    "Optional": lambda value: str(operator.index(value)),
    "float": _number,
    "Bytes": _sized,
    "Part": lambda value: value if isinstance(value, str) else f"1/{operator.index(value)}",
    "Counts": _list,
    "Text": _list,
    "Path": lambda value: os.fsdecode(os.fspath(value)),
}
_RIGHT = {"bool": "True or False", "int": "an integer", "Optional": "True or an integer", "float": "a number",
          "Bytes": 'a number of bytes, or a text as "25MiB"', "Part": 'N of 1/N, or a text as "1/16"',
          "Counts": "integers", "Text": "a text, or numbers", "Texts": "a text, or several"}


_F = typing.TypeVar("_F", bound=typing.Callable[..., typing.Any])


def with_options(command: str, *left_out: str) -> typing.Callable[[_F], _F]:
    """Decorates a function whose **options are the command's, so that help() and completion show them."""

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        declared_parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = {p.name for p in declared_parameters} | set(left_out)
        option_parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option.type)
            for name, option in OPTIONS[command].items()
            if name not in names
        ]
        setattr(function, "__signature__", signature.replace(parameters=[*declared_parameters, *option_parameters]))
        lines = [f"    {p.name}: {OPTIONS[command][p.name].help}" for p in option_parameters]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options of the command:", *lines])
        return function

    return decorate
