"""Results as pictures: a roofline of every workload, bars by suite, curves of a sweep. Needs matplotlib."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlkernel_bench.results import best

_CURVE = 4  # points of a line at least
_MARKS = "osD^vP*X<>"
_COLORS = {"backend": "tab:blue", "ruler": "0.6", "peer": "tab:orange"}


def draw(contents: list[Mapping[str, Any]], folder: Path) -> list[str]:
    """Write the pictures; returns their names."""
    import matplotlib as mpl

    mpl.use("Agg")
    results = [r for content in contents for r in content["results"] if r["candidates"]]
    swept = [r for content in contents if content["size"] == "sweep" for r in content["results"] if r["candidates"]]
    suites = dict.fromkeys(r["suite"] for r in results)
    names = ["roofline.png"]
    _roofline(contents[-1]["ceilings"], results, folder / names[0])
    for suite in suites:
        panels = curves([r for r in swept if r["suite"] == suite])
        drawn = {id(r) for panel in panels.values() for r in panel}
        rest = [r for r in results if r["suite"] == suite and id(r) not in drawn]
        if panels:
            names.append(f"curves-{suite}.png")
            _curves(suite, panels, folder / names[-1])
        if rest:
            names.append(f"bars-{suite}.png")
            _bars(suite, rest, folder / names[-1])
    return names


def curves(results: list[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Workloads that differ in their first size, and in their format, and in nothing else: what is the same -> those.

    Only where a format has four sizes or more.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for r in results:
        sizes = list(r["sizes"].items())
        same = [f"{k} {n}" for k, n in sizes[1:]] + [r["dtype"], r["task"]]
        same += [f"{k}={x}" for k, x in r["options"].items() if k not in {"format", "batch", "chain", "of"}]
        if sizes:
            found.setdefault(", ".join(same), []).append(r)

    def most(panel: list[Mapping[str, Any]]) -> int:
        return max(Counter(r["options"].get("format") for r in panel).values())

    return {name: panel for name, panel in found.items() if most(panel) >= _CURVE}


def _points(results: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Candidate -> (operations a byte, operations a second); bytes count as operations where there are none."""
    found: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        for c in result["candidates"]:
            if c.get("tflop_s") and c.get("gb_s"):
                found.setdefault(c["name"], []).append((1e3 * c["tflop_s"] / c["gb_s"], c["tflop_s"]))
            elif c.get("gb_s"):  # one operation a byte: on the line of the bandwidth
                found.setdefault(c["name"], []).append((1.0, c["gb_s"] / 1e3))
    return found


def _roofline(ceilings: Mapping[str, Any], results: list[Mapping[str, Any]], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6))
    bandwidth = ceilings["copy"] / 1e12
    xs = [10 ** (e / 8) for e in range(-8, 33)]
    for dtype, rate in ceilings["flops"].items():
        axes.plot(xs, [min(bandwidth * x, rate / 1e12) for x in xs], color="0.5", lw=1)
        axes.text(xs[-1], rate / 1e12, dtype, ha="right", va="bottom", fontsize=8, color="0.3")
    for i, (name, points) in enumerate(_points(results).items()):
        axes.scatter(*zip(*points, strict=True), label=name, s=18, marker=_MARKS[i % len(_MARKS)])
    axes.set(xscale="log", yscale="log", xlabel="operations a byte (bytes alone: 1)", ylabel="10^12 a second")
    axes.set_title("Every workload under the ceilings measured in the same run")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, loc="lower right")
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _curves(suite: str, panels: Mapping[str, list[Mapping[str, Any]]], file: Path) -> None:
    """Microseconds by the first size, a panel for what else differs, a line for each candidate and format."""
    import matplotlib.pyplot as plt

    figure, every = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4.8), squeeze=False)
    for axes, (name, panel) in zip(every[0], panels.items(), strict=True):
        lines: dict[tuple[str, str], dict[int, float]] = {}
        for r in panel:
            size, form = next(iter(r["sizes"].values())), r["options"].get("format", "")
            for c in r["candidates"]:
                known = best(c)
                if known is not None:
                    # A ruler's weight has no format: its lines lie on one another.
                    key = c["name"], "" if c["kind"] == "ruler" else form
                    lines.setdefault(key, {})[size] = known[1]["median"]
        for (who, form), at in lines.items():
            ruler = who == panel[0]["ruler"]
            style = {"color": "0.5", "lw": 2.5} if ruler else {"marker": "o", "ms": 3, "lw": 1.2}
            axes.plot(sorted(at), [at[n] for n in sorted(at)], label=f"{who} {form}".strip(), **style)
        size_name = next(iter(panel[0]["sizes"]))
        axes.set(xscale="log", yscale="log", xlabel=size_name, ylabel="microseconds", title=name)
        axes.grid(alpha=0.3)
        if lines:
            axes.legend(fontsize=7)
    figure.suptitle(suite)
    figure.savefig(file, dpi=110, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def _bars(suite: str, results: list[Mapping[str, Any]], file: Path) -> None:
    """Time as a multiple of the floor, or microseconds where a suite has none; a bar for each candidate."""
    import matplotlib.pyplot as plt

    labels, lengths, colors = [], [], []
    for result in results:
        floor = result["floor"]["us"] if result["clock"] == "device" else 0.0
        for c in result["candidates"]:
            known = best(c)
            if known is not None:
                labels.append(f"{result['work']}  {c['name']}")
                lengths.append(known[1]["median"] / floor if floor else known[1]["median"])
                plain = c["name"].partition(":")[0] == "reference"
                colors.append("lightblue" if plain else _COLORS[c["kind"]])
    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.22 * len(labels)))
    axes.barh(range(len(labels)), lengths, color=colors)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    if lengths and min(lengths) > 0:
        axes.set_xscale("log")
        axes.set_xlim(left=0.5 * min(lengths))
    axes.set_xlabel("time over the floor" if any(r["floor"]["us"] for r in results) else "microseconds")
    axes.set_title(f"{suite}: blue ours (light: the reference), orange peers, grey the ruler")
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)
