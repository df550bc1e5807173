"""Results as pictures: a roofline of every workload, bars by suite, curves of a sweep. Needs matplotlib.

Titles are findings, computed from the numbers. A time below the floor is an error of the measurement: no picture has
it, and each says which were left out.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rlkernel_bench import names
from rlkernel_bench.ceilings import SLACK
from rlkernel_bench.results import best
from rlkernel_core.files import whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = Mapping[str, Any]

SERIES: Final = 7  # lines of a panel at most
GROUPS: Final = 16  # workloads of a picture at most
CURVE: Final = 4  # points of a line at least
DECADES: Final = 30.0  # a linear axis shows a ratio up to this
OURS, OTHERS, PLAIN = "rlkernel", "other libraries", "plain torch"
COLORS: Final = {OURS: "tab:blue", OTHERS: "tab:orange", PLAIN: "0.65"}
LINES: Final = ("tab:blue", "tab:cyan", "tab:orange", "tab:green", "tab:purple", "tab:red", "tab:brown")
MARKS: Final = "os^Dv<>"


class Timed(NamedTuple):
    """A candidate that has a number."""

    result: Result
    name: str
    who: str  # a key of COLORS
    us: float
    whole: bool  # it does the job, and is no ruler that does a part of it

    @property
    def share(self) -> float | None:
        """Per cent of the hardware's limit; None where a workload has none."""
        floor: float = self.result["floor"]["us"] if self.result["clock"] == "device" else 0.0
        return 100 * floor / self.us if floor else None


def draw(contents: list[Mapping[str, Any]], folder: Path) -> list[str]:
    """Write the pictures; returns their file names."""
    drawn = []
    for name, figure in pictures(contents):
        with whole(folder / name) as draft:
            figure.savefig(draft, dpi=110, metadata={"Software": None}, format="png")
        drawn.append(name)
    return drawn


def pictures(contents: list[Mapping[str, Any]]) -> Iterator[tuple[str, Figure]]:
    """Every picture of some results, under its file name."""
    results = [r for content in contents for r in content["results"] if r["candidates"]]
    swept = {id(r) for content in contents if content["size"] == "sweep" for r in content["results"]}
    roof = roofline(contents)
    if roof is not None:
        yield "roofline.png", roof
    for suite in dict.fromkeys(r["suite"] for r in results):
        own = [r for r in results if r["suite"] == suite]
        panels = curves([r for r in own if id(r) in swept])
        on_lines = {id(r) for panel in panels.values() for r in panel}
        if panels:
            yield f"curves-{suite}.png", lines(suite, panels)
        rest = [r for r in own if id(r) not in on_lines and any(t.whole for t in timed(r))]
        for i in range(0, len(rest), GROUPS):
            yield f"bars-{suite}{f'-{1 + i // GROUPS}' if i else ''}.png", bars(suite, rest[i : i + GROUPS])


def timed(result: Result) -> Iterator[Timed]:
    """The candidates that have a number which the hardware allows."""
    for c in result["candidates"]:
        known = best(c)
        if known is not None and c["status"] != "impossible":
            base = c["name"].partition(":")[0]
            who = PLAIN if base in {"torch", "reference"} else OTHERS if c["kind"] != "backend" else OURS
            yield Timed(result, c["name"], who, known[1]["median"], c["kind"] != "ruler" or who == PLAIN)


def left_out(results: Iterable[Result]) -> str:
    """Which numbers no picture has, as a sentence; empty where there are none."""
    impossible = dict.fromkeys(
        f"{names.candidate(c['name'])} ({r['task'].replace('+', ' and ')})"
        for r in results
        for c in r["candidates"]
        if c["status"] == "impossible"
    )
    return f"Left out as faster than the hardware allows: {', '.join(impossible)}." if impossible else ""


