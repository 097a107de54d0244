# SPDX-License-Identifier: Apache-2.0
"""Whether a training run that was resumed is the run that was saved (docs/guide/pytorch.md, "Resuming").

    report = anyrank.resume.compare("run/step-100", "resumed/step-100")      # or python -m anyrank.resume A B
    assert report.same, report

Compares two checkpoints, bit for bit: weights, their fp32 copies, moments, steps, learning rates and schedulers, loss
scales, random states, the position in the data. Save one before the job ends, and one as soon as the new job has loaded
it, under whatever layout; or both a step later. Reads what anyrank.convert reads, folders of transformers' Trainer and
of safetensors files; nothing that is pickled is run.
"""

from __future__ import annotations

import argparse
import array
import dataclasses
import fnmatch
import functools
import hashlib
import json
import math
import os
import re
import struct
import sys
import typing
import zipfile

from anyrank._errors import AnyrankError
from anyrank._safetensors import SIZES
from anyrank._safetensors import read as read_safetensors
from anyrank.convert import _find_all, _pickles, _pieces, _read, dcp, several, shards
from anyrank.convert._tensors import View
from anyrank.explain.facts import FORMAT

Path = typing.Union[str, "os.PathLike[str]"]
Data = typing.Union[bytes, memoryview]

ROLES = {"weight": "weight", "master": "fp32 weight", "m": "first moment", "v": "second moment", "": "state"}
_SUFFIXES = {":m": "m", ":v": "v", ".m": "m", ".v": "v", **{f".{kind}": role for kind, role in _pieces.STATE.items()}}
# Of a Trainer's folder, what is no part of the state.
_NO_STATE = re.compile(r"config|tokenizer|vocab|merges|special_tokens|added_tokens|index\.json|training_args|map\.json")
_VARIES = re.compile(r"time|runtime|path|_dir|host|flos|log_history|best_model|version|args\b|save_steps|logging", re.I)
_OF_THE_MODEL = ("args", "ds_config", "module", "model", *(f"model{i}" for i in range(64)))
# Of DeepSpeed, how the ranks hold the model: its tensors are read by anyrank.convert.
_OF_THE_LAYOUT = ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "buffer_names", "shared_params",
                  "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "universal_checkpoint_info")
# Beside a checkpoint of DeepSpeed or FSDP in a folder of transformers' Trainer or of accelerate.
_TRAINERS = re.compile(r"trainer_state\.json|(rng_state|random_states)(_\d+)?\.|scheduler(_\d+)?\.|.*\.safetensors")
_WEIGHTS = re.compile(r"model|module|state_dict|weights|params|app")
SAMPLE = 1 << 16  # elements of a tensor that are looked at for a cause


@dataclasses.dataclass(frozen=True)
class Tensor:
    name: str  # of the parameter, or of what is none
    role: str  # a key of ROLES
    dtype: str
    shape: tuple[int, ...]
    read: typing.Callable[[], Data]

    @property
    def key(self) -> str:
        return self.name + (f" ({ROLES[self.role]})" if self.role in ("m", "v", "master") else "")


@dataclasses.dataclass
class State:
    """All that a checkpoint holds."""

    path: str
    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    values: dict[str, typing.Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, tensor: Tensor) -> None:
        """Adds a tensor. Two tensors with one name are both kept, such as a Trainer's 16-bit weights and DeepSpeed's
        weights."""
        while tensor.key in self.tensors:
            tensor = dataclasses.replace(tensor, name=f"{tensor.name}'")
        self.tensors[tensor.key] = tensor


@dataclasses.dataclass(frozen=True)
class Finding:
    cause: str
    says: str
    look_at: str
    names: tuple[str, ...]  # of the tensors or values, those before first

    def __str__(self) -> str:
        remainder = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        look = f"\n  look at: {self.look_at}" if self.look_at else ""
        return f"{self.cause}: {self.says}\n  {', '.join(self.names[:3])}{remainder}{look}"


