"""Certificates of the order of sums: what the command prints, what the table and a report hold."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from rlkernel_conformance.documents import markdown
from rlkernel_conformance.orders.calls import PROBES, numbers
from rlkernel_conformance.orders.certificates import Certificate, certificate, equal
from rlkernel_conformance.orders.shipped import shipped
from rlkernel_core.errors import ArgumentError, UnknownNameError

sys.path.insert(0, str(Path(__file__).parents[1] / "backends" / "triton" / "tools"))
ABOUT = {"backend": "triton", "arch": "sm90", "level": "bits", "dtype": "bfloat16"}
compiles = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@compiles
def test_the_command_says_which_sizes_and_architectures_add_alike(cli) -> None:
    words = ("--op", "logprob", "--arch", "sm90", "--size", "1x320,2x320")
    done = cli("conformance", "orders", "triton", *words, "--json")
    assert (done.exit_code, done.exception) == (0, None), done.output
    found = json.loads(done.stdout)
    assert [c["rows_alike"] for c in found["certificates"]] == [True, True]
    assert found["equal"] == [["logprob sm90 1x320", "logprob sm90 2x320"]]


@compiles
def test_a_split_of_a_row_into_parts_is_another_order() -> None:
    alone, parts = (certificate("logprob", size, level="order", dtype="float32") for size in ("1x300", "1x33000"))
    assert alone.hash
    assert alone.hash != parts.hash


@compiles
@pytest.mark.parametrize(("op", "size", "arch"), [("logprob", "8x2000", "sm90"), ("whiten", "4x300", "gfx942")])
def test_the_table_holds_what_is_derived_now(op, size, arch) -> None:
    import orders

    row = next(r for r in orders.stored() if (r["op"], r["size"], r["arch"]) == (op, size, arch))
    assert row == certificate(op, size, arch=arch, dtype=row["dtype"]).document(), f"run {orders.__file__}"


@compiles
def test_the_table_has_every_call_and_says_why_where_there_is_no_order() -> None:
    import orders

    rows = orders.stored()
    assert [orders.key(r) for r in rows] == [tuple(sorted(a.items())) for a in orders.asked()]
    assert [r for r in rows if not (r.get("hash") or r.get("why"))] == []


@pytest.mark.parametrize("op", ["logprob", "linear", "grouped_linear"])
def test_a_row_has_one_order_at_every_batch_size_of_the_table(op) -> None:
    rows = [r for r in shipped([f"rlkernel_triton.{op}.launch:prepare"], op) if "hash" in r]
    by_arch = {arch: {r["hash"] for r in rows if r["arch"] == arch} for arch in {r["arch"] for r in rows}}
    assert by_arch
    assert {arch: len(hashes) for arch, hashes in by_arch.items()} == dict.fromkeys(by_arch, 1)
    assert {r["rows_alike"] for r in rows} == {True}


def test_a_backend_without_a_table_ships_no_certificate() -> None:
    assert shipped(["rlkernel_torch.logprob:logprob"], "logprob") == []


def test_a_report_names_the_orders_that_its_backend_ships() -> None:
    from rlkernel_conformance.report import report
    from rlkernel_conformance.subject import Subject
    from tests.test_conformance_report import EFFORT, found

    content = report({Subject("torch", "logprob"): found()}, EFFORT)
    assert "orders" not in content["operators"]["logprob@1"]
    content["operators"]["logprob@1"]["orders"] = [{"hash": "0123456789ab", "arch": "sm90", "size": "1x300"}]
    assert "`0123456789ab` on sm90 at 1x300" in markdown(content)


def test_certificates_are_equal_by_their_hash_and_none_where_there_is_none() -> None:
    found = [Certificate(**ABOUT, op="logprob", size=s, hash=h) for s, h in (("1x2", "a"), ("2x2", "a"), ("3x2", ""))]
    assert {h: [c.size for c in same] for h, same in equal(found).items()} == {"a": ["1x2", "2x2"]}


@pytest.mark.parametrize("op", PROBES)
def test_the_sizes_of_an_operator_have_its_form(op) -> None:
    assert [len(numbers(op, size)) for size in PROBES[op].sizes] == [PROBES[op].form.count("x") + 1] * len(
        PROBES[op].sizes
    )


@pytest.mark.parametrize("size", ["8", "8x0", "8x-3", "8xV", "8x2x2"])
def test_a_size_of_another_form_is_refused(size) -> None:
    with pytest.raises(ArgumentError, match=r"size.*NxV"):
        certificate("logprob", size)


@pytest.mark.parametrize(
    ("more", "named"),
    [({"op": "sample"}, "sample"), ({"arch": "gfx1100"}, "gfx1100"), ({"backend": "cuda"}, "cuda"),
     ({"level": "digits"}, "digits"), ({"dtype": "float8"}, "float8")],
)  # fmt: skip
def test_what_has_no_certificates_is_named(more, named) -> None:
    with pytest.raises(UnknownNameError, match=named):
        certificate(**{"op": "logprob", "size": "1x300", **more})
