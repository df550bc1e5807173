"""What a captured function looks like from outside: buckets, groups, statistics and the graphed callable itself.

`capture` returns a `GraphedCallable`. Its life:

    READY --pause(keep | discard)--> PAUSED --resume--> READY          any --close--> CLOSED
    READY --a static tensor moved, on_guard_fail = eager | raise--> GUARDED --invalidate--> READY

Imports no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_core.ranks import TIMEOUT

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Bucket steps: doubling up to 8, then (up to, step). Pad waste of a decode step is free below the memory-bound knee,
# so large batches get coarser buckets; the largest size is always there, or a full batch would fit no bucket.
BUCKET_STEPS: Final = ((64, 8), (256, 16), (1 << 62, 32))


def bucket_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then multiples of 8, 16 and 32, ending in exactly `most`.

    Raises:
        ArgumentError: `most` is below 1.
    """
    checks.integer("most", most, at_least=1)
    sizes = [s for s in (1, 2, 4, 8) if s < most]
    for up_to, step in BUCKET_STEPS:
        while sizes and sizes[-1] >= 8 and sizes[-1] + step <= min(up_to, most - 1):
            sizes.append(sizes[-1] + step)
    return (*sizes, most)


@dataclass(frozen=True)
class Bucket:
    """One size that varies from call to call and is padded up to one of a few sizes.

    Pad values are `capture(..., pad={input: value})`. Rows added as padding never reach the caller: outputs are cut
    back along `out`. A function that reduces over the size takes the true one as a tensor (`valid`) and masks.
    """

    dims: Mapping[str, int]  # input name -> its dimension of this size; all agree in every call
    sizes: tuple[int, ...]  # ascending; `bucket_sizes(most)` is a good choice
    out: int | Mapping[str, int] | None = 0  # dimension cut in every output, or by output name; None: cut nothing
    valid: str | None = None  # keyword of fn that receives the true size as an int64 tensor []
    over: str = "raise"  # above the largest size: "raise", or "eager" (recorded)


def check_bucket(name: str, bucket: Any) -> None:
    """`bucket` is a Bucket with inputs, ascending sizes and a known rule for larger ones."""
    if not isinstance(bucket, Bucket):
        raise ArgumentTypeError(name, checks.describe(bucket), "must be a Bucket", "Pass Bucket({'x': 0}, (1, 2, 4)).")
    _dimensions(f"{name}.dims", bucket.dims)
    if not bucket.dims:
        raise ArgumentError(f"{name}.dims", "{}", "names no input", "Pass {'x': 0}.")
    if not isinstance(bucket.sizes, (tuple, list)):
        raise ArgumentTypeError(
            f"{name}.sizes", checks.describe(bucket.sizes), "must be a tuple of sizes", "Pass bucket_sizes(most)."
        )
    for size in bucket.sizes:
        checks.integer(f"{name}.sizes", size)
    if not bucket.sizes or list(bucket.sizes) != sorted(set(bucket.sizes)) or bucket.sizes[0] < 1:
        raise ArgumentError(f"{name}.sizes", bucket.sizes, "must be ascending sizes >= 1", "Pass bucket_sizes(most).")
    if isinstance(bucket.out, Mapping):
        _dimensions(f"{name}.out", bucket.out)
    elif bucket.out is not None:
        checks.integer(f"{name}.out", bucket.out)
    if not isinstance(bucket.valid, str | None):
        raise ArgumentTypeError(
            f"{name}.valid", checks.describe(bucket.valid), "must name a keyword of fn", "Pass its name, or None."
        )
    checks.choice(f"{name}.over", bucket.over, ("raise", "eager"))


def check_inputs(pad: Any, **sequences: Any) -> None:
    """`buckets`, `generators` and other sequences hold what their name says; `pad` maps input names to numbers."""
    for name, x in sequences.items():
        if x is not None and not isinstance(x, (tuple, list)):
            raise ArgumentTypeError(name, checks.describe(x), "must be a tuple or list", "Pass (item,).")
    for i, bucket in enumerate(sequences["buckets"] or ()):
        check_bucket(f"buckets[{i}]", bucket)
    for i, x in enumerate(sequences["generators"] or ()):
        if not hasattr(x, "get_state"):
            problem, remedy = "must be a torch.Generator", "Pass torch.Generator(device)."
            raise ArgumentTypeError(f"generators[{i}]", checks.describe(x), problem, remedy)
    if not isinstance(pad, Mapping | None):
        raise ArgumentTypeError("pad", checks.describe(pad), "must map input names to numbers", "Pass {'x': 0.0}.")
    for name, value in (pad or {}).items():
        checks.real(f"pad[{name!r}]", value)  # NaN and inf pad too


