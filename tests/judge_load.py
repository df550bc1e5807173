"""A judging server under honest and hostile clients at once: every honest verdict must be right.

    python -m tests.judge_load --requests 1000              # trials are stand-ins that answer from the source alone
    python -m tests.judge_load --requests 40 --real         # real trials, a clause each

Starts `rlkernel judge serve` with a token on a free port, sends requests of which a share is hostile, in random order
and side by side, then ends the server and looks for what it left. Prints a line of JSON; exit code 1 if anything was
wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.judged import HARM, RIGHT, WRONG_TEMPERATURE

TOKEN = "a token of more than sixteen"
PATIENCE_S = 2.0
_TRIES = 200
# Answers with the hash of the source; `#` and a word: does what hostile sources bring a trial to.
STAND_IN = """
import base64, hashlib, json, os, sys, time
asked = json.load(sys.stdin)
source = base64.b64decode(asked["source"])
word = source.partition(b"#")[2]
if word == b"hang":
    time.sleep(600)
if word == b"die":
    os._exit(3)
if word == b"garbage":
    print("{" * 10000)
elif word == b"flood":
    print(" " * (64 << 20))
else:
    print(json.dumps({"verdict": {"op": asked["task"]["op"], "source_hash": hashlib.sha256(source).hexdigest()}}))
"""
SERVER = """
import sys, pathlib
from rlkernel_judge.serve import serve
trial = None if sys.argv[2] == "real" else (sys.executable, "-I", "-S", "-c", sys.argv[2])
token, _, patience = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
serve("127.0.0.1", 0, ("cpu",), token, 64, patience_s=patience, overrun_s=5.0 if trial else 60.0, trial=trial)
"""


@dataclass
class Run:
    """One load: where to, and what was seen."""

    host: str
    port: int
    http: httpx.AsyncClient
    real: bool
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def post(self, body: bytes, **headers: str) -> httpx.Response:
        """POST /judge with the token; headers replace ours, an empty one leaves it out."""
        given = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json", **headers}
        return await self.http.post("/judge", content=body, headers={k: v for k, v in given.items() if v})

    async def raw(self, text: bytes, *, pause_s: float = 0.0) -> bytes:
        """Send bytes, at once or one by one, and what comes back until the connection ends."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            if not pause_s:
                writer.write(text)
            else:
                for i in range(len(text)):
                    writer.write(text[i : i + 1])
                    await writer.drain()
                    await asyncio.sleep(pause_s)
            return await reader.read()
        except OSError:
            return b""
        finally:
            writer.close()


def body(source: str, **more: Any) -> bytes:
    """A request's body."""
    return json.dumps({"source": source, "op": "logprob", "timing": False, "strict": False, **more}).encode()


def head(length: int, **more: str) -> bytes:
    """The head of a raw request."""
    lines = {"Host": "127.0.0.1", "Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", **more}
    return (
        f"POST /judge HTTP/1.1\r\nContent-Length: {length}\r\n".encode()
        + "".join(f"{k}: {v}\r\n" for k, v in lines.items()).encode()
    )


async def honest(run: Run, number: int) -> None:
    """A client that sends a task and waits for its verdict; it comes back after as long as it was asked to."""
    right = number % 2 == 0
    source = (RIGHT if right else WRONG_TEMPERATURE) + f"\n# {number}\n"
    for _ in range(_TRIES):
        answer = await run.post(body(source, clauses=["LP-08"]))
        if answer.status_code != 429:
            break
        await asyncio.sleep(0.05)
    found = answer.json() if answer.status_code == 200 else {}
    expected = hashlib.sha256(source.encode()).hexdigest()
    good = found.get("source_hash") == expected and (not run.real or found["correct"] is right)
    run.seen["honest"] += good
    if not good:
        run.wrong.append(f"honest {number}: {answer.status_code} {answer.text[:200]}")


async def status(run: Run, name: str, wanted: set[int], body_: bytes, **headers: str) -> None:
    """A hostile request over HTTP, and the answers that are right for it."""
    answer = await run.post(body_, **headers)
    if answer.status_code not in wanted:
        run.wrong.append(f"{name}: {answer.status_code} {answer.text[:200]}")


async def raw(run: Run, name: str, wanted: bytes, text: bytes, **more: float) -> None:
    """A hostile connection, and how its answer begins; nothing: it is cut."""
    began = time.monotonic()
    answer = await run.raw(text, **more)
    if not answer.startswith(wanted) or (not wanted and answer) or time.monotonic() - began > 60:
        run.wrong.append(f"{name}: {answer[:200]!r} after {time.monotonic() - began:.0f} s")


async def gone(run: Run) -> None:
    """A client that sends a task and goes away."""
    _, writer = await asyncio.open_connection(run.host, run.port)
    given = body(RIGHT, clauses=["LP-08"])
    writer.write(head(len(given)) + b"\r\n" + given)
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.transport.abort()


