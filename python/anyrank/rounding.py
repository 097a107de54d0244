# SPDX-License-Identifier: Apache-2.0
"""What rounding may change in each tensor of a PyTorch run: measured, by letting the run err as its arithmetic does.

Under Noise every operation's result is off by a random error as large as that of rounding, in the format that the
operation itself has: a run in bf16 errs in bf16, its norms in fp32 err in fp32. Runs with noise, against one without,
give the allowances that `anyrank verify --sensitivity` judges by. pytest.md has the rules and measured figures;
numerics.md, section 7, the same for anyrank's own reference.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import shutil
import struct
import tempfile
import typing

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from anyrank import _safetensors
from anyrank._errors import AnyrankError

DRAWS = 3
SAFETY = 8.0  # for what the draws do not show, and other orders of sums
DRAWN = "anyrank.draws/"  # before the name of a tensor: the sizes of the draws' differences
SAFETY_SINGLE = 100.0  # a single value has as many chances as there are draws to show its error: a loss, a norm

# Operations whose results are exact: they move, select, compare or make numbers. Casts round where the format is less.
EXACT = frozenset("""
    _local_scalar_dense _reshape_alias _unsafe_view abs alias amax amin arange argmax argmin as_strided_scatter
    bernoulli cat ceil clamp clamp_max clamp_min clone constant_pad_nd copy copysign count_nonzero detach
    diagonal_scatter embedding empty empty_like empty_permuted empty_strided expand_copy eye fill flip floor fmax
    fmin full full_like gather hardtanh heaviside index index_copy index_fill index_put index_select isfinite
    isinf isnan lift lift_fresh masked_fill masked_scatter masked_select max max_pool2d_with_indices maximum min
    minimum neg new_empty new_empty_strided new_full new_ones new_zeros nextafter nonzero one_hot ones ones_like
    permute_copy positive relu repeat resize roll round scalar_tensor scatter select_backward select_scatter set
    sgn sign slice_backward slice_scatter sort split_with_sizes_copy stack take threshold threshold_backward topk
    trace_copy tril triu trunc unfold_backward view_copy where zero zeros zeros_like
""".split())
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "mv": (0, 1), "dot": (0, 1)}


class Noise(TorchDispatchMode):  # type: ignore[misc]
    """with Noise(seed): every floating-point operation of this thread and of its backward pass errs.

    An error is uniform in (-1, 1) times the step of the result's format (2^-23 of a number of fp32). A product, or a
    sum of K terms, errs by sqrt(K) roundings more, each of them relative to the root of the sum of its terms' squares,
    which is not small where the sum is small by cancellation. The run's own random numbers stay what they are.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: typing.Any, types: typing.Any, args: typing.Any = (),
                           kwargs: typing.Any = None) -> typing.Any:
        if any(issubclass(t, FakeTensor) for t in types):  # a shape without values
            return func(*args, **(kwargs or {}))
        if any(hasattr(t, "__tensor_flatten__") for t in types):  # a DTensor, whose operations with its parts err
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1].rstrip("_")
        if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
            return result
        if name == "_to_copy":
            return self._err(result, self._relative(result)) if _is_less(result, args[0]) else result
        returns = func._schema.returns
        if name in EXACT or any(r.alias_info and not r.alias_info.is_write for r in returns):
            return result
        for tensor in _tensors(args[0] if name.startswith("_foreach") and func._schema.is_mutable else result):
            if tensor.is_floating_point() and tensor.numel():
                self._err(tensor, self._size(func, name, args, kwargs or {}, tensor))
        return result

    def _uniform(self, like: torch.Tensor) -> torch.Tensor:
        return torch.rand(like.shape, generator=self.generator, dtype=torch.float64) * 2 - 1

    def _err(self, result: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """Adds errors of this size. A zero stays zero, as a masked value or a dropped one is."""
        off = result.double() + self._uniform(result) * size
        result.copy_(torch.where((result != 0) & off.isfinite(), off, result.double()))
        return result

    def _relative(self, result: torch.Tensor) -> torch.Tensor:
        return result.double().abs() * torch.finfo(result.dtype).eps

    def _size(self, func: typing.Any, name: str, args: typing.Any, kwargs: typing.Any,
              result: torch.Tensor) -> torch.Tensor:
        """Returns the error of each element."""
        if torch.Tag.pointwise in func.tags or name.startswith("_foreach") and name != "_foreach_norm":
            return self._relative(result)
        size, terms = result.double().abs(), 1.0
        if name in PRODUCTS:
            a, b = (args[i].double() for i in PRODUCTS[name])
            terms = float(a.shape[-1])
            size = torch.maximum(size, torch.matmul(a * a, b * b).sqrt())
        else:
            inputs = [x for x in _tensors((args, kwargs)) if x.is_floating_point()]
            terms = max([x.numel() / result.numel() for x in inputs] + [1.0])
            if name in ("sum", "mean"):
                squares = func(args[0].double() ** 2, *args[1:], **{**kwargs, "dtype": torch.float64})
                size = torch.maximum(size, (squares / (terms if name == "mean" else 1)).sqrt())
            elif terms > 1 or "attention" in name or "conv" in name:
                size = torch.maximum(size, size.square().mean().sqrt())
        adds = 2.0**-53 if result.dtype == torch.float64 else 2.0**-24  # sums of fewer bits are formed in fp32
        return size * (torch.finfo(result.dtype).eps + adds * math.sqrt(terms))


def _tensors(value: typing.Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, tuple)) else []