def check_examples(examples: Any) -> None:
    """`examples` holds calls: a tuple of arguments each, a mapping, or one argument."""
    if not isinstance(examples, Iterable) or isinstance(examples, str | bytes | Mapping) or checks.is_tensor(examples):
        problem, remedy = "must be a sequence of examples", "Pass [(x,), (y,)]: a tuple of arguments each."
        raise ArgumentTypeError("examples", checks.describe(examples), problem, remedy)


def check_reason(reason: Any) -> None:
    """`reason` can be counted under, and read."""
    if not isinstance(reason, str) or not reason:
        raise ArgumentTypeError("reason", checks.describe(reason), "must be a few words", "Pass 'weights reloaded'.")


def _dimensions(name: str, dims: Any) -> None:
    if not isinstance(dims, Mapping):
        raise ArgumentTypeError(name, checks.describe(dims), "must map names to dimensions", "Pass {'x': 0}.")
    for key, dim in dims.items():
        checks.integer(f"{name}[{key!r}]", dim)


class CaptureGroup:
    """Graphs that share memory and therefore never replay at the same time.

    `lock` serializes captures and replays; `pools` is where an implementation keeps its memory pool. By default
    there is one group per process and device; two streams that really run at once need two groups. `name` is what
    messages call it.

    Where functions with collectives are captured (`collectives=True`), all ranks of `process_group` (None: all there
    are) capture, look at static tensors and replay in the same order; `timeout` is how many seconds they wait for each
    other before a capture.
    """

    def __init__(self, name: str = "", *, process_group: ProcessGroup | None = None, timeout: float = TIMEOUT) -> None:
        checks.number("timeout", timeout, above=0.0)
        self.name, self.process_group, self.timeout = name, process_group, timeout
        self.lock = threading.RLock()
        self.pools: dict[str, Any] = {}
        self.updates = 0  # blocks of weight_update under way, in which nothing of the group replays

    def __repr__(self) -> str:
        return f"CaptureGroup({self.name!r})"


@dataclass(frozen=True)
class CaptureStats:
    """Counters of one graphed callable since it was made; a snapshot."""

    state: str  # ready | paused | guarded | closed
    graphs: int  # graphs held now
    captures: int = 0  # graphs recorded, recaptures included
    replays: int = 0  # calls that replayed
    eager_calls: Mapping[str, int] = field(default_factory=dict)  # reason -> calls that did not replay
    recaptures: Mapping[str, int] = field(default_factory=dict)  # reason -> keys recorded again
    evictions: int = 0  # graphs dropped for another, see `max_graphs`
    warmup_calls: int = 0  # plain runs before recordings
    verified: int = 0  # replays compared with a plain run
    copied_bytes: int = 0  # inputs copied into static buffers
    pad_rows: int = 0  # rows added by buckets, over all replays
    capture_ms: float = 0.0  # warm-up and recording
    guard_ns: int = 0  # looking at static tensors
    pool_bytes: int = 0  # static inputs and outputs held now
    last_error: str | None = None  # of the latest capture that failed


@dataclass
class WeightUpdate:
    """What `weight_update` found at its end."""

    changed: tuple[str, ...] = ()  # static tensors that moved, changed shape or dtype; in-place writes are not listed


@runtime_checkable
class GraphedCallable(Protocol):
    """A function that replays a recording instead of running; call it like the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Copy the inputs into static buffers, replay, return outputs as `outputs` says.

        Raises:
            CaptureError: while paused or after close; as `on_guard_fail` and `on_capture_error` say.
            ArgumentError: an input larger than the largest bucket, on another device, or that cannot be a key.
        """
        ...

    def warm(self, examples: Iterable[Any] | None = None) -> int:
        """Capture ahead of use, largest first: these examples, or the first example at every bucket size.

        Returns the number of graphs recorded.
        """
        ...

    def check_static(self) -> tuple[str, ...]:
        """Names, in any order, of static tensors that moved since capture; follows `on_guard_fail` if there are any."""
        ...

    def invalidate(self, reason: str = "invalidated") -> None:
        """Forget all graphs; keys are captured anew when next used, counted under `reason`. Lifts a failed guard."""
        ...

    def pause(self, mode: str = "keep") -> None:
        """Refuse calls until `resume`. `mode` "keep" keeps graphs and buffers, "discard" frees them."""
        ...

    def resume(self) -> None:
        """Accept calls again, after looking at the static tensors."""
        ...

    def close(self) -> None:
        """Free everything, for good. Harmless when repeated."""
        ...

    def weight_update(self, canary: tuple[Any, ...] | None = None) -> AbstractContextManager[WeightUpdate]:
        """No replay while the body runs; at its end look at the static tensors and verify one call on `canary`."""
        ...

    @property
    def stats(self) -> CaptureStats:
        """Counters so far."""
        ...

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """What a call with these arguments would do and why; runs nothing.

        The first word, before a colon, is "replay", "capture", "eager" or "refused".
        """
        ...
