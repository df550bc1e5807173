"""What is made of measurements: files that cannot be edited, comparisons with an exit status, reports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rlkernel_bench import names
from rlkernel_bench.compare import compare
from rlkernel_bench.plots import SERIES, bars, curves, draw, finding, lines, pictures, roofline
from rlkernel_bench.report import as_csv, markdown, summary
from rlkernel_bench.results import read, read_all, seal, write

from rlkernel_core.errors import ConfigError, FileError

ROOT = Path(__file__).parents[1]


def candidate(name="triton", us=100.0, **more) -> dict:
    spread = {"median": us, "low": 0.99 * us, "high": 1.01 * us, "n": 9}
    known = {"name": name, "kind": "backend", "version": "1", "status": "measured", "message": "", "eager": spread}
    return {**known, **more}


def peer(name="torch", us=100.0, **more) -> dict:
    return candidate(name, us, kind="peer", adapter_ran="never", **more)


def content(*candidates, device="H200", works=1) -> dict:
    """Results of some workloads that all went the same way."""
    result = {
        "suite": "logprob", "op": "logprob", "sizes": {"N": 1}, "dtype": "bfloat16", "task": "forward", "options": {},
        "why": "a test", "clock": "device", "ruler": None, "floor": {"bytes": "N", "flops": "0", "us": 50.0},
        "goals": [], "input_sets": 2, "gpu": None, "candidates": list(candidates),
    }  # fmt: skip
    env = {"device_name": device, "torch": "2", "triton": "3", "python": "3", "rlkernel": "0", "commit": "abc"}
    ceilings = {"copy": 4e12, "read": 4e12, "cached": 4e12, "flops": {"bfloat16": 8e14}, "cache_bytes": 1}
    about = {"size": "full", "device": "cuda", "suites": ["logprob"], "environment": env, "gpu": None}
    return seal({**about, "ceilings": ceilings, "results": [{**result, "work": f"w{i}"} for i in range(works)]})


def test_results_come_back_as_they_were_written(tmp_path) -> None:
    kept = content(candidate())
    assert read(write(kept, tmp_path)) == kept
    assert read(tmp_path) == kept
    assert read_all(tmp_path) == [kept]


def test_edited_results_are_refused(tmp_path) -> None:
    file = write(content(candidate()), tmp_path)
    file.write_text(file.read_text().replace('"median": 100.0', '"median": 90.0'))
    with pytest.raises(FileError, match="changed after it was written"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has no 'schema'"),
        ("nonsense", "is no JSON"),
        ('{"schema": 9, "hash": ""}', "schema: must be 1 or 2; got 9"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(FileError, match=message):
        read(tmp_path)


def verdicts(old, new, threshold=0.05) -> list[str]:
    return [c.verdict for c in compare(content(old), content(new), threshold)]


def test_a_difference_counts_beyond_the_threshold() -> None:
    assert verdicts(candidate(us=100.0), candidate(us=104.0)) == ["same"]
    assert verdicts(candidate(us=100.0), candidate(us=110.0)) == ["slower"]
    assert verdicts(candidate(us=100.0), candidate(us=90.0)) == ["faster"]


def test_a_difference_within_the_noise_is_none() -> None:
    wide = {"median": 110.0, "low": 95.0, "high": 150.0, "n": 9}
    assert verdicts(candidate(us=100.0), candidate(eager=wide)) == ["same"]


def test_what_has_a_ruler_is_compared_by_its_ratio() -> None:
    def at(ratio, us):
        return candidate(us=us, times_ruler={"median": ratio, "low": ratio, "high": ratio, "n": 9})

    assert verdicts(at(1.0, 100.0), at(1.0, 130.0)) == ["same"]  # the card was slower, not the code
    assert verdicts(at(1.0, 100.0), at(1.2, 100.0)) == ["slower"]


def test_a_backend_that_went_wrong_or_away_is_a_regression() -> None:
    broken = {k: v for k, v in candidate(status="wrong").items() if k != "eager"}
    changes = compare(content(candidate()), content(broken), 0.05)
    assert [(c.verdict, c.regressed) for c in changes] == [("broken", True)]
    gone = compare(content(candidate()), content(), 0.05)
    assert [(c.verdict, c.regressed) for c in gone] == [("gone", True)]


def test_more_memory_is_a_regression() -> None:
    old, new = (candidate(memory={"extra_bytes": mib << 20}) for mib in (10, 20))
    assert verdicts(old, new) == ["same", "larger"]


def test_peers_do_not_regress() -> None:
    assert compare(content(peer(us=100.0)), content(peer(us=300.0)), 0.05) == []


def test_runs_of_different_devices_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="different devices, 'H200' and 'H100'"):
        compare(content(candidate()), content(candidate(), device="H100"), 0.05)


def test_comparing_exits_with_1_where_something_regressed(cli, tmp_path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write(content(candidate(us=100.0)), old)
    write(content(candidate(us=150.0)), new)
    assert cli("bench", "compare", str(old), str(old)).exit_code == 0
    result = cli("bench", "compare", str(old), str(new))
    assert (result.exit_code, "1.500" in result.stdout) == (1, True)
    assert cli("bench", "compare", str(old), str(new), "--threshold", "60%").exit_code == 0
    assert cli("bench", "compare", str(old), str(new), "--threshold", "much").exit_code == 2


def test_the_summary_counts_what_is_wrong_as_not_fast() -> None:
    fast = candidate("fast", 50.0, speedup_over_torch=2.5)
    wrong = {**candidate("wrong", status="wrong"), "eager": None}
    found = summary([content(fast, wrong, peer("torch", 125.0, speedup_over_torch=1.0), works=4)])
    assert found["fast"] == {
        "workloads": 4, "right": 4, "compared": 4, "geometric_mean": pytest.approx(2.5), "fast_1": 1.0,
        "fast_1.5": 1.0, "fast_2": 1.0,
    }  # fmt: skip
    assert found["wrong"] == {"workloads": 4, "right": 0, "compared": 4}
    assert found["torch"]["fast_1"] == 0.0


def test_the_report_says_status_floor_and_what_is_untested() -> None:
    absent = {k: v for k, v in peer("cce", status="absent", message="not installed: cce").items() if k != "eager"}
    text = markdown([content(candidate(percent_of_floor=50.0), peer(status="coarse"), absent)])
    for part in (
        "Floor 50 us",
        "| triton | measured, older | 100 |",
        "adapter never seen working before) | coarse",
        "- cce: not",
    ):
        assert part in text


def test_a_row_of_the_table_is_a_row_of_the_csv() -> None:
    lines = as_csv([content(candidate(), peer(), works=3)]).splitlines()
    assert len(lines) == 1 + 6
    assert lines[1].startswith("logprob,logprob,w0,triton,backend,1,measured,100.0,99.0,101.0,9,eager")


def texts(figure) -> str:
    """Everything that is written in a picture."""
    figure.draw_without_rendering()
    every = [figure.get_suptitle()]
    for axes in figure.axes:
        every += [axes.get_title(), axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()]
        every += [t.get_text() for t in [*axes.texts, *axes.get_yticklabels()]]
        every += [line.get_label() for line in axes.lines]
    for legend in [*figure.legends, *(axes.get_legend() for axes in figure.axes)]:
        every += [t.get_text() for t in legend.get_texts()] if legend else []
    return "\n".join(every)


def swept(*candidates, formats=("nf4",), works=4) -> dict:
    """A sweep over the first size, of some formats."""
    kept = content(*candidates, works=works * len(formats))
    for i, result in enumerate(kept["results"]):
        result["sizes"] = {"M": 2 ** (i % works), "K": 8}
        result["options"] = {"format": formats[i // works]}
        result["suite"] = result["op"] = "qmatmul"
    return kept | {"size": "sweep"}


def test_the_pictures_are_drawn(tmp_path) -> None:
    drawn = draw([content(candidate(gb_s=2000.0, tflop_s=0.0), peer(gb_s=900.0, tflop_s=400.0))], tmp_path)
    assert drawn == ["roofline.png", "bars-logprob.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in drawn)


def test_workloads_of_a_sweep_that_differ_in_one_size_are_lines_and_no_bars() -> None:
    kept = swept(candidate(), peer(), works=5)
    kept["results"][4]["sizes"] = {"M": 1, "K": 16}
    [(name, panel)] = curves(kept["results"]).items()
    assert (name, [r["work"] for r in panel]) == ("8 inputs, bf16, forward, format nf4", ["w0", "w1", "w2", "w3"])
    assert [name for name, _ in pictures([kept | {"size": "full"}])] == ["bars-qmatmul.png"]
    assert [name for name, _ in pictures([kept])] == ["curves-qmatmul.png", "bars-qmatmul.png"]


def test_without_arithmetic_there_is_no_roofline() -> None:
    assert roofline([content(candidate(gb_s=2000.0, tflop_s=0.0))]) is None


def test_a_rate_above_the_roof_is_left_out_and_said_so() -> None:
    honest = candidate("cuda", gb_s=1000.0, tflop_s=500.0)
    refuted = peer("cublas fp32", us=10.0, gb_s=5000.0, tflop_s=2500.0, status="impossible")
    uncaught = peer("liger", gb_s=1600.0, tflop_s=900.0)  # above 8e14 operations a second
    figure = roofline([content(honest, refuted, uncaught)])
    [points] = [c for c in figure.axes[0].collections if len(c.get_offsets())]
    assert points.get_offsets().tolist() == [[500.0, 500.0]]
    said = texts(figure)
    assert "Left out as faster than the hardware allows: cuBLAS (logits in fp32) in logprob, forward, Liger" in said


def test_a_time_below_the_floor_is_no_bar_and_said_so() -> None:
    figure = bars("logprob", content(candidate(), peer("trl", us=1.0, status="impossible"))["results"])
    assert len(figure.axes[0].patches) == 1
    assert "Left out as faster than the hardware allows: TRL (forward)." in texts(figure)


def test_bars_are_shares_of_the_limit_on_a_linear_axis_with_their_times() -> None:
    figure = bars("logprob", content(candidate(us=100.0), peer(us=1000.0))["results"])
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == [50.0, 5.0]
    assert (axes.get_xscale(), axes.get_xlabel()[0]) == ("linear", "%")
    assert {"100 \u00b5s", "1 ms", "rlkernel-triton", "plain torch"} <= set(texts(figure).splitlines())


def test_what_does_a_part_of_the_job_is_no_bar() -> None:
    figure = bars("logprob", content(candidate(), candidate("cublas", 60.0, kind="ruler"))["results"])
    assert len(figure.axes[0].patches) == 1
    assert "for comparison, cuBLAS (the logits alone): 60 \u00b5s" in texts(figure)


def test_pictures_name_no_candidate_and_no_workload_in_the_short_way_of_files() -> None:
    ours = [candidate(f"{name}:{way}") for name in ("triton", "cuda") for way in ("save", "recompute")]
    for figure in (bars("logprob", content(*ours, works=2)["results"]), lines("q", curves(swept(*ours)["results"]))):
        assert not re.search(r"triton:|cuda:|ours|\d+x\d+|bfloat16", texts(figure))


def test_a_title_is_what_was_found() -> None:
    fast = content(candidate(us=50.0), peer(us=100.0))["results"]
    slow = content(candidate(us=200.0), peer(us=100.0))["results"]
    assert finding("logprob", [*fast, *slow]) == (
        "logprob: rlkernel is faster than the fastest other at 1 of 2 workloads (0.50 to 2 times as fast, median 1.25)"
    )
    assert finding("logprob", content(candidate(us=100.0))["results"]) == (
        "logprob: rlkernel reaches 50 % of the hardware's limit"
    )


def test_ratios_are_written_with_the_digits_that_they_have() -> None:
    very = (
        content(candidate(us=1e5), peer(us=100.0))["results"] + content(candidate(us=1.0), peer(us=12345.0))["results"]
    )
    assert "(0.001 to 12 345 times as fast, median 6 173)" in finding("advantage", very)


def test_a_panel_has_seven_lines_at_most_and_says_how_many_are_missing() -> None:
    many = [peer(f"peer {i}", us=100.0 + i) for i in range(9)]
    figure = lines("qmatmul", curves(swept(candidate(), *many)["results"]))
    axes = figure.axes[0]
    assert len(axes.lines) == SERIES
    assert (axes.lines[0].get_label(), axes.get_legend().get_title().get_text()) == (
        "rlkernel-triton",
        "3 slower not drawn",
    )


def test_a_roofline_has_seven_series_at_most() -> None:
    many = [peer(f"peer {i}", gb_s=1000.0, tflop_s=100.0 + i) for i in range(9)]
    figure = roofline([content(candidate(gb_s=1000.0, tflop_s=400.0), *many)])
    assert len(figure.legends[0].get_texts()) == SERIES
    assert figure.legends[0].get_texts()[-1].get_text().startswith("others: peer 5, peer 6")


def test_a_candidate_has_one_color_in_every_panel_and_a_peer_its_own_name() -> None:
    kept = swept(candidate(), peer("marlin"), formats=("nf4", "mxfp4"))
    for result in kept["results"][:4]:
        result["candidates"] = result["candidates"][1:]
    panels = [{x.get_label(): x.get_color() for x in a.lines} for a in lines("qmatmul", curves(kept["results"])).axes]
    assert [[*p] for p in panels] == [["Marlin"], ["rlkernel-triton", "Marlin"]]
    assert panels[0]["Marlin"] == panels[1]["Marlin"] != panels[1]["rlkernel-triton"]


def test_the_roofline_is_titled_by_the_nearest_of_ours() -> None:
    near, far = (content(candidate(us=us, gb_s=1000.0, tflop_s=400.0)) for us in (60.0, 100.0))
    assert roofline([near, far]).get_suptitle() == "rlkernel reaches up to 83 % of the machine's roof, at logprob"


def test_no_legend_covers_data() -> None:
    kept = swept(candidate(gb_s=10.0, tflop_s=5.0), peer(gb_s=9.0, tflop_s=4.0), formats=("nf4", "mxfp4"))
    every = [*pictures([kept]), *pictures([kept | {"size": "full"}])]
    assert [name for name, _ in every] == ["roofline.png", "curves-qmatmul.png", "roofline.png", "bars-qmatmul.png"]
    for _, figure in every:
        figure.draw_without_rendering()
        legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
        plots = [axes.get_window_extent() for axes in figure.axes if axes.axison]
        assert legends
        assert not any(legend.get_window_extent().overlaps(plot) for legend in legends for plot in plots)


def test_a_size_of_one_is_said_in_the_singular_and_a_model_by_its_name() -> None:
    assert (names.size("sample", "B", 1), names.size("sample", "B", 1024)) == ("1 row", "1 024 rows")
    sizes = {"B": 64, "T": 16, "L": 36, "D": 4096, "Q": 4096, "K": 1024, "F": 12288, "V": 151936}
    step = {"suite": "rollout", "op": "sample,capture", "sizes": sizes, "dtype": "bfloat16", "task": "decode"}
    told = names.parts({**step, "options": {"weights": "int4_g128"}})
    assert [*told.values()] == ["64 rows", "16 tokens each", "Qwen3-8B", "bf16", "decode", "weights int4_g128"]


def test_a_run_on_the_command_line_leaves_results_and_a_report(cli, tmp_path) -> None:
    folder = tmp_path / "out"
    arguments = ("--suite", "policy_loss", "--backend", "reference", "--peers", "none", "--seconds", "0.001")
    result = cli("bench", "run", *arguments, "--out", str(folder), "--json")
    assert (result.exit_code, json.loads(result.stdout)["suites"]) == (0, ["policy_loss"])
    assert read(folder)["results"][0]["candidates"][0]["name"] == "reference"
    assert cli("bench", "report", str(folder)).exit_code == 0
    assert "policy_loss" in (folder / "report.md").read_text()
