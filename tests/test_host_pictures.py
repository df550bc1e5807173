"""Pictures of results that no suite wrote: each says what was found, in names that a reader knows."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from rlkernel_bench.plots import SERIES

ROOT = Path(__file__).parents[1]
SPEC = spec_from_file_location("host_pictures", ROOT / "tools" / "host_pictures.py")
host_pictures = module_from_spec(SPEC)
SPEC.loader.exec_module(host_pictures)


@pytest.mark.parametrize("path", host_pictures.PICTURES)
def test_a_picture_has_a_finding_named_sides_units_and_linear_values(path) -> None:
    figure = host_pictures.PICTURES[path]()
    figure.draw_without_rendering()
    said = [figure.get_suptitle()]
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_yscale() == "linear"
        assert len(axes.lines) <= SERIES + 1  # and the line of one
        said += [axes.get_title(), axes.get_ylabel(), *(t.get_text() for t in axes.get_yticklabels())]
    assert re.search(r"\d", said[0])
    assert not re.search(r"ours|stock|\d+x\d+", " ".join(said))


def test_a_title_is_computed_from_the_numbers() -> None:
    figure = host_pictures.products(
        {"rlkernel-cuda": {1: 4.0, 8: 2.0, 64: 0.9}, "Marlin": {1: 1.5, 64: 1.0}}, "Products"
    )
    assert figure.get_suptitle() == (
        "Products: rlkernel-cuda is up to 4.0 times as fast as cuBLAS on a bf16 weight;\n"
        "with more than 8 tokens nothing that was measured gains over a tenth"
    )


def test_the_committed_pictures_are_those_that_the_script_draws() -> None:
    assert [path for path in host_pictures.PICTURES if not (host_pictures.RESULTS / path).exists()] == []
