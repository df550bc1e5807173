"""Around a call: binding, explaining, lying targets, self-tests that call operators."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import rlkernel as rlk
from rlkernel_core.errors import ArgumentTypeError, FallbackWarning, PluginWarning, ResolutionError
from rlkernel_core.spec.logprob import LogprobResult
from tests.implementations import acme

LOGITS, IDS = torch.zeros(4, 7), torch.tensor([0, 3, 6, 2])


@pytest.fixture(autouse=True)
def fresh_process_state(tmp_path, monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rlk.refresh()
    yield
    rlk.refresh()


def test_binding_shows_in_the_status_and_calls_of_what_is_bound_are_counted() -> None:
    bound = rlk.logprob.bind(LOGITS, IDS)
    assert [(r.op, r.backend, r.calls) for r in rlk.status()] == [("logprob@1", "torch", 0)]
    bound(LOGITS, IDS)
    assert [r.calls for r in rlk.status()] == [1]
    rlk.logprob(LOGITS, IDS)
    assert [r.calls for r in rlk.status()] == [2]
    rlk.logprob.bind(LOGITS, IDS)
    assert [r.calls for r in rlk.status()] == [2]


@pytest.mark.parametrize("call", [rlk.logprob, rlk.logprob.bind, lambda *a, **k: rlk.explain("logprob", *a, **k)])
def test_an_unknown_keyword_is_named_wherever_a_call_is_described(call) -> None:
    with pytest.raises(ArgumentTypeError, match="temprature: logprob has no such argument.*did you mean 'temperature'"):
        call(LOGITS, IDS, temprature=2.0)


def test_an_operators_own_argument_is_no_word_of_the_explanation() -> None:
    weight = torch.randn(4, 128, dtype=torch.bfloat16)
    explained = rlk.explain("quantize", weight, "int8_channel", dtype=torch.float16).decision
    rlk.quantize(weight, "int8_channel", dtype=torch.float16)
    assert explained == rlk.last_decision("quantize")
    assert explained.call.dtype == "bfloat16"
    assert rlk.explain("quantize", device="cuda", dtype="float16").decision.call.dtype == "float16"
    assert rlk.explain("rollout_buffer", 256, 2, device="meta").decision.call.device == "meta"


def test_devices_and_dtypes_may_be_torchs_own() -> None:
    said = rlk.explain("logprob", device=torch.device("cuda", 1), dtype=torch.bfloat16, arch="sm90")
    assert said == rlk.explain("logprob", device="cuda", dtype="bfloat16", arch="sm90")


def two_records(call: Any, other: Any) -> LogprobResult:
    raise RuntimeError("never called")


def no_record() -> LogprobResult:
    raise RuntimeError("never called")


@pytest.mark.parametrize("target", [two_records, no_record])
def test_a_target_that_does_not_take_one_record_is_not_the_operator(monkeypatch, target) -> None:
    from tests import implementations

    monkeypatch.setattr(implementations, target.__name__, target, raising=False)
    said = rf"target-signature.*{target.__name__}\(.*does not take one argument, the LogprobCall of logprob@1"
    with rlk.registered(acme(target.__name__)), rlk.use("acme", "auto"):
        with pytest.warns(FallbackWarning), pytest.warns(PluginWarning, match=said):
            rlk.logprob(LOGITS, IDS)


def test_switching_self_tests_off_somewhere_does_not_pass_them_elsewhere() -> None:
    with rlk.registered(acme(self_test="fails")):
        with rlk.use("acme", probe="off"):
            assert (rlk.logprob(LOGITS, IDS).logprob == 1).all()
        with rlk.use("acme", "auto", probe="inprocess"), pytest.warns(FallbackWarning, match="probe/failed"):
            rlk.logprob(LOGITS, IDS)
        with rlk.use("acme", probe="off"):
            assert (rlk.logprob(LOGITS.double(), IDS).logprob == 1).all()


def calls_the_operator(device: str) -> None:
    CALLED.append(device)
    with rlk.use("acme", probe="inprocess"):
        if not (rlk.logprob(LOGITS, IDS).logprob == 1).all():
            raise ValueError("somebody else answered")


CALLED: list[str] = []


def calls_the_operator_and_fails(device: str) -> None:
    calls_the_operator(device)
    raise ValueError("wrong after all")


def stops(device: str) -> None:
    CALLED.append(device)
    raise KeyboardInterrupt


def test_a_self_test_may_call_the_operator(monkeypatch) -> None:
    from tests import self_tests

    monkeypatch.setattr(self_tests, "calls_the_operator", calls_the_operator, raising=False)
    CALLED.clear()
    with rlk.registered(acme(self_test="calls_the_operator")), rlk.use("acme", probe="inprocess"):
        assert (rlk.logprob(LOGITS, IDS).logprob == 1).all()
    assert CALLED == ["cpu"]


def test_what_was_called_in_a_failed_self_test_is_not_remembered(monkeypatch) -> None:
    from tests import self_tests

    test = calls_the_operator_and_fails
    monkeypatch.setattr(self_tests, test.__name__, test, raising=False)
    with rlk.registered(acme(self_test=test.__name__)):
        for _ in range(2):
            with rlk.use("acme", probe="inprocess"), pytest.raises(ResolutionError, match="wrong after all"):
                rlk.logprob(LOGITS, IDS)


def test_a_self_test_that_is_interrupted_has_not_passed(monkeypatch) -> None:
    from tests import self_tests

    monkeypatch.setattr(self_tests, "stops", stops, raising=False)
    CALLED.clear()
    with rlk.registered(acme(self_test="stops")), rlk.use("acme", probe="inprocess"):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                rlk.logprob(LOGITS, IDS)
    assert CALLED == ["cpu", "cpu"]


def test_what_explains_a_call_can_be_sent_to_another_process() -> None:
    explained = rlk.explain("logprob", LOGITS, IDS)
    again = pickle.loads(pickle.dumps(explained))
    assert (again, again.decision) == (explained, explained.decision)
    assert pickle.loads(pickle.dumps(rlk.logprob)) is rlk.logprob
    rlk.logprob(LOGITS, IDS)
    assert pickle.loads(pickle.dumps(rlk.status())) == rlk.status()


def test_a_device_that_only_has_shapes_is_served_by_the_reference() -> None:
    out = rlk.logprob(LOGITS.to("meta"), IDS.to("meta"))
    assert (out.logprob.device.type, rlk.last_decision("logprob").call.device) == ("meta", "meta")


def records(device: str) -> None:
    CALLED.append(device)


def test_every_device_of_a_type_is_tested_and_decided_on_its_own(monkeypatch) -> None:
    from tests import self_tests

    monkeypatch.setattr(self_tests, "records", records, raising=False)
    CALLED.clear()
    with FakeTensorMode():
        cards = [
            (torch.empty(4, 7, device=d), torch.empty(4, dtype=torch.int64, device=d)) for d in ("cuda:0", "cuda:1")
        ]
        with rlk.registered(acme(self_test="records", device="cuda")), rlk.use("acme", probe="inprocess"):
            for card in (0, 1, 1, 0):
                rlk.logprob(*cards[card])
            assert [r.calls for r in rlk.status()] == [4]
    assert CALLED == ["cuda:0", "cuda:1"]


def test_subclasses_of_tensors_are_tensors() -> None:
    class Mine(torch.Tensor):
        pass

    rlk.logprob(LOGITS.as_subclass(Mine), IDS)
    rlk.logprob(torch.nn.Parameter(LOGITS), IDS)
    assert sorted(r.decision.call.grad for r in rlk.status()) == [False, True]
    with torch.inference_mode():
        rlk.logprob(torch.nn.Parameter(LOGITS), IDS)
    assert rlk.last_decision("logprob").call.grad is False


def test_autocast_changes_neither_choice_nor_result() -> None:
    plain = rlk.logprob(LOGITS, IDS).logprob
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(rlk.logprob(LOGITS, IDS).logprob, plain, rtol=0, atol=0)
    assert len(rlk.status()) == 1
