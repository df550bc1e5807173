"""Results as pictures: a roofline of every workload, and bars by suite. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlkernel_bench.results import best

_MARKS = "osD^vP*X<>"
_COLOURS = {"backend": "tab:blue", "ruler": "0.6", "peer": "tab:orange"}


def draw(contents: list[Mapping[str, Any]], folder: Path) -> list[str]:
    """Write the pictures; returns their names."""
    import matplotlib as mpl

    mpl.use("Agg")
    results = [r for content in contents for r in content["results"] if r["candidates"]]
    suites = dict.fromkeys(r["suite"] for r in results)
    names = ["roofline.png"]
    _roofline(contents[-1]["ceilings"], results, folder / names[0])
    for suite in suites:
        names.append(f"bars-{suite}.png")
        _bars(suite, [r for r in results if r["suite"] == suite], folder / names[-1])
    return names


def _points(results: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Candidate -> (operations a byte, operations a second); bytes count as operations where there are none."""
    found: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        for c in result["candidates"]:
            if c.get("tflop_s") and c.get("gb_s"):
                found.setdefault(c["name"], []).append((1e3 * c["tflop_s"] / c["gb_s"], c["tflop_s"]))
            elif c.get("gb_s"):  # one operation a byte: on the slope, where it belongs
                found.setdefault(c["name"], []).append((1.0, c["gb_s"] / 1e3))
    return found


def _roofline(ceilings: Mapping[str, Any], results: list[Mapping[str, Any]], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6))
    slope = ceilings["copy"] / 1e12
    xs = [10 ** (e / 8) for e in range(-8, 33)]
    for dtype, rate in ceilings["flops"].items():
        axes.plot(xs, [min(slope * x, rate / 1e12) for x in xs], color="0.5", lw=1)
        axes.text(xs[-1], rate / 1e12, dtype, ha="right", va="bottom", fontsize=8, color="0.3")
    for i, (name, points) in enumerate(_points(results).items()):
        axes.scatter(*zip(*points, strict=True), label=name, s=18, marker=_MARKS[i % len(_MARKS)])
    axes.set(xscale="log", yscale="log", xlabel="operations a byte (bytes alone: 1)", ylabel="10^12 a second")
    axes.set_title("Every workload under the ceilings measured in the same run")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, loc="lower right")
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _bars(suite: str, results: list[Mapping[str, Any]], file: Path) -> None:
    """Time as a multiple of the floor, or microseconds where a suite has none; a bar for each candidate."""
    import matplotlib.pyplot as plt

    labels, lengths, colours = [], [], []
    for result in results:
        floor = result["floor"]["us"] if result["clock"] == "device" else 0.0
        for c in result["candidates"]:
            known = best(c)
            if known is not None:
                labels.append(f"{result['work']}  {c['name']}")
                lengths.append(known[1]["median"] / floor if floor else known[1]["median"])
                plain = c["name"].partition(":")[0] == "reference"
                colours.append("lightblue" if plain else _COLOURS[c["kind"]])
    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.22 * len(labels)))
    axes.barh(range(len(labels)), lengths, color=colours)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    if lengths and min(lengths) > 0:
        axes.set_xscale("log")
        axes.set_xlim(left=0.5 * min(lengths))
    axes.set_xlabel("time over the floor" if any(r["floor"]["us"] for r in results) else "microseconds")
    axes.set_title(f"{suite}: blue ours (light: the reference), orange peers, grey the ruler")
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)
