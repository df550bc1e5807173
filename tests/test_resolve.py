"""The choice as a pure function: order, permission, reasons, ties and fallbacks over random manifests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel.coverage import matches
from rlkernel.discover import FIRST_PARTY, Candidate
from rlkernel.resolve import Facts, resolve
from rlkernel_core.decision import AUTO, PLAIN_TORCH, Call, OpPolicy, Pin
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.reasons import CODES, Reason
from rlkernel_core.spec import OPERATORS

OP = OPERATORS["logprob"].id
FEATURES = ("grad", "entropy", "mask", "batch_invariant")
DEVICES = ("cpu", "cuda")
DTYPES = ("bfloat16", "float32")
ARCHS = ("sm80", "sm90", "gfx942")
THIRD = ("acme", "zeta")
STORAGE = OPERATORS["rollout_buffer"].id  # which no backend of ours has kernels for


def candidate(name: str, *impls: Impl, dist: str | None = None, reason: Reason | None = None) -> Candidate:
    home = dist or (FIRST_PARTY[name][0] if name in FIRST_PARTY else f"rlkernel-{name}")
    manifest = None if reason else Backend(name=name, api=API_VERSION, impls=impls)
    return Candidate(name, home, "1.0", manifest, reason)


def impl(device: str = "cpu", supports: tuple[str, ...] = (), op: str = OP, **requires: tuple[str, ...]) -> Impl:
    return Impl(op=op, target="pkg.mod:fn", requires=Requires(device=device, **requires), supports=frozenset(supports))


def by_name(*found: Candidate) -> dict[str, Candidate]:
    return {c.name: c for c in found}


impls = st.builds(
    impl,
    device=st.sampled_from([*DEVICES, "*"]),
    supports=st.sets(st.sampled_from(FEATURES)).map(tuple),
    op=st.sampled_from([OP, OP, OP, "sample@1", "logprob@2"]),
    dtypes=st.sets(st.sampled_from(DTYPES)).map(tuple),
    arch=st.sampled_from([(), ("sm90",), ("sm80+",), ("gfx9*",)]),
    packages=st.sampled_from([(), ("present>=1",), ("present>=9",), ("absent",)]),
)
broken = st.sampled_from(
    [Reason("load", "import-error", "raised"), Reason("api", "too-new", "9.9"), Reason("load", "invalid-manifest", "x")]
)
names = st.sampled_from([*FIRST_PARTY, *THIRD])


@st.composite
def machines(draw: st.DrawFn) -> dict[str, Candidate]:
    found = {}
    for name in draw(st.sets(names)):
        reason = draw(st.none() | st.none() | broken)
        found[name] = candidate(name, *draw(st.lists(impls, max_size=3)), reason=reason)
    return found


calls = st.builds(
    Call,
    op=st.just(OP),
    device=st.sampled_from(DEVICES),
    dtype=st.none() | st.sampled_from(DTYPES),
    grad=st.booleans(),
    features=st.frozensets(st.sampled_from(FEATURES[1:]), max_size=2),
    arch=st.none() | st.sampled_from(ARCHS),
)
orders = st.lists(st.sampled_from([AUTO, *FIRST_PARTY, *THIRD]), min_size=1, max_size=4, unique=True).map(tuple)
policies = st.builds(OpPolicy, order=orders, fallback=st.sampled_from(["warn", "error"]))
# As above, and for fallbacks: an operator without kernels, and GPUs that none were made for.
any_impls = st.builds(
    impl,
    device=st.sampled_from([*DEVICES, "*"]),
    op=st.sampled_from([OP, OP, STORAGE, "logprob@2"]),
    dtypes=st.sets(st.sampled_from(DTYPES)).map(tuple),
    arch=st.sampled_from([(), ("sm90",), ("sm80+",), ("gfx9*",)]),
)
any_calls = st.builds(
    Call,
    op=st.sampled_from([OP, STORAGE]),
    device=st.sampled_from(DEVICES),
    dtype=st.none() | st.sampled_from(DTYPES),
    arch=st.none() | st.sampled_from([*ARCHS, "sm75", "gfx803"]),
)


@st.composite
def gpus(draw: st.DrawFn) -> dict[str, Candidate]:
    """Machines where plain torch takes every call."""
    found = {PLAIN_TORCH: candidate(PLAIN_TORCH, *(impl("*", op=op) for op in (OP, STORAGE)))}
    for name in draw(st.sets(names)) - {PLAIN_TORCH}:
        reason = draw(st.none() | st.none() | broken)
        found[name] = candidate(name, *draw(st.lists(any_impls, max_size=3)), reason=reason)
    return found


FACTS = Facts(packages={"present": "2.0"})
modest = settings(max_examples=200, deadline=None, derandomize=True)


@modest
@given(machines(), calls, policies)
def test_resolution_is_deterministic_and_does_not_depend_on_listing_order(machine, call, policy) -> None:
    shuffled = dict(reversed(machine.items()))
    assert resolve(shuffled, FACTS, call, policy) == resolve(machine, FACTS, call, policy)


@modest
@given(machines(), calls, policies)
def test_nothing_outside_the_order_is_chosen(machine, call, policy) -> None:
    chosen = resolve(machine, FACTS, call, policy).backend
    permitted = {*policy.order, *(FIRST_PARTY if AUTO in policy.order else ())}
    assert chosen is None or chosen in permitted


@modest
@given(machines(), calls, policies)
def test_every_candidate_is_chosen_or_has_a_reason(machine, call, policy) -> None:
    decision = resolve(machine, FACTS, call, policy)
    accounted = {r.backend for r in decision.rejected} | {decision.backend} | set(decision.ambiguous)
    assert set(machine) - accounted == set()
    assert all(r.reason.slug in CODES for r in decision.rejected)


@modest
@given(machines(), calls, policies, st.lists(impls, max_size=2))
def test_installing_a_third_party_that_is_not_named_changes_nothing(machine, call, policy, extra) -> None:
    policy = OpPolicy(tuple(n for n in policy.order if n not in THIRD) or (AUTO,), policy.fallback)
    machine = {n: c for n, c in machine.items() if n not in THIRD}
    before = resolve(machine, FACTS, call, policy)
    after = resolve({**machine, "acme": candidate("acme", *extra)}, FACTS, call, policy)
    assert (after.backend, after.target, after.fell_back_from, after.ambiguous) == (
        before.backend,
        before.target,
        before.fell_back_from,
        before.ambiguous,
    )
    assert [r for r in after.rejected if r.backend != "acme"] == list(before.rejected)


@modest
@given(machines(), calls, policies)
def test_what_is_chosen_claims_all_that_the_call_needs(machine, call, policy) -> None:
    decision = resolve(machine, FACTS, call, policy)
    if decision.backend is None:
        return
    chosen = [
        i
        for i in machine[decision.backend].manifest.of(call.op)
        if call.features <= i.supports
        and (not call.grad or "grad" in i.supports)
        and i.requires.device in {"*", call.device}
        and (call.dtype is None or not i.requires.dtypes or call.dtype in i.requires.dtypes)
        and i.requires.packages in {(), ("present>=1",)}
    ]
    assert chosen != []


@modest
@given(machines(), calls)
def test_naming_one_backend_never_runs_another(machine, call) -> None:
    for name in machine:
        assert resolve(machine, FACTS, call, OpPolicy((name,))).backend in {None, name}


def kernels_exist(machine: dict[str, Candidate], call: Call) -> bool:
    """Whether a backend of ours, installed or not, has kernels of the call's operator for its hardware."""
    known = any(ours.has_kernels(call.op, call.device, call.arch) for ours in FIRST_PARTY.values())
    claimed = [
        i.requires
        for name, found in machine.items()
        if name in FIRST_PARTY and name != PLAIN_TORCH and found.manifest is not None
        for i in found.manifest.impls
        if i.op.partition("@")[0] == call.op.partition("@")[0] and i.requires.device in {"*", call.device}
    ]
    return known or any(not need.arch or call.arch is None or matches(need.arch, call.arch) for need in claimed)


