"""The judge over HTTP: JSON in, verdicts out.

    POST /judge                     a source and a task; waits for the verdict, or with "wait": false gives a case id
    GET  /jobs/{id}                 a case: waiting, running, done, cancelled
    GET  /health                    the server lives; needs no token
    GET  /devices                   what each device does, has done, and what is wrong with it
    POST /devices/{id}/reset        forget its faults and look whether it computes
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
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlkernel_core import __version__
from rlkernel_core.spec import OPERATORS
from rlkernel_judge.job_queue import Case, Docket, Full, OutOfService
from rlkernel_judge.source import MOST_BYTES
from rlkernel_judge.verdict import FAULTS, SCHEMA, Task, said

MOST_REQUEST: Final = 4 * MOST_BYTES  # JSON spells a character with up to six
Answer = Callable[[Request], Awaitable[Response]]
_WATCH_S: Final = 0.25  # how often a waiting client is looked for


class Asked(Task):
    """The body of POST /judge: a task with its source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = Field(max_length=MOST_BYTES, description="the file's text")
    file: str = Field(default="candidate.py", max_length=256, description="its name, for messages")
    wait: bool = Field(default=True, description="answer with the verdict; else at once, with a case id")


class Refusal(BaseModel):
    """Every answer that is no success."""

    schema_version: int = SCHEMA
    error: str


def app(docket: Docket, token: str | None = None, sandbox: str = "auto") -> Starlette:
    """The application over a docket, which it opens and closes with itself; the sandbox is the server's to choose."""

    @asynccontextmanager
    async def alive(_: Starlette) -> AsyncIterator[None]:
        docket.open()
        try:
            yield
        finally:
            await docket.close()

    def guarded(answer: Answer) -> Answer:
        """Let in who bears the token."""

        async def checked(request: Request) -> Response:
            kind, _, borne = request.headers.get("authorization", "").partition(" ")
            right = token is None or hmac.compare_digest(borne.strip().encode(), token.encode())
            if token is not None and not (right and kind.lower() == "bearer"):
                return refused(
                    401, "bear the server's token: Authorization: Bearer ...", {"WWW-Authenticate": "Bearer"}
                )
            return await answer(request)

        return checked

    async def judge(request: Request) -> Response:
        body = await whole(request)
        if body is None:
            return refused(413, f"a request has at most {MOST_REQUEST} bytes")
        try:
            asked = Asked.model_validate_json(body)
        except ValidationError as error:
            return refused(422, said(error)[:2000])
        if asked.op not in OPERATORS:
            return refused(422, f"op: unknown operator {asked.op!r}")
        if "sandbox" in asked.model_fields_set:
            return refused(422, "sandbox: the server decides; it was started with it")
        device = asked.device if "device" in asked.model_fields_set else docket.idlest()
        if device not in docket.devices:
            return refused(422, f"device: this server has {', '.join(docket.devices)}, not {device}")
        task = asked.model_dump(mode="json", exclude={"source", "file", "wait"}) | {
            "device": device,
            "sandbox": sandbox,
        }
        try:
            case = docket.submit(task, asked.source.encode(), asked.file)
        except Full as error:
            return refused(429, str(error), {"Retry-After": str(max(1, round(error.retry_s)))})
        except OutOfService as error:
            return refused(503, str(error), {"Retry-After": "60"})
        if not asked.wait:
            return JSONResponse(told(case), 202, headers={"Location": f"/jobs/{case.id}"})
        if not await waited(request, case, docket):
            return refused(499, "the client went away")
        return answered(case)

    async def job(request: Request) -> Response:
        case = docket.cases.get(request.path_params["id"])
        return refused(404, "no such case, or it is long finished") if case is None else JSONResponse(told(case))

    async def health(_: Request) -> Response:
        return JSONResponse(
            {"status": "closing" if docket.closing else "ok", "rlkernel": __version__, "schema": SCHEMA}
        )

    async def devices(request: Request) -> Response:
        return JSONResponse({name: state(docket, name) for name in docket.devices})

    async def reset(request: Request) -> Response:
        name = request.path_params["id"]
        if name not in docket.devices:
            return refused(404, f"this server has {', '.join(docket.devices)}")
        complaint = await docket.reset(name)
        return JSONResponse(state(docket, name), 200 if complaint is None else 503)

    async def faults(request: Request) -> Response:
        seen: Counter[str] = sum((d.faults for d in docket.devices.values()), Counter())
        return JSONResponse({name: {"meaning": text, "seen": seen[name]} for name, text in FAULTS.items()})

    routes = [
        Route("/judge", guarded(judge), methods=["POST"]),
        Route("/jobs/{id}", guarded(job)),
        Route("/health", health),
        Route("/devices", guarded(devices)),
        Route("/devices/{id}/reset", guarded(reset), methods=["POST"]),
        Route("/faults", guarded(faults)),
    ]
    return Starlette(routes=routes, lifespan=alive)


def refused(status: int, error: str, headers: dict[str, str] | None = None) -> Response:
    """An answer that is no success."""
    return JSONResponse(Refusal(error=error).model_dump(), status, headers=headers)


async def whole(request: Request) -> bytes | None:
    """The body, or None of one that is too large, which is not read to its end."""
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > MOST_REQUEST:
        return None
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_REQUEST:
            return None
    return bytes(body)


async def waited(request: Request, case: Case, docket: Docket) -> bool:
    """Wait for a verdict; a client that goes away takes its case with it."""
    while not case.done.is_set():
        try:
            async with asyncio.timeout(_WATCH_S):
                await case.done.wait()
        except TimeoutError:
            if await request.is_disconnected():
                await docket.cancel(case)
                return False
    return True


def answered(case: Case) -> Response:
    """A finished case as the answer to POST /judge."""
    answer = case.answer or {"error": "no answer"}
    if "verdict" in answer:
        return JSONResponse(answer["verdict"], headers={"X-Case": case.id})
    return refused(503 if case.state == "cancelled" else 500, str(answer.get("error")))


def told(case: Case) -> dict[str, Any]:
    """A case as JSON."""
    return {"schema_version": SCHEMA, "id": case.id, "state": case.state, **(case.answer or {})}


def state(docket: Docket, name: str) -> dict[str, Any]:
    """A device as JSON."""
    d = docket.devices[name]
    return {
        "in_service": d.complaint is None,
        "complaint": d.complaint,
        "running": d.running,
        "waiting": d.line.qsize(),
        "finished": d.finished,
        "faults": dict(d.faults),
    }
