# SPDX-License-Identifier: Apache-2.0
"""Watches a run while it goes: each captured step is sketched, and held against the rules of every right run."""

from __future__ import annotations

import os
import pathlib
import typing
import warnings

import torch

from anyrank._errors import AnyrankError
from anyrank.capture._capture import Capture
from anyrank.explain.facts import FILE, read_model
from anyrank.watch import states_of, tensors_of
from anyrank.watch_rules import Finding, Step, Watched, steps_agree

VALUES = ("init", "fwd", "bwd", "grad", "new", "m", "v", "buffer", "clip")


class Watch(Capture):
    """with anyrank.watch(model, optimizer, every=100): train(). Every `every`-th step is held against the rules of
    watch.md, by the first rank.

    folder     of the sketches, which all ranks reach; each step's are written over those of the one before
    on_finding  is called with each Finding, on the first rank; default: warns
    further arguments  as of anyrank.capture

    findings: all of them, on the first rank; metrics(): what of them a logger takes; notes: warnings, and what is odd
    and right in some runs.

    Where a step cannot be watched, as ranks have left, the run goes on without the watch, which says so once.
    """

    def __init__(self, model: typing.Any, optimizer: typing.Any = None, *, every: int = 100,
                 folder: str | os.PathLike[str] = "anyrank-watch",
                 on_finding: typing.Callable[[Finding], object] | None = None, **further: typing.Any) -> None:
        super().__init__(model, folder, optimizer, keep="sketch", every=every, **{"values": VALUES, **further})
        self.findings: list[Finding] = []
        self._on_finding = on_finding or (lambda found: warnings.warn(f"anyrank.watch: {found}", stacklevel=2))
        self._watched = Watched()
        self._eager = False
        self._unread: list[int] = []  # steps that are written and not judged, on the first rank

    def __enter__(self) -> Watch:
        self.start()
        return self

    def _end_step(self) -> None:
        try:
            super()._end_step()
            if self._exchange is not None:
                while self._unread and self._exchange.have_reached("written", self._unread[0], range(self._ranks()[1])):
                    self._judge(self._unread.pop(0))
        except AnyrankError as error:
            self._warn(f"anyrank.watch: the run goes on without it: {error}")
            self._abandon(str(error))

    def start(self) -> Watch:
        super().start()
        self._stand()
        return self

    def before_update(self, optimizer: typing.Any) -> None:
        super().before_update(optimizer)
        self._stand()

    def _next_step(self) -> None:
        super()._next_step()
        self._stand()

    def _let_go(self) -> None:
        super()._let_go()
        self._stand()

    def _stand(self) -> None:
        """Lets a model under torch.compile run as it is written in the next pass if that is captured, so that others
        stay compiled: what was compiled with hooks in it keeps them. From PyTorch 2.6 on."""
        set_stance = getattr(torch.compiler, "set_stance", None)
        eager = self._running and self._step + int(self._over) in self._chosen
        if set_stance is not None and eager != self._eager:
            set_stance("force_eager" if eager else "default")
            self._eager = eager

    def _on_written(self) -> None:
        if self._exchange is not None:
            self._exchange.leave("written", self._written)
        if self._ranks()[0] == 0:
            self._unread.append(self._written)
            if not self._watched.facts:
                self._watched.learn(self._facts.known())

    def _is_read(self) -> bool:
        return self._exchange is not None and self._exchange.have_reached("read", self._written, [0])

    def _judge(self, step: int) -> None:
        """Holds a step, which all ranks have written, against the rules."""
        folder = pathlib.Path(self._folder)
        entries, ranks = tensors_of(folder)
        self._tell(self._watched.step(step, [entry for entry in entries if entry["step"] == step],
                                      states_of(folder, ranks).get(step, ())))
        if self._exchange is not None:
            self._exchange.leave("read", step)

    def _tell(self, found: typing.Iterable[Finding]) -> None:
        for finding in found:
            self.findings.append(finding)
            self._on_finding(finding)
        self.notes += [text for text in self._watched.notes if text not in self.notes]

    def stop(self) -> None:
        last_step, running = self._step, self._is_running()
        try:
            super().stop()
            exchange, self._exchange = self._exchange, None  # whose ranks have all come to their end
            while running and self._unread:
                self._judge(self._unread.pop(0))
            self._exchange = exchange
        except AnyrankError as error:
            self._warn(f"anyrank.watch: {error}")
        path = pathlib.Path(self._folder) / FILE
        if self._ended and self._ranks()[0] == 0 and path.is_file():
            self._watched.learn(read_model(path))
            self._tell(steps_agree(self._watched, Step(last_step, {}, {})))

    def metrics(self) -> dict[str, typing.Any]:
        """For W&B, TensorBoard and the like."""
        return {"anyrank/findings": len(self.findings),
                "anyrank/first": str(self.findings[0]) if self.findings else ""}
