# SPDX-License-Identifier: Apache-2.0
"""Which training steps are to be captured."""

from __future__ import annotations

import typing

from anyrank._errors import AnyrankError

Steps = typing.Union[None, int, typing.Iterable[int], typing.Callable[[int], bool]]


class Chosen:
    """steps: None is all; 3 or {1, 100} or range(1, 4) those, from 1; a function says of a number whether it is."""

    def __init__(self, steps: Steps) -> None:
        self.max_step: int | None = None
        self._function: typing.Callable[[int], bool]
        if steps is None:
            self._function = lambda step: True
        elif callable(steps):
            self._function = steps
        else:
            numbers = [steps] if isinstance(steps, int) else steps
            try:
                requested = frozenset(numbers)
            except TypeError:
                raise AnyrankError(f"steps: {steps!r} is neither a number, numbers nor a function") from None
            if not requested or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in requested):
                raise AnyrankError(f"steps: {steps!r} has to be step numbers, which count from 1")
            self.max_step, self._function = max(requested), requested.__contains__

    def __contains__(self, step: int) -> bool:
        return bool(self._function(step))

    def is_past(self, step: int) -> bool:
        """Whether none from this one on is wanted."""
        return self.max_step is not None and step > self.max_step
