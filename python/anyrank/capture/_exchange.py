# SPDX-License-Identifier: Apache-2.0
"""How ranks tell each other the sizes of what they hold, when all is captured.

Through the store by which the process group was made, and not by a collective: a rank that left with an exception says
so there, and the others learn it at once instead of waiting for it.
"""

from __future__ import annotations

import json
import time
import typing
import weakref
import zlib

from anyrank._errors import AnyrankError

MOST_SAID = 4  # rounds that a rank may say before it hears the first of them
LONGEST_PAUSE = 0.25  # seconds between two looks for what another rank has to say
# Of each process group's store: how many captures into each folder this rank has made, and those that it has ended.
_made: weakref.WeakKeyDictionary[typing.Any, dict[str, int]] = weakref.WeakKeyDictionary()
_ended: weakref.WeakKeyDictionary[typing.Any, set[str]] = weakref.WeakKeyDictionary()


class Alone:
    """One rank, or one that cannot reach the others."""

    def __init__(self) -> None:
        self.said: list[typing.Any] = []

    def say(self, value: typing.Any) -> int:
        self.said.append(value)
        return len(self.said) - 1

    def hear(self, number: int) -> list[typing.Any]:
        value, self.said[number] = self.said[number], None
        return [value]

    def is_said(self, number: int) -> bool:
        return True

    def tell(self, value: typing.Any) -> list[typing.Any]:
        return [value]

    def leave(self, counter: str, value: int) -> None:
        pass

    def have_reached(self, counter: str, value: int, ranks: typing.Iterable[int]) -> bool:
        return True

    def failed(self, why: str) -> None:
        pass

    def end(self) -> None:
        pass


class Store:
    """The exchange of one capture, which all ranks know by its folder, as they spell it, and how many there were into
    it before: what a rank makes alone does not speak in another's."""

    def __init__(self, rank: int, world: int, timeout: float, folder: str) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        self.store = _get_default_store()
        self.rank, self.world, self.timeout, self.round = rank, world, timeout, 0
        self.captures, self.ended = _made.setdefault(self.store, {}), _ended.setdefault(self.store, set())
        self.captures[folder] = self.captures.get(folder, 0) + 1
        self.name = f"{folder}#{self.captures[folder]}"

    def _key(self, kind: object, rank: int, name: str = "") -> str:
        return f"anyrank-capture-{name or self.name}-{kind}-{rank}"

    def _say(self, key: str, value: dict[str, typing.Any]) -> None:
        self.store.set(key, zlib.compress(json.dumps(value).encode(), 1))

    def _stand(self, capture_name: str) -> None:
        """Lets the others know at the end of which capture this rank waits; "": of none."""
        self.ended.add(self.name)
        self.store.set(f"anyrank-capture-at-{self.rank}", capture_name)

    def _get(self, key: str, rank: int) -> bytes:
        limit, pause = time.monotonic() + self.timeout, 1e-3
        why = f"in {self.timeout:g} s (timeout=)"
        try:
            while time.monotonic() < limit:
                if self.store.check([key]):
                    return bytes(self.store.get(key))
                self._check_place(rank, key)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        except RuntimeError as error:
            why = f"before the process group's store was gone ({str(error).splitlines()[0]})"
        raise AnyrankError(f"rank {rank} did not come to the end of the capture {why}: every rank has to capture, and "
                           "to leave the block")

    def _check_place(self, rank: int, key: str) -> None:
        """Refuses the capture at whose end a rank waits for this one, if that is another than this one waits at."""
        place = f"anyrank-capture-at-{rank}"
        capture_name = self.store.get(place).decode() if self.store.check([place]) else ""
        if (
            capture_name
            and capture_name != self.name
            and capture_name not in self.ended
            and not self.store.check([key])
        ):
            self._refuse(capture_name)

    def _refuse(self, name: str) -> None:
        """Says that this rank does not come to the end of a capture that it has not made, and counts that as made."""
        folder, _, number = name.rpartition("#")
        self.captures[folder] = max(int(number), self.captures.get(folder, 0))
        self.ended.add(name)
        self._say(self._key(0, self.rank, name), {"instead": self.name})

    def tell(self, value: typing.Any) -> list[typing.Any]:
        """Exchanges a value. Returns all ranks' values in the order of ranks."""
        return self.hear(self.say(value))

    def say(self, value: typing.Any) -> int:
        """Does the first half of tell() and waits for nobody: returns the number by which the values are heard. At most
        MOST_SAID may be unheard."""
        self._say(self._key(self.round, self.rank), {"value": value})
        self.round += 1
        return self.round - 1

    def is_said(self, number: int) -> bool:
        """Returns whether hear() has nothing to wait for."""
        return bool(self.store.check([self._key(number, rank) for rank in range(self.world)]))

    def hear(self, number: int) -> list[typing.Any]:
        self._stand(self.name)
        heard = []
        for rank in range(self.world):
            reply = json.loads(zlib.decompress(self._get(self._key(number, rank), rank)))
            if "failed" in reply:
                raise AnyrankError(f"rank {rank} left the capture with an error, so no rank's file is complete: "
                                   f"{reply['failed']}")
            if "instead" in reply:
                if reply["instead"] not in self.ended:
                    self._refuse(reply["instead"])
                raise AnyrankError(f"rank {rank} is at the end of its capture {reply['instead']}, rank {self.rank} at "
                                   f"that of {self.name} (folder#number): every rank has to make the same captures, "
                                   "into folders that it names alike")
            heard.append(reply["value"])
        if number > MOST_SAID:  # each rank has said this round's, and has heard all but the last ones before it
            self.store.delete_key(self._key(number - MOST_SAID - 1, self.rank))
        return heard

    def leave(self, counter: str, value: int) -> None:
        """Leaves a number that others may look at."""
        self.store.set(self._key(counter, self.rank), str(value))

    def have_reached(self, counter: str, value: int, ranks: typing.Iterable[int]) -> bool:
        """Returns whether these ranks have left this number or a larger one; does not wait."""
        keys = [self._key(counter, rank) for rank in ranks]
        return bool(self.store.check(keys)) and all(int(self.store.get(key)) >= value for key in keys)

    def failed(self, why: str) -> None:
        """Says to those that come to their end that this rank has no file, after what it said before."""
        try:
            self._say(self._key(self.round, self.rank), {"failed": why})
            self._stand("")
        except RuntimeError:
            pass  # the store is gone, and with it those who would have asked

    def end(self) -> None:
        """Ends the exchange. The first rank, which may hold the store, leaves last, and leaves nothing for a later
        process group."""
        self._stand("")
        self.store.set(self._key("end", self.rank), b"1")
        for rank in range(self.world if self.rank == 0 else 0):
            self._get(self._key("end", rank), rank)
        for kind in (*range(self.round), "written", "read", "end") if self.rank == 0 else ():
            for rank in range(self.world):
                self.store.delete_key(self._key(kind, rank))
