# SPDX-License-Identifier: Apache-2.0
"""Modules that import numpy, or torch, are left out where there is none."""

import importlib.util

NEEDS = {"numpy": "test_explain_*", "torch": "test_explain_own_module.py"}
collect_ignore_glob = [files for module, files in NEEDS.items() if importlib.util.find_spec(module) is None]
