# SPDX-License-Identifier: Apache-2.0
"""How ranks tell each other the sizes of what they hold, when all is captured.

Through the store by which the process group was made, and not by a collective: a rank that left with an exception says
so there, and the others learn it at once instead of waiting for it.
"""

from __future__ import annotations

import datetime
import json
import typing
import zlib

from anyrank._errors import AnyrankError

_numbers = {"next": 0}


class Alone:
    """One rank, or one that cannot reach the others."""

    def tell(self, value: typing.Any) -> list[typing.Any]:
        return [value]

    def failed(self, why: str) -> None:
        pass

    def end(self) -> None:
        pass


class Store:
    """The exchange of one capture: every rank makes them in the same order."""

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        self.store = _get_default_store()
        self.rank, self.world, self.timeout, self.round = rank, world, timeout, 0
        self.name = f"anyrank-capture-{_numbers['next']}"
        _numbers["next"] += 1

    def _key(self, kind: object, rank: int) -> str:
        return f"{self.name}-{kind}-{rank}"

    def _get(self, key: str, rank: int) -> bytes:
        try:
            self.store.wait([key], datetime.timedelta(seconds=self.timeout))
            return bytes(self.store.get(key))
        except RuntimeError as error:
            raise AnyrankError(f"rank {rank} did not come to the end of the capture in {self.timeout:g} s (timeout=): "
                               f"every rank has to capture, and to leave the block; {str(error).splitlines()[0]}"
                               ) from None

    def tell(self, value: typing.Any) -> list[typing.Any]:
        """What every rank says, in the order of ranks."""
        text = zlib.compress(json.dumps({"value": value}).encode(), 1)
        now, self.round = self.round, self.round + 1
        self.store.set(self._key(now, self.rank), text)
        told = []
        for rank in range(self.world):
            said = json.loads(zlib.decompress(self._get(self._key(now, rank), rank)))
            if "failed" in said:
                raise AnyrankError(f"rank {rank} left the capture with an error, so no rank's file is complete: "
                                   f"{said['failed']}")
            told.append(said["value"])
        return told

    def failed(self, why: str) -> None:
        """Says to those that come to their end that this rank has no file, after what it said before."""
        try:
            self.store.set(self._key(self.round, self.rank), zlib.compress(json.dumps({"failed": why}).encode()))
        except RuntimeError:
            pass  # the store is gone, and with it those who would have asked

    def end(self) -> None:
        """The first rank, which may be the store's home, leaves last."""
        self.store.set(self._key("end", self.rank), b"1")
        for rank in range(self.world if self.rank == 0 else 0):
            self._get(self._key("end", rank), rank)
