# SPDX-License-Identifier: Apache-2.0
"""libanyrank_abi by ctypes: the functions of include/anyrank/abi.h, whose errors become AnyrankError."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pathlib
import typing

from anyrank._errors import AnyrankError

PACKAGE = pathlib.Path(__file__).resolve().parent
NUMBER = 1  # AR_ABI_NUMBER that this file was written for
NO_ORDER = ctypes.c_size_t(-1).value

_TEXT, _HANDLE, _SIZE, _GIVEN = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
_SIZES = ctypes.POINTER(ctypes.c_size_t)
_FUNCTIONS: dict[str, tuple[typing.Any, list[typing.Any]]] = {  # result, arguments
    "number": (ctypes.c_int, []),
    "version": (_TEXT, []),
    "error": (_TEXT, []),
    "free": (None, [_GIVEN]),
    "dump_open": (ctypes.c_int, [ctypes.POINTER(_HANDLE), _TEXT, _TEXT]),
    "dump_close": (None, [_HANDLE]),
    "dump_json": (_GIVEN, [_HANDLE]),
    "dump_metadata": (_TEXT, [_HANDLE, _TEXT]),
    "dump_count": (_SIZE, [_HANDLE]),
    "dump_at": (_HANDLE, [_HANDLE, _SIZE]),
    "tensor_name": (_TEXT, [_HANDLE]),
    "tensor_order": (_SIZE, [_HANDLE]),
    "tensor_bytes": (_SIZE, [_HANDLE]),
    "tensor_json": (_GIVEN, [_HANDLE]),
    "dump_align": (ctypes.c_int, [_HANDLE, _HANDLE]),
    "tensor_read": (ctypes.c_int, [_HANDLE, _HANDLE, _SIZE]),
    "tensor_read_part": (ctypes.c_int, [_HANDLE, _SIZE, _HANDLE, _SIZE]),
    "sketch_create": (ctypes.c_int, [ctypes.POINTER(_HANDLE), _TEXT, _SIZE, _SIZES]),
    "sketch_destroy": (None, [_HANDLE]),
    "sketch_add": (ctypes.c_int, [_HANDLE, _GIVEN, _SIZE, _SIZES, _SIZES, _SIZES]),
    "sketch_merge": (ctypes.c_int, [_HANDLE, _HANDLE]),
    "sketch_bytes": (_SIZE, [_HANDLE]),
    "sketch_encode": (None, [_HANDLE, _GIVEN]),
    "sketch_decode": (ctypes.c_int, [_HANDLE, _GIVEN, _SIZE]),
    "sketch_hash": (ctypes.c_uint64, [_GIVEN, _SIZE]),
    "sketches_json": (_GIVEN, [_TEXT]),
    "tensor_replicas": (ctypes.c_int, [_HANDLE, ctypes.POINTER(_GIVEN)]),
}


def find_library() -> str:
    """$ANYRANK_LIBRARY; else the wheel's own; else, in a tree of the sources, what that built."""
    named = os.environ.get("ANYRANK_LIBRARY")
    if named:
        return named
    places = [PACKAGE / "lib", PACKAGE.parents[1] / "build"]
    for path in (place / f"libanyrank_abi.{suffix}" for place in places for suffix in ("so", "dylib")):
        if path.exists():
            return str(path)
    raise AnyrankError("there is no libanyrank_abi: install the wheel, run ./quickstart in the sources, or set "
                       "ANYRANK_LIBRARY to its path")


@functools.lru_cache(maxsize=None)
def library() -> dict[str, typing.Any]:
    """Returns the library's functions by name, without the prefix ar_abi_."""
    path = find_library()
    try:
        loaded = ctypes.CDLL(path)
        functions = {name: getattr(loaded, f"ar_abi_{name}") for name in _FUNCTIONS}
    except (OSError, AttributeError) as error:
        raise AnyrankError(f"{path} cannot be used: {error}") from None
    for name, (result, arguments) in _FUNCTIONS.items():
        functions[name].restype, functions[name].argtypes = result, arguments
    if functions["number"]() != NUMBER:
        raise AnyrankError(f"{path} has interface {functions['number']()}, this package needs {NUMBER}")
    return functions


def checked(status: int) -> None:
    """Raises the library's message for a status that is an error."""
    if status != 0:
        raise AnyrankError(os.fsdecode(library()["error"]()))


def given_json(text: int | None) -> typing.Any:
    """Parses a JSON text that the library returned, and frees it."""
    if not text:
        raise AnyrankError(os.fsdecode(library()["error"]()))
    try:
        return json.loads(ctypes.string_at(text).decode())
    finally:
        library()["free"](text)
