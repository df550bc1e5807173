"""The drawings of the Concepts pages: `python docs/drawings.py` writes docs/assets/drawings/*.svg.

A drawing is boxes with lines of text, arrows and bars in a frame of its own, 600 wide, so that its text can be read on
a phone. Text stays text. Colors follow the reader's scheme, light or dark; no font is fetched.
tests/test_drawings.py holds that the files are what this script writes.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from typing import Final

from rlkernel_core.files import write_text

FOLDER: Final = Path(__file__).parent / "assets" / "drawings"
WIDTH: Final = 600
LINE: Final = 20  # height of a line of text
STYLE: Final = """
.paper { fill: #ffffff; }
text { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #1c1e26; }
.head { font-weight: 600; }
.note { font-size: 13px; fill: #4a4f5e; }
.code { font: 13px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
rect { stroke-width: 1.5; }
.box rect { rx: 6px; }
.plain { fill: #f4f5f8; stroke: #8a90a2; }
.ours { fill: #e6ebff; stroke: #3f51b5; }
.right { fill: #ddf3e4; stroke: #1b7f3f; }
.wrong { fill: #fde7e7; stroke: #b3261e; }
.dropped { fill: none; stroke: #8a90a2; stroke-dasharray: 3 3; }
.line { fill: none; stroke: #4a4f5e; stroke-width: 1.5; }
.tip { fill: #4a4f5e; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #232530; }
  text { fill: #eceef4; }
  .note { fill: #b9bece; }
  .plain { fill: #2e3140; stroke: #8a90a2; }
  .ours { fill: #2c3566; stroke: #9aa8ff; }
  .right { fill: #1d4029; stroke: #6ccb8b; }
  .wrong { fill: #4d2424; stroke: #ff9b94; }
  .dropped { stroke: #b9bece; }
  .line { stroke: #b9bece; }
  .tip { fill: #b9bece; }
}
"""


class Drawing:
    """Shapes of one drawing, in order."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, lines: list[str], look: str = "plain") -> None:
        """A box with its lines in the middle; the first is its name. A line that begins with ` is code."""
        self.parts.append(f'<g class="box"><rect class="{look}" x="{x}" y="{y}" width="{w}" height="{h}"/>')
        top = y + h / 2 - LINE * len(lines) / 2 + 15
        for n, line in enumerate(lines):
            kind = "code" if line.startswith("`") else "note" if n else "head"
            self.text(x + w / 2, top + n * LINE, line.strip("`"), kind)
        self.parts.append("</g>")

    def text(self, x: float, y: float, words: str, kind: str = "note", anchor: str = "middle") -> None:
        """One line of text; `anchor` says which end of it stands at x."""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through points with a tip at the last."""
        (x0, y0), (x1, y1) = points[-2:]
        angle = math.atan2(y1 - y0, x1 - x0)
        tip = [(x1, y1), *((x1 - 10 * math.cos(angle + s), y1 - 10 * math.sin(angle + s)) for s in (0.4, -0.4))]
        self.parts.append(f'<polyline class="line" points="{_points(points)}"/>')
        self.parts.append(f'<polygon class="tip" points="{_points(tip)}"/>')

    def bar(self, x: float, base: float, w: float, h: float, look: str) -> None:
        """A bar that stands on `base`."""
        self.parts.append(f'<rect class="{look}" x="{x:g}" y="{base - h:.1f}" width="{w:g}" height="{h:.1f}"/>')

    def __str__(self) -> str:
        size = f'width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                f'<rect class="paper" width="{WIDTH}" height="{self.height}" rx="8"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def _points(points: list[tuple[float, float]] | tuple[tuple[float, float], ...]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def architecture() -> Drawing:
    """Who imports whom."""
    d = Drawing("Arrows are imports: registry and backends import the core, the proof imports both", 440)
    d.box(20, 16, 270, 56, ["Trainer or rollout engine", "`import rlkernel"])
    d.box(330, 16, 250, 56, ["A plugin", "`import rlkernel_core"])
    d.box(
        20,
        112,
        270,
        108,
        ["rlkernel", "choice: policy, resolve, plans", "explain, lock, command line", "integrations, nn, checkpoints"],
        "ours",
    )
    d.box(
        330,
        112,
        250,
        108,
        ["rlkernel_core", "spec: meaning, call records", "definitions in float64", "quant: formats of weights"],
        "ours",
    )
    d.box(
        20,
        262,
        560,
        74,
        ["Backends", "torch (any device) · triton (portable) · cuda · rocm · jetson", "a third party's plugin"],
    )
    d.box(20, 376, 350, 50, ["rlkernel_conformance", "attacks every backend by its claims"])
    d.box(390, 376, 190, 50, ["rlkernel_bench", "times beside peers"])
    d.arrow((155, 72), (155, 110))
    d.arrow((455, 72), (455, 110))
    d.arrow((290, 166), (328, 166))
    d.arrow((455, 262), (455, 222))
    d.arrow((155, 220), (155, 260))
    d.text(166, 245, "loads the one that it chose", anchor="start")
    d.arrow((195, 376), (195, 338))
    d.arrow((485, 376), (485, 338))
    return d


def selection() -> Drawing:
    """How a backend is chosen."""
    d = Drawing("Each backend of the order is asked in turn; the first whose claims cover the call runs", 470)
    d.box(20, 16, 270, 56, ["A call of a new shape", "`logprob, cuda sm90, bf16, grad"])
    d.box(310, 16, 270, 56, ["The policy", '`order = ["acme", "auto"]'])
    rows = [
        ("acme", "wrong", "grad/unsupported: claims no gradients", "a reason and its fix"),
        ("cuda", "wrong", "shape/too-large: at most 4096 rows", "a reason and its fix"),
        ("triton", "right", "claims cover the call, self-test passed", "runs; the plan is kept for this shape"),
        ("torch", "plain", "policy/outranked", "could run, and an earlier one does"),
    ]
    d.arrow((155, 72), (155, 96), (70, 96), (70, 118))
    d.arrow((445, 72), (445, 96), (70, 96), (70, 118))
    for n, (name, look, reason, then) in enumerate(rows):
        y = 120 + n * 64
        d.box(20, y, 100, 46, [name], look)
        d.box(150, y, 430, 46, [reason, then], look)
        d.arrow((120, y + 23), (148, y + 23))
        if n < len(rows) - 1:
            d.arrow((70, y + 46), (70, y + 62))
    d.box(
        20,
        388,
        560,
        68,
        [
            "Fallback?",
            "yes: the order names acme, and it was passed over",
            "FallbackWarning, or FallbackError where the policy says so",
        ],
        "ours",
    )
    d.arrow((300, 358), (300, 386))
    return d


def laws() -> Drawing:
    """Three distributions of one token."""
    logits, temperature, top_p = (2.0, 1.6, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0), 0.7, 0.9
    raw = _softmax(logits)
    tempered = _softmax([z / temperature for z in logits])
    kept, before = [], 0.0
    for p in tempered:  # best first
        kept.append(before < top_p)
        before += p
    mass = sum(p for p, k in zip(tempered, kept, strict=True) if k)
    processed = [p / mass if k else 0.0 for p, k in zip(tempered, kept, strict=True)]
    d = Drawing("The same eight logits under the raw, the tempered and the processed law", 492)
    panels = [
        ("raw", "softmax(z): what engines report by default", raw),
        ("tempered", f"softmax(z / T), T = {temperature}: what a trainer computes", tempered),
        ("processed", f"top-p {top_p} kept, renormalized: what the token was drawn from", processed),
    ]
    for n, (name, told, law) in enumerate(panels):
        base = 136 + n * 136
        d.text(20, base - 94, name, "head", "start")
        d.text(130, base - 94, told, "note", "start")
        for i, p in enumerate(law):
            look = "right" if i == 1 else "ours"
            d.bar(60 + i * 62, base, 44, 140 * p, look if p else "dropped")
            if not p:
                d.bar(60 + i * 62, base, 44, 140 * tempered[i], "dropped")
            d.text(82 + i * 62, base + 16, f"{p:.3f}" if p else "dropped")
    log = math.log
    d.text(300, 456, "log p processed + log kept mass = log p tempered", "head")
    d.text(300, 476, f"green token: {log(processed[1]):.3f} + ({log(mass):.3f}) = {log(tempered[1]):.3f}")
    return d


def _softmax(z: tuple[float, ...] | list[float]) -> list[float]:
    total = sum(math.exp(x) for x in z)
    return [math.exp(x) / total for x in z]


def capture() -> Drawing:
    """What a replay looks at and copies."""
    d = Drawing("A call of a captured function: key, static tensors, copies in, replay, copies out", 470)
    d.box(20, 16, 560, 50, ["A call: step(hidden, temperature)", "hidden [5, D]"])
    d.box(
        20,
        96,
        270,
        66,
        ["Key known?", "shapes in buckets (5 to 8), dtypes,", "values that are no tensors, modes"],
        "ours",
    )
    d.box(340, 96, 240, 66, ["No: capture", "3 plain runs, then record", "the graph of this key"])
    d.box(
        20,
        192,
        270,
        66,
        ["Static tensors in place?", "weights and caches: never copied,", "looked at after weight_update"],
        "ours",
    )
    d.box(
        340, 192, 240, 66, ["No: one of them moved", "recapture, run eager or raise,", "as on_guard_fail says"], "wrong"
    )
    d.box(20, 288, 560, 50, ["Copy the inputs into static buffers", "rows 0 to 4 from hidden, rows 5 to 7 padded"])
    d.box(20, 362, 270, 50, ["Replay", "one launch for all kernels"], "right")
    d.box(310, 362, 270, 50, ["Copy the outputs", "cut back to 5 rows; a clone or a view"])
    d.text(300, 444, "Bitwise what the function itself gives for the padded inputs.", "head")
    d.arrow((155, 66), (155, 94))
    d.arrow((290, 129), (338, 129))
    d.arrow((155, 162), (155, 190))
    d.text(166, 181, "yes", anchor="start")
    d.arrow((290, 225), (338, 225))
    d.arrow((155, 258), (155, 286))
    d.text(166, 277, "yes", anchor="start")
    d.arrow((155, 338), (155, 360))
    d.arrow((290, 387), (308, 387))
    return d


PIECES: Final = {1: "the whole row", 2: "half", 4: "quarter"}


def exactness() -> Drawing:
    """Why a row alone and the row in a batch differ, and what makes them equal."""
    d = Drawing(
        "A sum whose order depends on the batch changes its last bits; one whose order the row decides does not", 400
    )
    rows = [
        (
            "Order by the shape of the batch",
            "wrong",
            [("row alone", 4), ("row among 64", 1)],
            "other last bits: the ratio is not 1 before anything was learned",
        ),
        (
            "Order by the row alone: batch_invariant",
            "right",
            [("row alone", 2), ("row among 64", 2)],
            "the same bits: drift is exactly zero",
        ),
    ]
    for n, (title, look, cases, then) in enumerate(rows):
        y = 30 + n * 190
        d.text(20, y, title, "head", "start")
        for i, (case, pieces) in enumerate(cases):
            top = y + 16 + i * 52
            d.text(20, top + 25, case, "note", "start")
            width = (420 - 8 * (pieces - 1)) / pieces
            for piece in range(pieces):
                d.box(
                    150 + piece * (width + 8),
                    top,
                    width,
                    40,
                    [PIECES[pieces]],
                    look,
                )
        d.text(150, y + 138, then, "note", "start")
    return d


def conformance() -> Drawing:
    """How a claim becomes a verdict."""
    d = Drawing("Claims choose the clauses, drawn cases attack each, float64 definitions judge", 506)
    d.box(20, 16, 270, 66, ["The manifest claims", "operators, dtypes, devices,", "features"])
    d.box(
        310,
        16,
        270,
        66,
        ["The spec has clauses", "what must hold, numbered,", "with tolerances and their sources"],
        "ours",
    )
    d.box(90, 122, 420, 50, ["Clauses that the claims call for", "cases are drawn, and shrunk where one fails"], "ours")
    d.box(20, 212, 270, 66, ["The backend", "in a process of its own, with", "limits of time and memory"])
    d.box(310, 212, 270, 66, ["The definition", "the same inputs in float64,", "slow and plain"])
    d.box(90, 318, 420, 50, ["Close enough?", "the spec's tolerance for this result and dtype"], "ours")
    d.box(20, 408, 270, 50, ["holds", "case by case"], "right")
    d.box(310, 408, 270, 50, ["refuted", "smallest case, with a script"], "wrong")
    d.text(300, 488, "Mutants with one planted bug each prove the suite in turn.", "head")
    d.arrow((155, 82), (230, 120))
    d.arrow((445, 82), (370, 120))
    d.arrow((230, 172), (155, 210))
    d.arrow((370, 172), (445, 210))
    d.arrow((155, 278), (230, 316))
    d.arrow((445, 278), (370, 316))
    d.arrow((230, 368), (155, 406))
    d.arrow((370, 368), (445, 406))
    return d


DRAWINGS: Final = (architecture, selection, laws, capture, exactness, conformance)


def drawn() -> dict[str, str]:
    """File name -> content."""
    return {f"{draw.__name__}.svg": str(draw()) for draw in DRAWINGS}


if __name__ == "__main__":
    for name, content in drawn().items():
        write_text(FOLDER / name, content)
        print(FOLDER / name)
