# SPDX-License-Identifier: Apache-2.0
"""Modules computed again from what they read, with one thing changed: attention, its angles, norms, products."""

from __future__ import annotations

import typing

from anyrank.explain.patterns import Pattern
from anyrank.explain.replay import angles, changes, gradients, norms, products
from anyrank.explain.tensors import Case

CAUSES = (*angles.CAUSES, *changes.CAUSES, *gradients.CAUSES, *norms.CAUSES, *products.CAUSES)


def patterns(case: Case) -> typing.Iterator[Pattern]:
    for module in (angles, products, norms, changes, gradients):
        yield from module.patterns(case)
