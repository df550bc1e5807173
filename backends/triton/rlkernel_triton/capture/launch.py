"""capture@1 over CUDA and HIP graphs.

Keys, buckets, static buffers, guards and statistics are those of every implementation
(`rlkernel_common.graphs`).
"""

from __future__ import annotations

from rlkernel_common.graphs.engine import Graphed
from rlkernel_common.graphs.graph import Options
from rlkernel_common.graphs.groups import default_group
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.capture import CaptureCall
from rlkernel_core.spec.graphed import GraphedCallable
from rlkernel_core.tree import first_tensor
from rlkernel_triton.capture.recorder import TorchGraphRecorder


def capture(call: CaptureCall) -> GraphedCallable:
    """See `rlkernel_core.spec.capture.CaptureCall`."""
    options = Options.of(call)
    tensor = first_tensor([call.example, *options.static])
    if tensor is None:
        remedy = "Pass a tensor on the device, or name static tensors."
        raise ArgumentError(
            "example", repr(call.example), "holds no tensor that says which device to record on", remedy
        )
    group = call.group or default_group(tensor.device)
    recorder = TorchGraphRecorder(group, tensor.device)
    return Graphed(call.fn, call.example, options, group, recorder, tensor.device)
