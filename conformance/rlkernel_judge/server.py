"""The judge over HTTP: JSON in, verdicts out.

    POST /judge                     a source and a task; waits for the verdict, or with "wait": false gives a job's id
    GET  /jobs/{id}                 a job: waiting, running, done, cancelled
    GET  /health                    the server lives; needs no token
    GET  /devices                   what each device does, has done, and what is wrong with it
    POST /devices/{id}/reset        forget its faults and check whether it computes
    GET  /faults                    names of faults, what they mean, how often they were seen

Built on Starlette; imports no torch.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlkernel_core import __version__
from rlkernel_core.spec import OPERATORS
from rlkernel_judge.job_queue import Device, Job, JobQueue, OutOfService, QueueFull
from rlkernel_judge.source import MAX_BYTES
from rlkernel_judge.verdict import FAULTS, SCHEMA, Task, complaints

MAX_REQUEST: Final = 4 * MAX_BYTES  # JSON spells a character with up to six
Handler = Callable[[Request], Awaitable[Response]]
_DISCONNECT_POLL_S: Final = 0.25  # how often a waiting client is looked for


class Asked(Task):
    """The body of POST /judge: a task with its source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = Field(max_length=MAX_BYTES, description="the file's text")
    file: str = Field(default="candidate.py", max_length=256, description="its name, for messages")
    wait: bool = Field(default=True, description="answer with the verdict; else at once, with a job's id")


class Refusal(BaseModel):
    """Every answer that is no success."""

    schema_version: int = SCHEMA
    error: str


def app(queue: JobQueue, token: str | None = None, sandbox: str = "auto") -> Starlette:
    """The application over a queue, which it opens and closes with itself; the sandbox is the server's to choose."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        queue.open()
        try:
            yield
        finally:
            await queue.close()

    def with_token(handler: Handler) -> Handler:
        """Serve requests that carry the token."""

        async def checked(request: Request) -> Response:
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            right = token is None or hmac.compare_digest(given.strip().encode(), token.encode())
            if token is not None and not (right and kind.lower() == "bearer"):
                raise HTTPException(
                    401, "send the server's token: Authorization: Bearer ...", {"WWW-Authenticate": "Bearer"}
                )
            return await handler(request)

        return checked

    def device_of(name: str) -> Device:
        if name not in queue.devices:
            raise HTTPException(404, f"this server has {', '.join(queue.devices)}")
        return queue.devices[name]

    def submitted(asked: Asked) -> Job:
        if asked.op not in OPERATORS:
            raise HTTPException(422, f"op: unknown operator {asked.op!r}")
        if "sandbox" in asked.model_fields_set:
            raise HTTPException(422, "sandbox: the server decides; it was started with it")
        device = asked.device if "device" in asked.model_fields_set else queue.least_busy()
        if device not in queue.devices:
            raise HTTPException(422, f"device: this server has {', '.join(queue.devices)}, not {device}")
        task = asked.model_dump(mode="json", exclude={"source", "file", "wait"})
        try:
            return queue.submit(task | {"device": device, "sandbox": sandbox}, asked.source.encode(), asked.file)
        except QueueFull as error:
            raise HTTPException(429, str(error), {"Retry-After": str(max(1, round(error.retry_s)))}) from error
        except OutOfService as error:
            raise HTTPException(503, str(error), {"Retry-After": "60"}) from error

    async def judge(request: Request) -> Response:
        try:
            asked = Asked.model_validate_json(await body_of(request))
        except ValidationError as error:
            raise HTTPException(422, complaints(error)[:2000]) from error
        job = submitted(asked)
        if not asked.wait:
            return JSONResponse(job_state(job), 202, headers={"Location": f"/jobs/{job.id}"})
        await finished(request, job, queue)
        if "verdict" not in job.answer:
            raise HTTPException(503 if job.state == "cancelled" else 500, str(job.answer.get("error")))
        return JSONResponse(job.answer["verdict"], headers={"X-Job": job.id})

    async def show_job(request: Request) -> Response:
        job = queue.jobs.get(request.path_params["id"])
        if job is None:
            raise HTTPException(404, "no such job, or it finished long ago")
        return JSONResponse(job_state(job))

    async def health(_: Request) -> Response:
        status = "closing" if queue.closing else "ok"
        return JSONResponse({"status": status, "rlkernel": __version__, "schema": SCHEMA})

    async def devices(_: Request) -> Response:
        return JSONResponse({name: device_state(device) for name, device in queue.devices.items()})

    async def reset(request: Request) -> Response:
        device = device_of(request.path_params["id"])
        complaint = await queue.reset(device.name)
        return JSONResponse(device_state(device), 200 if complaint is None else 503)

    async def faults(_: Request) -> Response:
        seen: Counter[str] = sum((d.faults for d in queue.devices.values()), Counter())
        return JSONResponse({name: {"meaning": text, "seen": seen[name]} for name, text in FAULTS.items()})

    routes = [
        Route("/judge", with_token(judge), methods=["POST"]),
        Route("/jobs/{id}", with_token(show_job)),
        Route("/health", health),
        Route("/devices", with_token(devices)),
        Route("/devices/{id}/reset", with_token(reset), methods=["POST"]),
        Route("/faults", with_token(faults)),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: refusal})


async def refusal(_: Request, error: Exception) -> Response:
    """An HTTPException as JSON."""
    if not isinstance(error, HTTPException):
        raise error
    return JSONResponse(Refusal(error=error.detail).model_dump(), error.status_code, headers=error.headers)


async def body_of(request: Request) -> bytes:
    """The body of a request.

    Raises:
        HTTPException: it is too large; it is not read to its end.
    """
    announced = request.headers.get("content-length", "0")
    body, fits = bytearray(), announced.isdigit() and int(announced) <= MAX_REQUEST
    if fits:
        async for chunk in request.stream():
            body += chunk
            if not (fits := len(body) <= MAX_REQUEST):
                break
    if not fits:
        raise HTTPException(413, f"a request has at most {MAX_REQUEST} bytes")
    return bytes(body)


async def finished(request: Request, job: Job, queue: JobQueue) -> None:
    """Wait for a verdict.

    Raises:
        HTTPException: the client went away, and its job was cancelled.
    """
    while not job.done.is_set():
        try:
            async with asyncio.timeout(_DISCONNECT_POLL_S):
                await job.done.wait()
        except TimeoutError:
            if await request.is_disconnected():
                await queue.cancel(job)
                raise HTTPException(499, "the client went away") from None


def job_state(job: Job) -> dict[str, Any]:
    """A job as JSON."""
    return {"schema_version": SCHEMA, "id": job.id, "state": job.state, **job.answer}


def device_state(device: Device) -> dict[str, Any]:
    """A device as JSON."""
    return {
        "in_service": device.complaint is None,
        "complaint": device.complaint,
        "running": device.running,
        "waiting": device.queue.qsize(),
        "finished": device.finished,
        "faults": dict(device.faults),
    }
