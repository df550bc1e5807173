"""How hypothesis is driven: what it draws depends on the strategy and the number of examples, and on nothing else.

Left alone it mixes numbers into its draws that stand in the sources of whatever modules are loaded, and seeds itself
with the source of the test; the same attack would then draw other cases beside another backend, in another process, or
after an edit that changes no case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.internal.conjecture import providers
from hypothesis.strategies import SearchStrategy

SEED: Final = 0x3CE12F7574476B0B675C6DDB5A2D314169FEBB56998BC7A1CF9DA4D47D6ADEC182254B1DE82919FC1CDDEFE3EF8AA402
_PHASES: Final = (Phase.explicit, Phase.generate, Phase.target)


def search(
    body: Callable[[Any], None],
    cases: SearchStrategy[Any],
    *,
    first: Iterable[Any] = (),
    examples: int,
    shrink: bool = True,
    seed: int = SEED,
) -> None:
    """Run `body` on cases until one raises, and raise that; without `shrink` for the first that was found.

    Args:
        body: what is to hold.
        cases: what to draw from.
        first: cases that are always tried, before any is drawn.
        examples: cases to draw.
        shrink: look for a smaller case that raises too.
        seed: another one draws other cases.
    """
    settings = hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        phases=(*_PHASES, Phase.shrink) if shrink else _PHASES,
        suppress_health_check=list(HealthCheck),
    )
    test: Any = hypothesis.seed(seed)(hypothesis.given(cases)(body))
    for case in first:
        test = hypothesis.example(case)(test)
    with _alone():
        settings(test)()


def _no_constants() -> dict[str, Any]:
    """Hypothesis's sources of numbers, with none; empty where it has no such thing."""
    if not hasattr(providers, "_get_local_constants"):  # before 6.131
        return {}
    made: Any = providers  # names that it imports and does not promise
    none = made.Constants(**{n: made.SortedSet() for n in ("integers", "floats", "bytes", "strings")})
    return {"_get_local_constants": lambda: none, "CONSTANTS_CACHE": type(providers.CONSTANTS_CACHE)(1024)}


_NO_CONSTANTS: Final = _no_constants()


@contextmanager
def _alone() -> Iterator[None]:
    """Draws within it know nothing of loaded modules."""
    with ExitStack() as scope:
        for name, value in _NO_CONSTANTS.items():
            scope.enter_context(patch.object(providers, name, value))
        yield
