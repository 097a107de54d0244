#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Random models of transformers have PyTorch's losses, logits and gradients, as golden/compare_random.py compares.

ANYRANK names another command than build/anyrank. Exit status 77 (skipped) where there is no torch or transformers."""

import importlib.util
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "golden/compare_random.py"


def main():
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers", "safetensors")):
        print("no torch or transformers here (scripts/install_deps.sh --pytorch)")
        sys.exit(77)
    sys.exit(subprocess.run([sys.executable, SCRIPT, "--models", "32"], check=False).returncode)


if __name__ == "__main__":
    main()
