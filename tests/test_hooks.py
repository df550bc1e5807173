"""Observers hear what was decided, and can change nothing."""

from __future__ import annotations

import os
import sys
import threading
from typing import ClassVar

import pluggy
import pytest
import torch

import rlkernel as rlk
from rlkernel import hooks
from rlkernel_core.errors import FallbackWarning, PluginWarning
from tests.implementations import acme
from tests.plugins import install, module_of

LOGITS, IDS = torch.zeros(2, 3), torch.tensor([0, 1])
hookimpl = pluggy.HookimplMarker("rlkernel")


@pytest.fixture
def observe():
    """Register an observer for the time of a test."""
    rlk.refresh()
    plugins = []

    def register(plugin):
        hooks.register(plugin)
        plugins.append(plugin)
        return plugin

    yield register
    for plugin in plugins:
        hooks.unregister(plugin)
    rlk.refresh()


class Recorder:
    def __init__(self) -> None:
        self.heard = []

    @hookimpl
    def rlkernel_decided(self, decision) -> None:
        self.heard.append(("decided", decision.backend))

    @hookimpl
    def rlkernel_fell_back(self, decision) -> None:
        self.heard.append(("fell back", decision.fell_back_from))

    @hookimpl
    def rlkernel_plugin_failed(self, name, error) -> None:
        self.heard.append(("failed", name, error.split(":")[0]))


def test_a_decision_is_heard_once_per_kind(observe) -> None:
    recorder = observe(Recorder())
    rlk.logprob(LOGITS, IDS)
    rlk.logprob(LOGITS, IDS)
    assert recorder.heard == [("decided", "torch")]


def test_a_fallback_is_heard(observe) -> None:
    recorder = observe(Recorder())
    with rlk.registered(acme()), rlk.use("acme", "auto"), pytest.warns(FallbackWarning):
        rlk.logprob(LOGITS, IDS, entropy=True)
    assert recorder.heard == [("fell back", "acme"), ("decided", "torch")]


def test_a_plugin_that_does_not_load_is_heard(observe, plug) -> None:
    recorder = observe(Recorder())
    plug("broken", "raise RuntimeError('boom')")
    with rlk.use("broken", "auto"), pytest.warns(PluginWarning), pytest.warns(FallbackWarning):
        rlk.logprob(LOGITS, IDS)
    assert ("failed", "broken", "load/import-error") in recorder.heard


def test_an_observer_that_raises_is_reported_and_disturbs_nobody(observe) -> None:
    class Raises:
        @hookimpl
        def rlkernel_decided(self) -> None:
            raise ZeroDivisionError("in the observer")

    recorder = observe(Recorder())
    observe(Raises())
    with pytest.warns(PluginWarning, match="ZeroDivisionError: in the observer"):
        out = rlk.logprob(LOGITS, IDS)
    assert out.logprob.shape == (2,)
    assert recorder.heard == [("decided", "torch")]


def test_an_observer_may_call_operators_also_in_another_thread(observe) -> None:
    class Calls:
        heard: ClassVar[list[str]] = []

        @hookimpl
        def rlkernel_decided(self, decision) -> None:
            self.heard.append(decision.call.op)
            rlk.logprob(LOGITS, IDS)
            if decision.call.op == "logprob@1":
                thread = threading.Thread(target=rlk.whiten, args=(LOGITS,), daemon=True)
                thread.start()
                thread.join(10)
                self.heard.append("deadlock" if thread.is_alive() else "done")

    calls = observe(Calls())
    rlk.logprob(LOGITS, IDS)
    assert calls.heard == ["logprob@1", "whiten@1", "done"]


def test_a_mistyped_hook_or_argument_is_an_error_at_registration() -> None:
    class Mistyped:
        @hookimpl
        def rlkernel_decidet(self) -> None:
            pass

    class Greedy:
        @hookimpl
        def rlkernel_decided(self, tensors) -> None:
            pass

    for plugin in (Mistyped(), Greedy()):
        with pytest.raises(pluggy.PluginValidationError):
            hooks.register(plugin)


OBSERVER = """
import pluggy
hookimpl = pluggy.HookimplMarker("rlkernel")
HEARD = []


@hookimpl
def rlkernel_decided(decision):
    HEARD.append(decision.backend)
"""
MISTYPED = """
import pluggy


@pluggy.HookimplMarker("rlkernel")
def rlkernel_decidet(decision):
    pass
"""
LATE = """
import pluggy


@pluggy.HookimplMarker("rlkernel")(wrapper=True)
def rlkernel_decided():
    return (yield)
"""


@pytest.fixture
def watch(tmp_path, monkeypatch, untried):
    """Install an observer like a distribution, for the time of a test."""

    def watch(name: str, source: str) -> None:
        site = install(tmp_path, name, source, group=hooks.GROUP, attr="__name__")
        text = f"[{hooks.GROUP}]\n{name} = {module_of(name)}\n"
        (site / f"{name}-1.0.dist-info" / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(str(site))
        rlk.refresh()

    yield watch
    monkeypatch.undo()
    rlk.refresh()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise RuntimeError('no display')", "RuntimeError: no display"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (MISTYPED, "rlkernel_decidet"),
        (OBSERVER.replace("(decision):", "(tensors):"), "tensors"),
        (LATE, "wrapper"),
    ],
)
def test_an_installed_observer_that_cannot_watch_is_reported_and_disturbs_nobody(watch, source, said) -> None:
    watch("odd", source)
    watch("fine", OBSERVER)
    with pytest.warns(PluginWarning, match=f"hook plugin 'odd'.*{said}"):
        rlk.logprob(LOGITS, IDS)
    assert sys.modules[module_of("fine")].HEARD == ["torch"]
    rlk.logprob(LOGITS, IDS, entropy=True)
    assert sys.modules[module_of("fine")].HEARD == ["torch"] * 2


def test_an_observer_that_was_refused_may_come_back_mended(observe) -> None:
    class Greedy:
        @hookimpl
        def rlkernel_decided(self, tensors) -> None:
            pass

    class Late:
        @hookimpl(wrapper=True)
        def rlkernel_decided(self):
            yield

    for plugin in (Greedy(), Late()):
        for _ in range(2):
            with pytest.raises(pluggy.PluginValidationError):
                hooks.register(plugin)
    recorder = observe(Recorder())
    rlk.logprob(LOGITS, IDS)
    assert recorder.heard == [("decided", "torch")]


def test_an_observer_that_leaves_hears_no_more(observe) -> None:
    recorder = Recorder()
    hooks.register(recorder)
    rlk.logprob(LOGITS, IDS)
    hooks.unregister(recorder)
    rlk.logprob(LOGITS, IDS, entropy=True)
    assert recorder.heard == [("decided", "torch")]
    with pytest.raises(ValueError, match="is not registered"):
        hooks.unregister(recorder)


def test_an_interrupt_in_an_observer_goes_through(observe) -> None:
    class Interrupts:
        @hookimpl
        def rlkernel_decided(self) -> None:
            raise KeyboardInterrupt

    observe(Interrupts())
    with pytest.raises(KeyboardInterrupt):
        rlk.logprob(LOGITS, IDS)
    assert rlk.logprob(LOGITS, IDS).logprob.shape == (2,)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch has threads, which Python 3.12 warns of
def test_a_fork_keeps_its_observers(observe) -> None:
    recorder = observe(Recorder())
    pid = os.fork()
    if pid == 0:
        rlk.logprob(LOGITS, IDS)
        os._exit(0 if recorder.heard == [("decided", "torch")] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert recorder.heard == []
