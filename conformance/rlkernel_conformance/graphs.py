"""Attacking "may run in a graph": record a call once, replay it on other values, compare with plain calls.

On a CUDA device the graph is a real one. Elsewhere the engine of the reference stands in: it runs the call under an
audit that refuses host synchronization and shapes that depend on values, and replays it from static buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.call_checks import leaves
from rlkernel_conformance.compare import Violation, require
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import CaptureError
from rlkernel_torch.direct import capture


def replays(
    subject: Subject,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    call: Callable[..., Any] | None = None,
) -> None:
    """A graph of the call on `first` gives, replayed on `second`, what plain calls give.

    Args:
        subject: what is called.
        first: tensors by argument name.
        second: other values of the same shapes.
        call: takes the tensors by name; the subject itself where not given.
    """
    fn = call or subject
    plain = [{k: x.clone() for k, x in leaves(fn(**given)).items()} for given in (first, second, first)]
    try:
        found = _cuda(fn, first, second) if subject.device.startswith("cuda") else _audited(fn, first, second)
    except (CaptureError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error, CaptureError) and "captur" not in str(error):
            raise
        raise Violation(f"cannot be captured: {error}") from error
    for expected, have in zip(plain, found, strict=True):
        require(expected.keys() == have.keys(), f"a replay has {sorted(have)}, a plain call {sorted(expected)}")
        for name, want in expected.items():
            _agree(subject, name, have[name], want)


def recorded(
    subject: Subject, fn: Callable[..., Any], first: Mapping[str, Tensor], *, written: Mapping[str, Tensor]
) -> Callable[..., None]:
    """A graph of a function that returns nothing and writes to tensors of its own; call it with other values.

    Args:
        subject: whose device it is.
        fn: takes tensors by name.
        first: values to record with.
        written: what fn writes to.
    """
    try:
        if not subject.device.startswith("cuda"):
            options: dict[str, Any] = {"mutates": (dict(written),), "rng": "forbid", "verify": "always", "warmup": 1}
            graph: Callable[..., None] = capture(fn, dict(first), **options)
            return graph
        return _cuda_recorded(fn, first)
    except (CaptureError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error, CaptureError) and "captur" not in str(error):
            raise
        raise Violation(f"cannot be captured: {error}") from error


def _record(fn: Callable[..., Any], buffers: Mapping[str, Tensor], *, warmup: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of the call on static buffers, after plain calls on a side stream, and its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            fn(**buffers)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn(**buffers)
    return graph, out


def _cuda_recorded(fn: Callable[..., Any], first: Mapping[str, Tensor]) -> Callable[..., None]:
    buffers = {k: x.clone() for k, x in first.items()}
    graph, _ = _record(fn, buffers, warmup=1)

    def replay(**given: Tensor) -> None:
        for k, x in given.items():
            buffers[k].copy_(x)
        graph.replay()

    return replay


def _agree(subject: Subject, name: str, found: Tensor, want: Tensor) -> None:
    """Bit by bit where the subject claims determinism, else closely."""
    tolerance = 0.0 if "deterministic" in subject.claims else 1e-5
    same = found.shape == want.shape and torch.allclose(found, want, tolerance, tolerance, equal_nan=True)
    require(same, f"{name} of a replay is {found.tolist()}, of a plain call {want.tolist()}")


def _audited(fn: Callable[..., Any], first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[Any]:
    with torch.no_grad():
        graph = capture(fn, dict(first), verify="always", warmup=1)
        return [leaves(graph(**given)) for given in (first, second, first)]


def _cuda(fn: Callable[..., Any], first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[Any]:
    buffers, found = {k: x.clone() for k, x in first.items()}, []
    with torch.no_grad():
        graph, result = _record(fn, buffers, warmup=2)
    out = leaves(result)
    for given in (first, second, first):
        for k, x in given.items():
            buffers[k].copy_(x)
        graph.replay()
        found.append({k: x.clone() for k, x in out.items()})
    torch.cuda.synchronize()
    return found
