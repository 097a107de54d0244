# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints of DeepSpeed, as ds_to_universal.py (versions 0.10 to 0.19) writes them: the model_states.pt of
the checkpoint that it converted, and zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt, each a state of a whole parameter.

A state is {"param": the tensor, keys that say how to cut it again}, of ZeRO 3 the flat tensor alone, or a number. Names
that the optimizer does not hold (frozen and tied parameters, buffers) have an fp32 copy of the model's tensor there.
"""

from __future__ import annotations

import array
import functools
import math
import os
import struct
import sys
import typing

from anyrank._errors import AnyrankError
from anyrank._safetensors import SIZES
from anyrank.convert._pickles import attribute, load, nested
from anyrank.convert._pieces import Piece, scalar, state_name, full_piece
from anyrank.convert._tensors import View, row_major

# What tells a loader how to cut the tensor, which is whole.
KEYS = {"param", "cat_dim", "vocab_tensor", "param_n_sub_params", "sub_param_shape", "is_expert_param",
        "ep_num_experts"}
CODES = {"F32": "f", "F64": "d", "F16": "e", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B", "BOOL": "?"}
CHUNK = 1 << 20  # elements that are compared at a time
Shape = typing.Tuple[int, ...]


def is_universal(folder: str) -> bool:
    return os.path.isdir(os.path.join(folder, "zero"))


def list_states(folder: str) -> dict[str, dict[str, str]]:
    """The files of each name: {name: {"fp32": path, ..}}."""
    zero, states = os.path.join(folder, "zero"), {}
    for root, _, files in sorted(os.walk(zero)):
        kinds = {}
        for file in sorted(files):
            path = os.path.join(root, file)
            if root == zero and file == "optimizer_state.pt":
                continue
            if root == zero or not file.endswith(".pt"):
                raise AnyrankError(f"{path}: is no state of a parameter: ds_to_universal.py writes zero/NAME/STATE.pt "
                                   f"and zero/optimizer_state.pt")
            kinds[file[:-3]] = path
        if kinds:
            states[os.path.relpath(root, zero).replace(os.sep, "/")] = kinds
    return states


def fits(shape: Shape, parts: list[Shape], rows: int | None) -> bool:
    """Whether tensor-parallel ranks' parts make this shape: as copies of it, or one after the other along a dimension.
    rows: those that are left of a vocabulary with padding."""
    def cut(full: Shape) -> Shape:
        return full if rows is None or not full else (min(rows, full[0]), *full[1:])

    fulls = [parts[0]] if all(part == parts[0] for part in parts) else []
    for dim in range(len(parts[0])):
        if all(part[:dim] + part[dim + 1:] == parts[0][:dim] + parts[0][dim + 1:] for part in parts):
            fulls.append((*parts[0][:dim], sum(part[dim] for part in parts), *parts[0][dim + 1:]))
    return shape in map(cut, fulls)


class Universal:
    """What zero/ holds. parts: shapes on each tensor-parallel rank; groups: the optimizer's parameters, by its groups;
    model: the model's own tensors, each as the first file that has it."""

    def __init__(self, folder: str, placeholders: typing.Collection[str], parts: list[dict[str, Shape]],
                 groups: list[dict[str, Shape]], model: dict[str, View], info: typing.Any) -> None:
        self.folder, self.placeholders, self.parts, self.groups = folder, placeholders, parts, groups
        self.model, self.info = model, info
        self.states = list_states(folder)
        self.notes: list[str] = []

    def check_states(self) -> None:
        """Refuses a parameter of the optimizer without its states, and another name that is no copy of the model's."""
        parameter_names = {name for group in self.groups for name in group}
        kinds = {frozenset(self.states.get(name, ())) for name in parameter_names}
        bare = []
        for name in sorted(parameter_names):
            state_kinds = frozenset(self.states.get(name, ()))
            fullest = max((candidate for candidate in kinds if state_kinds < candidate), key=len, default=state_kinds)
            if state_kinds == fullest and "fp32" in state_kinds:
                continue
            if state_kinds == {"fp32"} and self.is_copy(name):
                bare.append(name)
            else:
                lost = ", ".join(f"{kind}.pt" for kind in sorted(({"fp32"} | fullest) - state_kinds))
                raise AnyrankError(f"MissingShard: {os.path.join(self.folder, 'zero', name)}: has no {lost}, which "
                                   f"other parameters have: ds_to_universal.py did not end, or files were left behind")
        if bare:
            self.notes.append(f"{len(bare)} parameters have no optimizer state, the first {bare[0]}: when the "
                              f"checkpoint was saved, they had had no gradient")
        for name in sorted(self.states.keys() - parameter_names):
            if not self.is_copy(name):
                raise AnyrankError(f"{os.path.join(self.folder, 'zero', name)}: is neither a parameter of the "
                                   f"optimizer (param_shapes in model_states.pt) nor, in fp32.pt alone, a copy of what "
                                   f"model_states.pt has by this name: changed, or of another model")

    def is_copy(self, name: str) -> bool:
        """Whether fp32.pt is what ds_to_universal.py writes of a tensor for which the optimizer has no state: the
        model's own, in fp32, without a word on how it is cut."""
        model_tensor = self.model.get(name)
        if model_tensor is None or set(self.states[name]) != {"fp32"}:
            return False
        path = self.states[name]["fp32"]
        copy, keys = self.tensor(path)
        if set(keys) != {"param"} or (copy.dtype, copy.shape) != ("F32", model_tensor.shape):
            return False
        copied, source, size = copy.bytes(), model_tensor.bytes(), SIZES[model_tensor.dtype]
        return all(
            copied[4 * begin : 4 * (begin + CHUNK)]
            == as_fp32(model_tensor.dtype, source[size * begin : size * (begin + CHUNK)], path)
            for begin in range(0, model_tensor.count, CHUNK)
        )

    def tensor(self, path: str) -> tuple[View, dict[str, typing.Any]]:
        value = load(path, self.placeholders)
        keys = value if isinstance(value, dict) else {"param": value}
        unknown = sorted(str(key) for key in keys if key not in KEYS)
        if unknown:
            raise AnyrankError(f"{path}: has {', '.join(unknown[:4])}, which ds_to_universal.py of the versions "
                               f"that are known here (0.10 to 0.19) does not write: {', '.join(sorted(KEYS))}")
        if not isinstance(keys.get("param"), View):
            raise AnyrankError(f"{path}: holds no tensor: expected one, or a dictionary with one as 'param'")
        return keys["param"], keys

    def shape(self, name: str, path: str, view: View, keys: dict[str, typing.Any]) -> Shape:
        """Of the whole parameter, as model_states.pt has it, or the parts that were merged. A flat tensor has the
        elements in that order."""
        parts = [shapes[name] for shapes in self.parts if name in shapes]
        if keys.get("is_expert_param"):
            parts = [(keys.get("ep_num_experts") or 0, *parts[0][1:])]
        rows = None
        if keys.get("vocab_tensor"):
            rows = attribute(self.info, "original_vocab_size")
            if type(rows) is not int:
                raise AnyrankError(f"{path}: is cut to the vocabulary's size, which model_states.pt does not say "
                                   f"(universal_checkpoint_info, original_vocab_size)")
        if len(parts) == 1 and rows is None and view.count == math.prod(parts[0]):
            return parts[0]
        if not fits(view.shape, parts, rows):
            raise AnyrankError(f"{path}: {list(view.shape)} is not made of what tensor-parallel ranks hold, "
                               f"{', '.join(str(list(part)) for part in parts)} in model_states.pt" + (
                                   f", cut to {rows} rows" if rows is not None else ""))
        return view.shape

    def pieces(self) -> typing.Iterator[Piece]:
        self.check_states()
        for name in (name for group in self.groups for name in group):
            for kind, path in self.states[name].items():
                piece_name, role = state_name(name, kind)
                if kind == "step":
                    yield number(piece_name, load(path, self.placeholders), path)
                    continue
                view, keys = self.tensor(path)
                shape = self.shape(name, path, view, keys)
                read = functools.partial(self.read, path, shape)
                yield Piece(0, piece_name, role, view.dtype, shape, (0,) * len(shape), shape, read, path)
        yield from self.steps_of_groups()

    def read(self, path: str, shape: Shape) -> View:
        """The tensor, from its file again: as many files as there are states cannot be open at a time."""
        view, _ = self.tensor(path)
        if view.shape == shape:
            return view
        if view.strides != row_major(view.shape):
            raise AnyrankError(f"{path}: a flat tensor with gaps")
        return view.flat(0, shape)

    def steps_of_groups(self) -> typing.Iterator[Piece]:
        """Of ZeRO 3, whose steps are left in the optimizer's own dictionary."""
        path = os.path.join(self.folder, "zero", "optimizer_state.pt")
        if not os.path.isfile(path):
            raise AnyrankError(f"MissingShard: {path} is missing, which ds_to_universal.py writes last")
        state = load(path, self.placeholders)
        for g, group in enumerate(self.groups):
            value = nested(state, "optimizer_state_dict", "state", g, "step")
            for name in group:
                if value is not None and "step" not in self.states[name]:
                    yield number(f"{name}.step", value, path)


def number(name: str, value: typing.Any, path: str) -> Piece:
    view = scalar(value)
    if view is None:
        raise AnyrankError(f"{path}: {name!r} is a {type(value).__name__}, expected a number or one element")
    return full_piece(0, name, "", view, path)


def as_fp32(dtype: str, data: memoryview, location: str) -> bytes:
    """Tensor.float() of elements."""
    if dtype == "BF16":
        out = bytearray(2 * len(data))
        out[2::4], out[3::4] = data[::2], data[1::2]
        return bytes(out)
    if dtype not in CODES:
        raise AnyrankError(f"{location}: fp32.pt is a copy of a tensor of {dtype}, which cannot be compared with it")
    count = len(data) // struct.calcsize(CODES[dtype])
    numbers = array.array("f", struct.unpack(f"<{count}{CODES[dtype]}", data))  # too large a double becomes infinite
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
