"""Planted bugs in what replays of capture@1 give: inputs, padding, draws, weights, keys, outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlkernel_common.graphs.buffers import StaticInputs
from rlkernel_common.graphs.key import ValueKey
from rlkernel_conformance.mutants import mutant
from rlkernel_conformance.mutants.capture.planting import Changed, each_graph, filled_by
from rlkernel_core.tree import flatten


@mutant("GC-01", "GC-02", "GC-07", "GC-13", origin="padding written once: a smaller call sees what a larger one left")
def padding_is_what_was_left(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    def fill(inputs: StaticInputs, reading: Any) -> None:
        for i, buffer in zip(inputs.copied, inputs.tensors, strict=True):
            inputs.cut_input(i, buffer, reading).copy_(reading.leaves[i])

    return each_graph(
        reference(fn, example, **rest), lambda g: filled_by(g, lambda _, reading: fill(g.inputs, reading))
    )


STALE = ("GC-01", "GC-03", "GC-04", "GC-07", "GC-12", "GC-13", "GC-18", "GC-21", "GC-22")


@mutant("GC-02", *STALE, "GC-26", origin="a graph keeps the inputs it was captured with (FlashInfer, mini-sglang)")
def inputs_are_those_of_the_capture(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return each_graph(reference(fn, example, **rest), lambda g: filled_by(g, lambda _, reading: None))


@mutant("GC-02", "GC-01", "GC-13", origin="copies saved by address: new values in old storage are not seen")
def known_addresses_are_not_copied(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    def change(graph: Any) -> None:
        last: list[Any] = [None]

        def fill(true: Any, reading: Any) -> None:
            at = [(x.data_ptr(), tuple(x.shape), x.stride()) for x in reading.leaves if isinstance(x, Tensor)]
            at, same = at[:1], at[:1] == last[0]
            last[0] = at
            kept = [x.clone() for x in graph.inputs.tensors]
            true(reading)
            if same and reading.leaves[0].data_ptr() in HELD:
                graph.inputs.tensors[0].copy_(kept[0])

        filled_by(graph, fill)

    captured = each_graph(reference(fn, example, **rest), change)

    def call(x: Any, *more: Any, **kwargs: Any) -> Any:
        HELD[x.data_ptr()] = x  # the caller's tensor stays alive, so an address that comes again is the same tensor
        return captured(x, *more, **kwargs)

    return Changed(captured, call=call) if isinstance(example, tuple) and len(example) == 3 else captured


HELD: dict[int, Tensor] = {}


@mutant("GC-02", "GC-01", "GC-13", "GC-18", origin="rows copied as if they were dense")
def strides_are_not_looked_at(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)

    def dense(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.is_contiguous() or x.stride()[:1] == (0,):
            return x
        return torch.as_strided(x, x.shape, [x.shape[1], 1])

    return Changed(captured, call=lambda *args, **kwargs: captured(*map(dense, args), **kwargs))


@mutant("GC-03", origin="a scale taken over all rows of the bucket")
def padding_is_in_the_scale(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    def scaled(x: Any, *more: Any, **kwargs: Any) -> Any:
        out = fn(x, *more, **kwargs)
        return out + 0 * x.amax() if isinstance(out, Tensor) and out.shape == x.shape else out

    return reference(scaled if rest.get("pad") and not isinstance(fn, nn.Module) else fn, example, **rest)


@mutant("GC-04", origin="the function runs on the caller's tensors, not on copies")
def writes_go_to_the_caller(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)

    def call(*args: Any, **kwargs: Any) -> Any:
        out = captured(*args, **kwargs)
        graph = max(captured._table._graphs.values(), key=lambda g: g.used, default=None)
        if graph is not None and not kwargs and len(args) == len(graph.inputs.tensors) == 2:
            for x, buffer in zip(args, graph.inputs.tensors, strict=True):
                x.copy_(buffer)
        return out

    return Changed(captured, call=call)


@mutant("GC-05", origin="RNG frozen in the graph: every replay draws the same (warp)")
def draws_are_frozen(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)
    start = torch.get_rng_state()

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.set_rng_state(start)
        return captured(*args, **kwargs)

    return Changed(captured, call=call) if getattr(fn, "draws", False) else captured


@mutant("GC-05", origin="a stream of its own for each graph: the caller's generator does not move")
def the_generator_stays(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)

    def call(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_rng_state()
        try:
            return captured(*args, **kwargs)
        finally:
            torch.set_rng_state(before)

    return Changed(captured, call=call)


@mutant("GC-06", origin="rng='forbid' read by nobody")
def drawing_is_allowed(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return reference(fn, example, **{**rest, "rng": "follow"})


@mutant("GC-07", "GC-01", "GC-16", origin="weights are copied when captured, as inputs are")
def weights_are_those_of_the_capture(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    if not isinstance(fn, nn.Module) or rest.get("autograd") or any(p.requires_grad for p in fn.parameters()):
        return reference(fn, example, **rest)
    kept = {name: p.detach().clone() for name, p in fn.named_parameters()}

    @functools.wraps(fn.forward)
    def frozen(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(fn, kept, args, kwargs)

    frozen.__self__ = fn  # type: ignore[attr-defined]  # the module stays static
    return reference(frozen, example, **rest)


@mutant("GC-08", "GC-01", "GC-18", origin="static tensors are never looked at again")
def moves_go_unseen(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)
    captured._static.changed = tuple
    return captured


@mutant("GC-08", origin="guard='call' looks at the first call only")
def the_guard_falls_asleep(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return reference(fn, example, **{**rest, "guard": "sync"})


@mutant("GC-08", origin="a failed guard is answered by capturing again, whatever was asked for")
def every_failed_guard_recaptures(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return reference(fn, example, **{**rest, "on_guard_fail": "recapture"})


def with_keys(captured: Any, change: Callable[[Any], Any]) -> Any:
    """Read calls into other keys."""
    true = captured._reader.read

    def read(*call: Any) -> Any:
        reading = true(*call)
        return replace(reading, key=change(reading.key))

    captured._reader.read = read
    first = captured._example
    table = captured._table
    captured._example = replace(first, key=change(first.key))
    for key in list(table._graphs):
        table._graphs[change(key)] = table._graphs.pop(key)
    return captured


@mutant("GC-09", "GC-15", origin="a graph captured under autocast replays outside it")
def modes_are_no_keys(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return with_keys(reference(fn, example, **rest), lambda key: (key[0], key[1], (), key[3]))


@mutant("GC-09", "GC-01", "GC-18", origin="dropout frozen in the mode of the first call")
def training_is_no_key(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return with_keys(reference(fn, example, **rest), lambda key: (*key[:3], ()))


@mutant("GC-10", origin="outputs='view' gives clones")
def views_are_clones(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return reference(fn, example, **{**rest, "outputs": "clone"})


@mutant("GC-11", "GC-21", "GC-26", origin="results are the graph's own memory")
def clones_are_views(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return reference(fn, example, **{**rest, "outputs": "view"})


@mutant("GC-11", origin="an output that is an input is handed out as it is")
def an_input_is_not_cloned(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    def change(graph: Any) -> None:
        replaying = graph.replaying

        def replay(run: Any, leaves: Any) -> Any:
            inputs = {x.data_ptr(): x for x in graph.inputs.tensors}
            found, structure = flatten(run(leaves))
            own, _ = flatten(graph.recording.outputs)
            kept = [
                inputs[y.data_ptr()]
                if isinstance(y, Tensor) and y.data_ptr() in inputs and inputs[y.data_ptr()].shape == x.shape
                else x
                for x, y in zip(found, own, strict=True)
            ]
            return structure.build(kept)

        graph.replaying = lambda *call: functools.partial(replay, replaying(*call))

    return each_graph(reference(fn, example, **rest), change)


VALUE = ("GC-01", "GC-13", "GC-18")


@mutant("GC-12", *VALUE, origin="graph key without the temperature (warp)")
def values_are_no_keys(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return with_keys(
        reference(fn, example, **rest),
        lambda key: (key[0], tuple(None if isinstance(k, ValueKey) else k for k in key[1]), *key[2:]),
    )


@mutant("GC-12", origin="True, 1 and 1.0 are one key, and so are 0.0 and -0.0")
def equal_values_are_one_key(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    def plain(k: Any) -> Any:
        if not isinstance(k, ValueKey):
            return k
        number = float.fromhex(k.value) if k.cls is float and isinstance(k.value, str) else k.value
        return (number,)

    return with_keys(reference(fn, example, **rest), lambda key: (key[0], tuple(map(plain, key[1])), *key[2:]))


@mutant("GC-13", origin="max_graphs read by nobody")
def nothing_is_evicted(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    return reference(fn, example, **{**rest, "max_graphs": 1 << 20})


@mutant("GC-13", origin="an eviction frees what its neighbours share (cuBLAS workspaces of a pool)")
def an_eviction_breaks_the_others(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured = reference(fn, example, **rest)
    make_room = captured._table._make_room

    def room(reading: Any) -> None:
        held = len(captured._table)
        make_room(reading)
        if len(captured._table) < held:
            for graph in captured._table._graphs.values():
                graph.recording.replay = lambda: None

    captured._table._make_room = room
    return captured


@mutant("GC-13", origin="every replay keeps its outputs")
def a_replay_keeps_its_outputs(reference: Any, fn: Any, example: Any, **rest: Any) -> Any:
    captured, kept = reference(fn, example, **rest), []

    def call(*args: Any, **kwargs: Any) -> Any:
        out = captured(*args, **kwargs)
        kept.append(out)
        return out

    return Changed(captured, call=call)
