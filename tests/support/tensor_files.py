# SPDX-License-Identifier: Apache-2.0
"""safetensors files, written and read without anyrank: name -> (dtype, shape, bytes)."""

import json
import pathlib
import struct


def packed(header, data=b"", length=None):
    """A file's bytes from its header, as text, bytes or an object, without a look at whether it makes sense."""
    if not isinstance(header, (bytes, str)):
        header = json.dumps(header)
    text = header.encode("utf-8") if isinstance(header, str) else header
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def unpacked(path):
    """The header and the data."""
    raw = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8:8 + length]), raw[8 + length:]


def read(path):
    header, data = unpacked(path)
    return {name: [e["dtype"], e["shape"], data[e["data_offsets"][0]:e["data_offsets"][1]]]
            for name, e in header.items() if name != "__metadata__"}


def joined(tensors, metadata=None):
    """A file's bytes; its header ends at a multiple of 8."""
    header, data = {"__metadata__": metadata} if metadata else {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header)
    return packed(text + " " * (-len(text) % 8), data)


def write(path, tensors, metadata=None):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(joined(tensors, metadata))
    return path
