"""The jobs of a judging server: one at a time on each device, the others in its queue, each in a process of its own.

Whatever happens in a trial happens to that process, which ends with the server, however that goes.
After a fault that may have left a GPU in a bad state the device is checked; one that fails takes no more jobs until it
is reset. Imports no torch.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import sys
import time
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from rlkernel_core.errors import RLKernelError

Process = asyncio.subprocess.Process
TRIAL: Final = (sys.executable, "-m", "rlkernel_judge.trial")
HEALTH: Final = (
    sys.executable,
    "-c",
    (
        "import sys; from rlkernel_judge.sandbox import end_with_parent; end_with_parent(); "
        "from rlkernel_conformance.health import complaint; print(complaint(sys.argv[1]) or '')"
    ),
)
KEPT: Final = 1024  # finished jobs that can still be asked for
_STOPPED: Final = "stopped: the server was told to end before this job was judged; send it again"
_OVERRUN_S: Final = 60.0  # beyond a task's own limit: to start, and to end what is left
_ENDING_S: Final = 10.0
_HEALTH_S: Final = 120.0
# After these a device is checked before it takes another job.
_HARMFUL: Final = frozenset(
    {"illegal_access", "illegal_instruction", "segfault", "abort", "timeout", "killed", "out_of_memory", "jit_error"}
)
_FIRST_ESTIMATE_S: Final = 15.0  # of a trial, until some were seen


class QueueFull(RLKernelError):
    """The device's queue is full; `retry_s` estimates when it may not be."""

    def __init__(self, retry_s: float) -> None:
        super().__init__(f"too many jobs are waiting; try again in {retry_s:.0f} s")
        self.retry_s = retry_s


class OutOfService(RLKernelError):
    """The device failed its check, or the server is closing."""


@dataclass
class Job:
    """One request, from its arrival to its verdict."""

    id: str
    task: dict[str, Any]
    source: bytes
    file: str
    state: str = "waiting"  # waiting | running | done | late | cancelled | stopped
    answer: dict[str, Any] = field(default_factory=dict)  # {"verdict": ...}, or {"error": ...} perhaps with "fields"
    done: asyncio.Event = field(default_factory=asyncio.Event)
    process: Process | None = None

    def finish(self, state: str, answer: dict[str, Any]) -> None:
        """Record the answer and wake who waits for it."""
        self.state, self.answer, self.source = state, answer, b""
        self.done.set()


@dataclass
class Device:
    """One device and its queue."""

    name: str
    queue: asyncio.Queue[Job]
    complaint: str | None = None  # why it is out of service
    running: str | None = None  # id of the job
    finished: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def refusal(self) -> str:
        """Why it takes no job, or ""."""
        return "" if self.complaint is None else f"{self.name} is out of service: {self.complaint}"


