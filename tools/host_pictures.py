"""Draw the pictures of results that no suite wrote: TRL and verl beside rlkernel, quantized products.

    python tools/host_pictures.py            # anew, beside the files in benchmarks/results

Titles are computed from the numbers. Needs matplotlib.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("benchmarks", "registry", ".")]

from rlkernel_bench.plots import COLORS, LINES, MARKS, OTHERS, OURS

from rlkernel_core.files import whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULTS = ROOT / "benchmarks" / "results"
SHAPE = "4096x28672"  # gate and up of Llama-3 8B, which the quantized products were measured at
RULER = "cuBLAS on a bf16 weight"
# key of a result file -> its name, whose it is
SIDES = {
    "trl": {
        "stock": ("TRL", OTHERS),
        "ours": ("with rlkernel-cuda", OURS),
        "ours_portable": ("with rlkernel-triton", OURS),
    },
    "verl": {
        "stock": ("verl, Triton kernel", OTHERS),
        "stock_torch": ("verl, torch", OTHERS),
        "ours": ("with rlkernel-cuda", OURS),
        "ours_portable": ("with rlkernel-triton", OURS),
    },
}
PEERS = {"humming": "Humming", "marlin": "Marlin (fp16)", "gemlite": "gemlite", "int4pack": "torch's int4 product"}
FORMATS = {
    "qmatmul-4bit.png": ("int4_g128", "nf4", "mxfp4", "nvfp4"),
    "qmatmul-8bit.png": ("int8_channel", "fp8_channel", "mxfp8"),
}
Ratios = dict[str, dict[int, float]]  # name -> tokens -> times as fast as the ruler in the same run


def read(path: str) -> Any:
    """A result file."""
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def blank(wide: float, tall: float) -> Figure:
    """An empty picture."""
    from matplotlib.figure import Figure

    return Figure(figsize=(wide, tall), layout="constrained")


def curves(host: str, runs: Mapping[str, Any], axes: Sequence[Axes]) -> None:
    """Loss and reward by step, of the host alone and with rlkernel: one line on the other, so the first is wide."""
    (alone, theirs), (_, ours) = runs.items()
    stock = SIDES[host].get(alone, (host, OTHERS))[0]
    for panel, what, unit in zip(axes, ("loss", "reward"), ("loss", "mean reward"), strict=True):
        for run, label, style in ((theirs, stock, {"color": "0.7", "lw": 4}), (ours, "with rlkernel", {"lw": 1.2})):
            every = 60 / len(run[what])
            panel.plot([every * (i + 1) for i in range(len(run[what]))], run[what], label=label, **style)
        panel.set(xlabel="step", ylabel=unit)
        panel.grid(alpha=0.3)
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)


def bars(
    axes: Axes, host: str, values: Mapping[str, float], unit: str, title: str, sides: Mapping[str, Any] = SIDES
) -> None:
    """A bar for each side, with its number."""
    known = sides[host]
    for y, (key, value) in enumerate(values.items()):
        axes.barh(y, value, color=COLORS[known[key][1]])
        axes.text(value, y, f" {value:.3g} {unit}", va="center", fontsize=8)
    axes.set_yticks(range(len(values)), [known[key][0] for key in values])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(values.values()))
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=9)


def trl_curves() -> Figure:
    """TRL alone and with rlkernel on a CPU."""
    found = read("trl_cpu/curves.json")
    figure = blank(10, 4.2)
    curves("trl", found["runs"], figure.subplots(1, 2))
    apart = found["largest_difference_of_loss"]
    figure.suptitle(
        f"GRPO by TRL on a CPU, fp32: with rlkernel inside, no loss of 60 steps differs by more than {apart:.1e}"
    )
    return figure


def verl_curves(path: str, where: str) -> Figure:
    """Curves of verl alone and with rlkernel; time and memory of the larger update, if one was large enough."""
    found = read(path)
    steps = found["update"][max(found["update"], key=lambda name: int(name.split("x")[2]))]["step"]
    large = any(side["peak_gib"] for side in steps.values())
    figure = blank(10, 7 if large else 4.2)
    every = figure.subplots(2 if large else 1, 2, squeeze=False)
    runs = found["curves"]["runs"]
    curves("verl", runs, every[0])
    rewards = [run["reward"] for run in runs.values()]
    apart = max(abs(a - b) for a, b in zip(*rewards, strict=True))
    said = f"differ by at most {apart:.1g}" if apart else "are the same"
    title = f"verl's actor update on {where}: with rlkernel inside, rewards of 60 steps {said}"
    if large:
        bars(every[1][0], "verl", {k: s["ms"] for k, s in steps.items()}, "ms", "time of an update")
        bars(every[1][1], "verl", {k: s["peak_gib"] for k, s in steps.items()}, "GiB", "memory at the peak")
        title += f",\nand an update takes {steps['ours']['ms']:.0f} instead of {steps['stock']['ms']:.0f} ms "
        title += "(8192 tokens, hidden size 4096, vocabulary 128 256)"
    figure.suptitle(title)
    return figure


def trl_costs() -> Figure:
    """Time and memory of TRL's head and of a whole step."""
    found = read("h200/trl.json")
    figure = blank(12, 5)
    jobs = {}
    for name, head in found["head"].items():
        n, d, v = (int(x) for x in name.split("x"))
        size = f"{n} tokens, hidden size {d}, vocabulary {v}"
        jobs[f"head, forward and backward\n{size}"] = head["forward_backward"]
    jobs["GRPO step of a 1.5B model\n8 sequences of 256 + 1024 tokens"] = found["step"]["step"]
    for column, (title, sides) in zip(figure.subplots(2, len(jobs)).T, jobs.items(), strict=True):
        bars(column[0], "trl", {k: s["ms"] for k, s in sides.items() if k in SIDES["trl"]}, "ms", title)
        memory = {k: s["peak_gib"] for k, s in sides.items() if k in SIDES["trl"]}
        bars(column[1], "trl", memory, "GiB", "memory at the peak")
    head = found["head"]["8192x4096x128256"]["forward_backward"]
    saved = 1 - head["ours"]["peak_gib"] / head["stock"]["peak_gib"]
    step = found["step"]["step"]
    figure.suptitle(
        f"TRL on one H200, bf16: rlkernel's head takes {saved:.0%} less memory than TRL's; "
        f"a step takes {step['ours']['ms']:.0f} instead of {step['stock']['ms']:.0f} ms"
    )
    return figure