@dataclasses.dataclass(frozen=True)
class Report:
    before: str
    after: str
    tensors: int  # that both have
    values: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        head = f"{self.tensors} tensors and {self.values} values of {self.before} and {self.after}"
        if self.same:
            return f"{head}: the same"
        return "\n".join([f"{head}: DIFFERENT", *map(str, self.findings)])

    def to_json(self) -> str:
        return json.dumps({"same": self.same, **dataclasses.asdict(self)}, indent=1)


# --- reading --------------------------------------------------------------------------------------------------------


def _scalar(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _flatten(state: State, key: str, value: typing.Any) -> None:
    """Numbers and texts as values, tensors as tensors. Long lists of numbers (a random state) are one value."""
    if isinstance(value, View):
        name, role = _named(key)
        state.add(Tensor(name, role, value.dtype, value.shape, value.bytes))
    elif isinstance(value, dict):
        for inner, entry in value.items():
            _flatten(state, f"{key}.{inner}" if key else str(inner), entry)
    elif isinstance(value, (list, tuple)) and len(value) > 32 and all(map(_scalar, value)):
        digest = hashlib.sha256(repr(list(value)).encode()).hexdigest()[:12]
        state.values[key] = f"{len(value)} numbers, sha256 {digest}"
    elif isinstance(value, (list, tuple)):
        for i, entry in enumerate(value):
            _flatten(state, f"{key}.{i}", entry)
    elif isinstance(value, (bytes, bytearray)):
        state.values[key] = f"{len(value)} bytes, sha256 {hashlib.sha256(value).hexdigest()[:12]}"
    elif _scalar(value):
        state.values[key] = value
    else:
        state.notes.append(f"{key}: an object of {_pickles.class_of(value) or type(value).__name__} is not compared")


def _named(key: str) -> tuple[str, str]:
    for suffix, role in _SUFFIXES.items():
        if key.endswith(suffix):
            return key[:-len(suffix)], role
    return key, "" if "optim" in key or "rng" in key or key.endswith(".step") else "weight"


def _add_pieces(state: State, pieces: typing.Iterable[_pieces.Piece]) -> None:
    groups: dict[tuple[str, str], list[_pieces.Piece]] = {}
    for piece in pieces:
        groups.setdefault((piece.name, piece.role), []).append(piece)
    for (name, role), group in groups.items():
        boxes = _pieces.check_cover(name, group)

        def read(boxes: list[_pieces.Piece] = boxes, piece: _pieces.Piece = group[0]) -> Data:
            return b"".join(_pieces._whole_tensor(boxes, piece.shape, piece.dtype)) if boxes else b""

        state.add(Tensor(name, role, group[0].dtype, group[0].shape, read))


def _dcp_pieces(folder: str, placeholders: typing.Collection[str]) -> typing.Iterator[_pieces.Piece]:
    """Returns pieces by their paths in the saved dictionary, which tell a random state from a weight."""
    for item in dcp.read_items(folder, dcp.read_metadata(folder, placeholders), placeholders)[0]:
        parts = [str(part) for part in item.path]
        role = _pieces.STATE.get(parts[-1]) or ("weight" if _WEIGHTS.search(parts[0]) or len(parts) == 1 else "")
        name = ".".join(parts[:-1] if role in ("m", "v") else parts)
        yield _pieces.Piece(item.rank, name, role, item.dtype, item.shape, item.offset, item.extent, item.read,
                            item.origin)


def _named_parts(folder: str) -> typing.Iterator[_pieces.Piece]:
    """Returns the tensors of sharded safetensors files by the keys that were saved."""
    for part in shards.read_parts(folder):
        name, role = _named(part.name)
        yield dataclasses.replace(part, name=name, role=role)


def _add_optimizer(state: State, folder: str, names: typing.Collection[str],
                   placeholders: typing.Collection[str]) -> None:
    """Learning rates and loss scale under ZeRO, which each rank's file has, and one of a universal checkpoint."""
    universal_file = os.path.join("zero", "optimizer_state.pt")
    name = (
        universal_file
        if universal_file in names
        else min((file_name for file_name in names if file_name.endswith("_optim_states.pt")), default=None)
    )
    if name is not None:
        value = _pickles.load(os.path.join(folder, name), placeholders)
        value = value if name == universal_file else _pickles.nested(value, "optimizer_state_dict")
        groups = next((found for found in (_pickles.nested(value, *keys, "param_groups") for keys in (
            (), ("base_optimizer_state",), ("optimizer_state_dict",))) if isinstance(found, list)), None)
        if groups is None:
            state.notes.append(f"{name}: no param_groups: the optimizer's learning rates are not compared")
        scaler = _pickles.attribute(value, "loss_scaler")
        scaler_fields = vars(scaler) if _pickles.class_of(scaler) else {}
        _flatten(state, "optimizer", {
            "param_groups": [{key: entry for key, entry in group.items() if key != "params"} for group in groups or []],
            "loss_scaler": {key: entry for key, entry in scaler_fields.items() if not key.startswith("_")}})


def _add_ranks(state: State, folder: str, names: typing.Sequence[str], placeholders: typing.Collection[str]) -> None:
    """Files of DeepSpeed's ranks: what a rank has as the first one has it is read once, whatever their number."""
    first_state = State(folder)
    for i, name in enumerate(names):
        rank_state, prefix = State(folder), name.rsplit(".", 1)[0] if i else "model_states"
        _add_file(rank_state, folder, name, placeholders, _OF_THE_MODEL + _OF_THE_LAYOUT, "")
        first_state = first_state if i else rank_state
        for key, tensor in rank_state.tensors.items():
            if not (i and _same_tensor(first_state.tensors.get(key), tensor)):
                state.add(dataclasses.replace(tensor, name=f"{prefix}.{tensor.name}"))
        state.values.update({f"{prefix}.{key}": value for key, value in rank_state.values.items()
                             if not (i and key in first_state.values and _same_value(first_state.values[key], value))})
        state.notes += rank_state.notes


def _same_tensor(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and (a.dtype, a.shape, bytes(a.read())) == (b.dtype, b.shape, bytes(b.read()))


def _add_dcp_values(state: State, folder: str, placeholders: typing.Collection[str]) -> None:
    metadata = dcp.read_metadata(folder, placeholders)
    files = dcp._Files(folder, placeholders)
    paths = _pickles.attribute(metadata, "planner_data")
    infos = {str(_pickles.attribute(index, "fqn")): info
             for index, info in metadata.storage_data.items()}  # type: ignore[attr-defined]
    for key, entry in metadata.state_dict_metadata.items():  # type: ignore[attr-defined]
        if _pickles.class_of(entry).endswith("TensorStorageMetadata") or key not in infos:
            continue
        path = files.check(key, infos[key])
        offset, n = (_pickles.attribute(infos[key], name) for name in ("offset", "length"))
        value = _pickles.read_torch(files.map(path)[offset:offset + n], f"{path}, byte {offset}", placeholders)
        _flatten(state, ".".join(map(str, dcp.nested_path(paths, key))), value)


def _add_file(state: State, folder: str, name: str, placeholders: typing.Collection[str],
              without: typing.Collection[str] = (), prefix: str | None = None) -> None:
    """Adds a pickled file, without the parts that belong to the model."""
    value = _pickles.load(os.path.join(folder, name), placeholders)
    if isinstance(value, dict):
        value = {key: entry for key, entry in value.items() if key not in without}
    _flatten(state, name.rsplit(".", 1)[0].replace("/", ".") if prefix is None else prefix, value)


def _add_foreign(state: State, kind: str, folder: str, placeholders: typing.Collection[str]) -> None:
    if kind == "sglang":
        raise AnyrankError(f"{folder}: a dump of SGLang, which is no checkpoint")
    if kind == "dcp":
        _add_pieces(state, _dcp_pieces(folder, placeholders))
    else:
        checkpoint = _read(kind, folder, {}, placeholders)
        _add_pieces(state, checkpoint.pieces)
        state.notes += [note for note in checkpoint.notes if "no tensors are left out" not in note]
    if kind in ("dcp", "megatron_dist"):
        _add_dcp_values(state, folder, placeholders)
    names = [os.path.relpath(os.path.join(root, name), folder) for root, _, files in os.walk(folder) for name in files]
    if kind == "deepspeed":
        _add_optimizer(state, folder, names, placeholders)
        _add_ranks(state, folder, sorted(name for name in names if name.endswith("model_states.pt")), placeholders)
    for name in sorted(names):
        if os.path.basename(name) == "model_optim_rng.pt":
            _add_file(state, folder, name, placeholders, _OF_THE_MODEL)
        elif name == "common.pt":
            _add_file(state, folder, name, placeholders, ("args",))


def _add_plain(state: State, folder: str, names: typing.Sequence[str], placeholders: typing.Collection[str],
               prefix: str | None = None) -> None:
    """Files of a folder. What they hold is named by them, or by prefix: a file that is compared alone may have any."""
    for name in names:
        file = os.path.join(folder, name)
        if os.path.exists(file) and not os.path.isfile(file):
            state.notes.append(f"{file}: not read, and not compared")
        elif name.endswith(".safetensors"):
            for key, entry in read_safetensors(file)[0].items():
                tensor_name, role = _named(key)
                state.add(
                    Tensor(tensor_name, role, entry.dtype, tuple(entry.shape), functools.partial(bytes, entry.data))
                )
        elif _NO_STATE.search(name):
            continue
        elif name.endswith((".pt", ".pth", ".bin")) or (name.endswith(".pkl") and zipfile.is_zipfile(file)):
            _add_file(state, folder, name, placeholders, prefix=prefix)
        elif name.endswith(".json"):
            try:
                with open(file, encoding="utf-8") as text:
                    value = json.load(text)
            except (ValueError, RecursionError) as error:
                raise AnyrankError(f"{file}: not JSON: {error}") from None
            if not isinstance(value, dict) or value.get("format") != FORMAT:  # a dump's, of its run
                _flatten(state, name[:-5] if prefix is None else prefix, value)
        else:
            state.notes.append(f"{file}: not read, and not compared")


def _add_folder(state: State, path: str, placeholders: typing.Collection[str]) -> None:
    """Adds what a folder contains: another program's checkpoint, files, or both, as under transformers' Trainer."""
    names = sorted(os.listdir(path))
    found = _find_all(path)
    trainers = any(map(_TRAINERS.match, names))
    if len(found) > 1 and not trainers:
        raise several(path, [os.path.basename(folder) for _, folder in found])
    if not found or (trainers and all(folder != path for _, folder in found)):
        parts = shards.list_files(path)
        if parts:
            _add_pieces(state, _named_parts(path))
        handled = {*parts, *(os.path.basename(folder) for _, folder in found)}
        _add_plain(state, path, [name for name in names if name not in handled], placeholders)
    for kind, folder in found:
        _add_foreign(state, kind, folder, placeholders)


def read_state(path: Path, placeholders: typing.Collection[str] = ()) -> State:
    """Reads a whole checkpoint. Errors: AnyrankError, which says what is wrong, in which file."""
    path = os.fspath(path)
    state = State(path)
    if not os.path.exists(path):
        raise AnyrankError(f"{path}: there is no such checkpoint")
    try:
        if os.path.isdir(path):
            _add_folder(state, path, placeholders)
        else:
            _add_plain(state, os.path.dirname(path) or ".", [os.path.basename(path)], placeholders, "")
    except (OSError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise AnyrankError(f"{path}: damaged, or of a version that is not known ({type(error).__name__}: {error})"
                           ) from error
    if not state.tensors:
        raise AnyrankError(f"{path}: holds no tensor of a checkpoint that is known here")
    return state


# --- tensors --------------------------------------------------------------------------------------------------------


def _numbers(data: Data, dtype: str) -> list[float] | None:
    """Returns the first SAMPLE elements of floats."""
    size = SIZES[dtype]
    data = bytes(data[:SAMPLE * size])
    if dtype == "BF16":
        data = b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))
    if dtype == "F16":
        return [x for (x,) in struct.iter_unpack("<e", data)]
    code = {"F32": "f", "BF16": "f", "F64": "d"}.get(dtype)
    if code is None:
        return None
    numbers = array.array(code, data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return list(numbers)


def _short(x: float) -> float:
    """x as bf16, to the nearest, ties to even."""
    bits: int = struct.unpack("<I", struct.pack("<f", x))[0]
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _half(x: float) -> float:
    try:
        return float(struct.unpack("<e", struct.pack("<e", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def _parts(data: Data, tensor: Tensor, dim: int, n: int) -> list[bytes] | None:
    """n equal parts along a dimension, as digests; None where there are none."""
    if dim >= len(tensor.shape) or tensor.shape[dim] % n or not tensor.shape[dim]:
        return None
    rows = math.prod(tensor.shape[:dim])
    step = math.prod(tensor.shape[dim:]) // n * SIZES[tensor.dtype]
    if rows > 1 << 14:
        return None

    def digest(i: int) -> bytes:
        rows_of = range(i * step, rows * n * step, n * step)
        return hashlib.sha256(b"".join(data[offset:offset + step] for offset in rows_of)).digest()

    return [digest(i) for i in range(n)]


class _Causes:
    """Why a tensor is another one, as (cause, sentence)."""

    def __init__(self, before: State) -> None:
        self.before = before
        self.digest: dict[bytes, list[str]] = {}

    def names_of(self, data: Data, like: Tensor) -> list[str]:
        if not self.digest:
            for key, tensor in self.before.tensors.items():
                digest = hashlib.sha256(tensor.dtype.encode() + bytes(tensor.read())).digest()
                self.digest.setdefault(digest, []).append(key)
        return self.digest.get(hashlib.sha256(like.dtype.encode() + bytes(data)).digest(), [])

    def cause_of(self, a: Tensor, b: Tensor) -> tuple[str, str]:
        x, y = a.read(), b.read()
        label = f"a {ROLES[a.role]}"
        if any(bytes(x)) and not any(bytes(y)):
            return (("moments_reset", "moments are all zero in AFTER") if a.role in ("m", "v") else
                    ("zeroed", f"{label} is all zero in AFTER"))
        if a.role in ("m", "v"):
            swapped_key = next((key for key in self.names_of(y, b) if key.startswith(f"{a.name} (")), None)
            if swapped_key:
                return "moments_exchanged", "first and second moments have changed places"
        matching_keys = [key for key in self.names_of(y, b) if key != a.key]
        if matching_keys:
            return "other_tensor", f"{label} holds what another one held in BEFORE: {a.key} that of {matching_keys[0]}"
        return self.of_parts(a, x, y) or self.of_numbers(a, b, x, y)

    def of_parts(self, a: Tensor, x: Data, y: Data) -> tuple[str, str] | None:
        for n in (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64):
            for dim in (0, 1):
                old, new = _parts(x, a, dim, n), _parts(y, a, dim, n)
                if old is None or new is None:
                    continue
                wrong = [i for i in range(n) if old[i] != new[i]]
                if len(set(old)) == n and all(part in old for part in new):
                    places = ", ".join(f"{i} holds {old.index(new[i])}" for i in wrong[:4])
                    return "shards_exchanged", f"{n} equal parts along dimension {dim} changed places: {places}"
                if len(wrong) <= n // 2:
                    parts = ", ".join(map(str, wrong[:8]))
                    return "shards_differ", f"of {n} equal parts along dimension {dim}, only these differ: {parts}"
        return None

    @staticmethod
    def of_numbers(a: Tensor, b: Tensor, x: Data, y: Data) -> tuple[str, str]:
        old, new = _numbers(x, a.dtype), _numbers(y, b.dtype)
        label = "moments" if a.role in ("m", "v") else f"{ROLES[a.role]}s"
        if old is None or new is None:
            return "unknown", f"{label} differ"
        if a.dtype == "F32" and all(new[i] == _short(old[i]) for i in range(len(old))):
            return "kept_in_16_bits", f"{label} were rounded to bf16"
        if a.dtype == "F32" and all(new[i] == _half(old[i]) for i in range(len(old))):
            return "kept_in_16_bits", f"{label} were rounded to fp16"
        ratios = [new[i] / old[i] for i in range(len(old)) if abs(old[i]) > 1e-30]
        if ratios and all(abs(r - ratios[0]) <= 1e-5 * abs(ratios[0]) for r in ratios):
            return "scaled", f"{label} are multiplied by {ratios[0]:.6g}"
        size = math.sqrt(sum(v * v for v in old)) or 1.0
        off = math.sqrt(sum((v - w) ** 2 for v, w in zip(old, new))) / size
        if not math.isfinite(off):
            return "not_finite", f"{label} are not finite"
        return "unknown", f"{label} differ in no known way"


_LOOK = {
    "moments_reset": "whether the optimizer's state is loaded, and before the optimizer is wrapped or sharded",
    "moments_exchanged": "the names of exp_avg and exp_avg_sq in the loader",
    "other_tensor": "the order, or the names, by which parameters and states are matched (lists of numbers change with "
                    "the layout)",
    "shards_exchanged": "which rank reads which part: the numbering of ranks in the mesh, before and after",
    "shards_differ": "the ranks that hold these parts: a stale copy, or a group that is too small",
    "kept_in_16_bits": "fp32 copies of weights: they are loaded from the checkpoint, not made from the 16-bit weights",
    "scaled": "a loss scale, an average over ranks, or a bias correction that is applied on loading",
    "missing": "what the saver or the loader filters by name",
    "layout": "how the tensor is saved: full shape and dtype do not depend on the layout",
    "zeroed": "parameters that were made on the meta device and never loaded",
    "step_reset": "the optimizer's step: bias correction depends on it",
    "schedule": "the scheduler's state, and whether it is loaded after the optimizer's",
    "random_state": "the states of torch, CUDA, numpy and Python, each rank its own",
    "data_position": "the sampler's and the loader's state: batches are repeated or left out",
    "loss_scale": "the gradient scaler's state",
    "other_value": "",
    "not_finite": "whether the saved run was, before it was saved",
    "another_step": "which checkpoints are compared: both have to be of the same step",
    "unknown": "the same checkpoint saved twice: is it the same step?",
}


# --- values ---------------------------------------------------------------------------------------------------------

_KINDS = (("random_state", r"rng|random|seed|generator"), ("loss_scale", r"scal(e|er)\b|scaler|growth_tracker"),
          ("data_position", r"sampler|loader|consumed|epoch$|dataset|data_|batches|position|samples"),
          ("schedule", r"sched|last_epoch|_step_count|\blr\b|_lr\b|lrs\b|warmup|\bnum_steps\b"),
          ("step_reset", r"\bsteps?\b|global_step|iteration|step$"))


def _kind(key: str) -> str:
    if "sched" in key.lower():
        return "schedule"
    return next((kind for kind, pattern in _KINDS if re.search(pattern, key, re.I)), "other_value")


def _same_value(a: typing.Any, b: typing.Any) -> bool:
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or (a == b and isinstance(a, bool) == isinstance(b, bool))


def _compare_values(before: State, after: State, ignored: typing.Callable[[str], bool]
                    ) -> typing.Iterator[tuple[str, str, str]]:
    """(cause, sentence, name)"""
    for key in dict.fromkeys([*before.values, *after.values]):
        if ignored(key) or _VARIES.search(key):
            continue
        if key not in after.values or key not in before.values:
            yield "missing", f"values are missing from {'AFTER' if key in before.values else 'BEFORE'}", key
        elif not _same_value(before.values[key], after.values[key]):
            yield _kind(key), "values changed", f"{key} {before.values[key]!r} -> {after.values[key]!r}"


def _compare_tensors(before: State, after: State, ignored: typing.Callable[[str], bool]
                     ) -> typing.Iterator[tuple[str, str, str]]:
    causes = _Causes(before)
    for key in dict.fromkeys([*before.tensors, *after.tensors]):
        if ignored(key):
            continue
        if key not in after.tensors or key not in before.tensors:
            yield "missing", f"tensors are missing from {'AFTER' if key in before.tensors else 'BEFORE'}", key
            continue
        a, b = before.tensors[key], after.tensors[key]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield "layout", "tensors have another shape or dtype", (
                f"{key} {a.dtype} {list(a.shape)} -> {b.dtype} {list(b.shape)}")
        elif bytes(a.read()) != bytes(b.read()):
            kind = _kind(key) if a.role == "" else "other_value"
            if kind in ("random_state", "step_reset"):
                yield kind, "values changed", key
            else:
                yield (*causes.cause_of(a, b), key)


def compare(before: Path, after: Path, *, ignore: typing.Collection[str] = (),
            placeholders: typing.Collection[str] = ()) -> Report:
    """Compares two checkpoints of the same step.

    ignore        globs of names of tensors and values that are not compared
    placeholders  as of anyrank.convert

    Raises AnyrankError: a checkpoint that cannot be read.
    """
    a, b = read_state(before, placeholders), read_state(after, placeholders)

    def ignored(key: str) -> bool:
        return any(fnmatch.fnmatchcase(key, glob) for glob in ignore)

    varies = [key for key in dict.fromkeys([*a.values, *b.values]) if _VARIES.search(key)]
    if varies:
        a.notes.append(f"not compared, as times, paths and logs vary from run to run: {len(varies)} values, the first "
                       f"{varies[0]}")
    found: dict[tuple[str, str], list[str]] = {}
    for cause, says, name in [*_compare_tensors(a, b, ignored), *_compare_values(a, b, ignored)]:
        found.setdefault((cause, says), []).append(name)
    unknown = [says for cause, says in found if cause == "unknown"]
    if len(unknown) > 1 and any(cause == "step_reset" for cause, _ in found):
        parts = [key for key in found if key[0] in ("unknown", "step_reset")]
        found["another_step", "weights, moments and steps all differ: these are checkpoints of two steps"] = [
            name for key in parts for name in found.pop(key)]
    findings = [Finding(cause, f"{len(names)} {says}" if says.split()[0] in ("tensors", "values", "moments") else says,
                        _LOOK[cause], tuple(names)) for (cause, says), names in found.items()]
    findings.sort(key=lambda finding: -len(finding.names))
    return Report(a.path, b.path, len(a.tensors.keys() & b.tensors.keys()), len(a.values.keys() & b.values.keys()),
                  tuple(findings), tuple(dict.fromkeys([*a.notes, *b.notes])))


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 the same, 1 a difference, 2 a checkpoint that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m anyrank.resume", description="Whether a resumed run is the run "
                                     "that was saved: compares two checkpoints, bit for bit, and says what is lost.")
    parser.add_argument("before", metavar="BEFORE", help="the checkpoint that was saved")
    parser.add_argument("after", metavar="AFTER", help="one that the resumed run saved at the same step")
    parser.add_argument("--ignore", metavar="GLOB", action="append", default=[],
                        help="names of tensors and values that are not compared")
    parser.add_argument("--placeholder", action="append", default=[], metavar="MODULE.CLASS",
                        help="a pickled class that holds no weights, to be read as inert data")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    try:
        report = compare(args.before, args.after, ignore=args.ignore, placeholders=args.placeholder)
    except (AnyrankError, OSError) as error:
        print(f"anyrank resume: {error}", file=sys.stderr)
        return 2
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    print(report.to_json() if args.json else report)
    return 0 if report.same else 1


if __name__ == "__main__":
    sys.exit(main())
