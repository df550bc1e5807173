"""Starting the judge's server: on the loopback address unless another is given, elsewhere with a token only."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

import typer

from rlkernel_core.errors import ConfigError
from rlkernel_core.files import read_text
from rlkernel_judge.requirements import require

_STOPPING_S: Final = 10


def serve(
    host: str, port: int, devices: tuple[str, ...], token_file: Path | None, waiting: int, sandbox: str = "auto"
) -> None:
    """Serve until stopped.

    Raises:
        ConfigError: a package is missing, a token is needed and missing, a file cannot be read, or the sandbox does not
            work here.
    """
    token = token_of(host, token_file)
    require("rlkernel judge serve", "hypothesis", "numpy", "starlette", "torch", "uvicorn")
    import uvicorn

    from rlkernel_judge import sandbox as sandboxes
    from rlkernel_judge.job_queue import JobQueue
    from rlkernel_judge.server import app

    level = sandboxes.choose(sandbox).level

    class Server(uvicorn.Server):
        """Says where it listens once it does: port 0 is a free one."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                at = f"http://{host}:{self.servers[0].sockets[0].getsockname()[1]}"
                typer.echo(f"rlkernel judge on {at}, devices {', '.join(devices)}, sandbox {level}", err=True)

    config = uvicorn.Config(
        app(JobQueue(devices, waiting=waiting), token, sandbox),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_STOPPING_S,
        limit_concurrency=len(devices) * (waiting + 1) + 64,
    )
    with suppress(KeyboardInterrupt):  # the server has stopped by then
        Server(config).run()


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
