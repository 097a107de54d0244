#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times `anyrank verify` against `cmp` on the same two files in the page cache: bench/verify_speed.py [options]

Makes the two files (fp32 tensors of 64 MiB each), reads them once so that they are in the page cache, then runs both
commands one after the other, over and over, and prints the medians, their ratio and the most memory that verify had: all
of it, and without pages of the files. With --changed verify's second file differs from the first; cmp, which stops at
the first difference, still reads two that are the same. Exit status 1 where verify is slower than half of cmp, or takes
200 MB or more of its own.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TENSOR_BYTES = 64 << 20
OWN_LIMIT = 200e6


def floats(multiplier):
    """Floats between 1 and 2: any 23 bits below the exponent of 1."""
    return b"".join(struct.pack("<I", 0x3f800000 | (i * multiplier & 0x7fffff)) for i in range(1 << 18))


def write(path, total, changed=None):
    """A file of `total` bytes of tensors, of which `changed` are others."""
    count = max(total // TENSOR_BYTES, 1)
    header = {f"layers.{i}.weight": {"dtype": "F32", "shape": [4096, TENSOR_BYTES // 4 // 4096],
                                     "data_offsets": [i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES]} for i in range(count)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    block, other = floats(2654435761), floats(2246822519)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(count * TENSOR_BYTES // len(block)):
            file.write(other if changed == "everything" else block)
        if changed == "element":
            file.seek(-4096, os.SEEK_CUR)
            file.write(struct.pack("<f", 1.5))
        elif changed == "shard":
            file.seek(-TENSOR_BYTES // 4, os.SEEK_CUR)
            file.write(bytes(TENSOR_BYTES // 4))
        elif changed == "tensor":
            file.seek(-TENSOR_BYTES, os.SEEK_CUR)
            for _ in range(TENSOR_BYTES // len(other)):
                file.write(other)


def memory_of(pid, most):
    """Follows a process: the most of what it holds in all, and of its own, in bytes."""
    while True:
        try:
            lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return
        fields = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmHWM", "RssAnon"))}
        if not fields:
            return
        most["all"] = max(most["all"], int(fields.get("VmHWM", 0)) * 1024)
        most["own"] = max(most["own"], int(fields.get("RssAnon", 0)) * 1024)
        time.sleep(0.005)


def run(command, most=None):
    start = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    if most is not None:
        follower = threading.Thread(target=memory_of, args=(child.pid, most))
        follower.start()
    child.wait()
    seconds = time.monotonic() - start
    if most is not None:
        follower.join()
    if child.returncode not in (0, 1):
        sys.exit(f"{' '.join(command)}: exit status {child.returncode}")
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anyrank", default=str(ROOT / "build/anyrank"))
    parser.add_argument("--folder", help="where the two files go (default: a temporary folder)")
    parser.add_argument("--bytes", type=float, default=2 * 2**30, help="of each file (default 2 GiB)")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="of verify (default: the cores)")
    parser.add_argument("--changed", choices=("element", "shard", "tensor", "everything"),
                        help="what verify finds to be another: an element near the end, a quarter of the last tensor "
                             "(zeros), the last tensor, or every element of every tensor (default: nothing)")
    options = parser.parse_args()
    folder = pathlib.Path(options.folder or tempfile.mkdtemp(prefix="anyrank-verify-"))
    files = [str(folder / name) for name in ("reference.safetensors", "same.safetensors")]
    other = str(folder / "changed.safetensors") if options.changed else files[1]
    verify = [options.anyrank, "verify", files[0], other]
    if options.threads:
        verify += ["--threads", str(options.threads)]
    try:
        for path in files:
            write(path, int(options.bytes))
        if options.changed:
            write(other, int(options.bytes), options.changed)
        size = os.path.getsize(files[0])
        run(["cmp", *files])  # into the page cache
        run(["cmp", other, other])
        seconds = {"cmp": [], "verify": []}
        most = {"all": 0, "own": 0}
        for _ in range(options.runs):
            seconds["cmp"].append(run(["cmp", *files]))
            seconds["verify"].append(run(verify))
        run(verify, most)
    finally:
        for path in {*files, other}:
            pathlib.Path(path).unlink(missing_ok=True)
        if not options.folder:
            shutil.rmtree(folder)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name:7} {median[name]:.3f} s (from {min(values):.3f} to {max(values):.3f}), "
              f"{2 * size / median[name] / 1e9:.2f} GB/s of both files")
    speed = median["cmp"] / median["verify"]
    print(f"memory of verify: {most['own'] / 1e6:.1f} MB of its own, {most['all'] / 1e6:.1f} MB with pages of the files")
    print(f"verify runs at {speed:.2f} of cmp's speed on two files of {size / 1e9:.2f} GB")
    return 0 if speed >= 0.5 and most["own"] < OWN_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
