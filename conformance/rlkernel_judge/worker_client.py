"""The trial's side of a host: start it, call the candidate in it, and notice how it ends.

`Seat` is one host. `seated` puts its candidate where the front door of the operators finds it, as one more backend, so
that the clauses attack it as they attack any other; a gradient that a clause asks for is computed in the host too.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
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
from rlkernel_torch import backend as reference

BACKEND: Final = "candidate"
STARTING_S: Final = 120.0  # importing torch, and compiling what the candidate compiles on import


class Lost(RLKernelError):
    """The host is gone or silent; `fault` is a name of the taxonomy."""

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class CandidateError(RLKernelError):
    """The candidate raised; the message begins with the type of what it raised."""


class BaselineError(RLKernelError):
    """The baseline failed, or its host: no fault of the candidate's."""


class Seat:
    """One host process, of a candidate or of the baseline. Not to be shared by threads."""

    def __init__(
        self, cage: sandbox.Cage, op: str, device: str, limits: sandbox.Limits, *, baseline: bool = False
    ) -> None:
        self.op, self.device, self.baseline, self.number = op, device, baseline, 0
        self.lost: Lost | None = None
        self.until = time.monotonic() + STARTING_S  # when the next answers must be there
        self._stack = ExitStack()
        self.scratch = self._stack.enter_context(sandbox.private_folder(cage))
        self._socket, theirs = socket.socketpair()
        threads = torch.get_num_threads()
        job = json.dumps({"device": device, "limits": asdict(limits), "threads": threads})
        with theirs:
            self._process: subprocess.Popen[bytes] = cage.start(
                "rlkernel_judge.worker", self.scratch, str(theirs.fileno()), job,
                keep=(theirs.fileno(),), OMP_NUM_THREADS=str(threads),
            )  # fmt: skip
        self._stack.callback(self._socket.close)
        self._stack.callback(sandbox.end, self._process, self.scratch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the host and all it started; again does nothing."""
        self._stack.close()

    def ask(self, what: str, **words: Any) -> tuple[dict[str, Any], list[bytearray], list[Tensor]]:
        """One request: what was said, its blocks, and the tensors that were sent.

        Raises:
            Lost: there is no answer, now or since an earlier request.
            CandidateError: the candidate raised.
            BaselineError: instead of all others, where this is the host of the baseline.
            ArgumentError: the candidate refused an argument as the contract says.
        """
        if self.lost is not None:
            raise self.lost
        self.number += 1
        header, blocks, sent = wire.give({"do": what, "number": self.number, **words})
        try:
            wire.send(self._socket, header, blocks, self.until)
            header, answered = wire.receive(self._socket, self.until)
        except wire.Closed as error:
            self._lose(self._ended() if error.fault == "closed" else error.fault, str(error))
        said, error = guarded(lambda: json.loads(header))
        if error is not None or not isinstance(said, dict) or said.get("number") != self.number:
            self._lose("protocol_error", "an answer that is none")
        if "error" in said:
            self._raise(said["error"])
        checked, error = guarded(lambda: replies.read(what, said))
        if error is not None or checked is None:
            self._lose("protocol_error", f"an answer that is none to {what!r}")
        if what == "call" and not _fits(checked, answered, sent):
            self._lose("protocol_error", "tensors that are not those it names")
        return checked, answered, sent

    def result(self, said: Mapping[str, Any], blocks: list[bytearray]) -> Any:
        """The result in an answer.

        Raises:
            Violation: it is not what an operator returns.
        """
        found, error = guarded(lambda: wire.tensors_of(said["result"], blocks, self.device))
        if error is not None or found is None:
            raise Violation(f"not a result of this operator: {error}")
        return self.built(said, found)

    def built(self, said: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
        """The result in an answer, of these tensors; a dict of its fields becomes the operator's result.

        Raises:
            Violation: it is not what an operator returns.
        """
        found, error = guarded(lambda: wire.decode(said["result"], list(tensors)))
        cls = result_class(self.op)
        if error is None and isinstance(found, dict) and cls is not None:
            found, error = guarded(lambda: cls(**found))
        if error is not None:
            raise Violation(f"not a result of this operator: {error}")
        if said.get("call") and cls is not None and not isinstance(found, cls):
            raise Violation(
                f"the result is a {type(found).__name__}; {cls.__name__} or a dict of its fields is expected"
            )
        return found

    def _raise(self, told: Any) -> NoReturn:
        if not isinstance(told, dict):
            self._lose("protocol_error", "an error that is none")
        if self.baseline:
            raise BaselineError(f"{told.get('type')}: {told.get('text')}")
        if isinstance(told.get("argument"), list):
            raise ArgumentError(*([str(x) for x in told["argument"]] + [""] * 4)[:4])
        if told.get("type") == "LayoutError":
            raise LayoutError(str(told.get("text")))
        where = f" (line {told['line']})" if told.get("line") else ""
        raise CandidateError(f"{told.get('type')}: {told.get('text')}{where}")

    def _lose(self, fault: str, message: str) -> NoReturn:
        text = message if fault in {"timeout", "protocol_error"} else faults.FAULTS[fault]
        self.lost = Lost(fault, text)
        if self.baseline:
            raise BaselineError(f"{fault}: {text}")
        raise self.lost

    def _ended(self) -> str:
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "protocol_error"
        if status > 128:  # across name spaces a signal is told as shells do
            status = 128 - status
        return "timeout" if status == -signal.SIGXCPU else faults.of_exit(status)


def gathered(seat: Seat, given: dict[str, Any], *, fresh: bool | None = None) -> Any:
    """Call the candidate as an operator of this process: values, gradients, and what it did to its arguments.

    Raises:
        Violation: it did something that no operator may.
    """
    plain, shares = workloads.defaults(seat.op), seat.op in workloads.SHARES
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in workloads.leaves(given))
    if not wanted:
        said, blocks, sent = seat.ask("call", given=given, defaults=plain, grad=False, fresh=fresh)
        result = seat.result(said, blocks)
    else:
        inputs = list({id(x): x for x in workloads.leaves(given)}.values())
        bridge: dict[str, Any] = {"inputs": [id(x) for x in inputs]}
        outputs = _Bridge.apply(seat, given, plain, bridge, *inputs)
        said, blocks, sent = bridge["answer"]
        result = seat.built(said, outputs)
    _conduct(said, blocks, sent, shares=shares)
    return given.get(said["same"], result)


def _conduct(said: Mapping[str, Any], blocks: list[bytearray], sent: list[Tensor], *, shares: bool) -> None:
    """Do to our tensors what the candidate did to its own, and judge the rest."""
    for number, block in zip(said["written"], blocks[int(said["results"]) :], strict=True):
        home = wire.flat(sent[number])
        home.copy_(wire.from_bytes(block, home.dtype, str(home.device)))
    conduct = said["conduct"]
    if conduct["generator"]:
        torch.rand(())  # the clause that watches the generator sees it move
    if conduct["modes"]:
        raise Violation("a global mode changed: default dtype, default device, gradients or inference")
    if conduct["aliases"] and not shares:
        raise Violation("a result is memory of an input")


def _fits(said: Mapping[str, Any], blocks: list[bytearray], sent: list[Tensor]) -> bool:
    """Whether the blocks of an answer to a call are its results and the arguments it wrote to."""
    if said["results"] + len(said["written"]) != len(blocks) or any(i >= len(sent) for i in said["written"]):
        return False
    homes = [wire.flat(sent[i]) for i in said["written"]]
    return [x.numel() * x.element_size() for x in homes] == [len(b) for b in blocks[said["results"] :]]


def result_class(op: str) -> type | None:
    """The class of an operator's results; None where that is a tensor."""
    spec = OPERATORS[op]
    found = getattr(sys.modules[spec.record.__module__], str(spec.signature.return_annotation), None)
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


class _Bridge(torch.autograd.Function):
    """One call in the host, with its backward there too."""

    @staticmethod
    def forward(ctx: Any, seat: Seat, given: Any, plain: Any, bridge: dict[str, Any], *_: Tensor) -> Any:
        answer = seat.ask("call", given=given, defaults=plain, grad=True, fresh=None)
        said, blocks, _ = answer
        outputs, error = guarded(lambda: wire.tensors_of(said["result"], blocks, seat.device))
        if error is not None or outputs is None:
            raise Violation(f"not a result of this operator: {error}")
        bridge["answer"] = answer
        wanted = _wanted(said["result"])
        order = [id(x) for x in answer[2] if x.requires_grad]  # as the host answers
        ctx.seat, ctx.number = seat, seat.number
        ctx.places = [order.index(i) if i in order else None for i in bridge["inputs"]]
        ctx.mark_non_differentiable(*(x for x, w in zip(outputs, wanted, strict=True) if not w))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        said, blocks, _ = ctx.seat.ask("backward", call=ctx.number, grads=list(grads))
        found = ctx.seat.result(said, blocks)
        return None, None, None, None, *(None if place is None else found[place] for place in ctx.places)


def _wanted(told: Any) -> list[bool]:
    """For each tensor of an encoded result, in order, whether a gradient flows to it."""
    if isinstance(told, dict) and "tensor" in told:
        return [bool(told["grad"])]
    inner = told.values() if isinstance(told, dict) else told if isinstance(told, list) else ()
    return [w for part in inner for w in _wanted(part)]


@contextmanager
def seated(
    op: str, claims: frozenset[str], dtypes: tuple[str, ...], device: str, current: Callable[[], Seat]
) -> Iterator[Backend]:
    """Register the candidate as a backend of this process: its operator, and the reference for every other."""
    spec, plain = OPERATORS[op], workloads.defaults(op)

    def candidate(call: Any) -> Any:
        # What the caller left out is left out here too: a candidate need not take every argument.
        given = {n: x for n, x in call.as_dict().items() if n not in plain or x is not plain[n]}
        return gathered(current(), given)

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
