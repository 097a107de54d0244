#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long `anyrank verify` of one build takes, and of another, on dumps that differ in nearly every tensor.

    bench/verify_times.py OLD NEW [REPETITIONS]

OLD writes the dumps. The commands take turns, so that what else the machine does meets both; medians, and that of the ratio of neighbours.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
GRADS = ["grads", "llama-demo", "--input", "tests/golden/llama-gqa-tiny/batch.safetensors", "--activations"]
BROKEN = ["--inject", "embedding_edge_twice", "--per-rank", "--tp", "2"]
RUNS = {"right": [], "native": ["--numerics", "native"], "broken": BROKEN, "broken on 4": [*BROKEN, "--dp", "2"]}
# What is compared with the first: a file, or a folder of all ranks'.
AGAINST = {"rounding everywhere": "native/activations.safetensors", "a mistake at the start, 2 ranks": "broken/ranks",
           "a mistake at the start, 4 ranks": "broken on 4/ranks"}


def run(binary, *words):
    done = subprocess.run([binary, *words], cwd=ROOT, env={"ANYRANK_DATA": str(ROOT / "src/data"), **os.environ},
                          capture_output=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr.decode())


def main():
    binaries, repetitions = [os.path.abspath(path) for path in sys.argv[1:3]], int((sys.argv[3:] or [31])[0])
    with tempfile.TemporaryDirectory(prefix="anyrank-verify-times-") as folder:
        for name, words in RUNS.items():
            run(binaries[0], *GRADS, *words, "--out", f"{folder}/{name}")
        print(f"{'':34} {'old':>9} {'new':>9} {'new/old':>8}")
        for what, other in AGAINST.items():
            times = [[], []]
            for k in range(2 * repetitions):
                begun = time.perf_counter()
                run(binaries[k % 2], "verify", f"{folder}/right/activations.safetensors", f"{folder}/{other}")
                times[k % 2].append(time.perf_counter() - begun)
            old, new = map(statistics.median, times)
            ratio = statistics.median(b / a for a, b in zip(*times))
            print(f"{what:34} {1e3 * old:6.1f} ms {1e3 * new:6.1f} ms {ratio:8.3f}")


if __name__ == "__main__":
    main()
