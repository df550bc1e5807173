"""`sums` in manifests and `need = ["exact"]`: who promises equal bits, where it shows, and who is passed over."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

import rlkernel as rlk
from rlkernel import lock, policy, record
from rlkernel.discover import Candidate
from rlkernel.resolve import Facts, resolve
from rlkernel.survey import Situation, survey
from rlkernel_core.decision import EXACT, Call, Decision, OpPolicy, Pin
from rlkernel_core.errors import LockError
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.reasons import Reason
from rlkernel_core.spec import OPERATORS
from tests.implementations import acme

pytestmark = pytest.mark.usefixtures("fresh")

LOGITS, IDS = torch.zeros(2, 3), torch.tensor([0, 1])
CALL = Call("logprob@1", "cpu")


def adding(sums: str | None, supports: frozenset[str] = frozenset({"batch_invariant"})) -> Backend:
    """The backend acme, whose logprob adds in an order of this name."""
    [impl] = acme(supports=supports).impls
    return Backend(name="acme", api=API_VERSION, impls=(Impl(**{**impl.model_dump(), "sums": sums}),))


def decided(manifest: Backend, unproved: Reason | None = None, call: Call = CALL, **facts: object) -> Decision:
    """The decision about a call under `need = ["exact"]`, with reports that say this."""
    found = {"acme": Candidate("acme", "rlkernel-acme", "1.0", manifest)}
    with rlk.use(need=EXACT):
        rules, _ = policy.policy_for(policy.current(), OPERATORS["logprob"])
    return resolve(found, Facts(unproved=lambda *_: unproved, **facts), call, replace(rules, order=("acme",)))


OLDER = Reason("evidence", "older", "of other sources", "rlkernel conformance run acme")


@pytest.mark.parametrize(
    ("manifest", "unproved", "expected"),
    [
        (adding("tree/f32"), None, None),
        (adding(None), None, "features/no-sums"),
        (adding("tree/f32", frozenset()), None, "features/missing"),
        (adding("tree/f32"), OLDER, "evidence/older"),
    ],
)
def test_exact_runs_what_names_its_sums_is_batch_invariant_and_proved(manifest, unproved, expected) -> None:
    decision = decided(manifest, unproved)
    assert [r.reason.slug for r in decision.rejected] == ([expected] if expected else [])
    assert decision.sums == (None if expected else "tree/f32")


@pytest.mark.parametrize(("op", "refused"), [("logprob@1", True), ("linear@1", False)])
def test_exact_log_probabilities_over_ranks_want_bits_that_no_number_of_ranks_changes(op, refused) -> None:
    claimed = frozenset({"batch_invariant", "group"})
    split = Call(op, "cpu", features=frozenset({"group"}))
    (impl,) = adding("tree/f32", claimed).impls
    given = {**impl.model_dump(), "op": op, "sums": "tree/f32"}
    for supports, expected in ((claimed, refused), (claimed | {"rank_invariant"}, False)):
        one = Backend(name="acme", api=API_VERSION, impls=(Impl(**{**given, "supports": supports}),))
        assert [r.reason.slug for r in decided(one, call=split).rejected] == (["features/missing"] if expected else [])


def test_exact_needs_batch_invariance_only_of_operators_that_have_it() -> None:
    with rlk.use(need=EXACT):
        needs = {op: policy.policy_for(policy.current(), OPERATORS[op])[0].need for op in ("logprob", "whiten")}
    assert needs == {"logprob": {"batch_invariant", "exact"}, "whiten": {"exact"}}


def test_exact_without_a_folder_of_reports_names_the_key() -> None:
    with rlk.registered(adding("tree/f32")), rlk.use("acme", need=EXACT):
        [rejected] = [r for r in rlk.explain("logprob").decision.rejected if r.backend == "acme"]
    assert (rejected.reason.slug, rejected.reason.fix.partition(" = ")[0]) == ("evidence/none", "reports")


@pytest.mark.parametrize("sums", ["", "Tree", "tree//f32", "/f32", "tree f32"])
def test_a_name_of_sums_that_is_malformed_is_refused(sums) -> None:
    with pytest.raises(ValidationError, match="should look like"):
        Impl(op="logprob@1", target="a:b", requires=Requires(device="cpu"), sums=sums)


def test_sums_are_part_of_a_decisions_hash_and_their_absence_changes_no_hash() -> None:
    plain = Decision(CALL, OpPolicy(), "acme", "a:b", "acme 1", ())
    assert plain.hash == "a906385bf5f1"
    assert len({plain.hash, *(replace(plain, sums=s).hash for s in ("tree/f32", "rows/f32"))}) == 3


def test_explain_status_and_a_record_of_a_run_tell_the_sums(tmp_path) -> None:
    with rlk.registered(adding("tree/f32")), rlk.use("acme"):
        rlk.logprob(LOGITS, IDS)
        explained = rlk.explain("logprob")
        [ran] = rlk.status()
        record.write(tmp_path)
    assert "tests.implementations:ones sums=tree/f32  [" in str(explained)
    assert explained.decision.as_dict()["sums"] == "tree/f32"
    assert "tests.implementations:ones sums=tree/f32 [" in str(ran)
    assert record.read(tmp_path)[1][0].decision == ran.decision


def test_a_lock_pins_the_sums(tmp_path) -> None:
    path = tmp_path / "rlkernel.lock"
    with rlk.registered(adding("tree/f32")), rlk.use("acme"):
        rlk.logprob(LOGITS, IDS)
        [ran] = rlk.status()
    lock.write(path, [ran.decision])
    pin = Pin("tests.implementations:ones", str(ran.decision.version), "tree/f32")
    assert lock.read(str(path)) == {"logprob@1": {pin}}
    with rlk.registered(adding("rows/f32")), rlk.use("acme", lock=str(path)):
        with pytest.raises(LockError, match=r"pins .* sums=tree/f32; this is .* sums=rows/f32"):
            rlk.logprob(LOGITS, IDS)


def pinned_by_command(path: Path) -> Pin:
    """The pin of acme's logprob in the lock that `rlkernel lock` writes."""
    decisions = survey(Situation("cpu", None, "float32", frozenset()), ops=["logprob"], locked=False)
    lock.write(path, decisions)
    ((pin,),) = lock.read(str(path)).values()
    return pin


