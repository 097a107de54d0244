#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `import anyrank` takes: processor time and memory of fresh interpreters with it, less those without, medians.

    bench/import_time.py [--python INTERPRETER] [--runs N]

The interpreter finds the package where it is installed, else in python/.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys

CODES = {"import anyrank": "import anyrank",
         "import anyrank, and open_dump": "import anyrank; anyrank.open_dump",
         "import anyrank, and verify": "import anyrank; anyrank.verify"}


def cost(python, code):
    """(processor milliseconds, megabytes) of one interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).resolve().parents[1] / "python")}
    process = subprocess.Popen([python, "-c", code], env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    if status:
        sys.exit(f"{python} -c '{code}' failed")
    return 1e3 * (usage.ru_utime + usage.ru_stime), usage.ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(description="what import anyrank takes")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--runs", type=int, default=21)
    given = parser.parse_args()
    runs = {code: [] for code in ["pass", *CODES.values()]}
    for _ in range(given.runs):  # one after another, so that all see the same machine
        for code, costs in runs.items():
            costs.append(cost(given.python, code))
    bare = [statistics.median(part) for part in zip(*runs["pass"])]
    print(f"the interpreter alone: {bare[0]:.1f} ms of processor time, {bare[1]:.1f} MB")
    for name, code in CODES.items():
        own = [statistics.median(part) for part in zip(*runs[code])]
        print(f"{name}: {own[0] - bare[0]:.1f} ms of processor time more, {own[1] - bare[1]:.1f} MB")


if __name__ == "__main__":
    main()