@modest
@given(machines() | gpus(), any_calls | calls)
def test_a_kernel_backend_of_ours_that_auto_chooses_is_no_fallback(machine, call) -> None:
    decision = resolve(machine, FACTS, call, OpPolicy())
    assert decision.backend in {None, PLAIN_TORCH} or decision.fell_back_from is None


@modest
@given(gpus(), any_calls)
def test_plain_torch_under_auto_is_a_fallback_where_an_accelerator_has_kernels_and_nowhere_else(machine, call) -> None:
    decision = resolve(machine, FACTS, call, OpPolicy())
    expected = decision.backend == PLAIN_TORCH and call.device != "cpu" and kernels_exist(machine, call)
    assert (decision.fell_back_from is not None) is expected


@modest
@given(gpus(), any_calls, orders)
def test_plain_torch_that_the_order_puts_before_auto_is_the_choice(machine, call, order) -> None:
    asked = OpPolicy((PLAIN_TORCH, *(name for name in order if name != PLAIN_TORCH)))
    decision = resolve(machine, FACTS, call, asked)
    assert (decision.backend, decision.fell_back_from) == (PLAIN_TORCH, None)


@modest
@given(machines() | gpus(), any_calls | calls, policies)
def test_a_fallback_has_the_reason_of_what_it_passed_over(machine, call, policy) -> None:
    decision = resolve(machine, FACTS, call, policy)
    if decision.fell_back_from is not None:
        assert decision.fell_back_from != decision.backend
        assert decision.fell_back_from in {r.backend for r in decision.rejected}


