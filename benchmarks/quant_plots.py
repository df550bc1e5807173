"""Plot what products of quantised weights took on an H200, by the number of tokens, from the files of those runs.

    python benchmarks/quant_plots.py            # writes benchmarks/results/h200/qmatmul-*.png

4096 x 28672, gate and up of Llama-3 8B, bf16 tokens, weights out of the cache: microseconds, and how many times as fast
as cuBLAS on a bf16 weight in the same run. The portable kernels are timed through the operator; those for Hopper cut by
cut, and the plot has the fastest cut that was right. In the picture of peers all are timed through the operator, each
peer in turns with ours. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

HERE: Final = Path(__file__).resolve().parent
RESULTS: Final = HERE / "results" / "h200"
PORTABLE: Final = "quant_formats_run[3-9].json"  # of gpu_quant_formats.py
HOPPER: Final = "qmatmul_cuda_run*.json"  # of gpu_qmatmul_cuda.py
PEERS: Final = "quant_peers.json"  # of gpu_quant_peers.py
SHAPE: Final = "4096x28672"
RULER: Final = "cuBLAS, bf16 weight"
FOUR: Final = ("int4_g128", "nf4", "mxfp4", "nvfp4")
EIGHT: Final = ("int8_channel", "fp8_channel", "mxfp8")
OTHERS: Final = {  # peer -> label; those that multiply int4_g128
    "humming": "Humming", "marlin": "Marlin, fp16", "gemlite": "gemlite", "int4pack": "torch's int4",
}  # fmt: skip

Times = Mapping[int, float]  # tokens -> microseconds


class Line(NamedTuple):
    """A curve: what took how long, and what the ruler took in the same run."""

    label: str
    us: Times
    ruler: Times


def portable(files: list[Mapping[str, Any]], formats: tuple[str, ...]) -> list[Line]:
    """Curves of files of `gpu_quant_formats.py`, the last one's: the ruler, formats, torch's own int4 product."""
    us: dict[str, dict[int, float]] = {}
    ruler: dict[str, dict[int, float]] = {}
    for file in files:
        for key, took in file["speed"].items():
            named = re.fullmatch(r"(.+) M=(\d+)", key)
            if named and isinstance(took, float):
                name, tokens = named[1], int(named[2])
                us.setdefault(name, {})[tokens] = took
                ruler.setdefault(name, {})[tokens] = file["speed"][f"bf16 M={tokens}"]
    lines = [Line(RULER, us["bf16"], ruler["bf16"])]
    lines += [Line(f"triton, {name}", us[name], ruler[name]) for name in formats if name in us]
    if "int4_g128" in formats and "torch int4pack" in us:
        lines.append(Line("torch's int4, int4_g128", us["torch int4pack"], ruler["torch int4pack"]))
    return lines


def hopper(files: list[Mapping[str, Any]], formats: tuple[str, ...]) -> list[Line]:
    """Curves of files of `gpu_qmatmul_cuda.py`; of a number of tokens that several have, the last file's."""
    us: dict[str, dict[int, float]] = {}
    ruler: dict[str, dict[int, float]] = {}
    for file in files:
        best: dict[tuple[str, int], tuple[float, float]] = {}
        for section in file.values():
            for key, cut in section.items() if isinstance(section, dict) else ():
                named = re.match(rf"(\w+) {SHAPE} M=(\d+) ", key)
                if named and isinstance(cut, dict) and cut.get("used", 2.0) <= 1 and cut.get("repeats"):
                    at = named[1], int(named[2])
                    best[at] = min(best.get(at, (float("inf"), 0.0)), (cut["us"], cut["cublas"]))
        for (name, tokens), (took, beside) in best.items():
            us.setdefault(name, {})[tokens] = took
            ruler.setdefault(name, {})[tokens] = beside
    return [Line(f"cuda, {name}", us[name], ruler[name]) for name in formats if name in us]


def lines_of(folder: Path, formats: tuple[str, ...]) -> list[Line]:
    """Every curve of some formats."""
    first, second = ([json.loads(f.read_text()) for f in sorted(folder.glob(p))] for p in (PORTABLE, HOPPER))
    return portable(first, formats) + hopper(second, formats)


def peers(folder: Path) -> list[Line]:
    """Curves of a file of `gpu_quant_peers.py`: each peer's, and of ours the median over the peers' turns."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for peer, entry in json.loads((folder / PEERS).read_text()).items():
        for key, us in entry.get("us", {}).items() if peer in OTHERS else ():
            shape, _, tokens = key.partition(" M=")
            names = {"bf16": RULER, "triton": "triton, int4_g128", "cuda": "cuda, int4_g128", peer: OTHERS[peer]}
            for name in names.keys() & us.keys() if shape == SHAPE else ():
                found.setdefault(names[name], {}).setdefault(int(tokens), []).append((us[name], us["bf16"]))
    lines = []
    for label in (RULER, "triton, int4_g128", "cuda, int4_g128", *OTHERS.values()):
        at = {
            m: [statistics.median(side) for side in zip(*each, strict=True)] for m, each in found.get(label, {}).items()
        }
        lines += [Line(label, {m: us for m, (us, _) in at.items()}, {m: b for m, (_, b) in at.items()})] if at else []
    return lines


PICTURES: Final[Mapping[str, Callable[[Path], list[Line]]]] = {
    "qmatmul-4bit.png": partial(lines_of, formats=FOUR),
    "qmatmul-8bit.png": partial(lines_of, formats=EIGHT),
    "qmatmul-peers.png": peers,
}


def draw(lines: list[Line], file: Path) -> None:
    """Microseconds, and times as fast as the ruler, by tokens."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8))
    for line in lines:
        at = sorted(line.us)
        style = {"color": "0.5", "lw": 2.5} if line.label == RULER else {"marker": "o", "ms": 4}
        style |= {"ls": "--"} if line.label.startswith("torch") else {"lw": 2} if line.label.startswith("cuda") else {}
        left.plot(at, [line.us[m] for m in at], label=line.label, **style)
        both = [m for m in at if m in line.ruler]
        right.plot(both, [line.ruler[m] / line.us[m] for m in both], label=line.label, **style)
    for axes, what in ((left, "microseconds"), (right, "times as fast as cuBLAS on a bf16 weight")):
        axes.set(xscale="log", xlabel="tokens", ylabel=what)
        ticks = sorted({m for line in lines for m in line.us})
        axes.set_xticks(ticks, [str(m) for m in ticks], fontsize=7)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.set_yscale("log")
    left.legend(fontsize=8)
    figure.suptitle(f"x times a weight of {SHAPE}, H200")
    figure.savefig(file, dpi=110, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """All pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    for name, lines in PICTURES.items():
        draw(lines(RESULTS), given.out / name)


if __name__ == "__main__":
    main()
