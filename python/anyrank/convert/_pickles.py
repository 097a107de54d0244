# SPDX-License-Identifier: Apache-2.0
"""Reads what torch.save and torch.distributed.checkpoint pickled, running none of it.

A pickle may name any function and call it. Here each name is looked up in a list: tensors and containers are made by
functions of this file, classes of the libraries that write checkpoints become placeholders (a Placeholder keeps what it
was given and does nothing), and any other name ends the reading. torch is not needed, so it cannot be what is attacked.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import typing
import zipfile

from anyrank._errors import AnyrankError
from anyrank._safetensors import SIZES
from anyrank.convert._tensors import View

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
          "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
          "bool": "BOOL",
          "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
STORAGES = {"DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
            "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
            "BoolStorage": "BOOL", "Float8_e4m3fnStorage": "F8_E4M3", "Float8_e5m2Storage": "F8_E5M2",
            "UntypedStorage": "U8"}
# Libraries whose classes lie in checkpoints beside the tensors: settings, loss scalers, layouts, random states.
PLACEHOLDERS = ("torch.", "numpy.", "deepspeed.", "megatron.", "transformer_engine.", "apex.", "transformers.",
                "accelerate.", "omegaconf.", "sglang.", "pathlib.", "argparse.", "datetime.")
NAMED_PLACEHOLDERS = {"_codecs.encode", "types.SimpleNamespace", "numpy.ndarray", "numpy.dtype"}
# After these opcodes the top of the stack may be a new value that can be a key.
MAKERS = (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.FROZENSET, pickle.REDUCE, pickle.NEWOBJ,
          pickle.NEWOBJ_EX, pickle.INST, pickle.OBJ)


class _Ordered(typing.Dict[typing.Any, typing.Any]):
    """An OrderedDict, whose attributes (versions of modules) are dropped."""

    def __setstate__(self, state: typing.Any) -> None:
        pass


CONTAINERS: dict[str, typing.Callable[..., typing.Any]] = {
    "collections.OrderedDict": _Ordered, "builtins.set": set, "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "builtins.slice": slice, "__builtin__.set": set}


class Placeholder:
    """What stands in for an object of a class that is not loaded: its arguments, and its attributes if it has any."""

    _class = ""

    def __init__(self, *args: typing.Any, **_: typing.Any) -> None:
        self._args = args

    def __new__(cls, *args: typing.Any, **_: typing.Any) -> Placeholder:
        placeholder = super().__new__(cls)
        placeholder._args = args
        return placeholder

    def __setstate__(self, state: typing.Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update({key: value for key, value in part.items() if isinstance(key, str)})
        self.__dict__["_state"] = state

    def append(self, _value: typing.Any) -> None:
        """A pickled subclass of list."""

    def extend(self, _values: typing.Any) -> None:
        """The same."""

    def __setitem__(self, key: typing.Any, value: typing.Any) -> None:
        """A pickled subclass of dict."""
        self.__dict__.setdefault("_items", []).append((key, value))


def class_of(value: typing.Any) -> str:
    """The full name of the class whose placeholder this is; '' for anything else."""
    return value._class if isinstance(value, Placeholder) else ""


def attribute(value: typing.Any, name: str, default: typing.Any = None) -> typing.Any:
    """An attribute of a pickled object, or an entry of a dictionary."""
    if isinstance(value, dict):
        return value.get(name, default)
    return value.__dict__.get(name, default) if isinstance(value, Placeholder) else default


class _DType(str):
    """A torch.dtype, by its safetensors name."""

    __slots__ = ()


class _Storage(typing.NamedTuple):
    dtype: str
    data: memoryview


KEYS = (tuple, frozenset, slice)  # what can be a key and holds others
HOLDERS = (*KEYS, dict, list, set)
MOST_DEEP = 100  # Python hashes a tuple in a tuple by recursion, without an end


def _parts(value: typing.Any) -> list[typing.Any]:
    """What one of HOLDERS has in it."""
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return [*value, *value.values()] if isinstance(value, dict) else [*value]


def _weighed(load: typing.Any) -> typing.Any:
    """An opcode's method that weighs what it leaves on top of the stack."""
    def weighed(reader: typing.Any) -> None:
        load(reader)
        reader.weigh(reader.stack[-1])

    return weighed


