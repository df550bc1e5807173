"""Reference of capture@1: the eager model of graphs, on any device.

Keys, buckets, static buffers, guards and statistics are those of every implementation (`reference.graphs`); a replay
runs fn on the static buffers. Code that is wrong under a graph's aliasing is wrong here too, without a GPU.
"""

from __future__ import annotations

import torch

from rlkernel_common.graphs.eager import EagerRecorder
from rlkernel_common.graphs.engine import Graphed
from rlkernel_common.graphs.graph import Options
from rlkernel_common.graphs.groups import default_group
from rlkernel_core.spec.capture import CaptureCall
from rlkernel_core.spec.graphed import GraphedCallable
from rlkernel_core.tree import first_tensor


def capture(
    call: CaptureCall, kind: type[Graphed] = Graphed, recorder: type[EagerRecorder] = EagerRecorder
) -> GraphedCallable:
    """See `rlkernel_core.spec.capture.CaptureCall`.

    Args:
        call: its record.
        kind: what is made; the conformance suite puts faulty subclasses in its place.
        recorder: what records, likewise.
    """
    options = Options.of(call)
    tensor = first_tensor([call.example, *options.static])
    host = torch.default_generator.device
    device = host if tensor is None else tensor.device
    return kind(call.fn, call.example, options, call.group or default_group(device), recorder(), device)
