# SPDX-License-Identifier: Apache-2.0
"""Watches a run while it goes: each captured step is sketched, and held against the rules of every right run."""

from __future__ import annotations

import os
import pathlib
import typing
import warnings

from anyrank._library import given_json, library
from anyrank.capture._capture import Capture
from anyrank.capture._sketches import SketchFiles
from anyrank.watch import Finding, Watched

VALUES = ("init", "fwd", "bwd", "grad", "new", "m", "v", "buffer", "clip")


class Watch(Capture):
    """with anyrank.watch(model, optimizer, every=100): train(). Every `every`-th step is held against the rules of
    watch.md, by the first rank.

    folder     of the sketches, which all ranks reach; each step's are written over those of the one before
    on_finding  is called with each Finding, on the first rank; default: warns
    further arguments  as of anyrank.capture

    findings: all of them, on the first rank; metrics(): what of them a logger takes.
    """

    def __init__(self, model: typing.Any, optimizer: typing.Any = None, *, every: int = 100,
                 folder: str | os.PathLike[str] = "anyrank-watch",
                 on_finding: typing.Callable[[Finding], object] | None = None, **further: typing.Any) -> None:
        super().__init__(model, folder, optimizer, keep="sketch", every=every, **{"values": VALUES, **further})
        self.findings: list[Finding] = []
        self._on_finding = on_finding or (lambda found: warnings.warn(f"anyrank.watch: {found}", stacklevel=2))
        self._watched = Watched()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def _append_step(self) -> None:
        step = self._step
        super()._append_step()
        if self._exchange is None or self._record is None:
            return
        assert isinstance(self._record.files, SketchFiles)
        self._record.files.first = True  # written over this step's
        self._exchange.tell(None)  # all ranks have written
        if self._ranks()[0] == 0:
            frozen = [name for name, p in self._parameters if not p.requires_grad]
            self._watched.facts = {"learning_rates": self._facts.rates, "frozen": frozen}
            run = given_json(library()["sketches_json"](os.fsencode(pathlib.Path(self._folder))))
            for found in self._watched.step(step, [entry for entry in run["tensors"] if entry["step"] == step]):
                self.findings.append(found)
                self._on_finding(found)
        self._exchange.tell(None)  # no rank writes again before they are read

    def metrics(self) -> dict[str, typing.Any]:
        """For W&B, TensorBoard and the like."""
        return {"anyrank/findings": len(self.findings),
                "anyrank/first": str(self.findings[0]) if self.findings else ""}
