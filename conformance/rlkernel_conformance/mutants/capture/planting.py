"""Ways to plant a bug in a captured function of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def each_graph(captured: Any, change: Callable[[Any], object]) -> Any:
    """Change every graph that is made, the first one too."""
    table = captured._table
    capture = table._capture

    def captures(reading: Any) -> Any:
        graph = capture(reading)
        if graph is not None:
            change(graph)
        return graph

    for graph in table._graphs.values():
        change(graph)
    table._capture = captures
    return captured


class Changed:
    """A captured function with some of its methods replaced."""

    def __init__(self, captured: Any, **methods: Any) -> None:
        self._captured, self._methods = captured, methods

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            return self._methods[name]
        return getattr(self._captured, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call, or what stands in its place."""
        return self._methods.get("call", self._captured)(*args, **kwargs)


def with_stats(captured: Any, **changes: Callable[[Any], Any]) -> Any:
    """The counters changed as these functions of them say."""
    table = captured._table
    true = table.tally.snapshot

    def snapshot(*given: Any) -> Any:
        stats = true(*given)
        return replace(stats, **{name: change(stats) for name, change in changes.items()})

    table.tally.snapshot = snapshot
    return captured


def filled_by(graph: Any, fill: Callable[[Any, Any], object]) -> None:
    """Fill the inputs of a graph another way; `fill` takes the true way and the call."""
    true = graph.inputs.filling

    def truly(reading: Any) -> None:
        true(reading)(reading.leaves)

    def filling(reading: Any) -> Callable[[Any], object]:
        return lambda leaves: fill(truly, replace(reading, leaves=leaves))

    graph.inputs.filling = filling  # the inputs' `fill` goes through it
