"""The judge over HTTP: refusals, lines, devices, clients that go away; and two real trials beside each other."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from rlkernel_core.errors import ConfigError, FileError
from rlkernel_judge import server
from rlkernel_judge.job_queue import JobQueue
from rlkernel_judge.serve import serve, token_of
from rlkernel_judge.server import MAX_REQUEST, app
from tests.judged import HARM, RIGHT

TOKEN = "a token of more than sixteen"
ASKED = {"source": "def logprob(logits, ids): ...", "op": "logprob"}
# Stand-ins for a trial's process: the queue's own work is what is looked at.
QUICK = (
    "import json, sys; t = json.load(sys.stdin); print(json.dumps({'verdict': {'op': t['task']['op'], 'fault': None}}))"
)
STUCK = "import time; time.sleep(600)"
DEAD = "import os; print('{}', flush=True); os._exit(3)"
HARMED = "import json; print(json.dumps({'verdict': {'fault': 'illegal_access'}}))"
WELL, ILL = "print('')", "print('cuda:0 cannot add numbers')"


def queue_of(trial: str = QUICK, devices: tuple[str, ...] = ("cpu",), health: str = WELL, waiting: int = 8) -> JobQueue:
    def python(code: str) -> tuple[str, ...]:
        return sys.executable, "-c", code

    return JobQueue(devices, waiting=waiting, trial=python(trial), health=python(health))


async def until(holds) -> None:
    """Let the others work until something holds."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 the queue tells nobody when it starts a job
            await asyncio.sleep(0)


