"""The judge over HTTP: JSON in, verdicts out.

    POST /judge                     a source and a task; waits for the verdict, or with "wait": false gives a job's id
    GET  /jobs/{id}                 a job: waiting, running, done, cancelled
    GET  /health                    the server lives; needs no token
    GET  /devices                   what each device does, has done, and what is wrong with it
    POST /devices/{id}/reset        forget its faults and check whether it computes
    GET  /faults                    names of faults, what they mean, how often they were seen

Before a route is looked up or a byte of a body is read, `admission` refuses who names another host, who is a web page,
and who lacks the token. Built on Starlette; imports no torch.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlkernel_core import __version__
from rlkernel_core.spec import OPERATORS
from rlkernel_judge.job_queue import Device, Job, JobQueue, OutOfService, QueueFull
from rlkernel_judge.source import MAX_BYTES
from rlkernel_judge.verdict import FAULTS, SCHEMA, Task, complaints_by_field

MAX_REQUEST: Final = 4 * MAX_BYTES  # JSON spells a character with up to six
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
PATIENCE_S: Final = 15.0  # for a client to send its headers, and again for its body
_PORT: Final = re.compile(r":\d*$")
_STATUSES: Final = {"cancelled": 503, "stopped": 503, "late": 504}  # of jobs without a verdict, by their state
_DISCONNECT_POLL_S: Final = 0.25  # how often a waiting client is looked for


class Asked(Task):
    """The body of POST /judge: a task with its source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clauses: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=256)] = ()
    source: str = Field(max_length=MAX_BYTES, description="the file's text")
    file: str = Field(
        default="candidate.py", max_length=256, pattern=r"^\w[\w.+/-]*$", description="its name, for messages"
    )
    wait: bool = Field(default=True, description="answer with the verdict; else at once, with a job's id")


class Refusal(BaseModel):
    """Every answer that is no success."""

    schema_version: int = SCHEMA
    error: str
    fields: dict[str, str] = Field(default={}, description="what is wrong with each field of the request")


class BadFields(HTTPException):
    """Fields of a request that cannot be carried out, each with what is wrong with it."""

    def __init__(self, fields: dict[str, str]) -> None:
        self.fields = {name: text[:500] for name, text in fields.items()}
        super().__init__(422, "; ".join(f"{name}: {text}" for name, text in self.fields.items())[:2000])


def app(
    queue: JobQueue,
    token: str | None = None,
    sandbox: str = "auto",
    *,
    hosts: frozenset[str] = LOOPBACK,
    patience_s: float = PATIENCE_S,
) -> Starlette:
    """The application over a queue, which it opens and closes with itself; the sandbox is the server's to choose.

    Without a token a request must name one of `hosts`: a page in a browser of this machine that makes its own name
    point here (DNS rebinding) names its own.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        queue.open()
        try:
            yield
        finally:
            await queue.close()

    def device_of(name: str) -> Device:
        if name not in queue.devices:
            raise HTTPException(404, f"this server has {', '.join(queue.devices)}")
        return queue.devices[name]

    def submitted(asked: Asked) -> Job:
        device = asked.device if "device" in asked.model_fields_set else queue.least_busy()
        bad = {}
        if asked.op not in OPERATORS:
            bad["op"] = f"unknown operator {asked.op!r}"
        if "sandbox" in asked.model_fields_set:
            bad["sandbox"] = "the server decides; it was started with it"
        if device not in queue.devices:
            bad["device"] = f"this server has {', '.join(queue.devices)}, not {device}"
        if bad:
            raise BadFields(bad)
        task = asked.model_dump(mode="json", exclude={"source", "file", "wait"})
        try:
            return queue.submit(task | {"device": device, "sandbox": sandbox}, asked.source.encode(), asked.file)
        except QueueFull as error:
            raise HTTPException(429, str(error), {"Retry-After": str(max(1, round(error.retry_s)))}) from error
        except OutOfService as error:
            raise HTTPException(503, str(error), {"Retry-After": "60"}) from error

    async def judge(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "send JSON: Content-Type: application/json")
        try:
            asked = Asked.model_validate_json(await body_of(request, patience_s))
        except ValidationError as error:
            raise BadFields(complaints_by_field(error)) from error
        job = submitted(asked)
        if not asked.wait:
            return JSONResponse(job_state(job), 202, headers={"Location": f"/jobs/{job.id}"})
        await finished(request, job, queue)
        if job.answer.get("fields"):
            raise BadFields(job.answer["fields"])
        if "verdict" not in job.answer:
            raise HTTPException(_STATUSES.get(job.state, 502), str(job.answer.get("error")))
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
        Route("/judge", judge, methods=["POST"]),
        Route("/jobs/{id}", show_job),
        Route("/health", health),
        Route("/devices", devices),
        Route("/devices/{id}/reset", reset, methods=["POST"]),
        Route("/faults", faults),
    ]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(admission, token=token, hosts=hosts)],
        exception_handlers={HTTPException: refusal},
    )


def admission(inner: ASGIApp, token: str | None, hosts: frozenset[str]) -> ASGIApp:
    """An application whose requests come from programs, for this server, with its token."""

    async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
        refused = _refused(scope, token, hosts) if scope["type"] == "http" else None
        if refused is None:
            await inner(scope, receive, send)
        else:
            await _answer(refused)(scope, receive, send)

    return admitted


def _refused(scope: Scope, token: str | None, hosts: frozenset[str]) -> HTTPException | None:
    headers = Headers(scope=scope)
    host = headers.get("host", "")
    if token is None and _PORT.sub("", host).lower() not in hosts:
        return HTTPException(421, "this server answers to the address it listens on; send no other Host")
    if "origin" in headers:
        return HTTPException(403, "this server answers no web page: a request with Origin is refused")
    if token is None or scope["path"] == "/health":
        return None
    kind, _, given = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), token.encode()):
        return None
    return HTTPException(401, "send the server's token: Authorization: Bearer ...", {"WWW-Authenticate": "Bearer"})


async def refusal(_: Request, error: Exception) -> Response:
    """An HTTPException as JSON."""
    if not isinstance(error, HTTPException):
        raise error
    return _answer(error)


def _answer(error: HTTPException) -> Response:
    told = Refusal(error=error.detail, fields=getattr(error, "fields", {}))
    return JSONResponse(told.model_dump(), error.status_code, headers=error.headers)


async def body_of(request: Request, patience_s: float) -> bytes:
    """The body of a request.

    Raises:
        HTTPException: it is too large; it does not come in time; the client went away.
    """
    announced = request.headers.get("content-length", "0")
    body, fits = bytearray(), announced.isdigit() and int(announced) <= MAX_REQUEST
    try:
        async with asyncio.timeout(patience_s):
            if fits:
                async for chunk in request.stream():
                    body += chunk
                    if not (fits := len(body) <= MAX_REQUEST):
                        break
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {patience_s:g} s", {"Connection": "close"}) from None
    except ClientDisconnect:
        raise HTTPException(499, "the client went away") from None
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