def test_a_lock_of_the_command_pins_sources_and_versions_of_what_names_its_sums(tmp_path) -> None:
    with rlk.registered(adding("tree/f32")), rlk.use("acme"):
        pin = pinned_by_command(tmp_path / "rlkernel.lock")
        with rlk.use(lock=str(tmp_path / "rlkernel.lock")):
            rlk.logprob(LOGITS, IDS)
    torch_version = torch.__version__.partition("+")[0]
    assert re.fullmatch(rf"sources [0-9a-f]{{16}}, torch {re.escape(torch_version)}", pin.made_of)


def test_other_sources_are_not_what_was_pinned(tmp_path) -> None:
    path = tmp_path / "rlkernel.lock"
    with rlk.registered(adding("tree/f32")), rlk.use("acme"):
        pin = pinned_by_command(path)
        path.write_text(path.read_text().replace(pin.made_of, "sources 0123456789abcdef, torch 2.9.0"))
        with rlk.use(lock=str(path)), pytest.raises(LockError, match=r"pins .*torch 2\.9\.0\); this is .*sources"):
            rlk.logprob(LOGITS, IDS)


def test_what_names_no_sums_is_pinned_by_name_and_version_alone(tmp_path) -> None:
    with rlk.registered(adding(None)), rlk.use("acme"):
        assert pinned_by_command(tmp_path / "rlkernel.lock").made_of == ""


@pytest.mark.parametrize(
    ("pin", "admitted"),
    [
        (Pin("a:b", "acme 1", "tree", "sources 1"), True),
        (Pin("a:b", "acme 1", "tree"), True),
        (Pin("a:b", "acme 1", "tree", "sources 2"), False),
        (Pin("a:b", "acme 1"), False),
    ],
)
def test_a_pin_without_sources_admits_any(pin, admitted) -> None:
    assert pin.admits(Pin("a:b", "acme 1", "tree", "sources 1")) is admitted


def test_a_decision_hash_tells_sources_apart() -> None:
    one, other = (decided(adding("tree/f32"), made_of=lambda *_, s=s: f"sources {s}") for s in "12")
    assert (one.hash != other.hash, one.made_of) == (True, "sources 1")