@modest
@given(machines() | gpus(), any_calls | calls, policies)
def test_without_auto_only_what_the_order_names_is_fallen_back_from(machine, call, policy) -> None:
    named = tuple(name for name in policy.order if name != AUTO) or ("acme",)
    assert resolve(machine, FACTS, call, OpPolicy(named)).fell_back_from in {None, *named}


@modest
@given(machines() | gpus(), any_calls | calls, policies)
def test_what_comes_after_the_choice_makes_no_fallback_of_it(machine, call, policy) -> None:
    named = tuple(name for name in policy.order if name != AUTO) or ("acme",)
    chosen = resolve(machine, FACTS, call, OpPolicy(named))
    if chosen.backend is not None:
        longer = OpPolicy((*named[: named.index(chosen.backend) + 1], AUTO, "zeta"))
        if chosen.backend != "zeta":
            assert resolve(machine, FACTS, call, longer).fell_back_from == chosen.fell_back_from


def test_an_impostor_of_a_first_party_name_is_not_part_of_auto() -> None:
    machine = by_name(candidate("cuda", impl("cpu"), dist="evil-cuda"), candidate("torch", impl("*")))
    decision = resolve(machine, FACTS, Call(OP, "cpu"), OpPolicy())
    assert (decision.backend, decision.rejected[0].reason.slug) == ("torch", "policy/third-party")


def test_a_backend_of_ours_that_auto_leaves_out_is_no_third_party() -> None:
    machine = by_name(candidate("flashinfer", impl("*"), dist="rlkernel-cuda"), candidate("torch", impl("*")))
    decision = resolve(machine, FACTS, Call(OP, "cpu"), OpPolicy())
    assert (decision.backend, decision.rejected[0].reason.slug) == ("torch", "policy/not-in-order")
    assert "'auto' leaves it out" in decision.rejected[0].reason.text


def test_tiers_are_vendor_then_portable_then_reference() -> None:
    machine = by_name(candidate("torch", impl("*")), candidate("triton", impl("cuda")), candidate("cuda", impl("cuda")))
    chosen = []
    while machine:
        name = resolve(machine, FACTS, Call(OP, "cuda"), OpPolicy()).backend
        chosen.append(name)
        del machine[name]
    assert chosen == ["cuda", "triton", "torch"]


def test_two_backends_of_one_tier_that_qualify_are_a_tie() -> None:
    machine = by_name(candidate("cuda", impl("cuda")), candidate("jetson", impl("cuda")))
    assert resolve(machine, FACTS, Call(OP, "cuda"), OpPolicy()).ambiguous == ("cuda", "jetson")


def test_naming_one_settles_a_tie() -> None:
    machine = by_name(candidate("cuda", impl("cuda")), candidate("jetson", impl("cuda")))
    decision = resolve(machine, FACTS, Call(OP, "cuda"), OpPolicy(("jetson", AUTO)))
    assert (decision.backend, decision.ambiguous, decision.fell_back_from) == ("jetson", (), None)


def test_plain_torch_in_place_of_installed_kernels_that_do_not_take_the_call_is_a_fallback() -> None:
    machine = by_name(candidate("cuda", impl("cuda", dtypes=("bfloat16",))), candidate("torch", impl("*")))
    decision = resolve(machine, FACTS, Call(OP, "cuda", "float32"), OpPolicy())
    assert (decision.backend, decision.fell_back_from) == ("torch", "cuda")