def trl_training() -> Figure:
    """GRPO by TRL on one GPU, three ways: reward and drift by step, time and memory."""
    found = read("h200/trl_grpo.json")
    runs, steps = found["runs"], found["arguments"]["steps"]
    names = {
        "stock": ("TRL, transformers' generate", OTHERS),
        "ours": ("with rlkernel, transformers' generate", OURS),
        "exact": ("with rlkernel, exact rollout", OURS),
    }
    styles: dict[str, dict[str, Any]] = {"stock": {"color": "0.6", "lw": 3}, "ours": {"lw": 1.2}, "exact": {"lw": 1.2}}
    figure = blank(12, 7)
    (reward, drift), (seconds, memory) = figure.subplots(2, 2)
    for name, run in runs.items():
        smooth = [statistics.mean(run["reward"][max(0, i - 9) : i + 1]) for i in range(steps)]
        reward.plot(range(1, steps + 1), smooth, label=names[name][0], **styles[name])
        drift.plot(range(1, steps + 1), run["drift"], label=names[name][0], **styles[name])
    reward.set(xlabel="step", ylabel="share of right terms, mean of 10 steps", title="reward")
    drift.set(xlabel="step", ylabel="nats, mean of a step", title="rollout against trainer, before the step")
    drift.set_ylim(bottom=-0.05 * drift.get_ylim()[1])  # so that a line of zeros is seen
    for axes in (reward, drift):
        axes.grid(alpha=0.3)
    reward.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1, frameon=False)
    known = {"trl": names}
    for axes, what, unit, title in (
        (seconds, "step_s", "s", "time of a step, both at once on one GPU, beside other work"),
        (memory, "peak_gib", "GiB", "memory at the peak"),
    ):
        bars(axes, "trl", {name: run[what] for name, run in runs.items()}, unit, title, known)
    exact = runs["exact"]
    figure.suptitle(
        f"GRPO by TRL on one H200, {found['parameters'] / 1e9:.2f} billion parameters in bf16, {steps} steps: with an "
        f"exact rollout {exact['differ']} of {exact['tokens']:,} log-probabilities differ"
    )
    return figure


def portable(formats: Sequence[str]) -> Ratios:
    """The portable kernels and torch's own int4 product, each beside cuBLAS in the same run."""
    speed, found = read("h200/quant_formats.json")["speed"], Ratios()
    for key, us in speed.items():
        named = re.fullmatch(r"(.+) M=(\d+)", key)
        if named and isinstance(us, float) and named[1] in {*formats, "torch int4pack"}:
            if named[1] == "torch int4pack" and "int4_g128" not in formats:
                continue
            name = PEERS["int4pack"] if named[1] == "torch int4pack" else f"rlkernel-triton, {named[1]}"
            found.setdefault(name, {})[int(named[2])] = speed[f"bf16 M={named[2]}"] / us
    return found


