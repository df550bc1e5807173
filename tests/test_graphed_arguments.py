"""Every argument of every method of a graphed callable, given what it is not: refused by name, and nothing is lost."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from rlkernel_conformance.bad_arguments import NEVER
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.graphed import Bucket
from rlkernel_torch.direct import capture

WORDS = {**NEVER, "None": None, "int": 3, "list": ["moved"], "empty": "", "bytes": b"moved"}
CALLS = {
    "int": 3,
    "a string": "x",
    "object": object(),
    "None": None,
    "too many rows": (torch.zeros(9, 3),),
    "no rows to count": (torch.tensor(1.0),),
    "on another device": (torch.zeros(2, 3, device="meta"),),
    "no key": (torch.zeros(2, 3), {1, 2}),
}
# `over="raise"`: a call above the largest size is refused like one that is none.
ROWS = Bucket({"x": 0}, (1, 2, 4))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3, bias=False)

    @torch.no_grad()
    def forward(self, x, extra=None):
        return self.head(x)


def graphed():
    return capture(Policy(), (torch.ones(2, 3),), buckets=(ROWS,))


def updated(graph: Any, canary: Any) -> None:
    with graph.weight_update(canary):
        pytest.fail("a bad canary is found before the weights are written")


METHODS = {
    "warm.examples": (
        lambda g, x: g.warm(x),
        {
            **{k: v for k, v in NEVER.items() if k not in {"set", "array"}},
            "int": 3,
            "a string": "xy",
            "mapping": {"x": torch.ones(2, 3)},
            "tensor": torch.ones(2, 3),
            **{f"one example: {what}": [(torch.ones(2, 3),), x] for what, x in CALLS.items()},
        },
    ),
    "invalidate.reason": (lambda g, x: g.invalidate(x), WORDS),
    "pause.mode": (lambda g, x: g.pause(x), {**WORDS, "unknown": "drop"}),
    "weight_update.canary": (updated, {k: x for k, x in CALLS.items() if k != "None"}),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_bad_value_is_refused_by_name_and_loses_nothing(method) -> None:
    call, bad = METHODS[method]
    graph, wrong = graphed(), []
    name = method.partition(".")[2]
    before = graph.stats
    for what, value in bad.items():
        try:
            call(graph, value)
        except ArgumentError as error:
            about_the_call = what.removeprefix("one example: ") in CALLS
            wrong += (
                [] if (about_the_call or name in error.argument) and len(error.remedy) > 3 else [(what, str(error))]
            )
        else:
            wrong.append((what, "accepted"))
        assert graph.stats == before, what
    assert wrong == []


@pytest.mark.parametrize("method", ["__call__", "explain"])
@pytest.mark.parametrize("what", [w for w in CALLS if w not in {"int", "a string", "object", "None"}])
def test_a_bad_call_is_refused_by_name_and_loses_nothing(method, what) -> None:
    graph = graphed()
    before = graph.stats
    with pytest.raises(ArgumentError) as caught:
        getattr(graph, method)(*CALLS[what])
    assert len(caught.value.remedy) > 3
    assert graph.stats == before


def test_after_every_refusal_it_still_replays() -> None:
    graph = graphed()
    for call, bad in METHODS.values():
        for value in bad.values():
            with contextlib.suppress(ArgumentError):
                call(graph, value)
    assert torch.equal(graph(torch.ones(2, 3)), graph._fn(torch.ones(2, 3)))
    assert (graph.stats.state, graph.stats.captures, graph.stats.replays) == ("ready", 1, 1)
