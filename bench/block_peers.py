#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Native blocks of several builds of anyrank beside PyTorch with several BLAS libraries, in turns:

    bench/block_peers.py --anyrank build/anyrank --anyrank build/openblas/anyrank --torch "" --torch LIBRARY ...

--torch is what is preloaded into bench/torch_block.py's process (""; as PyTorch comes): PyTorch's wheels for x86-64 call
MKL's sgemm_, which a library with that symbol replaces (libopenblas.so.0, libblis.so.4), but for batches of products. On
an AMD processor MKL takes its kernels for AVX-512 if a preloaded library defines mkl_serv_intel_cpu_true to return 1:

    echo 'int mkl_serv_intel_cpu_true(void) { return 1; }' | cc -shared -fPIC -x c -o mkl_intel.so -

Prints the median and the smallest of each side's medians over the turns, and each build over the best PyTorch.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent


def rows_of(command, environment):
    with tempfile.TemporaryDirectory(prefix="anyrank-peers-") as folder:
        path = pathlib.Path(folder, "rows.json")
        subprocess.run([*command, "--json", str(path)], check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text(encoding="utf-8"))["rows"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anyrank", action="append", default=[], metavar="BINARY")
    parser.add_argument("--torch", action="append", default=[], metavar="LIBRARY")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--variants", default="eager,fused")
    o = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": str(o.threads), "OMP_WAIT_POLICY": "passive"}
    common = ["--threads", str(o.threads), "--repetitions", str(o.repetitions)]
    times = {}  # (block, side): seconds of each turn
    for _ in range(o.turns):
        for binary in o.anyrank:
            for row in rows_of([binary, "bench", "block", *common, "-q"], environment):
                if row["numerics"] == "native":
                    times.setdefault((row["block"], binary), []).append(row["seconds"])
        for library in o.torch:
            preloaded = " ".join(filter(None, (os.environ.get("LD_PRELOAD"), library)))
            command = [sys.executable, str(HERE / "torch_block.py"), *common, "--turns", "1", "--variants", o.variants]
            for row in rows_of(command, {**environment, "LD_PRELOAD": preloaded}):
                side = f"{row['side']} {pathlib.Path(library).name or 'as it comes'}"
                times.setdefault((row["block"], side), []).append(row["seconds"])
    for block in sorted({block for block, _ in times}):
        sides = {side: seconds for (of, side), seconds in times.items() if of == block}
        peers = [statistics.median(seconds) for side, seconds in sides.items() if side not in o.anyrank]
        for side, seconds in sides.items():
            median = statistics.median(seconds)
            over = f"  {median / min(peers):.2f} of the best PyTorch" if side in o.anyrank and peers else ""
            print(f"{block:6} {side:44} {1e3 * median:8.1f} ms, smallest {1e3 * min(seconds):8.1f} ms{over}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
