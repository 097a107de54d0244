# SPDX-License-Identifier: Apache-2.0
"""Modules that import numpy are left out where there is none."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("numpy") else ["test_explain_*"]
