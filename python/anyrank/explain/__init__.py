# SPDX-License-Identifier: Apache-2.0
"""anyrank.explain: why two runs differ.

    python -m anyrank.explain REFERENCE OTHER --facts
"""