def hopper(formats: Sequence[str]) -> Ratios:
    """The kernels for Hopper: of each number of tokens the fastest cut that was right."""
    found: Ratios = {}
    for file in ("h200/qmatmul_cuda.json", "h200/qmatmul_cuda_shapes.json"):
        for section in read(file).values():
            for key, cut in section.items() if isinstance(section, dict) else ():
                named = re.match(rf"(\w+) {SHAPE} M=(\d+) ", key)
                if (
                    named
                    and named[1] in formats
                    and isinstance(cut, dict)
                    and cut.get("used", 2.0) <= 1
                    and cut.get("repeats")
                ):
                    at = found.setdefault(f"rlkernel-cuda, {named[1]}", {})
                    at[int(named[2])] = max(at.get(int(named[2]), 0.0), cut["cublas"] / cut["us"])
    return found


def peers() -> Ratios:
    """int4 by others, each in turns with ours: of ours the median over the peers' turns."""
    found: dict[str, dict[int, list[float]]] = {}
    for peer, entry in read("h200/quant_peers.json").items():
        for key, us in entry.get("us", {}).items() if peer in PEERS else ():
            shape, _, tokens = key.partition(" M=")
            for side, name in {"cuda": "rlkernel-cuda", "triton": "rlkernel-triton", peer: PEERS[peer]}.items():
                if shape == SHAPE and side in us:
                    found.setdefault(name, {}).setdefault(int(tokens), []).append(us["bf16"] / us[side])
    return {name: {m: statistics.median(x) for m, x in at.items()} for name, at in found.items()}


def products(ratios: Ratios, what: str) -> Figure:
    """Times as fast as cuBLAS on a bf16 weight, by tokens."""
    ranked = sorted(ratios, key=lambda name: (not name.startswith("rlkernel"), -max(ratios[name].values())))
    figure = blank(9, 5)
    axes = figure.subplots()
    for i, name in enumerate(ranked):
        at = sorted(ratios[name])
        axes.plot(at, [ratios[name][m] for m in at], label=name, color=LINES[i], marker=MARKS[i], ms=4)
    axes.axhline(1, color="0.4", lw=1)
    sizes = sorted({m for at in ratios.values() for m in at})
    axes.set_xscale("log", base=2)  # tokens double
    axes.set_xticks(sizes, [str(m) for m in sizes], fontsize=8)
    axes.minorticks_off()
    axes.set(xlabel="tokens", ylabel=f"times as fast as {RULER}", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    best = ranked[0]
    most = max(ratios[best].values())
    gain = max(m for at in ratios.values() for m, times in at.items() if times > 1.1)
    figure.suptitle(
        f"{what}: {best} is up to {most:.1f} times as fast as {RULER};\n"
        f"with more than {gain} tokens nothing that was measured gains over a tenth",
        fontsize=10,
        weight="bold",
    )
    axes.set_title("One H200, a weight of 4096 inputs and 28672 outputs, bf16 tokens", fontsize=8, loc="left")
    return figure


PICTURES: Mapping[str, Callable[[], Figure]] = {
    "trl_cpu/curves.png": trl_curves,
    "verl_cpu/curves.png": lambda: verl_curves("verl_cpu/verl.json", "a CPU, fp32"),
    "h200/verl/curves.png": lambda: verl_curves("h200/verl/verl.json", "one H200, bf16"),
    "h200/trl.png": trl_costs,
    "h200/trl_grpo.png": trl_training,
    "h200/qmatmul-4bit.png": lambda: products(
        portable(FORMATS["qmatmul-4bit.png"]) | hopper(FORMATS["qmatmul-4bit.png"]), "Products with 4-bit weights"
    ),
    "h200/qmatmul-8bit.png": lambda: products(
        portable(FORMATS["qmatmul-8bit.png"]) | hopper(FORMATS["qmatmul-8bit.png"]), "Products with 8-bit weights"
    ),
    "h200/qmatmul-peers.png": lambda: products(peers(), "Products with int4 weights in groups of 128"),
}


def main() -> None:
    """All of them."""
    for path, make in PICTURES.items():
        with whole(RESULTS / path) as draft:
            make().savefig(draft, dpi=110, metadata={"Software": None}, format="png")
        print(path)


if __name__ == "__main__":
    main()
