"""Reference of capture@1: the eager model of graphs, on any device.

Keys, buckets, static buffers, guards and statistics are those of every implementation (`reference.graphs`); a replay
runs fn on the static buffers. Code that is wrong under a graph's aliasing is wrong here too, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlkernel_core.reference.graphs.eager import EagerRecorder
from rlkernel_core.reference.graphs.engine import Graphed
from rlkernel_core.reference.graphs.graph import Options
from rlkernel_core.reference.graphs.groups import default_group
from rlkernel_core.spec import capture as spec
from rlkernel_core.spec.graphed import Bucket, CaptureGroup, GraphedCallable
from rlkernel_core.tree import first_tensor

if TYPE_CHECKING:
    from torch import Generator


def capture(
    fn: Callable[..., Any],
    example: Any,
    *,
    buckets: Sequence[Bucket] | None = None,
    pad: Mapping[str, float] | None = None,
    static: Sequence[Any] | None = None,
    mutates: Sequence[Any] | None = None,
    outputs: str = "clone",
    rng: str = "follow",
    generators: Sequence[Generator] | None = None,
    verify: str = "auto",
    guard: str = "sync",
    on_guard_fail: str = "recapture",
    on_capture_error: str = "raise",
    warmup: int = 3,
    max_graphs: int = 32,
    group: CaptureGroup | None = None,
    collectives: bool = False,
    autograd: bool = False,
) -> GraphedCallable:
    """See `rlkernel_core.spec.capture.capture`."""
    spec.check(
        fn,
        example,
        buckets=buckets,
        pad=pad,
        static=static,
        mutates=mutates,
        outputs=outputs,
        rng=rng,
        generators=generators,
        verify=verify,
        guard=guard,
        on_guard_fail=on_guard_fail,
        on_capture_error=on_capture_error,
        warmup=warmup,
        max_graphs=max_graphs,
        group=group,
        collectives=collectives,
        autograd=autograd,
    )
    options = Options(
        buckets=buckets or (),
        pad=pad or {},
        static=static or (),
        mutates=mutates or (),
        outputs=outputs,
        rng=rng,
        generators=generators or (),
        verify=verify,
        guard=guard,
        on_guard_fail=on_guard_fail,
        on_capture_error=on_capture_error,
        warmup=warmup,
        max_graphs=max_graphs,
        collectives=collectives,
        autograd=autograd,
    )
    tensor = first_tensor([example, *options.static])
    host = torch.default_generator.device
    device = host if tensor is None else tensor.device
    return Graphed(fn, example, options, group or default_group(device), EagerRecorder(), device)