def _is_less(result: torch.Tensor, source: torch.Tensor) -> bool:
    """Returns whether a cast has fewer bits of significand than its source."""
    return bool(result.is_floating_point() and source.is_floating_point() and result.numel() > 0 and
                torch.finfo(result.dtype).eps > torch.finfo(source.dtype).eps)


# --- allowances -------------------------------------------------------------------------------------------------------

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Path = typing.Union[str, "os.PathLike[str]"]


def _dump(folder: Path) -> dict[str, torch.Tensor]:
    """Reads one rank's floating-point numbers; those of a tensor in several files one after the other. Integers, which
    do not round, count as a tensor without elements: nothing is allowed."""
    found: dict[str, list[torch.Tensor]] = {}
    for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
        entries, _ = _safetensors.read(file)
        for name, entry in entries.items():
            dtype, has_data = DTYPES.get(entry.dtype), entry.data.nbytes > 0
            found.setdefault(name, []).append(torch.frombuffer(bytearray(entry.data), dtype=dtype) if dtype and has_data
                                              else torch.empty(0, dtype=dtype))
    return {name: torch.cat(parts) for name, parts in found.items()}


class Allowance(typing.NamedTuple):
    """allowed: what an element may be off; largest: the largest element of the reference."""

    allowed: float
    largest: float


class Size(typing.NamedTuple):
    """Of a difference, as `anyrank verify --normal` compares it: root mean square, largest element, and the typical one
    in steps of the format, as 2^(mean number of binary digits of the steps) - 1."""

    rms: float = 0.0
    largest: float = 0.0
    typical: float = 0.0


