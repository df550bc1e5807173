"""An implementation's own check: asked once a shape, whatever it looks at, and heard once per verdict."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pluggy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkernel as rlk
from rlkernel import hooks, policy
from rlkernel_core.errors import FallbackError, FallbackWarning
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.reasons import Reason
from rlkernel_core.spec import OPERATORS
from tests.implementations import HERE, acme

HOME = __name__
ASKED: list[str] = []


def narrow(call: Any) -> Reason | None:
    """Looks at a size that only a nested argument has."""
    ASKED.append("narrow")
    return Reason("shape", "unsupported", f"{call.w.shape[0]} outputs") if call.w.shape[0] > 4 else None


def contiguous(call: Any) -> Reason | None:
    ASKED.append("contiguous")
    return None if call.logits.is_contiguous() else Reason("shape", "unsupported", "rows are strided")


def few(call: Any) -> Reason | None:
    ASKED.append("few")
    return Reason("shape", "unsupported", f"{call.top_logprobs} ids") if call.top_logprobs > 2 else None


def pretends(call: Any) -> Reason:
    """Refuses as if it were about another device, so that nobody hears of the fallback."""
    return Reason("device", "not-claimed", "not mine")


def bit(number: int) -> Callable[..., Reason | None]:
    """A check that refuses where a bit of `top_logprobs` is set."""

    def check(call: Any) -> Reason | None:
        return Reason("shape", "unsupported", f"bit {number}") if call.top_logprobs >> number & 1 else None

    return check


bit_0, bit_1, bit_2 = map(bit, range(3))


def product(call: Any) -> torch.Tensor:
    return torch.ones(call.x.shape[0], call.w.shape[0])


def backend(name: str, *impls: tuple[str, str, str]) -> Backend:
    """A backend whose implementations are (operator, target, check)."""
    claims = tuple(
        Impl(
            op=OPERATORS[op].id,
            target=target,
            requires=Requires(device="cpu"),
            supports=OPERATORS[op].feature_names,
            check=f"{HOME}:{check}" if check else None,
        )
        for op, target, check in impls
    )
    return Backend(name=name, api=API_VERSION, impls=claims)


def ones(check: str, name: str = "acme") -> Backend:
    return backend(name, ("logprob", f"{HERE}:ones", check))


@pytest.fixture(autouse=True)
def nothing_counted(fresh: None) -> None:
    ASKED.clear()


def served(op: str = "logprob") -> str:
    return str(rlk.last_decision(op).backend)


LOGITS, IDS = torch.randn(4, 7), torch.tensor([0, 3, 6, 2])


def test_sizes_inside_arguments_count() -> None:
    small, large = (rlk.quantize(torch.randn(n, 128), "int8_channel") for n in (4, 8))
    x = torch.randn(2, 128)
    with rlk.registered(backend("acme", ("qmatmul", f"{HOME}:product", "narrow"))), rlk.use("acme", "auto"):
        rlk.qmatmul(x, small)
        assert served("qmatmul") == "acme"
        with pytest.warns(FallbackWarning, match="8 outputs"):
            rlk.qmatmul(x, large)
        assert served("qmatmul") == "torch"
        rlk.qmatmul(x, small)
        assert served("qmatmul") == "acme"


def test_strides_count() -> None:
    with rlk.registered(ones("contiguous")), rlk.use("acme", "auto"):
        rlk.logprob(LOGITS, IDS)
        assert served() == "acme"
        with pytest.warns(FallbackWarning, match="strided"):
            rlk.logprob(LOGITS.t().contiguous().t(), IDS)
        assert served() == "torch"


def test_values_of_numbers_count() -> None:
    with rlk.registered(ones("few")), rlk.use("acme", "auto"):
        rlk.logprob(LOGITS, IDS, top_logprobs=2)
        assert served() == "acme"
        with pytest.warns(FallbackWarning, match="3 ids"):
            rlk.logprob(LOGITS, IDS, top_logprobs=3)
        assert served() == "torch"


def test_a_fallback_is_said_once_however_many_sizes_are_refused() -> None:
    with rlk.registered(acme(check="even_rows")), rlk.use("acme", "auto"):
        with pytest.warns(FallbackWarning, match="3 rows is odd") as seen:
            [rlk.logprob(torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.int64)) for rows in (3, 5, 7)]
        assert [w.filename for w in seen] == [__file__]


def test_a_forbidden_fallback_stays_an_error_with_the_words_for_these_sizes() -> None:
    with rlk.registered(acme(check="even_rows")), rlk.use("acme", "auto", fallback="error"):
        rlk.logprob(LOGITS, IDS)
        for rows in (3, 3, 5):
            with pytest.raises(FallbackError, match=f"{rows} rows is odd"):
                rlk.logprob(torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.int64))


def test_what_is_remembered_does_not_grow_with_sizes_and_counts_are_kept() -> None:
    with rlk.registered(acme(check="even_rows")), rlk.use("acme", "auto"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for rows in range(1, 21):
            rlk.logprob(torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.int64), temperature=1.0 + rows)
        assert {r.backend: r.calls for r in rlk.status()} == {"acme": 10, "torch": 10}


def test_observers_hear_each_verdict_once() -> None:
    heard = []

    class Recorder:
        @pluggy.HookimplMarker("rlkernel")
        def rlkernel_decided(self, decision: Any) -> None:
            heard.append(decision.backend)

    recorder = Recorder()
    hooks.register(recorder)
    try:
        with rlk.registered(ones("few")), rlk.use("acme", "auto"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            for n in (1, 2, 3, 4, 1, 3):
                rlk.logprob(LOGITS, IDS, top_logprobs=n)
    finally:
        hooks.unregister(recorder)
    assert heard == ["acme", "torch"]


def test_a_check_is_asked_once_a_shape() -> None:
    with rlk.registered(ones("few")), rlk.use("acme"):
        for rows in (4, 4, 3, 4, 3, 2):
            rlk.logprob(LOGITS[:rows] + 1, IDS[:rows])
    assert ASKED == ["few"] * 3


def test_a_check_is_asked_again_when_what_is_installed_changes() -> None:
    with rlk.registered(ones("few")), rlk.use("acme"):
        rlk.logprob(LOGITS, IDS)
        with rlk.registered(acme(name="zeta")):
            rlk.logprob(LOGITS, IDS)
        rlk.refresh()
        rlk.logprob(LOGITS, IDS)
        rlk.logprob(LOGITS, IDS)
    assert ASKED == ["few"] * 3


def test_a_check_of_what_is_bound_is_asked_once_a_shape_and_refuses_by_name() -> None:
    with rlk.registered(ones("few")):
        with rlk.use("acme"):
            bound = rlk.logprob.bind(LOGITS, IDS)
        bound(LOGITS, IDS)
        ASKED.clear()
        for _ in range(2):
            bound(LOGITS, IDS)
            bound(LOGITS, IDS, top_logprobs=2)
        assert ASKED == ["few"]
        for _ in range(2):
            with pytest.raises(rlk.ResolutionError, match="logprob was bound to .*:ones, which refuses.*3 ids"):
                bound(LOGITS, IDS, top_logprobs=3)


def test_a_backend_that_is_outranked_is_not_asked() -> None:
    with rlk.registered(acme()), rlk.registered(ones("few", "zeta")), rlk.use("acme", "zeta"):
        rlk.logprob(LOGITS, IDS)
        assert {r.backend: r.reason.slug for r in rlk.last_decision("logprob").rejected}["zeta"] == "policy/outranked"
    assert ASKED == []


def test_the_checks_of_several_implementations_decide_together() -> None:
    both = backend("acme", ("logprob", f"{HERE}:ones", "contiguous"), ("logprob", f"{HERE}:raises", "few"))
    strided = LOGITS.t().contiguous().t()
    with rlk.registered(both), rlk.use("acme", "auto"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for _ in range(2):
            rlk.logprob(LOGITS, IDS, top_logprobs=1)
            assert rlk.last_decision("logprob").target == f"{HERE}:ones"
            with pytest.raises(RuntimeError, match="the kernel failed"):
                rlk.logprob(strided, IDS, top_logprobs=1)
            rlk.logprob(strided, IDS, top_logprobs=3)
            assert served() == "torch"


refusing = st.lists(st.sampled_from(["", "bit_0", "bit_1", "bit_2"]), max_size=3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(refusing, refusing, st.lists(st.integers(0, 7), min_size=1, max_size=12))
def test_what_is_remembered_is_what_would_be_decided_afresh(first, second, calls) -> None:
    def claims(name: str, checks: list[str]) -> Backend:
        return backend(name, *(("logprob", f"{HERE}:ones", check) for check in checks))

    with rlk.registered(claims("acme", first)), rlk.registered(claims("zeta", second)), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        with rlk.use("acme", "zeta", "auto"):
            for n in calls:
                rlk.logprob(LOGITS, IDS, top_logprobs=n)
                assert rlk.last_decision("logprob") == rlk.explain("logprob", LOGITS, IDS, top_logprobs=n).decision


def test_a_check_speaks_of_shapes_alone() -> None:
    with rlk.registered(ones("pretends")), rlk.use("acme", "auto"):
        with pytest.warns(FallbackWarning, match="shape/check-failed.*it returned Reason.stage=.device"):
            rlk.logprob(LOGITS, IDS)


def test_binding_names_arguments_as_it_likes() -> None:
    with rlk.registered(ones("few")), rlk.use("acme", "auto"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        by_acme = rlk.logprob.bind(ids=IDS, logits=LOGITS, top_logprobs=2)
        by_the_reference = rlk.logprob.bind(top_logprobs=3, ids=IDS, logits=LOGITS)
        answers = [bool((bound(LOGITS, IDS).logprob == 1).all()) for bound in (by_acme, by_the_reference)]
        assert answers == [True, False]


def test_threads_that_differ_in_size_get_their_own_answers() -> None:
    barrier = threading.Barrier(4)

    def work(rows: int) -> list[bool]:
        logits, ids = torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.int64)
        barrier.wait(10)
        return [bool((rlk.logprob(logits, ids).logprob == 1).all()) for _ in range(50)]

    with rlk.registered(acme(check="even_rows")), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        rlk.configure("acme", "auto")
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(work, (2, 3, 4, 5)))
        rlk.configure()
    assert [set(r) for r in results] == [{True}, {False}, {True}, {False}]
    assert policy.SCOPE.get() is None
