"""A few hundred damaged files of every format: each ends in a typed error or is read. `make fuzz` runs 20,000."""

from __future__ import annotations

import importlib.util

import pytest

from tests.fuzz.attack import attacked
from tests.fuzz.formats import FORMATS

CASES = 12  # of each format
NEEDS = {"bundle": "rlkernel_triton", "recordings": "rlkernel_triton", "gguf": "gguf", "gguf header": "gguf"}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_damaged_file_ends_in_a_typed_error_or_is_read(form) -> None:
    needed = NEEDS.get(form.name, "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not here")
    outcome = attacked(form.name, form.parts(), form.join, form.read, CASES, 0)
    assert {where: text for where, (text, _) in outcome.found.items()} == {}
    assert outcome.cases == outcome.typed + outcome.accepted >= CASES // 2


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_document_that_is_damaged_is_a_valid_one(form, tmp_path) -> None:
    needed = NEEDS.get(form.name, "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not here")
    for name, data in form.join(form.parts()).items():
        (tmp_path / name).write_bytes(data)
    form.read(tmp_path)


def test_what_is_no_typed_error_is_found(tmp_path) -> None:
    def slips(_: object) -> None:
        raise KeyError("slip")

    outcome = attacked("x", {"x": b"{}"}, lambda parts: parts, slips, 3, 0)
    assert (outcome.cases, outcome.typed, sum(outcome.broken.values())) == (3, 0, 3)
