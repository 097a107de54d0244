#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of the pages that take long; pages_test.py looks at the others."""

import sys

import pages_test

if __name__ == "__main__":
    sys.exit(pages_test.main(["--long", *sys.argv[1:]]))
