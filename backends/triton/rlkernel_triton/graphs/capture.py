"""capture@1 over CUDA and HIP graphs.

Keys, buckets, static buffers, guards and statistics are those of every implementation
(`rlkernel_core.reference.graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlkernel_core.errors import ArgumentError
from rlkernel_core.reference.graphs.engine import Graphed
from rlkernel_core.reference.graphs.graph import Options
from rlkernel_core.reference.graphs.groups import default_group
from rlkernel_core.spec import capture as spec
from rlkernel_core.spec.graphed import Bucket, CaptureGroup, GraphedCallable
from rlkernel_core.tree import first_tensor
from rlkernel_triton.graphs.recorder import TorchGraphRecorder

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
    given: dict[str, Any] = {
        "buckets": buckets,
        "pad": pad,
        "static": static,
        "mutates": mutates,
        "outputs": outputs,
        "rng": rng,
        "generators": generators,
        "verify": verify,
        "guard": guard,
        "on_guard_fail": on_guard_fail,
        "on_capture_error": on_capture_error,
        "warmup": warmup,
        "max_graphs": max_graphs,
        "collectives": collectives,
        "autograd": autograd,
    }
    spec.check(fn, example, group=group, **given)
    for name in ("buckets", "static", "mutates", "generators"):
        given[name] = given[name] or ()
    given["pad"] = pad or {}
    tensor = first_tensor([example, *given["static"]])
    if tensor is None:
        remedy = "Pass a tensor on the device, or name static tensors."
        raise ArgumentError("example", repr(example), "holds no tensor that says which device to record on", remedy)
    group = group or default_group(tensor.device)
    recorder = TorchGraphRecorder(group, tensor.device)
    return Graphed(fn, example, Options(**given), group, recorder, tensor.device)
