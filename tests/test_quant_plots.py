"""The plots of quantised products show the committed measurements."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "quant_plots.py"
quant_plots = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def cut(us, used=0.9, repeats=True, cublas=60.0) -> dict:
    return {"used": used, "repeats": repeats, "us": us, "cublas": cublas}


def test_of_the_cuts_that_were_right_the_fastest_is_drawn_and_later_files_replace() -> None:
    first = {
        "wide": {
            "int4_g128 4096x28672 M=64 (1,)": cut(40.0),
            "int4_g128 4096x28672 M=64 (2,)": cut(30.0, used=1.2),
            "int4_g128 4096x28672 M=64 (3,)": cut(35.0, repeats=False),
            "int4_g128 4096x6144 M=64 (1,)": cut(10.0),
            "int4_g128 4096x28672 M=128 (1,)": cut(50.0),
        }
    }
    second = {"wide": {"int4_g128 4096x28672 M=128 (1,)": cut(55.0, cublas=70.0)}}
    [line] = quant_plots.hopper([first, second], ("int4_g128", "nf4"))
    assert line == quant_plots.Line("cuda, int4_g128", {64: 40.0, 128: 55.0}, {64: 60.0, 128: 70.0})


def test_cuts_that_were_tried_and_errors_are_no_points() -> None:
    speed = {"bf16 M=1": 58.0, "mxfp4 M=1": 30.0, "mxfp4 M=16": "no room", "mxfp4 M=16 cut 16x64 s3 w4/1": 9.0}
    lines = quant_plots.portable([{"speed": speed}], ("mxfp4",))
    assert [(line.label, line.us) for line in lines] == [(quant_plots.RULER, {1: 58.0}), ("triton, mxfp4", {1: 30.0})]


def test_ours_are_the_medians_over_the_turns_with_each_peer(tmp_path) -> None:
    turns = {
        "marlin": {"marlin": 30.0, "cuda": 20.0, "bf16": 58.0},
        "humming": {"humming": 24.0, "cuda": 22.0, "bf16": 60.0},
    }
    content = {peer: {"us": {"4096x28672 M=1": us, "4096x6144 M=1": us}} for peer, us in turns.items()}
    (tmp_path / quant_plots.PEERS).write_text(json.dumps(content))
    assert [(line.label, line.us, line.ruler) for line in quant_plots.peers(tmp_path)] == [
        (quant_plots.RULER, {1: 59.0}, {1: 59.0}),
        ("cuda, int4_g128", {1: 21.0}, {1: 59.0}),
        ("Humming", {1: 24.0}, {1: 60.0}),
        ("Marlin, fp16", {1: 30.0}, {1: 58.0}),
    ]


@pytest.mark.parametrize("name", quant_plots.PICTURES)
def test_a_picture_is_drawn_from_the_committed_measurements(tmp_path, name) -> None:
    pytest.importorskip("matplotlib")
    lines = quant_plots.PICTURES[name](quant_plots.RESULTS)
    kinds = {line.label.partition(",")[0] for line in lines}
    assert {"cuBLAS", "triton", "cuda"} <= kinds
    quant_plots.draw(lines, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (quant_plots.RESULTS / name).exists()