def test_another_kernel_of_ours_is_the_choice_where_the_order_does_not_name_the_first() -> None:
    machine = by_name(
        candidate("cuda", impl("cuda", dtypes=("bfloat16",))), candidate("triton", impl("cuda")), REFERENCE
    )
    call = Call(OP, "cuda", "float32")
    found = [resolve(machine, FACTS, call, OpPolicy(order, "error")) for order in [(AUTO,), ("cuda", AUTO)]]
    assert [(d.backend, d.fell_back_from) for d in found] == [("triton", None), ("triton", "cuda")]


@pytest.mark.parametrize(
    ("triton", "facts", "said"),
    [
        (candidate("triton", reason=Reason("load", "import-error", "boom")), FACTS, "load/import-error"),
        (candidate("triton", reason=Reason("api", "too-old", "0.3")), FACTS, "api/too-old"),
        (candidate("triton", impl("cuda", op="logprob@2")), FACTS, "operator/other-version"),
        (candidate("triton", impl("cuda", op="sample@1")), FACTS, "operator/absent"),
        (candidate("triton", impl("cuda", packages=("absent",))), FACTS, "environment/missing-package"),
        (candidate("triton", impl("cuda", dtypes=("bfloat16",))), FACTS, "dtype/unsupported"),
        (
            candidate("triton", impl("cuda")),
            Facts(failed_probes={"triton": Reason("probe", "failed", "boom")}),
            "probe/failed",
        ),
        (
            candidate("triton", impl("cuda")),
            Facts(broken_targets={"pkg.mod:fn": Reason("load", "target-missing", "x")}),
            "load/target-missing",
        ),
        (
            candidate("triton", impl("cuda")),
            Facts(locked={OP: frozenset({Pin("ref:fn", "rlkernel 1.0")})}),
            "policy/locked",
        ),
    ],
)
def test_whatever_keeps_installed_kernels_from_an_accelerator_is_the_reason_of_a_fallback(triton, facts, said) -> None:
    reference = candidate("torch", Impl(op=OP, target="ref:fn", requires=Requires(device="*")))
    decision = resolve(by_name(triton, reference), facts, Call(OP, "cuda", "float32", arch="sm80"), OpPolicy())
    assert (decision.backend, decision.fell_back_from) == ("torch", "triton")
    assert [r.reason.slug for r in decision.rejected if r.backend == "triton"] == [said]


def test_kernels_that_this_installation_is_too_old_for_are_a_fallback_with_the_line_that_updates_it() -> None:
    machine = by_name(candidate("triton", impl("cuda", op="sample@1")), REFERENCE)
    (absent,) = resolve(machine, FACTS, Call(OP, "cuda", arch="sm80"), OpPolicy()).rejected
    assert (absent.reason.slug, absent.reason.fix) == ("operator/absent", "pip install -U rlkernel-triton")


def test_installed_kernels_are_fallen_back_from_before_those_that_are_not_installed() -> None:
    machine = by_name(candidate("triton", impl("cuda", op="sample@1", dtypes=("bfloat16",))), REFERENCE_SAMPLE)
    decision = resolve(machine, FACTS, Call("sample@1", "cuda", "float64", arch="sm90"), OpPolicy())
    assert [(r.backend, r.reason.slug) for r in decision.rejected] == [
        ("cuda", "load/not-installed"),
        ("triton", "dtype/unsupported"),
    ]
    assert decision.fell_back_from == "triton"


def test_an_operator_without_kernels_runs_in_plain_torch_by_choice() -> None:
    machine = by_name(
        candidate("triton", impl("cuda")), candidate("torch", impl("*"), impl("*", op="rollout_buffer@1"))
    )
    decision = resolve(machine, FACTS, Call("rollout_buffer@1", "cuda", arch="sm90"), OpPolicy(fallback="error"))
    assert (decision.backend, decision.fell_back_from) == ("torch", None)


def test_a_kernel_that_the_order_names_after_auto_does_not_make_plain_torch_the_choice() -> None:
    machine = by_name(candidate("triton", impl("cuda")), REFERENCE)
    decision = resolve(machine, FACTS, Call(OP, "cuda", arch="sm80"), OpPolicy((AUTO, "triton")))
    assert (decision.backend, decision.fell_back_from) == ("torch", "triton")
    assert [r.reason.slug for r in decision.rejected] == ["policy/outranked"]


