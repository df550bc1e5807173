"""The cases before the judge: one at a time on each device, the others wait in line, each in a process of its own.

Whatever happens to a trial happens to that process. A fault that may have left a GPU in a bad state is followed by a
check of the device; one that fails takes no more cases until it is reset. Imports no torch.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import signal
import sys
import time
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from rlkernel_core.errors import RLKernelError

TRIAL: Final = (sys.executable, "-m", "rlkernel_judge.trial")
HEALTH: Final = (
    sys.executable,
    "-c",
    "import sys; from rlkernel_conformance.health import complaint; print(complaint(sys.argv[1]) or '')",
)
KEPT: Final = 1024  # finished cases that can still be asked for
_GRACE_S: Final = 60.0  # beyond a task's own limit: starting, and ending what is left
_ENDING_S: Final = 10.0
_HEALTH_S: Final = 120.0
# After these a device is looked at before it takes another case.
_HARMFUL: Final = frozenset(
    {"illegal_access", "illegal_instruction", "segfault", "abort", "timeout", "killed", "out_of_memory", "jit_error"}
)
_USUAL_S: Final = 15.0  # a trial, until some were seen


class Full(RLKernelError):
    """The line is full; `retry_s` says when it may not be."""

    def __init__(self, retry_s: float) -> None:
        super().__init__(f"too many cases are waiting; try again in {retry_s:.0f} s")
        self.retry_s = retry_s


class OutOfService(RLKernelError):
    """The device failed its check, or the docket is closing."""


@dataclass
class Case:
    """One request, from its arrival to its verdict."""

    id: str
    task: dict[str, Any]
    source: bytes
    file: str
    state: str = "waiting"  # waiting | running | done | cancelled
    answer: dict[str, Any] | None = None  # {"verdict": ...} or {"error": ...}
    done: asyncio.Event = field(default_factory=asyncio.Event)
    process: asyncio.subprocess.Process | None = None


@dataclass
class Device:
    """One device and its line."""

    name: str
    line: asyncio.Queue[Case]
    complaint: str | None = None  # why it is out of service
    running: str | None = None  # id of the case
    finished: int = 0
    faults: Counter[str] = field(default_factory=Counter)


class Docket:
    """All cases of a server."""

    def __init__(
        self,
        devices: tuple[str, ...],
        *,
        waiting: int = 64,
        trial: tuple[str, ...] = TRIAL,
        health: tuple[str, ...] = HEALTH,
    ) -> None:
        self.devices = {name: Device(name, asyncio.Queue(waiting)) for name in devices}
        self.cases: OrderedDict[str, Case] = OrderedDict()
        self.trial, self.health = trial, health
        self.usual_s, self.closing = _USUAL_S, False
        self._clerks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Start to work; needs a running event loop."""
        self._clerks = [asyncio.create_task(self._work(d)) for d in self.devices.values()]

    async def close(self) -> None:
        """Take no more cases, end those that run, tell those that wait."""
        self.closing = True
        for clerk in self._clerks:
            clerk.cancel()
        await asyncio.gather(*self._clerks, return_exceptions=True)
        for case in list(self.cases.values()):
            if not case.done.is_set():
                self._finish(case, "cancelled", {"error": "the server is closing"})

    def submit(self, task: dict[str, Any], source: bytes, file: str) -> Case:
        """Put a case in the line of its device.

        Raises:
            Full: the line is full.
            OutOfService: the device takes no cases.
            KeyError: no such device.
        """
        device = self.devices[task["device"]]
        if self.closing:
            raise OutOfService("the server is closing")
        if device.complaint is not None:
            raise OutOfService(
                f"{device.name} is out of service: {device.complaint}; POST /devices/{device.name}/reset"
            )
        case = Case(secrets.token_hex(8), task, source, file)
        try:
            device.line.put_nowait(case)
        except asyncio.QueueFull as error:
            raise Full(self.usual_s * max(1, device.line.qsize())) from error
        self.cases[case.id] = case
        finished = [k for k, c in self.cases.items() if c.done.is_set()]
        for old in finished[: max(0, len(finished) - KEPT)]:
            del self.cases[old]
        return case

    def idlest(self) -> str:
        """The device with the shortest line, of those in service where there are any."""
        return min(
            self.devices.values(), key=lambda d: (d.complaint is not None, d.line.qsize(), d.running is not None)
        ).name

    async def cancel(self, case: Case) -> None:
        """Nobody wants the verdict any more."""
        if not case.done.is_set():
            self._finish(case, "cancelled", {"error": "the request was cancelled"})
            await _end(case.process)

    async def reset(self, name: str) -> str | None:
        """Forget a device's faults and look whether it computes; what is wrong with it, or None.

        Raises:
            KeyError: no such device.
        """
        device = self.devices[name]
        device.faults.clear()
        device.complaint = await self._look(device)
        return device.complaint

    async def _work(self, device: Device) -> None:
        while True:
            case = await device.line.get()
            if case.done.is_set():
                continue
            if device.complaint is not None:
                self._finish(case, "done", {"error": f"{device.name} is out of service: {device.complaint}"})
                continue
            device.running, case.state, began = case.id, "running", time.monotonic()
            try:
                answer = await self._try(case)
            finally:
                device.running = None
                await _end(case.process)
            self.usual_s += 0.2 * (time.monotonic() - began - self.usual_s)
            fault = (answer.get("verdict") or {}).get("fault")
            device.finished += 1
            device.faults.update([fault] if fault else [])
            if fault in _HARMFUL and not device.name.startswith("cpu"):
                device.complaint = await self._look(device)
            if not case.done.is_set():
                self._finish(case, "done", answer)

    async def _try(self, case: Case) -> dict[str, Any]:
        """The answer of a trial's process, or what became of it."""
        asked = {"task": case.task, "source": base64.b64encode(case.source).decode(), "file": case.file}
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        case.process = await asyncio.create_subprocess_exec(
            *self.trial, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True
        )
        try:
            async with asyncio.timeout(float(case.task["limit_s"]) + _GRACE_S):
                out, _ = await case.process.communicate(json.dumps(asked).encode())
            answer = json.loads(out or b"{}")
        except TimeoutError:
            return {"error": "the trial did not end in time"}
        except ValueError:
            answer = {}
        if isinstance(answer, dict) and answer.keys() & {"verdict", "error"}:
            return answer
        return {"error": f"the trial's process ended with {case.process.returncode} and without a verdict"}

    async def _look(self, device: Device) -> str | None:
        process = await asyncio.create_subprocess_exec(
            *self.health, device.name, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(_HEALTH_S):
                out, _ = await process.communicate()
        except TimeoutError:
            return "its check did not end"
        finally:
            await _end(process)
        return out.decode().strip() or (None if process.returncode == 0 else "its check could not be carried out")

    @staticmethod
    def _finish(case: Case, state: str, answer: dict[str, Any]) -> None:
        case.state, case.answer = state, answer
        case.source = b""
        case.done.set()


async def _end(process: asyncio.subprocess.Process | None) -> None:
    """Ask a process to end its hosts and itself; then see to it."""
    if process is None or process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_ENDING_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()
