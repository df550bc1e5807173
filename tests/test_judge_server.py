"""The judge over HTTP: refusals, lines, devices, clients that go away; and two real trials beside each other."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from rlkernel.discover import guarded
from rlkernel_core.errors import ConfigError, FileError
from rlkernel_judge import server
from rlkernel_judge.job_queue import JobQueue
from rlkernel_judge.serve import serve, token_of
from rlkernel_judge.server import MAX_REQUEST, app
from rlkernel_judge.trial import judge
from rlkernel_judge.verdict import Task, bad_fields
from tests import sandboxed
from tests.judge_load import hostile, loaded
from tests.judged import HARM, RIGHT

TOKEN = "a token of more than sixteen"
JSON = {"content-type": "application/json"}
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
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8473", timeout=120) as found:
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
            answer = await http.post("/judge", content=body, headers=JSON)
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
            answer = await http.post("/judge", content=endless(), headers=JSON)
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
        assert (dead.status_code, "without a verdict" in dead.json()["error"], alive.status_code) == (502, True, 200)

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

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/judge", "headers": headers, "query_string": b""}
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
        assert [c.state for c in both] == ["stopped", "stopped"]

    asyncio.run(main())


def test_a_server_that_is_told_to_end_gives_the_verdict_of_what_runs_and_stops_what_waits() -> None:
    async def main() -> None:
        queue = queue_of(f"import time; time.sleep(0.5); {QUICK}")
        async with client(queue) as http:
            asked = [asyncio.create_task(http.post("/judge", json=ASKED)) for _ in range(2)]
            await until(lambda: sorted(j.state for j in queue.jobs.values()) == ["running", "waiting"])
            await queue.drain(30)
            answers = [await a for a in asked]
            later = await http.post("/judge", json=ASKED)
        assert sorted(a.status_code for a in answers) == [200, 503]
        assert ["stopped" in a.json().get("error", "") for a in answers] == [a.status_code == 503 for a in answers]
        assert later.status_code == 503

    asyncio.run(main())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "attacker.example"}, 421),
        ({"host": "127.0.0.1.attacker.example:8473"}, 421),
        ({"host": "localhost:8473"}, 200),
        ({"host": "[::1]:8473"}, 200),
        ({"origin": "http://127.0.0.1:8473"}, 403),
        ({"origin": "null"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_a_page_in_a_browser_of_this_machine_gets_nothing_judged(headers, status) -> None:
    async def main() -> None:
        queue = queue_of()
        async with client(queue) as http:
            answer = await http.post("/judge", content=json.dumps(ASKED), headers={**JSON, **headers})
        assert (answer.status_code, len(queue.jobs)) == (status, status == 200)

    asyncio.run(main())


def test_with_a_token_any_name_of_the_server_will_do() -> None:
    async def main() -> None:
        async with client(queue_of(), TOKEN) as http:
            headers = {"authorization": f"Bearer {TOKEN}", "host": "judge.example"}
            assert (await http.post("/judge", json=ASKED, headers=headers)).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer \xff"}])
def test_no_byte_of_a_body_is_read_before_the_token(headers) -> None:
    async def main() -> None:
        running, answers = app(queue_of(), TOKEN), []

        async def receive() -> dict[str, object]:
            raise AssertionError("the body was asked for")

        async def send(message: dict[str, object]) -> None:
            answers.append(message)

        given = [(b"host", b"x"), *((k.encode(), v.encode("latin-1")) for k, v in headers.items())]
        scope = {"type": "http", "method": "POST", "path": "/judge", "headers": given, "query_string": b""}
        await running(scope, receive, send)
        assert answers[0]["status"] == 401

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({**ASKED, "limit_s": "soon", "profile": 7}, {"limit_s", "profile"}),
        ({**ASKED, "limit_s": None}, {"limit_s"}),
        ({**ASKED, "op": ["logprob"]}, {"op"}),
        ({**ASKED, "op": "x" * 10_000}, {"op"}),
        ({**ASKED, "device": "cpu; rm"}, {"device"}),
        ({**ASKED, "clauses": ["LP-01"] * 1000}, {"clauses"}),
        ({**ASKED, "clauses": "LP-01"}, {"clauses"}),
        ({**ASKED, "file": "a.py; rm -rf /"}, {"file"}),
        ({**ASKED, "file": "a\n.py"}, {"file"}),
        ({**ASKED, "memory_gib": 0}, {"memory_gib"}),
        ({**ASKED, "wait": "perhaps"}, {"wait"}),
        ({"op": "logprob"}, {"source"}),
        ({**ASKED, "op": "nothing", "device": "cuda:9"}, {"op", "device"}),
        ([], {"body"}),
        ("logprob", {"body"}),
    ],
)
def test_a_bad_field_is_named(body, fields) -> None:
    async def main() -> None:
        async with client(queue_of()) as http:
            answer = await http.post("/judge", json=body)
        assert (answer.status_code, set(answer.json()["fields"])) == (422, fields)
        assert all(name in answer.json()["error"] for name in fields)

    asyncio.run(main())


def test_what_only_the_trial_can_know_to_be_bad_is_named_too() -> None:
    refused = "import json; print(json.dumps({'error': 'unknown score', 'fields': {'score': 'unknown score'}}))"

    async def main() -> None:
        async with client(queue_of(refused)) as http:
            answer = await http.post("/judge", json=ASKED)
        assert (answer.status_code, answer.json()["fields"]) == (422, {"score": "unknown score"})

    asyncio.run(main())


@pytest.mark.parametrize(
    ("task", "field"),
    [
        ({"op": "nothing"}, "op"),
        ({"clauses": ("LP-99",)}, "clauses"),
        ({"score": "x"}, "score"),
        ({"baseline": "x"}, "baseline"),
    ],
)
def test_a_trial_names_the_field_that_it_cannot_carry_out(task, field) -> None:
    _, error = guarded(lambda: judge(b"", Task(**{"op": "logprob", **task})))
    assert set(bad_fields(error)) == {field}


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def main() -> None:
        async def stalls() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(600)

        running = app(queue_of(), patience_s=0.05)
        async with running.router.lifespan_context(running):
            transport = httpx.ASGITransport(running)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                answer = await http.post("/judge", content=stalls(), headers=JSON)
        assert (answer.status_code, "did not come" in answer.json()["error"]) == (408, True)

    asyncio.run(main())


def test_a_trial_that_does_not_end_is_ended_and_told() -> None:
    async def main() -> None:
        queue = queue_of(STUCK)
        queue.overrun_s = 0.1
        async with client(queue) as http:
            answer = await http.post("/judge", json={**ASKED, "limit_s": 0.1})
            assert (answer.status_code, "did not end" in answer.json()["error"]) == (504, True)
            (job,) = queue.jobs.values()
            assert (job.state, job.process.returncode is not None) == ("late", True)

    asyncio.run(main())


def test_a_trial_that_cannot_be_started_leaves_its_device_at_work() -> None:
    async def main() -> None:
        queue = queue_of()
        queue.trial = ("/nowhere/python",)
        async with client(queue) as http:
            dead = await http.post("/judge", json=ASKED)
            queue.trial = (sys.executable, "-c", QUICK)
            alive = await http.post("/judge", json=ASKED)
        assert (dead.status_code, alive.status_code) == (502, 200)

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
        assert (bad.status_code, bad.json()["fault"], bad.json()["score"]) == (200, "segfault", 0.0)
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


def test_a_server_that_is_killed_leaves_no_trial() -> None:
    token = f"server-{os.getpid()}"
    head = "import sys; from rlkernel_judge.sandbox import end_with_parent; end_with_parent(int(sys.argv[-1]))"
    trial = f"{head}; {STUCK}"
    code = f"""
import sys
from rlkernel_judge.serve import serve
serve("127.0.0.1", 0, ("cpu",), None, 8, "limits", trial=(sys.executable, "-c", {trial!r}, {token!r}))
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        address = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert httpx.post(f"{address[0]}/judge", json={**ASKED, "wait": False}).status_code == 202
        assert len(sandboxed.until_some(f"{token}\0")) == 1
        process.kill()
    assert sandboxed.until_none(f"{token}\0") == []


def test_a_trial_whose_server_is_gone_already_ends_at_once() -> None:
    code = "from rlkernel_judge.sandbox import end_with_parent; end_with_parent(1 << 30); print('went on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 1)


def test_honest_verdicts_are_right_beside_hostile_clients() -> None:
    found = loaded(36, share=0.5)
    assert (found["wrong"], found["honest_right"], found["said"]) == ([], found["honest"], "")
    assert set(found["kinds"]) == set(hostile(real=False))


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