def test_a_named_backend_of_another_version_of_the_operator_is_passed_over() -> None:
    machine = by_name(candidate("acme", impl(op="logprob@2")), REFERENCE)
    decision = resolve(machine, FACTS, Call(OP, "cpu"), OpPolicy(("acme", AUTO)))
    assert (decision.backend, decision.fell_back_from) == ("torch", "acme")


def test_passing_over_a_backend_for_another_device_or_operator_is_no_fallback() -> None:
    machine = by_name(
        candidate("cuda", impl("cuda")),
        candidate("triton", impl("cpu", op="sample@1")),
        candidate("torch", impl("*")),
    )
    decision = resolve(machine, FACTS, Call(OP, "cpu"), OpPolicy())
    assert (decision.backend, decision.fell_back_from) == ("torch", None)


REFERENCE = candidate("torch", impl("*"))
REFERENCE_SAMPLE = candidate("torch", impl("*", op="sample@1"))
ROCM = candidate("rocm", impl("cuda", arch=("gfx9*",)), impl("cuda", dtypes=("bfloat16",), arch=("gfx11*",)))


@pytest.mark.parametrize(
    ("arch", "order", "passed_over"),
    [
        ("sm90", (AUTO,), None),  # made for other hardware
        ("sm90", ("rocm", AUTO), "rocm"),  # but wanted on this one
        ("gfx803", (AUTO,), None),  # an AMD GPU that it does not know
        ("gfx1100", (AUTO,), None),  # it knows this one and does not take the call; another kernel of ours does
        ("gfx1100", ("rocm", AUTO), "rocm"),
    ],
)
def test_a_backend_that_gives_way_to_another_kernel_is_passed_over_only_where_it_is_named(
    arch, order, passed_over
) -> None:
    machine = by_name(ROCM, candidate("triton", impl("cuda")))
    decision = resolve(machine, FACTS, Call(OP, "cuda", "float32", arch=arch), OpPolicy(order))
    assert (decision.backend, decision.fell_back_from) == ("triton", passed_over)


def test_what_is_made_for_hopper_is_not_passed_over_on_another_gpu() -> None:
    machine = by_name(candidate("cuda", impl("cuda", arch=("sm90",))), candidate("triton", impl("cuda")))
    decision = resolve(machine, FACTS, Call(OP, "cuda", arch="sm80"), OpPolicy(fallback="error"))
    assert (decision.backend, decision.fell_back_from) == ("triton", None)


def test_a_named_backend_that_does_not_load_is_fallen_back_from() -> None:
    machine = by_name(candidate("acme", reason=Reason("load", "import-error", "boom")), candidate("torch", impl("*")))
    decision = resolve(machine, FACTS, Call(OP, "cpu"), OpPolicy(("acme", AUTO)))
    assert (decision.backend, decision.fell_back_from) == ("torch", "acme")


def test_a_named_backend_that_is_not_installed_has_a_reason_with_the_pip_line() -> None:
    decision = resolve(by_name(candidate("torch", impl("*"))), FACTS, Call(OP, "cuda"), OpPolicy(("cuda", AUTO)))
    first = decision.rejected[0]
    assert (first.backend, first.reason.slug, first.reason.fix) == (
        "cuda",
        "load/not-installed",
        "pip install 'rlkernel[cuda]'",
    )


def slug_of(machine: dict[str, Candidate], call: Call, policy: OpPolicy | None = None, facts: Facts = FACTS) -> str:
    return resolve(machine, facts, call, policy or OpPolicy(("acme",))).rejected[0].reason.slug


def test_each_stage_refuses_with_its_own_code() -> None:
    cpu = Call(OP, "cpu", "float32", arch="sm90")
    table = {
        "operator/absent": impl(op="sample@1"),
        "operator/other-version": impl(op="logprob@2"),
        "device/not-claimed": impl("cuda"),
        "environment/missing-package": impl(packages=("absent",)),
        "environment/package-version": impl(packages=("present>=9",)),
        "arch/unsupported": impl(arch=("gfx942",)),
        "arch/excluded": impl(arch=("sm80+",), arch_excluded=("sm90",)),
        "dtype/unsupported": impl(dtypes=("bfloat16",)),
    }
    assert {code: slug_of(by_name(candidate("acme", i)), cpu) for code, i in table.items()} == {c: c for c in table}