@asynccontextmanager
async def client(queue: JobQueue, token: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that is open."""
    running = app(queue, token)
    async with running.router.lifespan_context(running):
        transport = httpx.ASGITransport(running)
        async with httpx.AsyncClient(transport=transport, base_url="http://judge", timeout=120) as found:
            yield found


def test_a_verdict_comes_back() -> None:
    async def main() -> None:
        async with client(queue_of()) as http:
            answer = await http.post("/judge", json=ASKED)
        assert (answer.status_code, answer.json()) == (200, {"op": "logprob", "fault": None})

    asyncio.run(main())


def test_a_job_can_be_asked_for_later() -> None:
    async def main() -> None:
        queue = queue_of()
        async with client(queue) as http:
            answer = await http.post("/judge", json={**ASKED, "wait": False})
            assert (answer.status_code, answer.headers["location"]) == (202, f"/jobs/{answer.json()['id']}")
            await queue.jobs[answer.json()["id"]].done.wait()
            later = await http.get(answer.headers["location"])
            assert (later.json()["state"], later.json()["verdict"]["op"]) == ("done", "logprob")
            assert (await http.get("/jobs/none")).status_code == 404

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 422, "JSON"),
        (b"\xff\xfe\x00", 422, "JSON"),
        (b'{"source": "\\ud800", "op": "logprob"}', 422, "JSON"),
        (json.dumps({**ASKED, "op": "logprb"}).encode(), 422, "unknown operator"),
        (json.dumps({**ASKED, "device": "cuda:7"}).encode(), 422, "this server has cpu"),
        (json.dumps({**ASKED, "limit_s": 1e9}).encode(), 422, "limit_s"),
        (json.dumps({**ASKED, "profile": "endless"}).encode(), 422, "profile"),
        (json.dumps({**ASKED, "command": "rm"}).encode(), 422, "command"),
        (json.dumps({**ASKED, "sandbox": "limits"}).encode(), 422, "the server decides"),
        (json.dumps({**ASKED, "source": "x" * (300 << 10)}).encode(), 422, "source"),
        (b"x" * (MAX_REQUEST + 1), 413, "at most"),
    ],
)
def test_a_request_that_is_none_is_refused_and_the_server_goes_on(body, status, words) -> None:
    async def main() -> None:
        async with client(queue_of()) as http:
            answer = await http.post("/judge", content=body)
            assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text[:300]
            assert (await http.get("/health")).json()["status"] == "ok"

    asyncio.run(main())


def test_a_body_of_unknown_length_is_not_read_beyond_the_limit() -> None:
    async def main() -> None:
        sent = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal sent
            while sent < 16 * MAX_REQUEST:
                sent += 1 << 16
                yield b"x" * (1 << 16)

        async with client(queue_of()) as http:
            answer = await http.post("/judge", content=endless())
        assert (answer.status_code, sent < 3 * MAX_REQUEST) == (413, True)

    asyncio.run(main())


def test_a_token_is_asked_of_everything_but_health() -> None:
    async def main() -> None:
        async with client(queue_of(), TOKEN) as http:
            for method, path in (("POST", "/judge"), ("GET", "/devices"), ("GET", "/faults"), ("GET", "/jobs/x")):
                for borne in (None, "Bearer wrong", f"Basic {TOKEN}"):
                    headers = {"authorization": borne} if borne else {}
                    assert (await http.request(method, path, headers=headers)).status_code == 401
            assert (await http.get("/health")).status_code == 200
            answer = await http.post("/judge", json=ASKED, headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200

    asyncio.run(main())


def test_a_full_line_says_when_to_come_back() -> None:
    async def main() -> None:
        queue = queue_of(STUCK, waiting=1)
        async with client(queue) as http:
            first = (await http.post("/judge", json={**ASKED, "wait": False})).json()["id"]
            await until(lambda: queue.jobs[first].state == "running")
            second = await http.post("/judge", json={**ASKED, "wait": False})
            third = await http.post("/judge", json={**ASKED, "wait": False})
            assert (second.status_code, third.status_code) == (202, 429)
            assert int(third.headers["retry-after"]) >= 1

    asyncio.run(main())


def test_who_names_no_device_gets_the_least_busy() -> None:
    async def main() -> None:
        queue = queue_of(STUCK, devices=("cuda:0", "cuda:1"))
        async with client(queue) as http:
            for _ in range(2):
                await http.post("/judge", json={**ASKED, "wait": False})
                await until(lambda: all(c.state == "running" for c in queue.jobs.values()))
            assert {c.task["device"] for c in queue.jobs.values()} == {"cuda:0", "cuda:1"}

    asyncio.run(main())


def test_devices_work_beside_each_other_and_each_on_one_job() -> None:
    async def main() -> None:
        queue = queue_of(STUCK, devices=("cuda:0", "cuda:1"))
        async with client(queue) as http:
            ids = [
                (await http.post("/judge", json={**ASKED, "device": d, "wait": False})).json()["id"]
                for d in ("cuda:0", "cuda:1", "cuda:0")
            ]
            await until(lambda: [queue.jobs[i].state for i in ids] == ["running", "running", "waiting"])
            devices = (await http.get("/devices")).json()
            assert (devices["cuda:0"]["waiting"], devices["cuda:1"]["waiting"]) == (1, 0)
            assert devices["cuda:0"]["running"] == ids[0]

    asyncio.run(main())


def test_a_trial_that_dies_takes_no_other_with_it() -> None:
    async def main() -> None:
        queue = queue_of(DEAD)
        async with client(queue) as http:
            dead = await http.post("/judge", json=ASKED)
            queue.trial = (sys.executable, "-c", QUICK)
            alive = await http.post("/judge", json=ASKED)
        assert (dead.status_code, "without a verdict" in dead.json()["error"], alive.status_code) == (500, True, 200)

    asyncio.run(main())


def test_a_device_that_fails_its_check_is_out_of_service_until_it_is_reset() -> None:
    async def main() -> None:
        queue = queue_of(HARMED, devices=("cuda:0",), health=ILL)
        asked = {**ASKED, "device": "cuda:0"}
        async with client(queue) as http:
            assert (await http.post("/judge", json=asked)).status_code == 200
            refused = await http.post("/judge", json=asked)
            assert (refused.status_code, "out of service" in refused.json()["error"]) == (503, True)
            assert (await http.get("/faults")).json()["illegal_access"]["seen"] == 1
            assert (await http.post("/devices/cuda:0/reset")).status_code == 503
            queue.health, queue.trial = (sys.executable, "-c", WELL), (sys.executable, "-c", QUICK)
            reset = await http.post("/devices/cuda:0/reset")
            assert (reset.status_code, reset.json()["in_service"], reset.json()["faults"]) == (200, True, {})
            assert (await http.post("/judge", json=asked)).status_code == 200
            assert (await http.post("/devices/tpu/reset")).status_code == 404

    asyncio.run(main())


def test_a_client_that_goes_away_takes_its_job_with_it() -> None:
    async def main() -> None:
        queue = queue_of(STUCK)
        running = app(queue)
        body = json.dumps(ASKED).encode()
        gone = asyncio.Event()
        words = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, object]:
            found = next(words, None)
            if found is None:
                await gone.wait()
            return found or {"type": "http.disconnect"}

        async def send(_: object) -> None:
            return

        scope = {"type": "http", "method": "POST", "path": "/judge", "headers": [], "query_string": b""}
        async with running.router.lifespan_context(running):
            call = asyncio.create_task(running(scope, receive, send))
            await until(lambda: any(c.process for c in queue.jobs.values()))
            gone.set()
            await call
            (job,) = queue.jobs.values()
            assert (job.state, await job.process.wait() != 0) == ("cancelled", True)

    asyncio.run(main())


def test_a_server_that_closes_answers_those_who_wait() -> None:
    async def main() -> None:
        queue = queue_of(STUCK)
        queue.open()
        task = {"op": "logprob", "device": "cpu", "limit_s": 60}
        both = [queue.submit(task, b"", "a.py") for _ in range(2)]
        await until(lambda: both[0].state == "running")
        await queue.close()
        assert [c.state for c in both] == ["cancelled", "cancelled"]

    asyncio.run(main())


def test_two_real_trials_one_of_which_kills_its_process() -> None:
    async def main() -> None:
        queue = JobQueue(("cpu",))
        asked = {"op": "logprob", "clauses": ["LP-01"], "timing": False, "strict": False}
        async with client(queue) as http:
            bad, good = await asyncio.gather(
                http.post("/judge", json={**asked, "source": HARM["segfault"]}),
                http.post("/judge", json={**asked, "source": RIGHT}),
            )
            seen = (await http.get("/faults")).json()["segfault"]["seen"]
        assert (bad.status_code, bad.json()["fault"], bad.json()["score"]) == (200, "segfault", 0.1)
        assert (good.status_code, good.json()["correct"], good.json()["held"], seen) == (200, True, 1, 1)

    asyncio.run(main())


def test_the_command_serves_on_the_loopback_and_stops_when_it_is_told() -> None:
    command = [sys.executable, "-m", "rlkernel", "judge", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        line = process.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", line)
        answer = httpx.get(f"{address[0]}/health")
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert (answer.json()["status"], "sandbox" in line, rest, process.returncode) == ("ok", True, "", 0)


def test_only_the_loopback_is_open_without_a_token(tmp_path) -> None:
    assert [token_of(host, None) for host in ("127.0.0.1", "::1", "localhost")] == [None, None, None]
    for host in ("0.0.0.0", "192.0.2.1", "judge.example"):
        with pytest.raises(ConfigError, match="open to others"):
            token_of(host, None)
    (tmp_path / "token").write_text(f"{TOKEN}\nrest")
    (tmp_path / "short").write_text("secret")
    assert token_of("0.0.0.0", tmp_path / "token") == TOKEN
    with pytest.raises(ConfigError, match="at least 16"):
        token_of("0.0.0.0", tmp_path / "short")
    with pytest.raises(FileError, match="does not exist"):
        token_of("127.0.0.1", tmp_path / "none")


def test_without_its_packages_the_server_names_the_line_that_installs_them(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(ConfigError, match=r"needs uvicorn: pip install 'rlkernel\[cpu,judge\]'"):
        serve("127.0.0.1", 0, ("cpu",), None, 1)


def test_the_server_imports_no_torch() -> None:
    code = f"import sys, {server.__name__}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
