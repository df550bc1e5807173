"""capture@1: run a function once, then replay the recording with new inputs.

    key(call)  = (structure, bucketed shapes, dtypes, layouts, every argument that is not a tensor, ambient modes)
    replay(x)  = fn(static) after static[: n] <- x, static[n :] <- pad;  outputs are cut back to n
    contract   : replay(x) is bitwise fn(pad(x)), draws what fn(pad(x)) would draw from the same generator state, and
                 leaves the generator where fn(pad(x)) would

A recording reads and writes fixed addresses. Therefore inputs are copied into static buffers at every call; tensors
that are not copied (weights, caches) are declared `static`, and their addresses are fingerprinted; outputs live in
memory that the next replay overwrites, so they are cloned unless `outputs="view"` is asked for.

Types that appear in calls are in `rlkernel_core.spec.graphed`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentTypeError
from rlkernel_core.spec.form import Clause, Feature, OpCall, OpSpec
from rlkernel_core.spec.graphed import Bucket, CaptureGroup, GraphedCallable, check_inputs
from rlkernel_core.tree import first_tensor

if TYPE_CHECKING:
    from torch import Generator, Tensor

CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "outputs": ("clone", "view"),
    "rng": ("follow", "forbid"),
    "verify": ("auto", "never", "first", "always"),
    "guard": ("sync", "call"),
    "on_guard_fail": ("recapture", "eager", "raise"),
    "on_capture_error": ("raise", "eager"),
}


@dataclass(slots=True, eq=False)
class CaptureCall(OpCall[GraphedCallable]):
    """A callable that gives fn's results by replaying a graph of it; the example's graph is captured at once.

    Args:
        fn: any callable of tensors and hashable values, returning nested tensors. It must not synchronize with the
            host, and no shape in it may depend on values. If it is a module, or a method of one, that module is static.
        example: a tuple of positional arguments, a dict of keyword arguments, or one tensor. Its first tensor decides
            the device. Tensors on the CPU are accepted by graphs of other devices and copied over at each call.
        buckets: sizes that vary from call to call; other shapes are part of the key.
        pad: input name -> value of the rows that a bucket adds; 0 where not named.
        static: what is read in place and never copied: modules, tensors, dicts of tensors, or callables returning
            them (for tensors that are rebound, and for those derived from weights). Passing one as an argument keeps
            its address.
        mutates: static tensors (or modules) that fn writes to: caches, counters. Restored after warm-up.
        outputs: "clone" (the caller's own tensors) or "view" (static memory, overwritten by a later replay of any
            graph in the group).
        rng: "follow": every replay draws anew and advances the generator as fn would; padding changes how much is
            drawn. "forbid": CaptureError if fn draws.
        generators: generators that fn draws from besides the default one of the device.
        verify: compare a replay bitwise with a plain run on cloned inputs from the same generator state: never, at the
            first call of each key, or always. "auto" is "first" where the platform is known to record illegal work
            silently (HIP), else "never". A difference is treated as a failed capture.
        guard: look at the addresses of static tensors in `check_static`, `weight_update` and `resume` only ("sync"),
            or at every call ("call").
        on_guard_fail: when one moved: "recapture", "eager" (recorded in stats) until `invalidate`, or "raise".
        on_capture_error: "raise", or "eager": run fn itself for this key, with one FallbackWarning, a count in
            `stats.eager_calls` and the reason in `explain`. Nothing else is left behind by a failed capture.
        warmup: runs of fn before recording. Their effects on generators and `mutates` are undone; an exception in
            them propagates unchanged.
        max_graphs: bound on graphs held; the least recently used make room, at least one.
        group: graphs that share memory with these; None is the group of this process and device.
        collectives: fn contains collectives, and every rank (of `group.process_group`) captures and replays in the same
            order. Before a capture, ranks compare what goes into it (sizes, buckets, values, modes, static tensors) and
            after it whether each of them could: a difference is a CaptureError on every rank, before any of them
            waits in a collective; a rank that does not come is a RankError that names it.
        autograd: replay the backward pass too. Gradients reach tensor inputs and static tensors that require them;
            the backward must run before the next replay. Without it, a function whose outputs require grad is a
            failed capture: nothing is detached silently.

    Raises:
        ArgumentError: an argument is not as described.
        CaptureError: the example could not be captured and `on_capture_error="raise"`.
    """

    fn: Callable[..., Any]
    example: Any
    _: KW_ONLY
    buckets: Sequence[Bucket] | None = None
    pad: Mapping[str, float] | None = None
    static: Sequence[Any] | None = None
    mutates: Sequence[Any] | None = None
    outputs: str = "clone"
    rng: str = "follow"
    generators: Sequence[Generator] | None = None
    verify: str = "auto"
    guard: str = "sync"
    on_guard_fail: str = "recapture"
    on_capture_error: str = "raise"
    warmup: int = 3
    max_graphs: int = 32
    group: CaptureGroup | None = None
    collectives: bool = False
    autograd: bool = False


def check(call: CaptureCall) -> None:
    """Checks shared by all implementations of capture@1."""
    example = call.example
    if not callable(call.fn):
        raise ArgumentTypeError("fn", checks.describe(call.fn), "must be callable", "Pass a function or a module.")
    if not (isinstance(example, (tuple, dict)) or checks.is_tensor(example)):
        raise ArgumentTypeError(
            "example",
            checks.describe(example),
            "must be a tuple of arguments, a dict of keyword arguments or one tensor",
            "Pass (x, y).",
        )
    given = {"outputs": call.outputs, "rng": call.rng, "verify": call.verify, "guard": call.guard}
    given |= {"on_guard_fail": call.on_guard_fail, "on_capture_error": call.on_capture_error}
    for name, value in given.items():
        checks.choice(name, value, CHOICES[name])
    checks.flags(collectives=call.collectives, autograd=call.autograd)
    checks.integer("warmup", call.warmup, at_least=0)
    checks.integer("max_graphs", call.max_graphs, at_least=1)
    if call.group is not None:
        checks.instance("group", call.group, CaptureGroup)
    check_inputs(call.pad, buckets=call.buckets, static=call.static, mutates=call.mutates, generators=call.generators)


def _where(call: Any) -> Tensor | None:
    """The first tensor of the example, else of the static tensors, decides the device; None is the CPU."""
    static = call.static if isinstance(call.static, (tuple, list)) else ()  # `check` names anything else
    tensor: Tensor | None = first_tensor([call.example, *static])
    return tensor


SPEC = OpSpec(
    name="capture",
    record=CaptureCall,
    summary="record a function once, replay it with new inputs, and know when that would be wrong",
    where=_where,
    planned=False,
    check=check,
    one_of=("on_capture_error", "on_guard_fail", "rng", "outputs"),
    needed=lambda call: {"verify": call.verify in {"first", "always"}, "grad": call.autograd},
    features=(
        Feature("grad", "autograd=True: the backward pass is replayed too"),
        Feature("buckets", "sizes that vary are padded up and cut back"),
        Feature("static", "tensors read in place, with their addresses watched"),
        Feature("mutates", "tensors written by fn, restored after warm-up"),
        Feature("outputs:clone", "outputs belong to the caller"),
        Feature("outputs:view", "outputs are static memory that a later replay overwrites"),
        Feature("rng:follow", "replays draw what plain runs would draw"),
        Feature("rng:forbid", "drawing is an error"),
        Feature("generators", "generators besides the default one are followed"),
        Feature("verify", "replays are compared bitwise with plain runs"),
        Feature("guard:call", "static tensors are looked at in every call"),
        Feature("on_guard_fail:recapture", "a moved static tensor drops the graphs"),
        Feature("on_guard_fail:eager", "a moved static tensor stops replays until invalidated"),
        Feature("on_guard_fail:raise", "a moved static tensor is an error until invalidated"),
        Feature("on_capture_error:raise", "a failed capture is an error"),
        Feature("on_capture_error:eager", "a failed capture runs fn itself, and says so"),
        Feature("pause", "pause, resume and close around sleep and weight sync"),
        Feature("group", "graphs share one pool and one lock"),
        Feature("collectives", "collectives may be captured"),
    ),
    clauses=(
        Clause("GC-01", "replay is eager", "a replay is bitwise fn on the padded inputs, for new inputs", "accuracy"),
        Clause(
            "GC-02",
            "inputs are honored",
            "views, strided and reallocated tensors are read anew at every call, whatever the buffers hold",
            "accuracy",
        ),
        Clause(
            "GC-03",
            "padding is isolated",
            "pad values, NaN included, change no valid row where fn treats rows alone",
            "law",
            "buckets",
        ),
        Clause("GC-04", "inputs untouched", "no argument is written to unless it is static or mutated", "side_effect"),
        Clause(
            "GC-05",
            "randomness follows",
            "k replays draw k different samples, those of k plain runs from the same seed, and leave the generator "
            "where they would; interleaved callables keep one stream",
            "law",
            "rng:follow",
        ),
        Clause("GC-06", "randomness forbidden", "a function that draws raises CaptureError", "refusal", "rng:forbid"),
        Clause("GC-07", "weights in place", "an in-place write to a static tensor is seen by the next replay", "law"),
        Clause(
            "GC-08",
            "moved weights",
            "a static tensor rebound, resized or cast is named by check_static, and on_guard_fail follows",
            "refusal",
            "static",
        ),
        Clause(
            "GC-09",
            "modes are keys",
            "grad mode, autocast, inference mode, determinism and training flags each give a key of their own",
            "law",
        ),
        Clause("GC-10", "views are overwritten", "a view holds the result of the latest replay", "law", "outputs:view"),
        Clause("GC-11", "clones are stable", "a clone never changes", "law", "outputs:clone"),
        Clause(
            "GC-12",
            "values are keys",
            "a changed argument that is no tensor gives a new key, never a stale value",
            "law",
        ),
        Clause(
            "GC-13",
            "bounded and steady",
            "graphs held never exceed max_graphs; survivors of an eviction replay right; 1000 replays grow nothing",
            "side_effect",
        ),
        Clause(
            "GC-14",
            "failure leaves nothing",
            "after an exception in warm-up or capture, plain calls and new captures work, and generator, grad mode, "
            "stream and mutated tensors are as before",
            "side_effect",
        ),
        Clause(
            "GC-15",
            "failure is recorded",
            "on_capture_error='eager' warns once, counts every call and explains why",
            "side_effect",
            "on_capture_error:eager",
        ),
        Clause(
            "GC-16",
            "pause",
            "a call while paused raises CaptureError; after discard and resume the answers are right",
            "refusal",
            "pause",
        ),
        Clause(
            "GC-17", "warm-up is undone", "mutated tensors and generators see one call, not warmup + 1", "side_effect"
        ),
        Clause(
            "GC-18",
            "exact counts",
            "stats count every replay, capture, recapture, eviction and eager call, and explain announces each",
            "law",
        ),
        Clause("GC-19", "illegal work", "host synchronization or a value-dependent shape fails the capture", "refusal"),
        Clause("GC-20", "verify", "a replay that differs from a plain run is a failed capture", "refusal", "verify"),
        Clause("GC-21", "threads", "calls from several threads are serialized and each gets its own answer", "law"),
        Clause(
            "GC-22",
            "gradient",
            "gradients equal those of fn, reach inputs and static tensors, and a backward after the next replay raises",
            "gradient",
            "grad",
        ),
        Clause(
            "GC-23", "no silent detach", "outputs that require grad without autograd=True fail the capture", "refusal"
        ),
        Clause("GC-24", "no rows", "a bucketed size of 0 gives empty outputs", "accuracy", "buckets"),
        Clause("GC-25", "bad arguments", "a wrong argument raises ArgumentError that names it", "refusal"),
        Clause(
            "GC-26",
            "collectives",
            "every replay carries out the collectives of fn on every rank; without collectives=True they are refused",
            "accuracy",
            "collectives",
        ),
    ),
)
