# SPDX-License-Identifier: Apache-2.0
"""A capture that tells its Watcher when a step is captured and when all steps are."""

from __future__ import annotations

import typing

from anyrank.capture import Capture

if typing.TYPE_CHECKING:
    from anyrank.compare.script import Watcher


class ScriptCapture(Capture):
    """The capture of an unchanged script, which a Watcher starts and which ends the process."""

    def __init__(self, watcher: Watcher, model: typing.Any, folder: str, **options: typing.Any) -> None:
        super().__init__(model, folder, **options)
        self._watcher = watcher
        self.is_complete = False  # files are written
        self.captured_steps = 0

    def rank(self) -> int:
        return self._ranks()[0]

    def end_updated_step(self) -> None:
        """Ends a step whose update was made. A pipeline's stage does not wait for the next pass: its inputs come from
        a rank that may have ended."""
        if self._running and self._passes and self._is_over():
            self._end_step()

    def _next_step(self) -> None:
        self.captured_steps += 1
        self._watcher.on_step(self._step)
        super()._next_step()

    def stop(self) -> None:
        was_running = self._is_running()
        super().stop()
        if was_running and not self._running:
            self.is_complete = True
            self._watcher.on_complete()