def finding(suite: str, results: Sequence[Result]) -> str:
    """What the numbers of a suite say: how the fastest of ours compares with the fastest of the others."""
    ratios = []
    for r in results:
        ours = [t.us for t in timed(r) if t.who == OURS]
        others = [t.us for t in timed(r) if t.who != OURS and t.whole and t.name != "reference"]
        if ours and others:
            ratios.append(min(others) / min(ours))
    if ratios:
        first = sum(x > 1 for x in ratios)
        low, middle, high = (_times(x) for x in (min(ratios), statistics.median(ratios), max(ratios)))
        return (
            f"{suite}: rlkernel is faster than the fastest other at {first} of {len(ratios)} workloads "
            f"({low} to {high} times as fast, median {middle})"
        )
    shares = [max(s) for r in results if (s := [t.share for t in timed(r) if t.who == OURS and t.share is not None])]
    if shares:
        span = _span(f"{x:.0f}" for x in (min(shares), max(shares)))
        return f"{suite}: rlkernel reaches {span} % of the hardware's limit"
    times = [t.us for r in results for t in timed(r)]
    return f"{suite}: {_span(names.duration(x) for x in (min(times), max(times)))} per call"


def _span(ends: Iterable[str]) -> str:
    """`5 to 7`, or `5` where both are the same."""
    return " to ".join(dict.fromkeys(ends))


def _times(ratio: float) -> str:
    digits = ".1g" if ratio < 0.1 else ".2f" if ratio < 2 else ".2g" if ratio < 10 else ",.0f"
    return f"{ratio:{digits}}".replace(",", " ")


def bars(suite: str, results: Sequence[Result]) -> Figure:
    """A group of bars for each workload: how near each candidate comes to the hardware's limit, and its time."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    groups = [(r, sorted((t for t in timed(r) if t.whole), key=lambda t: t.us)) for r in results]
    limited = all(t.share is not None for _, found in groups for t in found)
    values = {id(t): (t.share if limited else t.us) or 0.0 for _, found in groups for t in found}
    largest = max(values.values())
    rows = sum(len(found) + 1.6 for _, found in groups)
    figure = Figure(figsize=(10.5, 1.9 + 0.2 * rows), layout="constrained")
    axes = figure.subplots()
    common, y, ticks, said = names.shared([r for r, _ in groups]), 0.0, {}, set()
    for r, found in groups:
        head = names.workload(r, common)
        head += ", another run" if head in said else ""
        said.add(head)
        parts = [f"{names.candidate(t.name, suite)}: {names.duration(t.us)}" for t in timed(r) if not t.whole]
        head += f"   [for comparison, {'; '.join(parts)}]" if parts else ""
        axes.text(0, y, head, weight="bold", fontsize=8, va="center", in_layout=False)
        for t in found:
            y += 1
            axes.barh(y, values[id(t)], height=0.8, color=COLORS[t.who])
            axes.text(values[id(t)] + 0.008 * largest, y, names.duration(t.us), fontsize=7, va="center")
            ticks[y] = names.candidate(t.name, suite)
        y += 1.6
    axes.set_yticks([*ticks], [*ticks.values()], fontsize=8)
    axes.set_ylim(y - 0.6, -1)
    axes.set_xlim(0, 1.12 * largest)
    limit = "% of the speed that memory and arithmetic of the machine allow (time per call beside each bar)"
    axes.set_xlabel(limit if limited else "\u00b5s per call")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    who = [name for name in COLORS if any(t.who == name for _, found in groups for t in found)]
    figure.legend(handles=[Patch(color=COLORS[n], label=n) for n in who], loc="outside lower center", ncols=3)
    about = f"Every workload: {', '.join(common.values())}" if common and len(groups) > 1 else ""
    _titled(figure, finding(suite, results))
    _noted(axes, about, left_out(results))
    return figure


def curves(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Workloads that differ in their first size and in nothing else: what is the same -> those, four at least."""
    found: dict[str, list[Result]] = {}
    for r in results:
        first, *_ = [*r["sizes"], ""]
        same = ", ".join(text for k, text in names.parts(r).items() if k != first)
        if first:
            found.setdefault(same, []).append(r)
    return {name: panel for name, panel in found.items() if len(panel) >= CURVE}


