"""Tolerances are data: one table, made from the specs alone, whose version changes with any of its numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlkernel_conformance import tolerances
from rlkernel_core.errors import UnknownNameError
from rlkernel_core.spec import OPERATORS


def test_the_table_holds_every_tolerance_with_its_source() -> None:
    rows = tolerances.table()
    stated = {
        (spec.id, t.output, t.dtype, t.atol, t.rtol, t.source) for spec in OPERATORS.values() for t in spec.tolerances
    }
    assert {tuple(r[c] for c in ("operator", "output", "dtype", "atol", "rtol", "source")) for r in rows} == stated
    assert all(r["source"] and r["judgment"] for r in rows)


def test_no_row_stands_twice() -> None:
    keys = [tuple(r[c] for c in ("operator", "output", "dtype", "judgment")) for r in tolerances.table()]
    assert len(keys) == len(set(keys))


def test_a_quantized_product_is_judged_on_two_levels() -> None:
    rows = tolerances.table(("qmatmul",))
    assert {r["judgment"] for r in rows if (r["output"], r["dtype"]) == ("y", "bfloat16")} == {
        "against the dequantized weight",
        "against the full weight, plus sum |x| error_bound(w)",
    }


def test_the_version_changes_with_a_number_and_with_nothing_else(monkeypatch) -> None:
    before, other = tolerances.version(("whiten",)), tolerances.version(("logprob",))
    rows = OPERATORS["whiten"].tolerances
    looser = (replace(rows[0], atol=rows[0].atol * 2), *rows[1:])
    monkeypatch.setitem(OPERATORS["whiten"].__dict__, "tolerances", looser)
    assert tolerances.version(("whiten",)) != before
    assert tolerances.version(("logprob",)) == other


def test_the_table_is_printed(cli) -> None:
    said = cli("conformance", "tolerances", "--op", "whiten").stdout
    assert f"version {tolerances.version(('whiten',))}" in said
    assert "two pairwise sums and a division" in said
    told = json.loads(cli("conformance", "tolerances", "--op", "whiten", "--json").stdout)
    assert told == {"version": tolerances.version(("whiten",)), "tolerances": tolerances.table(("whiten",))}


def test_an_unknown_operator_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'whiten'"):
        tolerances.table(("whitn",))
