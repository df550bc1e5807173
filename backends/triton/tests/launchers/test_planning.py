"""Host code plans for a GPU that is not here, and nothing that it planned so outlives the scope."""

import pytest
import torch

from rlkernel_core.errors import UnknownNameError
from rlkernel_core.spec.sample import SampleCall
from rlkernel_triton.affine_suffix_scan.recursion import warps
from rlkernel_triton.launchers import (
    Plan,
    Recorder,
    Scope,
    current,
    in_pieces_of,
    piece_of,
    planned_target,
    planning_for,
    using,
)
from rlkernel_triton.launchers.targets import TARGETS
from rlkernel_triton.quant.tile_config import machine
from rlkernel_triton.sample.launch import sample

META = torch.device("meta")


def drawn(target, rows=4):
    """The launches of a draw."""
    recorder = Recorder()
    with planning_for(target), using(recorder):
        sample(SampleCall(torch.empty(rows, 1000, device="meta"), top_k=20, seed=7, step=3))
    return [launch.build for launch in recorder.launches]


@pytest.mark.parametrize(("target", "expected"), [("sm_90", 4), ("gfx942", 2), ("gfx1100", 4)])
def test_warps_are_those_of_the_target(target, expected):
    with planning_for(target):
        assert warps(META) == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("sm_90", ("sm90", 132, True, False)),
        ("sm_87", ("jetson", 8, True, True)),
        ("gfx942", ("other", 304, False, False)),
    ],
)
def test_a_product_is_cut_for_the_target(target, expected):
    with planning_for(target):
        assert tuple(machine(META)) == expected


@pytest.mark.parametrize(
    ("target", "overlapping", "registers"), [("sm_90", True, 96), ("sm_80", False, 96), ("gfx942", False, None)]
)
def test_a_draw_is_launched_as_on_the_target(target, overlapping, registers):
    _, select = drawn(target)
    options = dict(select.options)
    assert (options.get("launch_pdl", False), options.get("maxnreg")) == (overlapping, registers)
    assert dict(select.constants)["USE_PDL"] == overlapping


def test_a_draw_is_planned_for_the_scope_that_it_is_in():
    assert drawn("sm_90") != drawn("sm_80")
    assert drawn("sm_90") == drawn("sm_90")


def test_a_plan_binds_in_the_scope_that_it_was_made_in():
    with planning_for("gfx942"):
        plan = Plan(Recorder())
    assert plan.get("warps", lambda _: (warps(META),)) == (2,)


def test_a_launcher_has_the_last_word_on_its_target():
    class Fixed(Recorder):
        target = TARGETS["sm_87"]

    with planning_for("sm_90"):
        with using(Fixed()):
            assert planned_target().arch == 87
        with using(Recorder()):
            assert planned_target().arch == 90


def test_pieces_of_work_are_no_larger_than_the_scope_says():
    assert piece_of(100, 2) == 100
    with in_pieces_of(128):
        assert (piece_of(100, 2), piece_of(60, 2)) == (64, 60)
        with in_pieces_of(None):
            assert piece_of(100) == 100


def test_scopes_end():
    outside = current()
    with planning_for("sm_90"), using(Recorder()) as _:
        with planning_for("sm_80"):
            assert planned_target().arch == 80
        assert planned_target().arch == 90
    assert current() == outside == Scope()


def test_an_unknown_target_is_refused():
    with pytest.raises(UnknownNameError, match="sm90"), planning_for("sm90"):
        pass
