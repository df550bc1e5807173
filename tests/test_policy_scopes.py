"""Scopes of policy over threads, tasks, generators and processes, and while the process around them changes."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import rlkernel as rlk
from rlkernel import policy
from rlkernel_core.errors import ConfigError, FallbackWarning
from tests.implementations import acme

pytestmark = pytest.mark.usefixtures("fresh")

LOGITS, IDS = torch.zeros(4, 7), torch.tensor([0, 3, 6, 2])


def answered() -> str:
    rlk.logprob(LOGITS, IDS)
    return str(rlk.last_decision("logprob").backend)


def in_thread(run: Callable[[], Any]) -> list[Any]:
    """What another thread returns; nothing if it is not done soon."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()), daemon=True)
    thread.start()
    thread.join(10)
    return found


def test_a_warm_call_waits_for_nobody() -> None:
    answered()
    with policy.PROCESS.lock:  # as while another thread runs a self-test
        assert in_thread(answered) == ["torch"]


def test_one_use_may_be_entered_by_many_threads_at_once() -> None:
    with rlk.registered(acme()):
        chosen, meet = rlk.use("acme"), threading.Barrier(2)

        def work(last: bool) -> list[str]:
            with chosen:
                meet.wait(10)
                seen = [answered()]
                meet.wait(10)
                if last:
                    meet.wait(10)
            if not last:
                meet.wait(10)
            return [*seen, answered()]

        with ThreadPoolExecutor(2) as pool:
            results = [r.result(timeout=20) for r in (pool.submit(work, False), pool.submit(work, True))]
    assert results == [["acme", "torch"]] * 2


def test_one_use_may_be_entered_again_inside_itself() -> None:
    with rlk.registered(acme()):
        chosen = rlk.use("acme")
        with chosen, rlk.use("torch"):
            with chosen:
                assert answered() == "acme"
            assert answered() == "torch"
        assert answered() == "torch"


def test_tasks_have_contexts_of_their_own() -> None:
    async def work(backend: str, turn: asyncio.Event, other: asyncio.Event) -> str:
        with rlk.use(backend):
            turn.set()
            await other.wait()
            return answered()

    async def both() -> list[str]:
        a, b = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(work("acme", a, b), work("torch", b, a))

    with rlk.registered(acme()):
        assert asyncio.run(both()) == ["acme", "torch"]
        assert answered() == "torch"


def test_generators_that_end_in_any_order_leave_nothing_behind() -> None:
    def work(backend: str) -> Iterator[None]:
        with rlk.use(backend):
            yield

    with rlk.registered(acme()):
        first, second = work("acme"), work("torch")
        next(first), next(second)
        first.close()
        second.close()
        assert policy.SCOPE.get() is None


def test_an_async_generator_that_another_context_finishes_is_no_error() -> None:
    async def work() -> Any:
        with rlk.use("torch"):
            yield 1

    async def half() -> None:
        async for _ in work():
            break  # the event loop closes it later, in a task of its own

    asyncio.run(half())
    assert policy.SCOPE.get() is None


async def _coroutine() -> None: ...
async def _async_generator() -> Any:
    yield


def _generator() -> Any:
    yield


@pytest.mark.parametrize("function", [_coroutine, _async_generator, _generator])
def test_a_function_whose_body_runs_later_cannot_be_decorated(function) -> None:
    with pytest.raises(ConfigError, match=f"{function.__name__}.*with rlkernel.use"):
        rlk.use("torch")(function)


def test_the_source_is_the_layer_that_set_the_order() -> None:
    with rlk.use("torch"):
        pass
    rlk.configure("torch")
    assert rlk.explain("logprob").decision.source == "configure()"
    with rlk.use("torch"):
        assert rlk.explain("logprob").decision.source == "use()"
    rlk.configure()
    with rlk.use("auto"):
        assert rlk.explain("logprob").decision.source == "use()"


def test_a_registered_backend_outlives_a_refresh_in_its_block() -> None:
    with rlk.registered(acme()):
        rlk.refresh()
        with rlk.use("acme"):
            assert answered() == "acme"
    assert "acme" not in policy.installed()


def test_a_backend_that_is_registered_again_is_found_where_it_was_missed() -> None:
    with rlk.registered(acme()):
        rlk.configure("acme", "auto")
        assert answered() == "acme"
    with pytest.warns(FallbackWarning, match="load/not-installed"):
        assert answered() == "torch"
    with rlk.registered(acme()):
        assert answered() == "acme"


def test_two_threads_cannot_register_one_name() -> None:
    with rlk.registered(acme()), pytest.raises(ConfigError, match="'acme' is installed"):
        with rlk.registered(acme()):
            pass
    assert "acme" not in policy.installed()


def test_calls_go_on_while_the_process_is_reconfigured() -> None:
    stop, wrong = threading.Event(), []

    def call() -> None:
        while not stop.is_set():
            with rlk.use("torch"):
                if answered_here() != "torch":
                    wrong.append("use")
            rlk.logprob(LOGITS, IDS)

    def answered_here() -> str:
        return str(policy.current().policy.default.order[0] if rlk.logprob(LOGITS, IDS) else "")

    with ThreadPoolExecutor(2) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # between two steps the order may name what is gone
        calls = [pool.submit(call) for _ in range(2)]
        for turn in range(30):
            with rlk.registered(acme()):
                rlk.configure("acme", "torch")
                rlk.status()
            if turn % 3 == 0:
                rlk.refresh()
            rlk.configure()
        stop.set()
        for done in calls:
            done.result(timeout=10)
    assert wrong == []


def test_a_use_keeps_what_it_found_when_the_process_is_configured() -> None:
    with rlk.registered(acme()), rlk.use(fallback="error"):
        rlk.configure("acme")
        assert answered() == "torch"
    assert policy.current().policy.default.order == ("acme",)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch has threads, which Python 3.12 warns of
def test_a_fork_while_another_thread_holds_the_lock_works() -> None:
    answered()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with policy.PROCESS.lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if rlk.last_decision("logprob") is None and answered() == "torch" else 1)
    done.set()
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0


def test_an_error_on_the_way_in_changes_nothing(monkeypatch) -> None:
    chosen = rlk.use("torch")
    rlk.refresh()
    monkeypatch.setenv("RLKERNEL_ORDR", "x")
    with pytest.raises(ConfigError), chosen:
        pass
    assert policy.SCOPE.get() is None
    monkeypatch.delenv("RLKERNEL_ORDR")
    assert answered() == "torch"


def test_an_order_that_is_given_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match="order is given twice"):
        rlk.use("auto", order=["torch"])