def lines(suite: str, panels: Mapping[str, Sequence[Result]]) -> Figure:
    """A panel for what else differs: time by the first size, a line for each candidate, seven at most."""
    from matplotlib.figure import Figure

    wide = min(3, len(panels))
    tall = -(-len(panels) // wide)
    figure = Figure(figsize=(5.2 * wide, 1.2 + 3.9 * tall), layout="constrained")
    every = figure.subplots(tall, wide, squeeze=False).flatten()
    for axes in every[len(panels) :]:
        axes.set_axis_off()
    named = list(dict.fromkeys(t.name for panel in panels.values() for r in panel for t in timed(r)))
    for axes, (name, panel) in zip(every, panels.items(), strict=False):
        _panel(axes, suite, panel, named)
        axes.set_title("\n".join(textwrap.wrap(name, 55)), fontsize=9)
    results = [r for panel in panels.values() for r in panel]
    _titled(figure, finding(suite, results), left_out(results))
    return figure


def _panel(axes: Axes, suite: str, panel: Sequence[Result], named: Sequence[str]) -> None:
    """Draw a panel; a candidate has the look of its place in `named`, so the same in every panel."""
    first = next(iter(panel[0]["sizes"]))
    ruler = panel[0]["ruler"]
    found: dict[str, dict[int, float]] = {}
    who: dict[str, str] = {}
    for r in panel:
        for t in timed(r):
            found.setdefault(t.name, {})[r["sizes"][first]] = t.us
            who[t.name] = t.who
    # The quickest at the largest size first, after ours and the ruler.
    ranked = sorted(found, key=lambda n: (who[n] != OURS, n != ruler, found[n][max(found[n])] / max(found[n])))
    for name in ranked[:SERIES]:
        i = named.index(name)
        look = {"color": f"C{i}", "marker": MARKS[i % len(MARKS)], "ms": 4}
        style = {"color": "0.5", "lw": 2.5} if name == ruler else look
        at = sorted(found[name])
        axes.plot(at, [found[name][n] for n in at], label=names.candidate(name, suite), **style)
    sizes = sorted({n for at in found.values() for n in at})
    times = [us for name in ranked[:SERIES] for us in found[name].values()]
    if max(sizes) > DECADES * min(sizes):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(n) for n in sizes], fontsize=7, rotation=45)
        axes.minorticks_off()
    if max(times) > DECADES * min(times):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel=names.size(suite, first), ylabel="\u00b5s per call")
    axes.grid(alpha=0.3)
    more = f"{len(ranked) - SERIES} slower not drawn" if len(ranked) > SERIES else None
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False, title=more)