def hostile(real: bool) -> dict[str, Callable[[Run], Awaitable[None]]]:
    """Every kind of hostile client, by name."""

    def of_status(name: str, wanted: set[int], given: bytes, **headers: str) -> Callable[[Run], Awaitable[None]]:
        return lambda run: status(run, name, wanted, given, **headers)

    def of_raw(name: str, wanted: bytes, text: bytes, **more: float) -> Callable[[Run], Awaitable[None]]:
        return lambda run: raw(run, name, wanted, text, **more)

    good = body(RIGHT)
    sources = {
        "a source that ends its process": (HARM["protocol_error"], "x#die", {200, 502, 429}),
        "a source that kills its process": (HARM["segfault"], "x#garbage", {200, 502, 429}),
        "a source that hangs": (HARM["timeout"], "x#hang", {200, 504, 429}),
        "a source that floods": (HARM["abort"], "x#flood", {200, 502, 429}),
    }
    return {
        **{
            name: of_status(name, wanted, body(source if real else word, clauses=["LP-08"], limit_s=5 if real else 0.1))
            for name, (source, word, wanted) in sources.items()
        },
        "no JSON": of_status("no JSON", {422}, b"{" * 50_000),
        "a bad field": of_status("a bad field", {422}, body(RIGHT, limit_s="NaN")),
        "an unknown operator": of_status("an unknown operator", {422}, body(RIGHT, op="x" * 1000)),
        "a huge body": of_status("a huge body", {413}, b"x" * (5 << 20)),
        "a huge body that is announced": of_raw("announced", b"HTTP/1.1 413", head(1 << 40) + b"\r\n"),
        "a wrong token": of_status("a wrong token", {401}, good, authorization="Bearer wrong"),
        "no token": of_status("no token", {401}, b"x" * 100_000, authorization=""),
        "a web page": of_status("a web page", {403}, good, origin="http://attacker.example"),
        "a form": of_status("a form", {415}, good, **{"content-type": "application/x-www-form-urlencoded"}),
        "no HTTP": of_raw("no HTTP", b"HTTP/1.1 400", b"\x16\x03\x01" + bytes(600) + b"\r\n\r\n"),
        "silence": of_raw("silence", b"", b""),
        "slow headers": of_raw("slow headers", b"", head(9)[:40] + b"x" * 10_000, pause_s=0.2),
        "a body that stalls": of_raw("a body that stalls", b"HTTP/1.1 408", head(1000) + b"\r\n{"),
        "a client that goes away": gone,
    }


async def load(run: Run, requests: int, share: float, abreast: int, seed: int) -> None:
    """Send all requests in random order, so many abreast; silent connections come beside them."""
    kinds, lot = hostile(run.real), random.Random(seed)
    count = round(requests * share)
    names = [list(kinds)[i % len(kinds)] for i in range(count)]
    work: list[tuple[str, int]] = [("", i) for i in range(requests - count)] + [(name, 0) for name in names]
    lot.shuffle(work)
    places = asyncio.Semaphore(abreast)

    async def one(name: str, number: int) -> None:
        async with places:
            if not name:
                await honest(run, number)
            else:
                await kinds[name](run)
                run.seen[name] += 1

    async with asyncio.TaskGroup() as group:
        for name, number in work:
            group.create_task(one(name, number))


def loaded(
    requests: int, *, share: float = 0.1, real: bool = False, abreast: int = 32, seed: int = 0
) -> dict[str, Any]:
    """The whole load: what was sent, what went wrong, and what the server left."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "token").write_text(TOKEN)
        began = time.monotonic()
        command = [sys.executable, "-c", SERVER, f"{folder}/token", "real" if real else STAND_IN, str(PATIENCE_S)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            address = re.search(r"http://([\d.]+):(\d+)", server.stderr.readline())
            run = asyncio.run(_against(address, real, requests, share, abreast, seed))
            server.terminate()
            rest = server.stderr.read()
        return {
            "requests": requests,
            "hostile": sum(n for name, n in run.seen.items() if name != "honest"),
            "honest": requests - round(requests * share),
            "honest_right": run.seen["honest"],
            "real": real,
            "kinds": {name: n for name, n in sorted(run.seen.items()) if name != "honest"},
            "wrong": run.wrong,
            "said": rest,
            "seconds": round(time.monotonic() - began, 1),
        }


async def _against(address: re.Match[str], real: bool, requests: int, share: float, abreast: int, seed: int) -> Run:
    limits = httpx.Limits(max_connections=abreast)
    base = f"http://{address[1]}:{address[2]}"
    async with httpx.AsyncClient(base_url=base, timeout=1800, limits=limits) as http:
        run = Run(address[1], int(address[2]), http, real)
        await load(run, requests, share, abreast, seed)
        devices = await http.get("/devices", headers={"authorization": f"Bearer {TOKEN}"})
        if devices.json()["cpu"]["running"] is not None or devices.json()["cpu"]["waiting"]:
            run.wrong.append(f"afterwards: {devices.text}")
    return run


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--hostile", type=float, default=0.1, help="share of hostile requests")
    parser.add_argument("--real", action="store_true", help="real trials")
    parser.add_argument("--abreast", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    found = loaded(asked.requests, share=asked.hostile, real=asked.real, abreast=asked.abreast, seed=asked.seed)
    print(json.dumps(found))
    sys.exit(bool(found["wrong"] or found["honest_right"] != found["honest"]))


if __name__ == "__main__":
    main()
