"""Planted bugs in capture@1: in what replays give, and in what it leaves behind, counts and refuses.

Many are a method of plain torch's graphed callable, or of one of its parts, that does something else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from rlkernel_common.graphs.engine import Graphed
from rlkernel_common.graphs.key import Key, Reader, ValueKey
from rlkernel_conformance.mutants import graphed, graphed_inputs, plant
from rlkernel_conformance.mutants.bug import Bug, How
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.capture import CaptureCall
from rlkernel_core.spec.graphed import CaptureStats
from rlkernel_torch.capture import capture

Where = Callable[[CaptureCall], Any]


def always(_: CaptureCall) -> bool:
    return True


def alone(call: CaptureCall) -> bool:
    """No other ranks take part."""
    return not call.collectives


def made_of(kind: type[Graphed] = Graphed, *, wanted: Where = always, **parts: type) -> How:
    """For some calls another graphed callable, or plain torch's with other parts: a reader, or parts of its table."""
    of_table = {name: part for name, part in parts.items() if name != "reader"}
    table = type("FaultyTable", (kind.table,), of_table)
    made = type("FaultyGraphed", (kind,), {"table": table, "reader": parts.get("reader", kind.reader)})
    return lambda right, call: capture(call, made) if wanted(call) else right(call)


def counts(**changes: Callable[[CaptureStats], Any]) -> How:
    """Other counters: functions of all of them."""

    class Miscounting(Graphed):
        @property
        def stats(self) -> CaptureStats:
            found = super().stats
            return replace(found, **{name: change(found) for name, change in changes.items()})

    return made_of(Miscounting)


def scaled_by_all_rows(call: CaptureCall) -> Any:
    def scaled(x: Any, *more: Any, **kwargs: Any) -> Any:
        out = call.fn(x, *more, **kwargs)
        return out + 0 * x.amax() if isinstance(out, Tensor) and out.shape == x.shape else out

    return scaled if call.pad and not isinstance(call.fn, nn.Module) else call.fn