def test_features_and_gradients_are_refused_when_not_claimed() -> None:
    machine = by_name(candidate("acme", impl()))
    assert slug_of(machine, Call(OP, "cpu", features=frozenset({"entropy"}))) == "features/missing"
    assert slug_of(machine, Call(OP, "cpu", grad=True)) == "grad/unsupported"


def test_a_feature_that_the_policy_needs_is_refused_when_not_claimed() -> None:
    policy = OpPolicy(("acme",), need=frozenset({"batch_invariant"}))
    assert slug_of(by_name(candidate("acme", impl())), Call(OP, "cpu"), policy) == "features/missing"


def test_a_lock_refuses_what_it_does_not_pin() -> None:
    facts = Facts(locked={OP: frozenset({Pin("pkg.mod:fn", "rlkernel-acme 2.0")})})
    assert slug_of(by_name(candidate("acme", impl())), Call(OP, "cpu"), facts=facts) == "policy/locked"
    pinned = Facts(locked={OP: frozenset({Pin("pkg.mod:fn", "rlkernel-acme 1.0")})})
    assert resolve(by_name(candidate("acme", impl())), pinned, Call(OP, "cpu"), OpPolicy(("acme",))).backend == "acme"


def test_running_what_the_lock_pins_is_no_fallback() -> None:
    machine = by_name(candidate("cuda", impl("cuda")), candidate("triton", impl("cuda")))
    facts = Facts(locked={OP: frozenset({Pin("pkg.mod:fn", "rlkernel-triton 1.0")})})
    decision = resolve(machine, facts, Call(OP, "cuda"), OpPolicy(fallback="error"))
    assert (decision.backend, decision.fell_back_from) == ("triton", None)
    assert [r.reason.slug for r in decision.rejected if r.backend == "cuda"] == ["policy/locked"]


def test_an_installed_version_that_is_none_does_where_any_does() -> None:
    facts, call = Facts(packages={"odd": "unknown"}), Call(OP, "cpu")
    assert slug_of(by_name(candidate("acme", impl(packages=("odd>=1",)))), call, facts=facts) == (
        "environment/package-version"
    )
    machine = by_name(candidate("acme", impl(packages=("odd",))))
    assert resolve(machine, facts, call, OpPolicy(("acme",))).backend == "acme"


def test_a_name_that_stands_twice_keeps_its_first_place() -> None:
    machine = by_name(candidate("acme", impl()), candidate("torch", impl("*")))
    once = resolve(machine, FACTS, Call(OP, "cpu"), OpPolicy(("torch", AUTO, "acme")))
    twice = resolve(machine, FACTS, Call(OP, "cpu"), OpPolicy(("torch", AUTO, "torch", "acme", AUTO)))
    assert (once.backend, once.rejected) == (twice.backend, twice.rejected)


def test_a_failed_self_test_refuses_the_backend() -> None:
    facts = Facts(failed_probes={"acme": Reason("probe", "crashed", "status -11")})
    assert slug_of(by_name(candidate("acme", impl())), Call(OP, "cpu"), facts=facts) == "probe/crashed"


def test_an_unknown_architecture_is_refused_by_nobody() -> None:
    machine = by_name(candidate("acme", impl(arch=("sm90",))))
    assert resolve(machine, FACTS, Call(OP, "cpu"), OpPolicy(("acme",))).backend == "acme"


def test_a_later_backend_that_would_do_is_outranked() -> None:
    machine = by_name(candidate("acme", impl()), candidate("zeta", impl()))
    decision = resolve(machine, FACTS, Call(OP, "cpu"), OpPolicy(("acme", "zeta")))
    assert [(r.backend, r.reason.slug) for r in decision.rejected] == [("zeta", "policy/outranked")]


def test_the_second_implementation_of_a_backend_takes_what_the_first_refuses() -> None:
    machine = by_name(candidate("acme", impl(dtypes=("bfloat16",)), impl(dtypes=("float32",))))
    decision = resolve(machine, FACTS, Call(OP, "cpu", "float32"), OpPolicy(("acme",)))
    assert (decision.backend, decision.fell_back_from) == ("acme", None)


def test_the_hash_names_what_runs_and_not_what_was_refused() -> None:
    one = resolve(by_name(candidate("acme", impl())), FACTS, Call(OP, "cpu"), OpPolicy(("acme",)))
    two = resolve(
        by_name(candidate("acme", impl()), candidate("zeta")), FACTS, Call(OP, "cpu"), OpPolicy(("acme", "zeta"))
    )
    assert one.hash == two.hash