def _keys(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the numbers, from one number of the format to the next one apart."""
    bits = x.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()]).long()
    return torch.where(bits < 0, -(2 ** (8 * x.element_size() - 1)) - bits, bits)


def size_of(value: torch.Tensor, approximation: torch.Tensor) -> Size:
    if value.element_size() == 1:  # of 8 bits there is no arithmetic
        value, approximation = value.float(), approximation.float()
    off = (approximation.double() - value.double()).abs()
    off = off[off.isfinite()]
    if not off.numel():
        return Size()
    steps = (_keys(approximation) - _keys(value)).double().abs()
    digits = torch.frexp(steps)[1].clamp(0, 32).double().mean().item()
    return Size(off.square().mean().sqrt().item(), off.max().item(), 2.0**digits - 1.0)


def allowances(reference: Path, draws: typing.Sequence[Path], path: Path) -> dict[str, Allowance]:
    """Writes the file for `sensitivity=` to `path`: for each tensor of the dump `reference`, of one rank, the largest
    difference of any of its elements in any of the dumps `draws`, times SAFETY, and a step of its largest element; and
    the size of each draw's difference, for `normal=True`.
    """
    exact = _dump(reference)
    return _write(exact, [_sizes(exact, _dump(draw)) for draw in draws], path)


def _sizes(exact: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> dict[str, Size]:
    """Returns a draw's differences."""
    for name, value in exact.items():
        counterpart = values.get(name)
        if counterpart is None or counterpart.shape != value.shape or counterpart.dtype != value.dtype:
            raise AnyrankError(f"{name} is not in every run of one rank with the same shape: what the step does "
                               "depends on the last bits of its values")
    return {name: size_of(value, values[name]) for name, value in exact.items()}


def _write(exact: dict[str, torch.Tensor], draws: typing.Sequence[dict[str, Size]], path: Path) -> dict[str, Allowance]:
    allowed, rows = {}, {}
    for name, value in exact.items():
        finite = value.double()[value.isfinite()].abs()
        largest = finite.max().item() if finite.numel() else 0.0
        spread = max((draw[name].largest for draw in draws), default=0.0)
        factor = SAFETY if value.numel() > 1 else SAFETY_SINGLE
        allowed[name] = Allowance(factor * spread + torch.finfo(value.dtype).eps * largest, largest)
        rows[name] = allowed[name].allowed, [draw[name] for draw in draws]
    write_allowances(path, rows)
    return allowed


def write_allowances(path: Path, rows: typing.Mapping[str, tuple[float, typing.Sequence[Size]]]) -> None:
    """Writes the file for `sensitivity=`: how much an element of each tensor may be off, and the sizes of draws, of
    which all tensors have equally many or none."""
    entries, draw_count = {}, max((len(sizes) for _, sizes in rows.values()), default=0)
    for name, (allowed, sizes) in rows.items():
        entries[name] = _safetensors.Entry("F64", (), memoryview(struct.pack("<d", allowed)))
        numbers = [x for size in sizes for x in size]
        if numbers:
            entries[DRAWN + name] = _safetensors.Entry("F64", (len(sizes), len(Size._fields)),
                                                       memoryview(struct.pack(f"<{len(numbers)}d", *numbers)))
    _safetensors.write(path, entries, {"format": "pt", "anyrank.allows": "the run's own formats",
                                       "anyrank.seeds": str(draw_count), "anyrank.safety": f"{SAFETY:g}"})


def measure(run: typing.Callable[[pathlib.Path, typing.ContextManager[object]], object], path: Path,
            draws: int = 19) -> dict[str, Allowance]:
    """Measures what rounding does to a step, for `anyrank verify --normal` and `--sensitivity`, and writes it to path.

        def run(folder, rounding):                # the same weights, batch and seed each time
            model, optimizer = build()
            with anyrank.capture(model, folder, optimizer), rounding:
                step(model)

        anyrank.rounding.measure(run, "allowed.safetensors")

    `run` is called twice without errors, then `draws` times with them. Only sizes of differences are kept. A right run
    is then called not normal at most once in draws + 1.
    """
    if draws < 2:
        raise ValueError(f"draws={draws}: two or more runs tell what is usual")
    with tempfile.TemporaryDirectory(prefix="anyrank-rounding-") as folder:
        root = pathlib.Path(folder)
        run(root / "one", contextlib.nullcontext())
        exact, sizes = _dump(root / "one"), []
        if not exact:
            raise AnyrankError("the run wrote nothing into the folder that it is given: it has to capture a step there")
        run(root / "again", contextlib.nullcontext())
        repeat_sizes = _sizes(exact, _dump(root / "again"))
        unstable_name = next((name for name in repeat_sizes if repeat_sizes[name].largest > 0), None)
        if unstable_name is not None:
            raise AnyrankError(
                f"the run has other values when it is made again, first in {unstable_name}: it has to begin "
                "with the same weights, batch and seed"
            )
        for draw in range(1, 1 + draws):
            run(root / "drawn", Noise(draw))
            sizes.append(_sizes(exact, _dump(root / "drawn")))
            shutil.rmtree(root / "drawn")
        return _write(exact, sizes, path)