class _Reader(pickle._Unpickler):
    """Python's own unpickler, and not the one in C: that one makes room for as many objects as one number of a damaged
    file says, which may be more than the machine has.

    A container may be in others many times over, so that a few bytes tell of one that is without end when it is hashed,
    compared, printed or walked through. Its weight, which counts what is in it as often as it is there, is bounded by
    the file's size: a key's when it is made, all others' when all is read."""

    dispatch: typing.ClassVar[dict[int, typing.Any]] = {
        **pickle._Unpickler.dispatch, **{code[0]: _weighed(pickle._Unpickler.dispatch[code[0]]) for code in MAKERS}}

    def __init__(self, data: bytes, source: str, placeholders: typing.Collection[str],
                 storage: typing.Callable[[str, str, int], memoryview] | None) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.source, self.allowed, self.storage = source, placeholders, storage
        self.classes: dict[str, type] = {}
        self.max_weight = 1_000_000 + 10 * len(data)
        self.weights: dict[int, tuple[int, int]] = {}  # and depths, by id, of keys that hold such
        self.weighed_keys: list[typing.Any] = []  # these keys, so that nothing else gets their ids

    def load(self) -> typing.Any:
        loaded = super().load()
        self.weigh_all(loaded)
        return loaded

    def weigh(self, value: typing.Any) -> None:
        """What can be a key and holds others, when it is made."""
        inside = [part for part in _parts(value) if isinstance(part, KEYS)] if isinstance(value, KEYS) else []
        if inside and id(value) not in self.weights:
            pairs = [self.weights.get(id(part), (1 + len(_parts(part)), 1)) for part in inside]
            weight, depth = 1 + len(_parts(value)) + sum(pair[0] for pair in pairs), 1 + max(pair[1] for pair in pairs)
            self.limit(weight)
            if depth > MOST_DEEP:
                self.fail(f"tuples in tuples, {depth} deep")
            self.weights[id(value)] = weight, depth
            self.weighed_keys.append(value)

    def weigh_all(self, loaded: typing.Any) -> None:
        """Every container, when all have what they will have. A Placeholder is opaque to what holds it."""
        weights: dict[int, int] = {}  # by id; below 0 until those of what is in it are known
        roots: list[list[typing.Any]] = [[loaded]]
        visited: set[int] = set()
        for root in roots:
            todo: list[typing.Any] = [root]
            while todo:
                value = todo.pop()
                parts = _parts(value)
                inside = [part for part in parts if isinstance(part, HOLDERS)]
                if id(value) not in weights:
                    weights[id(value)] = -1 if inside else 1 + len(parts)
                    if any(weights.get(id(part), 0) < 0 for part in inside):
                        self.fail(f"a {type(value).__name__} that holds itself")
                    todo += (value, *inside) if inside else ()
                    opaque = [part for part in parts if isinstance(part, Placeholder) and id(part) not in visited]
                    visited.update(map(id, opaque))
                    roots += [[*vars(part).values()] for part in opaque]
                elif weights[id(value)] < 0:
                    weights[id(value)] = 1 + len(parts) + sum(weights[id(part)] for part in inside)
                    self.limit(weights[id(value)])

    def limit(self, weight: int) -> None:
        if weight > self.max_weight:
            self.fail(f"containers in containers that stand for {weight} values, in a file that may hold "
                      f"{self.max_weight}: damaged, or made to keep its reader busy")

    def find_class(self, module: str, name: str) -> typing.Any:
        full = f"{module}.{name}"
        if full in CONTAINERS:
            return CONTAINERS[full]
        if module == "torch" and name in DTYPES:
            return _DType(DTYPES[name])
        if module in ("torch", "torch.storage") and name in STORAGES:
            return _DType(STORAGES[name])
        if full in ("torch.Size", "torch.serialization._get_layout"):
            return lambda *args: tuple(args[0]) if args and name == "Size" else args
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor", "_rebuild_tensor_v3"):
            return lambda *args: self.tensor(name, *args)
        if module == "torch._utils" and name.startswith("_rebuild_parameter"):
            return lambda data, *_: data
        if full == "torch._tensor._rebuild_from_type_v2":
            return lambda rebuild, _type, args, _state: rebuild(*args)
        if module == "torch._utils" and name.startswith("_rebuild"):
            return lambda *_: self.fail(f"a tensor made by {full}, which is not supported: save it dense and plain")
        if full not in self.allowed and full not in NAMED_PLACEHOLDERS and not module.startswith(PLACEHOLDERS) and (
                f"{module}." not in PLACEHOLDERS):
            self.fail(f"names {full}, which is no part of a checkpoint that this reader knows; refused, and nothing "
                      f"of it was run. If it is a class that holds no weights, --placeholder {full} reads it as "
                      f"inert data")
        if full not in self.classes:
            self.classes[full] = type(name.rsplit(".", 1)[-1], (Placeholder,), {"_class": full})
        return self.classes[full]

    def persistent_load(self, key: typing.Any) -> _Storage:
        if self.storage is None or not isinstance(key, tuple) or len(key) < 5 or key[0] != "storage" or (
                not isinstance(key[1], _DType) or type(key[2]) is not str or type(key[4]) is not int):
            self.fail(f"a storage of another kind than torch's, told by a {type(key).__name__}")
        _, dtype, name, _device, count = key[:5]
        return _Storage(dtype, self.storage(name, dtype, count))

    def tensor(self, function_name: str, storage: typing.Any, offset: int, shape: typing.Any, strides: typing.Any,
               *extra: typing.Any) -> View:
        """torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks), and v3 with a dtype."""
        if not isinstance(storage, _Storage):
            self.fail("a tensor without a storage")
        dtype = extra[2] if function_name == "_rebuild_tensor_v3" and len(extra) > 2 else storage.dtype
        if not all(type(n) is int and n >= 0 for n in (offset, *shape, *strides)) or not isinstance(dtype, str):
            self.fail("a tensor whose shape, strides and offset are not numbers from 0, or whose dtype is none")
        if len(shape) != len(strides) or len(shape) > 8 or dtype not in SIZES:
            self.fail(f"a tensor of {dtype} {list(shape)} with strides {list(strides)}: malformed, or not supported")
        view = View(str(dtype), tuple(shape), tuple(strides), storage.data, offset)
        last_element = offset + sum((n - 1) * step for n, step in zip(shape, strides))
        if view.count and (last_element + 1) * SIZES[view.dtype] > storage.data.nbytes:
            self.fail(f"a tensor {list(shape)} reaches beyond its storage of {storage.data.nbytes} bytes")
        return view

    def fail(self, problem: str) -> typing.NoReturn:
        raise AnyrankError(f"{self.source}: {problem}")


