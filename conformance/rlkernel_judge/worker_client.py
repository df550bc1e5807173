"""The trial's side of a worker: start it, call the candidate in it, and notice how it ends.

`registered_candidate` puts a worker's candidate where the front door of the operators finds it, as one more backend, so
that the clauses attack it as they attack any other; a gradient that a clause asks for is computed in the worker too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Final, NoReturn, Self

import torch
from torch import Tensor

import rlkernel
from rlkernel.discover import guarded
from rlkernel_conformance import faults
from rlkernel_conformance.compare import Violation
from rlkernel_core.errors import ArgumentError, LayoutError, RLKernelError
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS
from rlkernel_judge import replies, sandbox, wire, workloads
from rlkernel_judge.arena import Arena, Place
from rlkernel_judge.private_folder import private_folder
from rlkernel_judge.process_tree import ProcessTree
from rlkernel_torch import backend as reference

BACKEND: Final = "candidate"
STARTING_S: Final = 120.0  # importing torch, and compiling what the candidate compiles on import
_ENDING_S: Final = 15.0  # for a supervisor to end what a worker left
Reply = tuple[dict[str, Any], list[bytearray], list[Tensor]]  # JSON, its blocks, and the tensors of the request


class WorkerLost(RLKernelError):
    """The worker is gone or silent; `fault` is a name of the taxonomy."""

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class CandidateError(RLKernelError):
    """The candidate raised; the message begins with the type of what it raised."""


class BaselineError(RLKernelError):
    """The baseline failed, or its worker: no fault of the candidate's."""