def with_parameters(fn: nn.Module, now: Callable[[], dict[str, Tensor]]) -> Any:
    """The module as a function of its inputs, with parameters that are given at each call."""

    @functools.wraps(fn.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(fn, now(), args, kwargs)

    call.__self__ = fn  # type: ignore[attr-defined]  # the module stays static
    return call


def frozen_weights(call: CaptureCall) -> Any:
    fn = call.fn
    if not isinstance(fn, nn.Module) or call.autograd or any(p.requires_grad for p in fn.parameters()):
        return fn
    kept = {name: p.detach().clone() for name, p in fn.named_parameters()}
    return with_parameters(fn, lambda: kept)


def weights_without_gradient(call: CaptureCall) -> Any:
    fn = call.fn
    if not call.autograd or not isinstance(fn, nn.Module):
        return fn
    return with_parameters(fn, lambda: {name: p.detach() for name, p in fn.named_parameters()})


def reading_keys(change: Callable[[Key], tuple[Any, ...]]) -> How:
    """Calls read into other keys."""

    class OtherKeys(Reader):
        def read(self, args: Any, kwargs: Any) -> Any:
            reading = super().read(args, kwargs)
            return replace(reading, key=Key(change(reading.key)))

        def likeness(self, leaves: Any, args: Any, kwargs: Any) -> Any:
            """Whatever the keys leave out."""
            return None

    return made_of(reader=OtherKeys)


def refuses_keywords(right: Callable[[CaptureCall], Any], call: CaptureCall) -> Any:
    for bucket in call.buckets or ():
        if bucket.valid and bucket.valid not in inspect.signature(call.fn).parameters:
            raise ArgumentError("buckets", bucket.valid, "is no keyword of fn", "Name a parameter.")
    return right(call)


def without_values(key: Key) -> tuple[Any, ...]:
    return key[0], tuple(None if isinstance(k, ValueKey) else k for k in key[1]), *key[2:]


def with_equal_values(key: Key) -> tuple[Any, ...]:
    def plain(k: Any) -> Any:
        if not isinstance(k, ValueKey):
            return k
        return (float.fromhex(k.value) if k.cls is float and isinstance(k.value, str) else k.value,)

    return key[0], tuple(map(plain, key[1])), *key[2:]


def mutated_as_static(call: CaptureCall) -> CaptureCall:
    return replace(call, mutates=None, static=[*(call.static or ()), *(call.mutates or ())])


def sorted_buckets(given: Any) -> Any:
    return tuple(replace(b, sizes=tuple(sorted(b.sizes))) for b in given) if isinstance(given, tuple) else given


BUGS: Final = {
    # what replays give
    "padding_is_what_was_left": Bug(
        "GC-01",
        "padding written once: a smaller call sees what a larger one left",
        made_of(inputs=graphed_inputs.LeavesPadding),
    ),
    "inputs_are_those_of_the_capture": Bug(
        "GC-02",
        "a graph keeps the inputs it was captured with (FlashInfer, mini-sglang)",
        made_of(inputs=graphed_inputs.KeepsTheFirst),
    ),
    "known_addresses_are_not_copied": Bug(
        "GC-02",
        "copies saved by address: new values in old storage are not seen",
        made_of(
            graphed_inputs.HoldsTheCallers,
            wanted=lambda c: isinstance(c.example, tuple) and len(c.example) == 3,
            inputs=graphed_inputs.KnowsAddresses,
        ),
    ),
    "strides_are_not_looked_at": Bug("GC-02", "rows copied as if they were dense", made_of(graphed.ReadsDense)),
    "sizes_are_int32": Bug("GC-03", "Bucket.valid in a narrow dtype", made_of(inputs=graphed_inputs.NarrowSizes)),
    "sizes_need_a_named_parameter": Bug("GC-03", "no Bucket.valid for a function of **keywords", refuses_keywords),
    "padding_is_in_the_scale": Bug(
        "GC-03", "a scale taken over all rows of the bucket", plant.given(fn=scaled_by_all_rows)
    ),
    "writes_go_to_the_caller": Bug(
        "GC-04", "the function runs on the caller's tensors, not on copies", made_of(graphed.WritesBack)
    ),
    "draws_are_frozen": Bug(
        "GC-05",
        "RNG frozen in the graph: every replay draws the same (warp)",
        made_of(graphed.FrozenDraws, wanted=lambda c: getattr(c.fn, "draws", False)),
    ),
    "the_generator_stays": Bug(
        "GC-05",
        "a stream of its own for each graph: the caller's generator does not move",
        made_of(graphed.GeneratorStays),
    ),
    "drawing_is_allowed": Bug("GC-06", "rng='forbid' read by nobody", plant.given(rng="follow")),
    "weights_are_those_of_the_capture": Bug(
        "GC-07", "weights are copied when captured, as inputs are", plant.given(fn=frozen_weights)
    ),
    "moves_go_unseen": Bug("GC-08", "static tensors are never looked at again", made_of(graphed.NeverLooks)),
    "moves_of_bare_tensors_go_unseen": Bug(
        "GC-08",
        "weights of modules are watched, tensors passed themselves are not",
        made_of(graphed.LooksIntoModulesOnly),
    ),
    "the_guard_falls_asleep": Bug("GC-08", "guard='call' looks at the first call only", plant.given(guard="sync")),
    "every_failed_guard_recaptures": Bug(
        "GC-08",
        "a failed guard is answered by capturing again, whatever was asked for",
        plant.given(on_guard_fail="recapture"),
    ),
    "modes_are_no_keys": Bug(
        "GC-09",
        "a graph captured under autocast replays outside it",
        reading_keys(lambda key: (key[0], key[1], (), key[3])),
    ),
    "training_is_no_key": Bug(
        "GC-09", "dropout frozen in the mode of the first call", reading_keys(lambda key: (*key[:3], ()))
    ),
    "views_are_clones": Bug("GC-10", "outputs='view' gives clones", plant.given(outputs="clone")),
    "clones_are_views": Bug("GC-11", "results are the graph's own memory", plant.given(outputs="view")),
    "an_input_is_not_cloned": Bug(
        "GC-11", "an output that is an input is handed out as it is", made_of(graph=graphed.HandsOutInputs)
    ),
    "one_of_a_dtype_is_not_cloned": Bug(
        "GC-11", "clones are made of tensors that share a dtype", made_of(graph=graphed.ClonesPairs)
    ),
    "values_are_no_keys": Bug("GC-12", "graph key without the temperature (warp)", reading_keys(without_values)),
    "equal_values_are_one_key": Bug(
        "GC-12", "True, 1 and 1.0 are one key, and so are 0.0 and -0.0", reading_keys(with_equal_values)
    ),
    "nothing_is_evicted": Bug("GC-13", "max_graphs read by nobody", plant.given(max_graphs=1 << 20)),
    "an_eviction_breaks_the_others": Bug(
        "GC-13",
        "an eviction frees what its neighbors share (cuBLAS workspaces of a pool)",
        made_of(graphed.EvictsBadly),
    ),
    "a_replay_keeps_its_outputs": Bug("GC-13", "every replay keeps its outputs", made_of(graphed.KeepsOutputs)),
    "a_buffer_keeps_its_history": Bug(
        "GC-13",
        "inputs copied with gradients on: every call stays reachable from a static buffer",
        made_of(inputs=graphed_inputs.KeepsHistory),
    ),
    # what is left behind, counted and refused
    "a_failure_leaves_the_generator": Bug(
        "GC-14",
        "after a failed capture the generator is where it broke off",
        made_of(graphed.Failing, wanted=alone, state=graphed.FailsWithDraws),
    ),
    "a_failure_leaves_what_it_wrote": Bug(
        "GC-14",
        "after a failed capture caches hold half a step",
        made_of(graphed.Failing, wanted=alone, state=graphed.FailsWithWrites),
    ),
    "a_failure_leaves_gradients_on": Bug(
        "GC-14", "captured under grad, which a failure leaves on", made_of(graphed.LeavesGradientsOn)
    ),
    "a_failure_is_for_good": Bug(
        "GC-14", "one failure turns capturing off for good", made_of(graphed.GivesUp, wanted=lambda c: c.mutates)
    ),
    "eager_without_a_word": Bug(
        "GC-15",
        "a function that cannot be captured runs eagerly and nobody hears of it",
        made_of(graphed.SilentlyEager, wanted=alone),
    ),
    "eager_calls_are_not_counted": Bug(
        "GC-15", "calls that did not replay are not counted", made_of(graphed.UncountedEagerCalls)
    ),
    "explains_nothing": Bug("GC-15", "explain without a reason", made_of(graphed.ExplainsNothing)),
    "paused_calls_run": Bug("GC-16", "pause is a hint", made_of(graphed.RunsWhilePaused)),
    "answers_from_before_the_discard": Bug(
        "GC-16",
        "a discard forgets the graphs of one size and keeps their outputs as answers",
        made_of(graphed.AnswersFromBefore),
    ),
    "warming_up_is_kept": Bug(
        "GC-17", "warm-up runs advance caches and counters", lambda right, call: right(mutated_as_static(call))
    ),
    "a_capture_draws": Bug("GC-17", "every capture draws once from the caller's generator", made_of(graphed.Drawing)),
    "recaptures_are_not_counted": Bug(
        "GC-18", "recaptures are not told from captures", counts(recaptures=lambda s: {})
    ),
    "warm_ups_are_not_counted": Bug("GC-18", "warmup_calls counts recordings alone", counts(warmup_calls=lambda s: 0)),
    "padding_is_not_counted": Bug(
        "GC-18", "replays of a padded call are counted by rows", counts(pad_rows=lambda s: 0)
    ),
    "replays_are_miscounted": Bug(
        "GC-18", "verification and replays share a counter", counts(replays=lambda s: s.replays + (s.replays > 2))
    ),
    "static_is_forgotten_by_a_discard": Bug(
        "GC-18",
        "static arguments are copied, and mutated tensors not put back, after a discard",
        made_of(graphed.ForgetsStatic),
    ),
    "records_whatever_it_is_given": Bug(
        "GC-19",
        "a graph with a value of its capture baked in",
        lambda right, call: capture(call, recorder=graphed.RecordsAnything) if alone(call) else right(call),
    ),
    "nothing_is_verified": Bug("GC-20", "verify accepted and ignored", plant.given(verify="never")),
    "writes_are_not_verified": Bug(
        "GC-20",
        "mutated tensors compared with themselves: a replay that fills a cache wrongly passes",
        made_of(state=graphed.ComparesWithItself),
    ),
    "what_fn_keeps_is_not_verified": Bug(
        "GC-20",
        "a plain run's result is not copied: the replay writes what it is compared with",
        made_of(graph=graphed.ComparesWithWhatFnKeeps),
    ),
    "the_canary_is_not_called": Bug("GC-20", "weight_update ignores its canary", made_of(graphed.NoCanary)),
    "verified_once": Bug("GC-20", "verify='always' looks once", plant.maps(verify={"always": "first"})),
    "threads_are_not_kept_apart": Bug(
        "GC-21", "static buffers that two threads fill at once", made_of(graphed.NotKeptApart)
    ),
    "the_size_is_the_padded_one": Bug(
        "GC-97", "Bucket.valid tells the padded size", made_of(inputs=graphed_inputs.PaddedSizes)
    ),
    "weights_get_no_gradient": Bug(
        "GC-22", "weights are constants of a captured backward", plant.given(fn=weights_without_gradient)
    ),
    "a_late_backward_is_answered": Bug(
        "GC-22", "a late backward is answered with the gradients of another call", made_of(graph=graphed.AnswersLate)
    ),
    "a_late_backward_of_a_view_is_answered": Bug(
        "GC-22",
        "views of all calls are one tensor, whose history is that of the latest",
        made_of(graph=graphed.AnswersLate, wanted=lambda c: c.outputs == "view"),
    ),
    "detached_silently": Bug(
        "GC-23",
        "no autograd, silently detached (RL-Kernel)",
        made_of(graphed.WithoutGrad, wanted=lambda c: not c.autograd),
    ),
    "no_rows_fail": Bug("GC-24", "a launch of zero rows", made_of(graphed.FailsOnNoRows)),
    "sizes_are_sorted": plant.lenient("GC-25", "bucket sizes sorted in silence", buckets=sorted_buckets),
    "what_is_too_large_is_cut": Bug(
        "GC-25", "a call above the largest bucket is cut to fit", made_of(graphed.CutsTheLarge)
    ),
    "collectives_need_no_leave": Bug(
        "GC-26",
        "collectives recorded without a word: ranks that differ in what they capture wait for ever",
        plant.given(collectives=True),
    ),
    "collectives_are_frozen": Bug(
        "GC-26",
        "a collective carried out when captured, its result replayed ever after",
        made_of(graphed.FirstAnswers, wanted=lambda c: c.collectives),
    ),
}
