"""Calling an operator: who answers, what is said about it, and what it costs when something is wrong."""

from __future__ import annotations

import inspect
import os
import threading
import warnings

import pytest
import torch

import rlkernel as rlk
from rlkernel import discover, policy, resolve
from rlkernel_core.errors import (
    AmbiguousBackendError,
    ConfigError,
    FallbackError,
    FallbackWarning,
    PluginWarning,
    ResolutionError,
    UnknownNameError,
)
from rlkernel_core.spec import OPERATORS
from tests.implementations import acme

pytestmark = pytest.mark.usefixtures("fresh")

LOGITS = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([0, 3, 6, 2])


def answered_by_acme(**kwargs) -> bool:
    return bool((rlk.logprob(LOGITS, IDS, **kwargs).logprob == 1).all())


def test_the_reference_answers_by_default() -> None:
    expected = torch.log_softmax(LOGITS, -1).gather(1, IDS[:, None])[:, 0]
    torch.testing.assert_close(rlk.logprob(LOGITS, IDS).logprob, expected)
    assert rlk.last_decision("logprob").backend == "torch"


def test_use_changes_the_answer_in_its_block_only() -> None:
    with rlk.registered(acme()):
        with rlk.use("acme"):
            assert answered_by_acme()
        assert not answered_by_acme()


def test_use_nests_and_decorates() -> None:
    with rlk.registered(acme()):

        @rlk.use(logprob="acme")
        def inside() -> bool:
            with rlk.use("torch"):
                assert not answered_by_acme()
            return answered_by_acme()

        assert [inside(), inside(), answered_by_acme()] == [True, True, False]


def test_use_is_undone_by_an_exception() -> None:
    with rlk.registered(acme()), pytest.raises(ZeroDivisionError), rlk.use("acme"):
        raise ZeroDivisionError
    assert not answered_by_acme()


def test_configure_holds_for_the_process_and_use_beats_it() -> None:
    with rlk.registered(acme()):
        rlk.configure("acme")
        assert answered_by_acme()
        with rlk.use("torch"):
            assert not answered_by_acme()
        rlk.configure()
        assert not answered_by_acme()


def test_another_thread_has_its_own_context() -> None:
    seen = []
    with rlk.registered(acme()), rlk.use("acme"):
        thread = threading.Thread(target=lambda: seen.append(answered_by_acme()))
        thread.start()
        thread.join()
        assert (seen, answered_by_acme()) == ([False], True)


def test_many_threads_that_decide_at_once_agree() -> None:
    barrier, seen = threading.Barrier(8), []

    def call() -> None:
        barrier.wait()
        seen.append(rlk.logprob(LOGITS, IDS).logprob)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(torch.equal(s, seen[0]) for s in seen)
    assert len(seen) == 8


def test_an_unknown_backend_or_operator_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        rlk.use("toch")
    with pytest.raises(ConfigError, match="did you mean 'logprob'"):
        rlk.use(logprb="torch")


def test_a_feature_nobody_in_the_order_claims_lists_every_reason() -> None:
    with rlk.registered(acme()), rlk.use("acme"), pytest.raises(ResolutionError) as raised:
        rlk.logprob(LOGITS, IDS, entropy=True)
    assert "acme   features/missing" in str(raised.value)
    assert "torch  policy/not-in-order" in str(raised.value)
    assert raised.value.decision.backend is None


def test_a_fallback_warns_once_per_kind_and_names_both_sides() -> None:
    with rlk.registered(acme()), rlk.use("acme", "auto"):
        with pytest.warns(FallbackWarning, match="torch runs instead of acme.*features/missing") as seen:
            rlk.logprob(LOGITS, IDS, entropy=True)
        assert [w.filename for w in seen] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rlk.logprob(LOGITS, IDS, entropy=True)
        assert rlk.last_decision("logprob").fell_back_from == "acme"


def test_a_fallback_warning_made_an_error_stays_one() -> None:
    with rlk.registered(acme()), rlk.use("acme", "auto"):
        for _ in range(2):
            with pytest.raises(FallbackWarning), warnings.catch_warnings():
                warnings.simplefilter("error", FallbackWarning)
                rlk.logprob(LOGITS, IDS, entropy=True)


def test_a_forbidden_fallback_is_an_error() -> None:
    with rlk.registered(acme()), rlk.use("acme", "auto", fallback="error"):
        with pytest.raises(FallbackError, match='fallback = "error" forbids that torch'):
            rlk.logprob(LOGITS, IDS, entropy=True)
        assert answered_by_acme()


def test_an_exception_inside_a_kernel_reaches_the_caller_and_nothing_else_is_tried() -> None:
    with (
        rlk.registered(acme("raises")),
        rlk.use("acme", "auto"),
        pytest.raises(RuntimeError, match="the kernel failed"),
    ):
        rlk.logprob(LOGITS, IDS)


