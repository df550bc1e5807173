"""The process in which a candidate runs: python -m rlkernel_judge.worker LEVEL SCRATCH SOCKET JOB.

It enters the sandbox, loads the candidate and answers requests until the socket closes. Nothing it says is believed
but what is checked outside: results against the reference, times against the trial's own clock. What it notices itself
(changed inputs, replaced functions, a moved generator) is a hint that finds honest mistakes; code that rewrites this
module can silence it, and gains nothing that the trial does not check again.

Every function that timing and checking need is bound before the candidate is imported.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import linecache
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

from rlkernel_judge import sandbox

Request = Mapping[str, Any]
Reply = tuple[dict[str, Any], list[Any]]  # JSON, and tensors
_MAX_CALLS: Final = 64  # calls whose graphs are kept for a backward


def main(level: str, scratch: str, descriptor: str, job: str) -> None:
    """Enter the sandbox, then serve."""
    settings, folder = json.loads(job), Path(scratch)
    sandbox.enter(level, folder, sandbox.Limits(**settings["limits"]))
    facts = sandbox.facts(folder)
    import torch

    torch.set_num_threads(settings["threads"])
    with socket.socket(fileno=int(descriptor)) as channel:
        _Worker(channel, settings, folder, facts).serve()


class _Worker:
    """Answers one request after another."""

    def __init__(
        self, channel: socket.socket, settings: Mapping[str, Any], folder: Path, facts: Mapping[str, bool]
    ) -> None:
        import torch

        from rlkernel.discover import guarded
        from rlkernel_conformance import health
        from rlkernel_conformance.poisoned_storage import Poisoned
        from rlkernel_core.spec import OPERATORS
        from rlkernel_judge import arena, guard, tamper_check, wire, workloads
        from rlkernel_judge.source import RECORD

        device = settings["device"]
        self.shared = arena.Arena(**settings["arena"]) if settings["arena"] is not None else None
        self.put, self.places, self.align = arena.put, arena.places, arena.aligned
        self.place: Any = None  # arguments in the shared memory
        self.results_from = 0  # bytes, where results lie there
        self.torch, self.wire, self.tamper_check, self.workloads = torch, wire, tamper_check, workloads
        self.operators, self.record_name = OPERATORS, RECORD
        self.guarded, self.clock, self.send, self.receive = guarded, time.perf_counter, wire.send, wire.receive
        self.cuda = device.startswith("cuda")
        self.sync: Callable[[], Any] = torch.cuda.synchronize if self.cuda else lambda: None
        self.event = partial(torch.cuda.Event, enable_timing=True)
        self.elapsed = torch.cuda.Event.elapsed_time
        self.equal, self.poisoned, self.complaint = torch.equal, Poisoned, health.complaint
        self.channel, self.device, self.folder, self.facts = channel, device, folder, facts
        self.run: Callable[..., Any] | None = None
        self.record: Callable[..., Any] | None = None  # of the operator, where `run` takes it
        self.keywords: frozenset[str] | None = None  # of `run`; None: all
        self.scope = ExitStack()  # in which a baseline runs
        self.calls: dict[int, tuple[list[Any], list[Any]]] = {}
        self.sets: list[dict[str, Any]] = []  # arguments that stay where they are
        self.results: list[Any] = []  # of the last burst
        self.new_guard = guard.Guard
        self.guard: Any = None  # of a candidate's process, from its first load on
        self.before = tamper_check.snapshot()

    def serve(self) -> None:
        """Until the other side closes."""
        while True:
            try:
                header, blocks = self.receive(self.channel)
            except self.wire.ConnectionLost:
                return
            request, tensors = self.wire.decode_request(header, blocks, self.device)
            try:
                reply, error = self.guarded(partial(self._answer, request, tensors))
            except KeyboardInterrupt as interrupt:  # raised by the candidate: nobody is at a keyboard
                reply, error = None, interrupt
            content, results = reply or ({"error": _described(error, self.folder)}, [])
            content["number"] = request["number"]
            self.send(self.channel, json.dumps(content).encode(), results)

    def _answer(self, request: Request, tensors: list[Any]) -> tuple[dict[str, Any], list[bytes]]:
        content, results = getattr(self, f"do_{request['do']}")(request, tensors)
        return content, [self.wire.to_bytes(x) for x in results]

    def do_ready(self, _request: Request, _: list[Any]) -> Reply:
        """What this process can still do, and whether its device can be used in the sandbox; its pools are started."""
        x = self.torch.ones(512, 512)
        (x @ x).sum().item()
        return {"facts": self.facts, "complaint": self.complaint(self.device) if self.cuda else None}, []

    def do_load(self, request: Request, _: list[Any]) -> Reply:
        """Import a candidate's source, or the implementations of an installed backend."""
        op, self.record, self.keywords = request["op"], None, None
        if request["source"] is None:
            self.run = self._baseline(op, request["impls"], compiled=request["compile"])
            return {}, []
        if self.guard is None:
            self.guard = self.new_guard(request.get("functions", ()), request.get("plugins", ()))
            self.guard.arm()
        run = getattr(self._imported(request["source"]), op)
        parameters = inspect.signature(run).parameters
        if next(iter(parameters), None) == self.record_name:
            self.record = self.operators[op].record
        elif not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            self.keywords = frozenset(parameters)
        self.run = run
        return {}, []

    def _baseline(self, op: str, impls: tuple[Any, ...], *, compiled: bool) -> Callable[..., Any]:
        """The operator of the front door with these implementations alone; or the first of them, compiled by torch."""
        import rlkernel
        from rlkernel.discover import load_target
        from rlkernel_core.manifest import API_VERSION, Backend

        if not compiled:
            only = Backend(name="baseline", api=API_VERSION, impls=impls)
            self.scope.enter_context(rlkernel.registered(only))
            self.scope.enter_context(rlkernel.use("baseline", fallback="error"))
            front: Callable[..., Any] = getattr(rlkernel, op)
            return front
        first, record = impls[0], self.operators[op].record
        function: Any = load_target(first.target)

        def run(**given: Any) -> Any:
            call = record(**given)
            return function(call)(call) if first.prepared else function(call)

        whole: Callable[..., Any] = self.torch.compile(run)
        return whole

    def _imported(self, source: str) -> Any:
        path = self.folder / "candidate.py"  # Triton reads the source of a kernel from its file
        path.write_text(source, encoding="utf-8")
        linecache.checkcache(str(path))
        spec = importlib.util.spec_from_file_location("candidate", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules["candidate"] = module
        spec.loader.exec_module(module)
        return module

    def _call(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
        """Call the candidate; a keyword that it does not have is left out where it holds the operator's default."""
        if self.run is None:
            raise RuntimeError("nothing is loaded")
        if self.record is not None:
            return self.run(self.record(**given))
        left = {k: v for k, v in given.items() if self.keywords is None or k in self.keywords or k not in defaults}
        odd = [k for k in given.keys() - left.keys() if given[k] is not defaults[k] and given[k] != defaults[k]]
        if odd:
            raise TypeError(f"it takes no argument {odd[0]!r}")
        return self.run(**left)

    def do_call(self, request: Request, tensors: list[Any]) -> Reply:
        """One call, with what it left behind: written inputs, a moved generator, aliases, work on other streams.

        `fresh` says what memory holds that the candidate asks for without content: NaN, 1, or whatever was there.
        """
        torch, flat, given = self.torch, self.wire.flat, request["given"]
        kept = [flat(x).clone() for x in tensors]
        state, modes = torch.get_rng_state(), _modes(torch)
        fresh = nullcontext() if request["fresh"] is None else self.poisoned(high=request["fresh"])
        with torch.set_grad_enabled(request["grad"]), fresh:
            result = self._call(given, request["defaults"])
        stray = self._stray()
        outputs: list[Any] = []
        encoded = self.wire.encode_result(result, outputs)
        written = [i for i, (x, k) in enumerate(zip(tensors, kept, strict=True)) if not self._same(flat(x), k)]
        inputs = {x.untyped_storage().data_ptr() for x in tensors if x.numel()}
        if request["grad"]:
            self.calls[request["number"]] = ([x for x in tensors if x.requires_grad], outputs)
            while len(self.calls) > _MAX_CALLS:
                del self.calls[next(iter(self.calls))]
        reply = {
            "result": encoded,
            "results": len(outputs),
            "written": written,
            "conduct": {
                "generator": not torch.equal(torch.get_rng_state(), state),
                "modes": _modes(torch) != modes,
                "aliases": any(x.untyped_storage().data_ptr() in inputs for x in outputs if x.numel()),
                "stray_s": stray,
            },
            "same": next((name for name, value in given.items() if value is result), None),  # as `out` is
            "call": True,
        }
        return reply, [*outputs, *(flat(tensors[i]) for i in written)]

    def _stray(self) -> float:
        """Seconds of work that the current stream does not wait for."""
        if not self.cuda:
            return 0.0
        self.torch.cuda.current_stream().synchronize()
        began = self.clock()
        self.sync()
        return self.clock() - began

    def _same(self, a: Any, b: Any) -> bool:
        """Whether two flat tensors hold the same bytes."""
        return not a.numel() or bool(self.equal(a.view(self.torch.uint8), b.view(self.torch.uint8)))

    def do_backward(self, request: Request, _: list[Any]) -> Reply:
        """Gradients of an earlier call for upstream gradients; None where the candidate gives none."""
        inputs, outputs = self.calls[request["call"]]
        pairs = [(o, g) for o, g in zip(outputs, request["grads"], strict=True) if g is not None and o.requires_grad]
        grads = self.torch.autograd.grad(
            [o for o, _ in pairs], inputs, [g for _, g in pairs], retain_graph=True, allow_unused=True
        )
        return self._result(list(grads))

    def do_keep(self, request: Request, _: list[Any]) -> Reply:
        """Arguments of later bursts; `rewrite` changes their values where they lie, unseen by version counters."""
        if request["rewrite"]:
            self._overwrite(self.sets, request["sets"])
        else:
            self.sets, self.results = request["sets"], []
        self.sync()
        return {}, []

    def do_draw(self, request: Request, _: list[Any]) -> Reply:
        """Arguments of a workload from seeds: made new, or rewritten where they lie."""
        if request["new"]:
            self.sets = []
        for i, seed in enumerate(request["seeds"]):
            drawn = self.workloads.draw(request["workload"], seed, self.device)
            if i == len(self.sets):
                self.sets.append(drawn)
            self._overwrite(self.sets[i], drawn)
        self.results = []
        self.sync()
        return {}, []

    def _overwrite(self, old: Any, new: Any) -> None:
        leaves = self.workloads.leaves
        for x, y in zip(leaves(old), leaves(new), strict=True):
            x.data.copy_(y)

    def do_burst(self, request: Request, _: list[Any]) -> Reply:
        """Calls in an order, as fast as they come; the trial times from outside, `seconds` is the second clock."""
        defaults, order = request["defaults"], request["order"]
        results: list[Any] = [None] * len(self.sets)
        marks = [(self.event(), self.event()) for _ in order] if self.cuda else []
        self.sync()
        spans = []
        with self.torch.no_grad():
            for turn, i in enumerate(order):
                began = self.clock()
                if marks:
                    marks[turn][0].record()
                results[i] = self._call(self.sets[i], defaults)
                if marks:
                    marks[turn][1].record()
                spans.append(self.clock() - began)
        self.sync()
        self.results = results
        return {"seconds": [self.elapsed(a, b) / 1e3 for a, b in marks] or spans}, []

    def do_attach(self, request: Request, _: list[Any]) -> Reply:
        """Arguments that lie in the shared memory from now on, where the trial writes them."""
        if self.shared is None:
            raise RuntimeError("no memory is shared")
        where, self.results_from = self.places(self.workloads.leaves(request["given"]))
        self.place = self.put(request["given"], self.shared, where)
        return {}, []

    def do_timed(self, request: Request, _: list[Any]) -> Reply:
        """One call on the shared arguments, its results written to the shared memory: all of it in the trial's time."""
        shared, at = self.shared, [self.results_from]
        outputs: list[Any] = []
        if shared is None or self.place is None:
            raise RuntimeError("nothing is attached")
        with self.torch.no_grad():
            encoded = self.wire.encode_result(self._call(self.place, request["defaults"]), outputs)
            for x in outputs:
                end = at[-1] + x.numel() * x.element_size()
                if end > shared.size:
                    raise ValueError("the results are larger than those of the operator")
                if x.numel():
                    shared.bytes[at[-1] : end].view(x.dtype).view(x.shape).copy_(x)
                at.append(self.align(end))
        return {"result": encoded, "at": at[:-1], "call": True}, []

    def do_fetch(self, request: Request, _: list[Any]) -> Reply:
        """A result of the last burst, as it is now."""
        return self._result(self.results[request["index"]])

    def _result(self, value: Any) -> Reply:
        tensors: list[Any] = []
        return {"result": self.wire.encode_result(value, tensors)}, tensors

    def do_look(self, _request: Request, _: list[Any]) -> Reply:
        """What the candidate changed outside itself, and what of ours it reached for."""
        refused = self.guard.refused if self.guard is not None else []
        return {"touched": self.tamper_check.changed(self.before), "borrowed": list(refused)}, []

    def do_ping(self, _request: Request, _: list[Any]) -> Reply:
        """What a round trip costs."""
        return {}, []


def _modes(torch: Any) -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
    )


def _described(error: BaseException | None, folder: Path) -> dict[str, Any]:
    """An exception as JSON: type, message, where in the candidate."""
    frames = traceback.extract_tb(error.__traceback__) if error else ()
    lines = [f.lineno for f in frames if f.filename == str(folder / "candidate.py")]
    found = {"type": type(error).__name__, "text": str(error)[:2000], "line": lines[-1] if lines else None}
    if hasattr(error, "remedy"):  # an ArgumentError of the contract
        return {**found, "argument": [str(getattr(error, n, "")) for n in ("argument", "got", "problem", "remedy")]}
    return found


if __name__ == "__main__":
    os.umask(0o077)
    main(*sys.argv[1:])