class Worker:
    """One worker process, of a candidate or of the baseline. Not to be shared by threads."""

    def __init__(
        self,
        box: sandbox.Sandbox,
        op: str,
        device: str,
        limits: sandbox.Limits,
        *,
        baseline: bool = False,
        arena: Arena | None = None,
    ) -> None:
        self.op, self.device, self.baseline, self.number = op, device, baseline, 0
        self.lost: WorkerLost | None = None
        self.deadline = time.monotonic() + STARTING_S  # when the next replies must be there
        self._stack = ExitStack()
        self.scratch = self._stack.enter_context(private_folder(for_nobody=box.as_nobody))
        self._socket, theirs = socket.socketpair()
        threads = torch.get_num_threads()
        self.arena = arena
        shared = {"descriptor": arena.descriptor, "size": arena.size} if arena is not None else None
        settings = {"device": device, "limits": asdict(limits), "threads": threads, "arena": shared}
        job = json.dumps({**settings, "candidate": not baseline})
        keep = (arena.descriptor,) if arena is not None else ()
        with theirs:
            self._process: subprocess.Popen[bytes] = box.start(
                "rlkernel_judge.worker", self.scratch, str(theirs.fileno()), job,
                limits=limits, keep=(theirs.fileno(), *keep),
                OMP_NUM_THREADS=str(threads), TORCHINDUCTOR_COMPILE_THREADS="1",
            )  # fmt: skip
        self.tree = ProcessTree(self._process.pid)
        self.tasks = 0  # threads before the candidate was loaded, its pools started
        self._stack.callback(self._socket.close)
        self._stack.callback(sandbox.kill, self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker and all it started; again does nothing."""
        self._stack.close()

    def ask(self, what: str, **content: Any) -> Reply:
        """One request and its reply.

        Raises:
            WorkerLost: there is no reply, now or since an earlier request.
            CandidateError: the candidate raised.
            BaselineError: instead of all others, where this is the worker of the baseline.
            ArgumentError: the candidate refused an argument as the contract says.
        """
        if self.lost is not None:
            raise self.lost
        self.number += 1
        header, blocks, sent = wire.encode_request({"do": what, "number": self.number, **content})
        try:
            wire.send(self._socket, header, blocks, self.deadline)
            header, received = wire.receive(self._socket, self.deadline)
        except wire.ConnectionLost as lost:
            self._lose(self._ended() if lost.fault == "closed" else lost.fault, str(lost))
        reply, _ = guarded(partial(json.loads, header))
        if not isinstance(reply, dict) or reply.get("number") != self.number:
            self._lose("protocol_error", "a reply that is none")
        if "error" in reply:
            self._raise(reply["error"])
        checked, _ = guarded(partial(replies.read, what, reply))
        if checked is None:
            self._lose("protocol_error", f"a reply that is none to {what!r}")
        if what == "ready":
            self.tasks = len(self.tree.tasks())
        if what == "call" and not _fits(checked, received, sent):
            self._lose("protocol_error", "tensors that are not those it names")
        return checked, received, sent

    def tensors(self, reply: Mapping[str, Any], blocks: list[bytearray]) -> list[Tensor]:
        """The tensors of a result.

        Raises:
            Violation: they are not what an operator returns.
        """
        found, error = guarded(lambda: wire.tensors_of(reply["result"], blocks, self.device))
        if found is None:
            raise Violation(f"not a result of this operator: {error}")
        return found

    def result(self, reply: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
        """The result in a reply, of these tensors; a dict of its fields becomes the operator's result.

        Raises:
            Violation: it is not what an operator returns.
        """
        found, error = guarded(lambda: wire.decode_result(reply["result"], list(tensors)))
        cls = result_class(self.op)
        if error is None and isinstance(found, dict) and cls is not None:
            found, error = guarded(partial(cls, **found))
        if error is not None:
            raise Violation(f"not a result of this operator: {error}")
        if reply.get("call") and cls is not None and not isinstance(found, cls):
            raise Violation(
                f"the result is a {type(found).__name__}; {cls.__name__} or a dict of its fields is expected"
            )
        return found

    def fetched(self, index: int) -> Any:
        """A result of the last burst, as it is now."""
        reply, blocks, _ = self.ask("fetch", index=index)
        return self.result(reply, self.tensors(reply, blocks))

    def results_at(self, reply: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a result that was written to the shared memory, copied.

        Raises:
            Violation: they are not what an operator returns.
        """
        arena = self.arena
        if arena is None:
            raise ValueError("this worker shares no memory")

        def copies() -> list[Tensor]:
            nodes = {node["tensor"]: node for node in wire.tensor_nodes(reply["result"])}
            return [arena.view(_place(nodes[i], offset)).clone() for i, offset in enumerate(reply["at"])]

        found, error = guarded(copies)
        if found is None:
            raise Violation(f"not a result of this operator: {error}")
        return found

    def _raise(self, error: Any) -> NoReturn:
        if not isinstance(error, dict):
            self._lose("protocol_error", "an error that is none")
        text = f"{error.get('type')}: {error.get('text')}"
        if self.baseline:
            raise BaselineError(text)
        if isinstance(error.get("argument"), list):
            raise ArgumentError(*([str(x) for x in error["argument"]] + [""] * 4)[:4])
        if error.get("type") == "LayoutError":
            raise LayoutError(str(error.get("text")))
        raise CandidateError(f"{text} (line {error['line']})" if error.get("line") else text)

    def _lose(self, fault: str, message: str) -> NoReturn:
        text = message if fault in {"timeout", "protocol_error"} else faults.FAULTS[fault]
        self.lost = WorkerLost(fault, text)
        if self.baseline:
            raise BaselineError(f"{fault}: {text}")
        raise self.lost

    def _ended(self) -> str:
        try:
            status = self._process.wait(timeout=_ENDING_S)
        except subprocess.TimeoutExpired:
            return "protocol_error"
        if sandbox.cause(self._process) == "memory":
            return "out_of_memory"
        if status > 128:  # across name spaces a signal is reported as shells do
            status = 128 - status
        return "timeout" if status == -signal.SIGXCPU else faults.of_exit(status)


def call_candidate(worker: Worker, given: dict[str, Any], *, fresh: bool | None = None) -> Any:
    """Call the candidate as an operator of this process: values, gradients, and what it did to its arguments.

    Raises:
        Violation: it did something that no operator may.
    """
    inputs = workloads.leaves(given)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        inputs = list({id(x): x for x in inputs}.values())
        exchange: dict[str, Any] = {"inputs": [id(x) for x in inputs]}
        outputs = _RemoteCall.apply(worker, given, exchange, *inputs)  # type: ignore[no-untyped-call]
        reply, blocks, sent = exchange["reply"]
        result = worker.result(reply, outputs)
    else:
        defaults = workloads.defaults(worker.op)
        reply, blocks, sent = worker.ask("call", given=given, defaults=defaults, grad=False, fresh=fresh)
        result = worker.result(reply, worker.tensors(reply, blocks))
    _apply_conduct(reply, blocks, sent, may_alias=worker.op in workloads.MAY_ALIAS)
    return given.get(reply["same"], result)


def _apply_conduct(reply: Mapping[str, Any], blocks: list[bytearray], sent: list[Tensor], *, may_alias: bool) -> None:
    """Do to our tensors what the candidate did to its own, and judge the rest."""
    for number, block in zip(reply["written"], blocks[int(reply["results"]) :], strict=True):
        memory = wire.flat(sent[number])
        memory.copy_(wire.from_bytes(block, memory.dtype, str(memory.device)))
    conduct = reply["conduct"]
    if conduct["generator"]:
        torch.rand(())  # the clause about the generator sees it move
    if conduct["modes"]:
        raise Violation("a global mode changed: default dtype, default device, gradients or inference")
    if conduct["aliases"] and not may_alias:
        raise Violation("a result is memory of an input")


def _fits(reply: Mapping[str, Any], blocks: list[bytearray], sent: list[Tensor]) -> bool:
    """Whether the blocks of a reply to a call are its results and the arguments it wrote to."""
    if reply["results"] + len(reply["written"]) != len(blocks) or any(i >= len(sent) for i in reply["written"]):
        return False
    memories = [wire.flat(sent[i]) for i in reply["written"]]
    return [x.numel() * x.element_size() for x in memories] == [len(b) for b in blocks[reply["results"] :]]


def _place(node: Mapping[str, Any], offset: int) -> Place:
    """Where a result lies that a reply names, in order of its elements."""
    shape = tuple(int(n) for n in node["shape"])
    dtype = getattr(torch, str(node["dtype"]), None)
    if not isinstance(dtype, torch.dtype) or any(n < 0 for n in shape):
        raise ValueError(f"{node} is no tensor")
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return Place(offset, dtype, shape, tuple(stride))


def result_class(op: str) -> type | None:
    """The class of an operator's results; None where that is a tensor."""
    spec = OPERATORS[op]
    found = getattr(sys.modules[spec.record.__module__], str(spec.signature.return_annotation), None)
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


class _RemoteCall(torch.autograd.Function):
    """One call in the worker, with its backward there too."""

    @staticmethod
    def forward(ctx: Any, worker: Worker, given: Any, exchange: dict[str, Any], *_: Tensor) -> Any:
        reply, blocks, sent = exchange["reply"] = worker.ask(
            "call", given=given, defaults=workloads.defaults(worker.op), grad=True, fresh=None
        )
        outputs = worker.tensors(reply, blocks)
        differentiable = [bool(node["grad"]) for node in wire.tensor_nodes(reply["result"])]
        order = [id(x) for x in sent if x.requires_grad]  # as the worker replies
        ctx.worker, ctx.number = worker, worker.number
        ctx.places = [order.index(i) if i in order else None for i in exchange["inputs"]]
        ctx.mark_non_differentiable(*(x for x, d in zip(outputs, differentiable, strict=True) if not d))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        reply, blocks, _ = ctx.worker.ask("backward", call=ctx.number, grads=list(grads))
        found = ctx.worker.result(reply, ctx.worker.tensors(reply, blocks))
        return None, None, None, *(None if place is None else found[place] for place in ctx.places)


@contextmanager
def registered_candidate(
    op: str, claims: frozenset[str], dtypes: tuple[str, ...], device: str, current: Callable[[], Worker]
) -> Iterator[Backend]:
    """Register the candidate as a backend of this process: its operator, and the reference for every other."""
    spec, defaults = OPERATORS[op], workloads.defaults(op)

    def candidate(call: Any) -> Any:
        # What the caller left out is left out here too: a candidate need not take every argument.
        given = {n: x for n, x in call.as_dict().items() if n not in defaults or x is not defaults[n]}
        return call_candidate(current(), given)

    globals()[f"{op}_candidate"] = candidate
    requires = Requires(device=device.partition(":")[0], dtypes=dtypes if spec.primary else ())
    own = Impl(op=spec.id, target=f"{__name__}:{op}_candidate", requires=requires, supports=claims)
    impls = tuple(own if i.op == spec.id else i for i in reference.impls)
    manifest = Backend(name=BACKEND, api=API_VERSION, impls=impls)
    try:
        with rlkernel.registered(manifest):
            yield manifest
    finally:
        del globals()[f"{op}_candidate"]
