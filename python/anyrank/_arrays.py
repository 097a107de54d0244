# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch, arrays of numpy and other buffers as (dtype, shape, bytes), and back, without a copy where the
memory already is what a file would hold."""

from __future__ import annotations

import ctypes
import struct
import sys
import typing

from anyrank._safetensors import SIZES, Entry

# The names that numpy and torch have for the types of safetensors files. float8 is torch's, and that of ml_dtypes.
NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
         "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
         "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64"}
OF_DTYPE = {dtype: name for name, dtype in NAMES.items()}
_FORMATS = {"d": "F64", "f": "F32", "e": "F16", "q": "I64", "l": "I64", "i": "I32", "h": "I16", "b": "I8", "B": "U8",
            "H": "U16", "I": "U32", "Q": "U64", "L": "U64", "?": "BOOL"}


def is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_numpy(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def entry_of(value: typing.Any) -> Entry:
    """Converts a tensor, array, buffer, number or nested list of numbers. complex128 becomes float64 with a last
    dimension of 2. Python's floats become F64, its integers I64. Errors: TypeError for anything else, and for types
    that no file can hold."""
    if isinstance(value, Entry):
        return value
    if is_torch(value):
        return _of_torch(value)
    if is_numpy(value):
        return _of_numpy(value)
    if isinstance(value, (bool, int, float, list, tuple)):
        return _of_numbers(value)
    if hasattr(value, "__array__"):
        import numpy

        return _of_numpy(numpy.asarray(value))
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(f"{type(value).__name__} is no tensor: give a tensor of torch, an array of numpy, a buffer or "
                        "numbers") from None
    if view.format not in _FORMATS or not view.c_contiguous:
        raise TypeError(f"a buffer of format {view.format!r} is no contiguous array of numbers")
    return Entry(_FORMATS[view.format], tuple(view.shape or ()), view.cast("B"))


def _of_torch(value: typing.Any) -> Entry:
    torch = sys.modules["torch"]
    if hasattr(value, "full_tensor"):  # a DTensor; all its ranks have to do this
        value = value.full_tensor()
    if value.layout is not torch.strided or value.is_quantized:
        raise TypeError(f"a tensor of {value.layout} and {value.dtype}: give a dense one")
    if value.is_meta:
        raise TypeError("a tensor on the meta device has no values")
    tensor = value.detach()
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    name = str(tensor.dtype).replace("torch.", "")
    if name not in NAMES:
        raise TypeError(f"tensors of {tensor.dtype} cannot be compared")
    shape, size, word = tuple(tensor.shape), tensor.numel() * tensor.element_size(), tensor.element_size()
    if size == 0:
        return Entry(NAMES[name], shape, memoryview(b""))
    if sys.byteorder == "big" and word > 1:
        word = word // 2 if tensor.is_complex() else word
        tensor = tensor.view(-1).view(torch.uint8).view(-1, word).flip(1).contiguous()
    buffer = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    buffer.owner = tensor  # the memory is there for as long as the view
    return Entry(NAMES[name], shape, memoryview(buffer).cast("B"))


def _of_numpy(value: typing.Any) -> Entry:
    numpy = sys.modules["numpy"]
    array = numpy.asarray(value)
    shape = tuple(array.shape)
    if array.dtype.name == "complex128":
        shape = (*shape, 2)
        array = numpy.ascontiguousarray(array).view(array.real.dtype)
    if array.dtype.name not in NAMES:
        raise TypeError(f"arrays of {array.dtype} cannot be compared")
    array = numpy.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return Entry(NAMES[array.dtype.name], shape, memoryview(array.reshape(-1).view(numpy.uint8)))


def _of_numbers(value: typing.Any) -> Entry:
    shape: list[int] = []
    rows = [value]
    while rows and isinstance(rows[0], (list, tuple)):
        shape.append(len(rows[0]))
        if any(not isinstance(row, (list, tuple)) or len(row) != shape[-1] for row in rows):
            raise TypeError("a nested list whose parts differ in length is no tensor")
        rows = [element for row in rows for element in row]
    if any(not isinstance(element, (bool, int, float)) for element in rows):
        raise TypeError("a list of what are no numbers is no tensor")
    if rows and all(isinstance(element, bool) for element in rows):
        return Entry("BOOL", tuple(shape), memoryview(bytes(rows)))
    is_integral = all(isinstance(element, int) for element in rows)
    if is_integral and any(not -2**63 <= element < 2**63 for element in rows):
        raise TypeError("a list of integers that 64 bits do not hold is no tensor")
    data = struct.pack(f"<{len(rows)}{'q' if is_integral else 'd'}", *rows)
    return Entry("I64" if is_integral else "F64", tuple(shape), memoryview(data))


def torch_of(entry: Entry) -> typing.Any:
    """Returns a tensor of torch, which shares the memory if the memory is writable and aligned."""
    import torch

    dtype = getattr(torch, _known(entry))
    if entry.data.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    address = ctypes.addressof(ctypes.c_char.from_buffer(entry.data)) if not entry.data.readonly else 1
    data = entry.data if address % SIZES[entry.dtype] == 0 else bytearray(entry.data)
    return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)


def _known(entry: Entry) -> str:
    if entry.dtype not in OF_DTYPE:
        raise TypeError(f"{entry.dtype} is no type of torch or numpy")
    return OF_DTYPE[entry.dtype]


def numpy_of(entry: Entry) -> typing.Any:
    """Returns an array of numpy that shares the memory. Types that numpy lacks, such as bfloat16, become float32 with
    the same values, unless the package ml_dtypes is loaded."""
    import numpy

    name = _known(entry)
    if hasattr(numpy, name) or name == "bool":
        return numpy.frombuffer(entry.data, dtype=name).reshape(entry.shape)
    extra = sys.modules.get("ml_dtypes")
    if extra is not None:
        return numpy.frombuffer(entry.data, dtype=getattr(extra, name)).reshape(entry.shape)
    if entry.dtype != "BF16":
        raise TypeError(f"numpy has no type for {entry.dtype}: import ml_dtypes, or read it as a tensor of torch")
    bits = numpy.frombuffer(entry.data, dtype="<u2").astype("<u4") << 16
    return bits.view("<f4").reshape(entry.shape)


def same_bytes(a: Entry, b: Entry) -> bool:
    """Returns whether type, shape and bytes are the same."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    words = a.data.nbytes // 8 * 8  # a memoryview is compared element by element
    bytes_a, bytes_b = (memoryview(entry.data).cast("B") for entry in (a, b))
    return bytes_a[words:] == bytes_b[words:] and bytes_a[:words].cast("Q") == bytes_b[:words].cast("Q")


# The code to read a float's bits by; NaN is what is above this, without the sign. (E4M3 has one NaN, E8M0 no sign.)
_NAN = {"F64": ("Q", 0x7FF0 << 48), "F32": ("I", 0x7F80 << 16), "C64": ("I", 0x7F80 << 16), "F16": ("H", 0x7C00),
        "BF16": ("H", 0x7F80), "F8_E4M3": ("B", 0x7E), "F8_E5M2": ("B", 0x7C), "F8_E8M0": ("B", 0xFE)}


def has_nan(entry: Entry) -> bool:
    if entry.dtype not in _NAN or entry.data.nbytes == 0:
        return False
    code, above = _NAN[entry.dtype]
    view = memoryview(entry.data.cast("B")).cast(typing.cast("typing.Literal['B']", code))
    numpy = sys.modules.get("numpy")
    sign = 0 if entry.dtype == "F8_E8M0" else 1 << (8 * view.itemsize - 1)
    if numpy is not None:
        bits = numpy.frombuffer(view, dtype=f"u{view.itemsize}")
        return bool(((bits & ~bits.dtype.type(sign)) > above).any())
    return any(bits & ~sign > above for bits in view)