@pytest.mark.parametrize(
    "target, slug", [("absent_function", "load/target-missing"), ("forgetful", "load/target-signature")]
)
def test_a_manifest_that_names_what_is_not_there_falls_back_with_the_reason(target, slug) -> None:
    with rlk.registered(acme(target)), rlk.use("acme", "auto"):
        with pytest.warns() as seen:
            rlk.logprob(LOGITS, IDS)
        assert {w.category for w in seen} == {FallbackWarning, PluginWarning}
        assert rlk.last_decision("logprob").rejected[0].reason.slug == slug


@pytest.mark.parametrize("check, said", [("check_raises", "ZeroDivisionError: in the check"), ("check_lies", "False")])
def test_a_check_that_fails_or_gives_no_reason_counts_against_it(check, said) -> None:
    with rlk.registered(acme(check=check)), rlk.use("acme", "auto"):
        with pytest.warns(FallbackWarning, match=f"shape/check-failed.*{said}"):
            rlk.logprob(LOGITS, IDS)
        assert rlk.last_decision("logprob").backend == "torch"


@pytest.mark.parametrize("check", [None, "even_rows"])
def test_what_is_bound_keeps_its_implementation_and_is_counted(check) -> None:
    with rlk.registered(acme(check=check)):
        with rlk.use("acme"):
            bound = rlk.logprob.bind(LOGITS, IDS)
        assert (bound.__name__, inspect.signature(bound)) == ("logprob", OPERATORS["logprob"].signature)
        assert not answered_by_acme()
        assert [bool((bound(LOGITS[:n], IDS[:n]).logprob == 1).all()) for n in (4, 2, 4)] == [True] * 3
        assert {ran.backend: ran.calls for ran in rlk.status()} == {"acme": 3, "torch": 1}


def test_a_call_that_needs_gradients_is_another_kind() -> None:
    with rlk.registered(acme(supports=frozenset())), rlk.use("acme"):
        assert answered_by_acme()
        with pytest.raises(ResolutionError, match="grad/unsupported"):
            rlk.logprob(LOGITS.clone().requires_grad_(), IDS)
        with torch.no_grad():
            rlk.logprob(LOGITS.clone().requires_grad_(), IDS)


def test_need_refuses_what_does_not_claim_it() -> None:
    with (
        rlk.registered(acme()),
        rlk.use("acme", need="deterministic"),
        pytest.raises(ResolutionError, match="deterministic"),
    ):
        rlk.logprob(LOGITS, IDS)


def test_a_tie_is_an_error_with_the_line_that_settles_it(monkeypatch) -> None:
    ours = {n: discover.FIRST_PARTY[n]._replace(dist=discover.IN_PROCESS) for n in ("cuda", "jetson")}
    for module in (discover, resolve):
        monkeypatch.setattr(module, "FIRST_PARTY", {**discover.FIRST_PARTY, **ours})
    with rlk.registered(acme(name="cuda")), rlk.registered(acme(name="jetson")):
        with pytest.raises(AmbiguousBackendError, match=r'order = \["cuda", "auto"\]'):
            rlk.logprob(LOGITS, IDS)


def test_status_counts_calls_and_says_what_served_them() -> None:
    for _ in range(3):
        rlk.logprob(LOGITS, IDS)
    (ran,) = rlk.status()
    assert (ran.op, ran.backend, ran.calls, ran.decision.version) == ("logprob@1", "torch", 3, "rlkernel 0.1.0")


def test_the_hash_of_all_decisions_changes_with_what_ran() -> None:
    rlk.logprob(LOGITS, IDS)
    one = rlk.decisions_hash()
    rlk.logprob(LOGITS, IDS, entropy=True)
    assert rlk.decisions_hash() != one


def test_last_decision_refuses_an_unknown_operator() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'logprob'"):
        rlk.last_decision("logprb")


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_the_front_door_has_the_signature_and_contract_of_the_spec(op) -> None:
    call = getattr(rlk, op)
    assert inspect.signature(call) == OPERATORS[op].signature
    assert call.__doc__ == OPERATORS[op].record.__doc__


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch has threads, which Python 3.12 warns of
def test_a_fork_decides_anew_and_works() -> None:
    rlk.logprob(LOGITS, IDS)
    pid = os.fork()
    if pid == 0:
        empty = all(not t for s in policy.scopes() for t in s.tables.values())
        os._exit(0 if empty and rlk.logprob(LOGITS[:, :1], torch.zeros(4, dtype=torch.long)).logprob[0] == 0 else 1)
    assert os.waitpid(pid, 0)[1] == 0
