"""The backend under attack: what it may refuse, and what that is not."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis.errors import UnsatisfiedAssumption

import rlkernel as rlk
from rlkernel_conformance.clauses import attacks_on
from rlkernel_conformance.compare import Violation, within
from rlkernel_conformance.harness import carry_out
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.qmatmul_calls import Product, fitted
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ResolutionError
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.quant import QuantSpec, quantize
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.whiten import WhitenCall
from rlkernel_torch.advantage.whitening import whiten as right
from rlkernel_torch.attention import attention as attended
from rlkernel_torch.qmatmul import qmatmul as product

PICKY = Backend(
    name="picky",
    api=API_VERSION,
    impls=(
        Impl(
            op="whiten@1",
            target="tests.test_conformance_subject:whiten",
            requires=Requires(device="cpu", dtypes=("float32",)),
            check="tests.test_conformance_subject:fits",
        ),
    ),
)


def whiten(call):
    return right(call)


def fits(call):
    return None if call.x.is_contiguous() else Reason("shape", "unsupported", "rows that are apart")


@pytest.fixture
def subject():
    with rlk.registered(PICKY), (found := Subject("picky", "whiten")).chosen():
        yield found


def test_an_implementation_whose_packages_are_not_here_is_no_subject() -> None:
    needs = PICKY.impls[0].requires.model_copy(update={"packages": ("no-such-compiler>=3.4",)})
    lacking = PICKY.model_copy(update={"impls": (PICKY.impls[0].model_copy(update={"requires": needs}),)})
    with rlk.registered(lacking):
        assert Subject("picky", "whiten").impls == ()


def test_a_call_that_its_check_refuses_has_no_result(subject) -> None:
    assert subject.unless_refused(torch.randn(4, 6).t()) is None


def test_a_call_that_its_check_admits_has_one(subject) -> None:
    x = torch.arange(6.0)
    assert torch.equal(subject.unless_refused(x).y, right(WhitenCall(x)).y)


def test_a_call_beyond_its_claims_is_an_error(subject) -> None:
    with pytest.raises(ResolutionError, match="dtype"):
        subject.unless_refused(torch.randn(6, dtype=torch.float64))


def multiplying(check):
    """A backend of products with a check of this module."""
    impl = Impl(
        op="qmatmul@1",
        target="tests.test_conformance_subject:qmatmul",
        requires=Requires(device="cpu", dtypes=("bfloat16",)),
        supports=frozenset({"format:int4_g128", "format:int4_g32", "bias"}),
        check=f"tests.test_conformance_subject:{check}",
    )
    return Backend(name="tiled", api=API_VERSION, impls=(impl,))


# Kernels on tiles: a weight of 16 rows and 256 columns at least, prepacked, its scales in the dtype of x.
TILED = multiplying("on_tiles")
MULTIPLIED: list[tuple[int, int]] = []


def qmatmul(call):
    y = product(call)
    MULTIPLIED.append(call.w.shape)
    return y


def no_calls(call):
    return Reason("shape", "unsupported", "never")


def on_tiles(call):
    x, w = call.x, call.w
    fits = (
        w.layout == "reference_tiled"
        and w.shape[0] % 16 == 0
        and w.shape[1] % 256 == 0
        and (x.numel() >= 65 * w.shape[1] if w.spec.group == 32 else x.numel() <= 17 * w.shape[1])
    )
    return None if fits else Reason("shape", "unsupported", "off the grid")


def on_deep_tiles(call):
    fits = call.w.shape[0] % 128 == 0 and call.w.shape[1] % 512 == 0
    return None if fits else Reason("shape", "unsupported", "off the grid")


def test_weights_of_512_columns_are_tried_where_fewer_are_refused() -> None:
    with rlk.registered(multiplying("on_deep_tiles")), (subject := Subject("tiled", "qmatmul")).chosen():
        case = fitted(subject, Product("int4_g128", 3, 20, 300, 5, dtype="bfloat16"))
    assert (case.M, case.N, case.K) == (3, 128, 512)


def test_a_clause_of_which_the_check_refuses_every_case_is_not_claimed() -> None:
    """Tokens as they are, where a product quantizes them; the features say only which formats there are."""
    with rlk.registered(multiplying("no_calls")), (subject := Subject("tiled", "qmatmul")).chosen():
        (attack,) = [a for a in attacks_on("qmatmul") if a.clause.id == "QM-04"]
        outcome = carry_out(subject, attack, Profile("few", 10, 60))
    assert (outcome.status, outcome.executed) == ("not_claimed", 0), outcome.message
    assert "refused at selection" in outcome.message
    assert "never" in outcome.message


@pytest.mark.parametrize("clause", ["QM-03", "QM-11", "QM-91", "QM-92", "QM-94"])
def test_a_backend_that_wants_tiles_is_attacked_on_its_grid(clause) -> None:
    MULTIPLIED.clear()
    with rlk.registered(TILED), (subject := Subject("tiled", "qmatmul")).chosen():
        [attack] = [a for a in attacks_on("qmatmul") if a.clause.id == clause]
        outcome = carry_out(subject, attack, Profile("few", 6, 60, thorough=False))
    assert (outcome.status, outcome.message) == ("held", "")
    assert outcome.executed > 0
    assert MULTIPLIED


def test_a_weight_that_is_refused_even_so_is_no_case() -> None:
    with rlk.registered(TILED), (subject := Subject("tiled", "qmatmul")).chosen():
        w = quantize(torch.ones(16, 256), QuantSpec.named("int4_g128"))
        with pytest.raises(UnsatisfiedAssumption):
            subject(torch.ones(18, 256).bfloat16(), w)


@pytest.mark.parametrize(("value", "wrong"), [(65519.0, True), (65520.0, False), (-66005.0, True)])
def test_what_lies_beyond_a_dtype_may_be_infinite_and_nothing_else(value, wrong) -> None:
    subject = Subject("torch", "qmatmul")
    with pytest.raises(Violation) if wrong else nullcontext():
        within(subject, "y", torch.tensor([torch.inf], dtype=torch.float16), [value], [0.5])


def test_infinities_are_themselves_beside_zeros() -> None:
    found = torch.tensor([0.0, -torch.inf])
    with pytest.raises(Violation, match="expected inf"):
        within(Subject("torch", "qmatmul"), "y", found, [torch.inf, -torch.inf], [0.0, 0.0])


def test_a_weight_that_is_taken_with_many_tokens_gets_them() -> None:
    with rlk.registered(TILED), (subject := Subject("tiled", "qmatmul")).chosen():
        found = fitted(subject, Product("int4_g32", M=2, N=10, K=70, seed=0, dtype="bfloat16"))
    assert found == Product("int4_g32", M=66, N=128, K=256, seed=0, dtype="bfloat16")


LARGE_PAGES = Backend(
    name="large-pages",
    api=API_VERSION,
    impls=(
        Impl(
            op="attention@1",
            target="tests.test_conformance_subject:attention",
            requires=Requires(device="cpu", dtypes=("float32",)),
            supports=frozenset({"paged"}),
            check="tests.test_conformance_subject:in_whole_tiles",
        ),
    ),
)


def attention(call):
    """Page N - 1 in place of every page that is none."""
    table = call.page_table
    return attended(call if table is None else replace(call, page_table=table.clamp(0, call.k.shape[0] - 1)))


def in_whole_tiles(call):
    small = call.page_table is not None and call.k.shape[1] % 128
    return Reason("shape", "unsupported", "pages of a part of a tile") if small else None


@pytest.mark.parametrize(("clause", "status"), [("AT-06", "held"), ("AT-07", "violated")])
def test_pages_of_whole_tiles_are_tried_where_smaller_ones_are_refused(clause, status) -> None:
    with rlk.registered(LARGE_PAGES), (subject := Subject("large-pages", "attention")).chosen():
        (attack,) = [a for a in attacks_on("attention") if a.clause.id == clause]
        outcome = carry_out(subject, attack, Profile("few", 3, 60))
    assert (outcome.status, outcome.executed > 0) == (status, True), outcome.message