class JobQueue:
    """All jobs of a server."""

    def __init__(
        self,
        devices: tuple[str, ...],
        *,
        waiting: int = 64,
        trial: tuple[str, ...] = TRIAL,
        health: tuple[str, ...] = HEALTH,
        overrun_s: float = _OVERRUN_S,
    ) -> None:
        self.devices = {name: Device(name, asyncio.Queue(waiting)) for name in devices}
        self.jobs: OrderedDict[str, Job] = OrderedDict()
        self.trial, self.health, self.overrun_s = trial, health, overrun_s
        self.average_s, self.closing = _FIRST_ESTIMATE_S, False
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Start to work; needs a running event loop."""
        self._tasks = [asyncio.create_task(self._serve(device)) for device in self.devices.values()]

    async def drain(self, grace_s: float) -> None:
        """Take no more jobs, answer those that wait, and give those that run some time for their verdicts."""
        self.closing = True
        running = []
        for job in self.jobs.values():
            if job.state == "waiting":
                job.finish("stopped", {"error": _STOPPED})
            elif job.state == "running":
                running.append(asyncio.create_task(job.done.wait()))
        if running:
            await asyncio.wait(running, timeout=grace_s)
        await self.close()

    async def close(self) -> None:
        """Take no more jobs, end those that run, answer all."""
        self.closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for job in self.jobs.values():
            if not job.done.is_set():
                job.finish("stopped", {"error": _STOPPED})

    def submit(self, task: dict[str, Any], source: bytes, file: str) -> Job:
        """Put a job in the queue of its device.

        Raises:
            QueueFull: there is no room.
            OutOfService: the device takes no jobs.
            KeyError: no such device.
        """
        device = self.devices[task["device"]]
        if self.closing:
            raise OutOfService("the server is closing")
        if device.refusal:
            raise OutOfService(f"{device.refusal}; POST /devices/{device.name}/reset")
        job = Job(secrets.token_hex(8), task, source, file)
        try:
            device.queue.put_nowait(job)
        except asyncio.QueueFull as error:
            raise QueueFull(self.average_s * max(1, device.queue.qsize())) from error
        self.jobs[job.id] = job
        finished = [k for k, j in self.jobs.items() if j.done.is_set()]
        for old in finished[: max(0, len(finished) - KEPT)]:
            del self.jobs[old]
        return job

    def least_busy(self) -> str:
        """The device with the shortest queue, of those in service where there are any."""
        devices = self.devices.values()
        return min(devices, key=lambda d: (d.complaint is not None, d.queue.qsize(), d.running is not None)).name

    async def cancel(self, job: Job) -> None:
        """Nobody wants the verdict any more."""
        if not job.done.is_set():
            job.finish("cancelled", {"error": "the request was cancelled"})
            await _end(job.process)

    async def reset(self, name: str) -> str | None:
        """Forget a device's faults and check it; what is wrong with it, or None.

        Raises:
            KeyError: no such device.
        """
        device = self.devices[name]
        device.faults.clear()
        device.complaint = await self._check(device)
        return device.complaint

    async def _serve(self, device: Device) -> None:
        """Run the jobs of a device, one after another."""
        while True:
            job = await device.queue.get()
            if job.done.is_set():
                continue
            if device.refusal:
                job.finish("done", {"error": device.refusal})
                continue
            device.running, job.state, began = job.id, "running", time.monotonic()
            try:
                answer = await self._run(job)
            finally:
                device.running = None
                await _end(job.process)
            self.average_s += 0.2 * (time.monotonic() - began - self.average_s)
            fault = (answer.get("verdict") or {}).get("fault")
            device.finished += 1
            device.faults.update([fault] if fault else [])
            if fault in _HARMFUL and not device.name.startswith("cpu"):
                device.complaint = await self._check(device)
            if not job.done.is_set():
                job.finish(answer.pop("state", "done"), answer)

    async def _run(self, job: Job) -> dict[str, Any]:
        """The answer of a trial's process, or what became of it."""
        asked = {"task": job.task, "source": base64.b64encode(job.source).decode(), "file": job.file}
        try:
            job.process = process = await _start((*self.trial, str(os.getpid())), start_new_session=True)
        except OSError as error:
            return {"error": f"the trial's process could not be started: {error.strerror}"}
        if job.done.is_set():  # cancelled meanwhile
            return {}
        out = await _output(process, float(job.task["limit_s"]) + self.overrun_s, json.dumps(asked).encode())
        if out is None:
            return {"error": "the trial did not end in time", "state": "late"}
        try:
            answer = json.loads(out or b"{}")
        except ValueError:
            answer = {}
        if isinstance(answer, dict) and answer.keys() & {"verdict", "error"}:
            return answer
        return {"error": f"the trial's process ended with {process.returncode} and without a verdict"}

    async def _check(self, device: Device) -> str | None:
        process = await _start((*self.health, device.name))
        try:
            out = await _output(process, _HEALTH_S)
        finally:
            await _end(process)
        if out is None:
            return "its check did not end"
        return out.decode().strip() or (None if process.returncode == 0 else "its check could not be carried out")


async def _start(command: tuple[str, ...], *, start_new_session: bool = False) -> Process:
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=start_new_session
    )


async def _output(process: Process, limit_s: float, given: bytes = b"") -> bytes | None:
    """What a process writes until it ends; None where it does not end in time."""
    try:
        async with asyncio.timeout(limit_s):
            return (await process.communicate(given))[0]
    except TimeoutError:
        return None


async def _end(process: Process | None) -> None:
    """Ask a process to end its workers and itself; kill it where it does not."""
    if process is None or process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_ENDING_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