def roofline(contents: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Rates of the workloads that do arithmetic under the roof of the machine; None where none does."""
    from matplotlib.figure import Figure

    points, above = _points(contents)
    if not points:
        return None
    ceilings = contents[-1]["ceilings"]
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    axes = figure.subplots()
    bandwidth = max(ceilings["copy"], ceilings["read"]) / 1e12
    xs = [x for found in points.values() for x, _, _ in found]
    low, high = min(xs) / 3, max(xs) * 3
    for dtype, rate in _roofs(ceilings["flops"]).items():
        knee = rate / bandwidth
        edge = [low, *([knee] if low < knee < high else []), high]
        axes.plot(edge, [min(bandwidth * x, rate) for x in edge], color="0.4", lw=1.2)
        axes.annotate(dtype, (high, rate), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    for i, (name, found) in enumerate(points.items()):
        axes.scatter(
            [x for x, _, _ in found], [y for _, y, _ in found], label=name, s=26, marker=MARKS[i], color=LINES[i]
        )
    bottom = min(y for found in points.values() for _, y, _ in found) / 3
    for x, suites in _clusters(points).items():
        axes.text(x, bottom, " " + ", ".join(suites), rotation=90, va="bottom", ha="center", fontsize=7, color="0.35")
    # Both are ratios over decades.
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom / 1.5, None))
    axes.set(xlabel="arithmetic operations per byte moved", ylabel="TFLOP/s")
    figure.legend(loc="outside lower center", fontsize=8, ncols=3)
    device = contents[-1]["environment"]["device_name"]
    said = f"Left out as faster than the hardware allows: {', '.join(dict.fromkeys(above))}." if above else ""
    _titled(figure, _nearest(contents))
    _noted(
        axes, f"{device}. Each point is a workload; the roof is what copies and products reached in the same run.", said
    )
    return figure


def _clusters(points: Mapping[str, Sequence[tuple[float, float, str]]]) -> dict[float, list[str]]:
    """Suites by where their workloads stand; those too near to each other to be read apart stand together."""
    found: dict[float, list[str]] = {}
    for x, suite in sorted({(x, suite) for some in points.values() for x, _, suite in some}):
        near = next((known for known in found if x < 1.3 * known), x)
        found.setdefault(near, [])
        found[near] += [suite] if suite not in found[near] else []
    return found


def _roofs(flops: Mapping[str, float]) -> dict[str, float]:
    """TFLOP/s -> by name; two within a tenth of each other are one line."""
    found: dict[str, float] = {}
    for dtype, rate in sorted(flops.items(), key=lambda item: -item[1]):
        near = next((name for name, known in found.items() if rate / 1e12 > 0.9 * known), None)
        said = names.dtype(dtype)
        if near:
            found[f"{near}, {said}"] = found.pop(near)
        else:
            found[said] = rate / 1e12
    return found


def _points(contents: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[tuple[float, float, str]]], list[str]]:
    """Series -> (operations per byte, TFLOP/s, suite), seven series at most, and who is above the roof."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    above = []
    for content in contents:
        limits = content["ceilings"]
        for r in content["results"]:
            allowed = {t.name for t in timed(r)}
            for c in r["candidates"]:
                rate, moved = c.get("tflop_s") or 0.0, c.get("gb_s") or 0.0
                if not rate or not moved:
                    continue
                roof = (
                    min(max(limits["copy"], limits["read"]) * 1e3 * rate / moved, max(limits["flops"].values())) / 1e12
                )
                if c["name"] not in allowed or rate > roof / SLACK:
                    above.append(f"{names.candidate(c['name'])} in {r['suite']}, {r['task'].replace('+', ' and ')}")
                else:
                    name = names.candidate(c["name"].partition(":")[0])
                    found.setdefault(name, []).append((1e3 * rate / moved, rate, r["suite"]))
    ranked = sorted(found, key=lambda n: (not n.startswith("rlkernel"), -len(found[n])))
    if len(ranked) > SERIES:
        rest = ranked[SERIES - 1 :]
        found[f"others: {', '.join(rest)}"] = [point for name in rest for point in found[name]]
        ranked = [*ranked[: SERIES - 1], f"others: {', '.join(rest)}"]
    return {name: found[name] for name in ranked}, above


def _nearest(contents: Sequence[Mapping[str, Any]]) -> str:
    """How near to the roof ours come, as a title."""
    shares = [
        (t.share, r["suite"])
        for content in contents
        for r in content["results"]
        if any(c.get("tflop_s") for c in r["candidates"])
        for t in timed(r)
        if t.who == OURS and t.share is not None
    ]
    if not shares:
        return "No kernel of rlkernel was measured on a workload with arithmetic"
    share, suite = max(shares)
    return f"rlkernel reaches up to {share:.0f} % of the machine's roof, at {suite}"


def _titled(figure: Figure, title: str, note: str = "") -> None:
    """The finding above all panels."""
    width = int(figure.get_figwidth() * 11)
    text = [*textwrap.wrap(title, width), *textwrap.wrap(note, width)]
    figure.suptitle("\n".join(text), fontsize=10, weight="bold" if not note else "normal")


def _noted(axes: Axes, *notes: str) -> None:
    """What holds for all of a picture, and what is missing, below its title."""
    width = int(axes.figure.get_figwidth() * 13)
    text = [line for note in notes for line in textwrap.wrap(note, width)]
    axes.set_title("\n".join(text), fontsize=8, loc="left")
