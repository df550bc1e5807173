"""Planted bugs in what capture@1 leaves behind, counts and refuses."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from rlkernel_common.graphs import state
from rlkernel_common.graphs.eager import EagerRecorder
from rlkernel_conformance.mutants import mutant
from rlkernel_conformance.mutants.capture.planting import Changed, each_graph, with_stats
from rlkernel_torch import capture as door


def without_restore(captured: Any, *, random: bool, written: bool) -> Any:
    """A capture that fails does not put everything back."""
    if captured._options.collectives:  # ranks are threads, which would patch what they share
        return captured
    table = captured._table
    capture = table._capture

    def captures(reading: Any) -> Any:
        restore = state.DeviceState.restore
        failed = [False]

        def partly(self: Any) -> None:
            noise, values = self.random(), self.mutated()
            restore(self)
            if failed[0]:
                for (_, write), kept in zip(self._channels, noise, strict=True):
                    write(kept) if random else None
                for x, value in zip(self._mutated, values, strict=True):
                    x.copy_(value) if written else None

        call = table._fn

        def fn(*args: Any, **kwargs: Any) -> Any:
            failed[0] = True
            out = call(*args, **kwargs)
            failed[0] = False
            return out

        table._fn = fn
        try:
            with patch.object(state.DeviceState, "restore", partly):
                return capture(reading)
        finally:
            table._fn = call

    table._capture = captures
    return captured


@mutant("GC-14", origin="after a failed capture the generator is where it broke off")
def a_failure_leaves_the_generator(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return without_restore(reference(fn, example, **rest), random=True, written=False)


@mutant("GC-14", origin="after a failed capture caches hold half a step")
def a_failure_leaves_what_it_wrote(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return without_restore(reference(fn, example, **rest), random=False, written=True)


@mutant("GC-14", origin="captured under grad, which a failure leaves on")
def a_failure_leaves_gradients_on(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)

    def call(*args: Any, **kwargs: Any) -> Any:
        failed = True
        try:
            out = captured(*args, **kwargs)
            failed = False
            return out
        finally:
            if failed:
                torch.set_grad_enabled(True)

    return Changed(captured, call=call)


@mutant("GC-14", origin="one failure turns capturing off for good")
def a_failure_is_for_good(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured, dead = reference(fn, example, **rest), []

    def call(*args: Any, **kwargs: Any) -> Any:
        failed = True
        try:
            out = fn(*args, **kwargs) * 0 if dead else captured(*args, **kwargs)
            failed = False
            return out
        finally:
            dead.extend([True] * failed)

    return Changed(captured, call=call) if rest.get("mutates") and callable(fn) else captured


@mutant("GC-15", origin="a function that cannot be captured runs eagerly and nobody hears of it")
def eager_without_a_word(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    if rest.get("collectives"):  # ranks are threads, which would patch what they share
        return reference(fn, example, **rest)
    with patch("rlkernel_common.graphs.table.warnings.warn"):
        return reference(fn, example, **rest)


@mutant("GC-15", origin="calls that did not replay are not counted")
def eager_calls_are_not_counted(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)
    failed = captured._table._failed
    return with_stats(captured, eager_calls=lambda s: {} if failed else s.eager_calls)


@mutant("GC-15", origin="explain without a reason")
def explains_nothing(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)
    return Changed(captured, explain=lambda *args, **kwargs: "eager")


@mutant("GC-16", origin="pause is a hint")
def paused_calls_run(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)
    captured._require_open = lambda **_: None
    return captured


@mutant("GC-16", "GC-13", origin="a discard forgets the graphs of one size and keeps their outputs as answers")
def answers_from_before_the_discard(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured, last, asleep = reference(fn, example, **rest), [None], []

    def call(*args: Any, **kwargs: Any) -> Any:
        out = captured(*args, **kwargs)
        if asleep and last[0] is not None:
            return last[0]
        last[0] = copy.copy(out)
        return out

    def pause(mode: str = "keep") -> None:
        captured.pause(mode)
        asleep.extend([mode] * (mode == "discard"))

    return Changed(captured, call=call, pause=pause)


@mutant("GC-17", "GC-01", "GC-14", origin="warm-up runs advance caches and counters")
def warming_up_is_kept(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return reference(
        fn, example, **{**rest, "mutates": None, "static": [*(rest.get("static") or ()), *(rest.get("mutates") or ())]}
    )


@mutant("GC-17", "GC-05", origin="every capture draws once from the caller's generator")
def a_capture_draws(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)
    each_graph(captured, lambda _: torch.rand(1))
    return captured


@mutant("GC-18", origin="recaptures are not told from captures")
def recaptures_are_not_counted(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return with_stats(reference(fn, example, **rest), recaptures=lambda _: {})


@mutant("GC-18", origin="replays of a padded call are counted by rows")
def padding_is_not_counted(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return with_stats(reference(fn, example, **rest), pad_rows=lambda _: 0)


@mutant("GC-18", origin="verification and replays share a counter")
def replays_are_miscounted(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return with_stats(reference(fn, example, **rest), replays=lambda s: s.replays + (s.replays > 2))


class Lax(EagerRecorder):
    """Records whatever it is given."""

    def record(self, program: Any) -> Any:
        """Without the audit."""
        with patch("rlkernel_common.graphs.eager.Audit", lambda *_, **__: nullcontext()):
            return super().record(program)


@mutant("GC-19", "GC-14", "GC-15", "GC-26", origin="a graph with a value of its capture baked in")
def records_whatever_it_is_given(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    if rest.get("collectives"):  # ranks are threads, which would patch what they share
        return reference(fn, example, **rest)
    with patch.object(door, "EagerRecorder", Lax):
        return reference(fn, example, **rest)


@mutant("GC-20", "GC-18", origin="verify accepted and ignored")
def nothing_is_verified(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return reference(fn, example, **{**rest, "verify": "never"})


@mutant("GC-20", "GC-18", origin="verify='always' looks once")
def verified_once(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    always = rest.get("verify") == "always"
    return reference(fn, example, **{**rest, "verify": "first"} if always else rest)


@mutant("GC-21", origin="static buffers that two threads fill at once")
def threads_are_not_kept_apart(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)

    class Open:
        name, pools, lock, updates = "open", captured.group.pools, nullcontext(), 0

    captured.group = captured._table._group = Open()
    return captured


@mutant("GC-22", origin="weights are constants of a captured backward")
def weights_get_no_gradient(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    if not rest.get("autograd") or not isinstance(fn, nn.Module):
        return reference(fn, example, **rest)

    @functools.wraps(fn.forward)
    def constant(*args: Any, **kwargs: Any) -> Any:
        plain = {name: p.detach() for name, p in fn.named_parameters()}
        return torch.func.functional_call(fn, plain, args, kwargs)

    constant.__self__ = fn  # type: ignore[attr-defined]
    return reference(constant, example, **rest)


@mutant("GC-22", origin="a late backward is answered with the gradients of another call")
def a_late_backward_is_answered(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    class Never:
        number = property(lambda self: 0, lambda self, value: None)

    def change(graph: Any) -> None:
        graph.latest = Never()

    return each_graph(reference(fn, example, **rest), change)


@mutant("GC-23", "GC-09", "GC-15", "GC-18", origin="no autograd, silently detached (RL-Kernel)")
def detached_silently(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    if rest.get("autograd"):
        return reference(fn, example, **rest)
    with torch.no_grad():
        captured = reference(fn, example, **rest)
    return Changed(captured, call=torch.no_grad()(captured))


@mutant("GC-24", origin="a launch of zero rows")
def no_rows_fail(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, Tensor) and x.numel() == 0:
            raise RuntimeError("CUDA error: invalid configuration argument")
        return captured(x, *args, **kwargs)

    return Changed(captured, call=call)


@mutant("GC-25", origin="bucket sizes sorted in silence", unchecked=True)
def sizes_are_sorted(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    buckets = rest.get("buckets")
    if isinstance(buckets, tuple):
        rest["buckets"] = tuple(replace(b, sizes=tuple(sorted(b.sizes))) for b in buckets)
    return reference(fn, example, **rest)


@mutant("GC-25", origin="a call above the largest bucket is cut to fit")
def what_is_too_large_is_cut(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return captured(x[:8] if isinstance(x, Tensor) and rest.get("buckets") else x, *args, **kwargs)

    return Changed(captured, call=call)


@mutant("GC-26", origin="collectives recorded without a word: ranks that differ in what they capture wait for ever")
def collectives_need_no_leave(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return reference(fn, example, **{**rest, "collectives": True})


@mutant("GC-26", origin="a collective carried out when captured, its result replayed ever after")
def collectives_are_frozen(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)
    if not rest.get("collectives"):
        return captured
    first: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        out = captured(*args, **kwargs)
        first.append(out)
        return first[0]

    return Changed(captured, call=call)