def read_pickle(file: typing.IO[bytes], source: str, placeholders: typing.Collection[str] = (),
                storage: typing.Callable[[str, str, int], memoryview] | None = None) -> typing.Any:
    """What one pickle holds. storage: (key, dtype, elements) -> bytes, of tensors."""
    try:
        return _Reader(file.read(), source, placeholders, storage).load()
    except AnyrankError:
        raise
    except RecursionError:
        raise AnyrankError(f"{source}: a pickle nested too deeply") from None
    except Exception as error:  # whatever bytes that are no pickle may raise
        raise AnyrankError(f"{source}: not a readable pickle, or cut short: {type(error).__name__}: {error}") from None


class _Slice(io.RawIOBase):
    """Bytes of a buffer as a file."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.position = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.data.nbytes}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self.position = base + offset
        return self.position

    def readinto(self, out: typing.Any) -> int:
        n = max(0, min(len(out), self.data.nbytes - self.position))
        out[:n] = self.data[self.position:self.position + n]
        self.position += n
        return n


def map_file(path: str | os.PathLike[str]) -> memoryview:
    """A file's bytes, mapped."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_torch(data: memoryview, source: str, placeholders: typing.Collection[str] = ()) -> typing.Any:
    """What torch.save wrote (its zip format, since PyTorch 1.6): tensors are Views of `data`."""
    if bytes(data[:4]) != b"PK\x03\x04":
        old = bytes(data[:2]) == b"\x80\x02"
        raise AnyrankError(f"{source}: " + ("a file in the format before PyTorch 1.6: load and torch.save it again "
                                            "with a newer one" if old else "is no file of torch.save"))
    try:
        archive = zipfile.ZipFile(io.BufferedReader(_Slice(data)))
        members = {entry.filename.split("/", 1)[-1]: entry for entry in archive.infolist()}
        order = archive.read(members["byteorder"]) if "byteorder" in members else b"little"
        if "data.pkl" not in members or order != b"little":
            raise AnyrankError(f"{source}: " + ("written on a big-endian machine, which is not supported"
                                                if "data.pkl" in members else "a zip file that torch.save did not "
                                                                             "write"))
        program = archive.open(members["data.pkl"])
    except (zipfile.BadZipFile, EOFError, ValueError, OSError, KeyError) as error:
        raise AnyrankError(f"{source}: a file of torch.save that is cut short or damaged: {error}") from None

    def storage(key: str, dtype: str, count: int) -> memoryview:
        entry = members.get(f"data/{key}")
        if entry is None or entry.compress_type != zipfile.ZIP_STORED:
            raise AnyrankError(f"{source}: its member data/{key} is missing or compressed")
        head = bytes(data[entry.header_offset:entry.header_offset + 30])
        if head[:4] != b"PK\x03\x04":
            raise AnyrankError(f"{source}: its member data/{key} is damaged")
        start = entry.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        size = count * SIZES[dtype]
        if type(count) is not int or not 0 <= size <= entry.file_size or start + entry.file_size > data.nbytes:
            raise AnyrankError(f"{source}: its member data/{key} has {entry.file_size} bytes, {size} are needed")
        return data[start:start + entry.file_size]

    with program:
        return read_pickle(program, source, placeholders, storage)


def load(path: str | os.PathLike[str], placeholders: typing.Collection[str] = ()) -> typing.Any:
    """A .pt file: dictionaries, lists, Views, numbers and Placeholders."""
    return read_torch(map_file(path), os.fspath(path), placeholders)


def nested(value: typing.Any, *keys: typing.Any) -> typing.Any:
    """value[keys[0]][keys[1]].. of dictionaries, lists and pickled objects; None where one lacks it."""
    for key in keys:
        if isinstance(value, (dict, Placeholder)):
            value = attribute(value, key) if isinstance(key, str) or not isinstance(value, dict) else value.get(key)
        elif isinstance(value, (list, tuple)) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


