"""Starting the judge's server: on the loopback address unless another is given, elsewhere with a token only."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import typer

from rlkernel_core.errors import ConfigError
from rlkernel_core.files import read_text
from rlkernel_judge.requirements import require

_STOPPING_S: Final = 20.0  # beyond what running trials get: to end them, and to send what they found
_CONNECTIONS: Final = 256  # beyond those of jobs
_LOOK_S: Final = 1.0


def serve(
    host: str,
    port: int,
    devices: tuple[str, ...],
    token_file: Path | None,
    waiting: int,
    sandbox: str = "auto",
    *,
    grace_s: float = 10.0,
    patience_s: float = 15.0,
    overrun_s: float = 60.0,
    trial: tuple[str, ...] | None = None,
) -> None:
    """Serve until stopped; then trials that run have `grace_s` for their verdicts.

    A client has `patience_s` for its headers, and again for its body. `trial` is the command that judges one job, which
    has `overrun_s` beyond the limit of its task.

    Raises:
        ConfigError: a package is missing, a token is needed and missing, a file cannot be read, or the sandbox does not
            work here.
    """
    token = token_of(host, token_file)
    require("rlkernel judge serve", "hypothesis", "numpy", "starlette", "torch", "uvicorn")
    import uvicorn

    from rlkernel_judge import sandbox as sandboxes
    from rlkernel_judge.job_queue import TRIAL, JobQueue
    from rlkernel_judge.server import LOOPBACK, app

    level = sandboxes.choose(sandbox).level
    queue = JobQueue(devices, waiting=waiting, trial=trial or TRIAL, overrun_s=overrun_s)

    class Server(uvicorn.Server):
        """Says where it listens once it does: port 0 is a free one."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                at = f"http://{host}:{self.servers[0].sockets[0].getsockname()[1]}"
                typer.echo(f"rlkernel judge on {at}, devices {', '.join(devices)}, sandbox {level}", err=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            draining = asyncio.create_task(queue.drain(grace_s))
            await super().shutdown(sockets)
            if self.force_exit:  # told twice
                draining.cancel()
                await queue.close()
            else:
                await draining

    bound = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(
        app(queue, token, sandbox, hosts=LOOPBACK | {bound.lower()}, patience_s=patience_s),
        host=host,
        port=port,
        http=impatient(patience_s),
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(grace_s + _STOPPING_S),
        limit_concurrency=len(devices) * (waiting + 1) + _CONNECTIONS,
    )
    with suppress(KeyboardInterrupt):  # the server has stopped by then
        Server(config).run()


def impatient(patience_s: float) -> type[asyncio.Protocol]:
    """The HTTP of uvicorn, over connections that are cut where the headers of a request do not come in time.

    By itself it waits for the first byte, and for the rest of a header, as long as the client likes.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        _idle_since = 0.0
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._idle_since = self.loop.time()
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        def _look(self) -> None:
            now = self.loop.time()
            if self.cycle is not None and not self.cycle.response_complete:
                self._idle_since = now
            if now - self._idle_since > patience_s:
                self.transport.abort()
            else:
                self._timer = self.loop.call_later(min(_LOOK_S, patience_s), self._look)

    return Impatient


def token_of(host: str, file: Path | None) -> str | None:
    """The token that requests must bear; None where none is needed.

    Raises:
        ConfigError: the address is open to others and there is no token, or the file has none.
        FileError: the file cannot be read.
    """
    if file is None:
        if not is_loopback(host):
            raise ConfigError(f"--host {host} is open to others: give --token-file, or listen on 127.0.0.1")
        return None
    token = read_text(file, "Its first line is the token.", 1 << 16).partition("\n")[0].strip()
    if len(token) < 16:
        raise ConfigError(f"--token-file {file}: a token has at least 16 characters")
    return token


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
