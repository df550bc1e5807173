"""What every rank of a process group says, compared: through the store that the group was made with.

Not by a collective, because ranks that are about to disagree may not meet in one. So a rank that has died, or never
came, is named after a time-out of one's own, with every backend. Imports torch when asked.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rlkernel_core.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
TIMEOUT: Final = 60.0  # seconds; importing torch on a slow file system takes ten
_ROUNDS: Final[Counter[str]] = Counter()  # exchanges so far by group and purpose: every rank counts the same


class Round:
    """One exchange: `say` once, then `hear`; whoever has nothing to do with the answers may leave after saying."""

    def __init__(self, purpose: str, group: ProcessGroup | None, timeout: float = TIMEOUT) -> None:
        from torch import distributed
        from torch.distributed import distributed_c10d
        from torch.distributed.distributed_c10d import PrefixStore

        self._purpose, self._timeout, self.said = purpose, timeout, False
        self._ranks, self._rank = distributed.get_process_group_ranks(group), distributed.get_rank()
        place = f"rlkernel/{purpose}/{','.join(map(str, self._ranks))}"
        default = distributed_c10d._get_default_store()  # noqa: SLF001 torch has no public name for it
        self._store: Any = PrefixStore(f"{place}/{_ROUNDS[place]}", default)
        _ROUNDS[place] += 1

    def say(self, mine: Mapping[str, str]) -> None:
        """What this rank has to say."""
        text = json.dumps(dict(mine), sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]  # most ranks say the same: it travels once
        self._asked(lambda: self._store.set(f"said/{name}", text))
        self._asked(lambda: self._store.set(str(self._rank), name))
        self.said = True

    def hear(self) -> dict[int, dict[str, str]]:
        """What every rank of the group said, by rank in the default group.

        A few requests a rank however many there are: a thousand ranks ask one store.

        Raises:
            RankError: a rank did not speak in time, or the one that holds the store is gone; the message names it.
        """
        keys = [str(rank) for rank in self._ranks]
        try:
            self._store.wait(keys, timedelta(seconds=max(self._timeout, 0.001)))
        except RuntimeError as late:  # stores have errors of several kinds, all of them RuntimeErrors
            silent = [r for r in self._ranks if not self._asked(partial(self._store.check, [str(r)]))]
            if silent:
                raise RankError(self._missing(silent), silent) from late
        names = [found.decode() for found in self._asked(partial(self._store.multi_get, keys))]
        said = {name: json.loads(self._asked(partial(self._store.get, f"said/{name}"))) for name in set(names)}
        return {rank: said[name] for rank, name in zip(self._ranks, names, strict=True)}

    def _asked(self, question: Callable[[], T]) -> T:
        """What the store answers."""
        try:
            return question()
        except RuntimeError as gone:
            raise RankError(
                f"the store of the process group is gone when {self._purpose} were compared "
                f"({str(gone).partition(chr(10))[0]}): rank 0, or the launcher that holds it in its place, has ended; "
                "see its log",
                (0,),
            ) from gone

    def _missing(self, silent: list[int]) -> str:
        return (
            f"rank {', '.join(map(str, silent))} of {len(self._ranks)} did not answer within {self._timeout:g} s when "
            f"{self._purpose} were compared: it has died, or does not call this as often as the others; see its log"
        )


def exchange(
    purpose: str, mine: Mapping[str, str], group: ProcessGroup | None, timeout: float = TIMEOUT
) -> dict[int, dict[str, str]]:
    """What every rank of the group said; see `Round`."""
    one = Round(purpose, group, timeout)
    one.say(mine)
    return one.hear()


def by_key(everyone: Mapping[int, Mapping[str, str]]) -> dict[str, dict[int, str]]:
    """What was said of each key, by rank; ranks that said nothing of it are left out."""
    keys = sorted({key for said in everyone.values() for key in said})
    return {key: {rank: said[key] for rank, said in everyone.items() if key in said} for key in keys}


def whole(everyone: Mapping[int, Mapping[str, str]], absent: str = "not there") -> dict[str, dict[int, str]]:
    """The same with a word for ranks that said nothing of a key."""
    return {key: {rank: said.get(key, absent) for rank, said in everyone.items()} for key in by_key(everyone)}


def differing(served: Mapping[str, Mapping[int, str]]) -> list[str]:
    """A line for every key of which ranks said different things."""
    return [
        f"{key}: " + "; ".join(f"rank {rank}: {text}" for rank, text in said.items())
        for key, said in served.items()
        if len(set(said.values())) > 1
    ]
