"""Products of quantised weights by others beside ours, in one run on one GPU.

    python benchmarks/gpu_quant_peers.py --out $OUT [--seconds 85] [--peers humming,marlin] [--rows 1,16] [--shapes ...]

Every peer has a process of its own. It packs its weights, compiles, and is held to float64 (whoever multiplies the
suite's codes to 2 % of the result, whoever quantises by itself to 25 %, in the Frobenius norm; ours to the bound of the
contract). When all are ready each is timed alone on the GPU: in turns with the kernels of rlkernel-cuda, with the
portable ones and with cuBLAS on a bf16 weight, in graphs over copies of the weights that exceed 256 MB, medians of
rounds in a random order. Peers that pip cannot bring (Marlin, TritonLLM) or that must not meet other packages are
looked for in `.peers/peers.tar.xz`: `site/` and `tllm/`. Their adapters are `rlkernel_bench/peers/quantised.py`.

`scaled_mm` and `flashinfer own` are fp8 on both sides and quantise tokens themselves, beside our backends `cublaslt`
and `flashinfer`; what FlashInfer needs is set by `.fi/fi_env.sh`. `tritonllm` multiplies the experts of a gpt-oss layer
in mxfp4, 32 of 5760 x 2880, four a token; its routing tables are made before the time, ours reads the groups' ends.

Predictions and what was found: benchmarks/notes/quant-peers.md.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import queue
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]
from gpu_all import PATHS, distributions, environment  # noqa: E402  the scripts beside this one
from gpu_qmatmul_cuda import kept_compiler  # noqa: E402

COLD = 256 << 20  # bytes that calls go through before they meet a weight again
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024)
SHAPES = ("4096x28672", "4096x6144", "14336x4096", "8192x10240")  # K x N
TOKENS = (1, 4, 16, 64, 256, 1024)  # of a mixture of experts, four experts each
EXPERTS, TOP = 32, 4
FORMATS = {"bitsandbytes": "nf4", "tritonllm": "mxfp4", "scaled_mm": "fp8_channel", "flashinfer own": "fp8_block128"}
ACTS = {"fp8_channel": "token_fp8", "fp8_block128": "block128_fp8"}  # tokens are quantised too
LIMITS = {"int4pack": 128}  # up to where a peer is asked: torch's int4 reads the weight for every 16 rows
NAMES = ("humming", "marlin", "int4pack", "bitsandbytes", "gemlite", "tritonllm")
OURS = ("cuda", "triton", "cublaslt", "flashinfer")  # backends; the last two run where they are named
ROUNDS = 15
SAME, OWN = 0.02, 0.25  # relative errors that a peer may have


class Case:
    """One weight: as it came, as ours take it, as the peer does."""

    def __init__(self, name: str, shape: str, form: str) -> None:
        import torch
        from rlkernel_bench.peers.quantised import PRODUCTS

        import rlkernel as rlk
        from rlkernel_core.errors import ResolutionError

        K, N = map(int, shape.split("x"))
        self.name, self.shape, self.product = name, shape, PRODUCTS[name]
        self.experts = EXPERTS if name == "tritonllm" else 1
        weight = torch.randn(self.experts * N, K, device="cuda", dtype=torch.bfloat16) * K**-0.5
        with rlk.use("triton", fallback="error"):
            act = {"act": ACTS[form]} if form in ACTS else {}
            w = rlk.quantize(weight, rlk.QuantSpec.named(form, **act))
        dense = weight.view(self.experts, N, K) if self.experts > 1 else weight
        self.given = {"weight": dense, "w": w}
        self.packed = self.product.pack(self.given)
        self.tiles = w
        with contextlib.suppress(ResolutionError), rlk.use("triton", fallback="error"):
            self.tiles = rlk.prepack(w)  # what the kernels for Hopper read as well

    def inputs(self, rows: int) -> dict[str, Any]:
        """Tokens, sorted by expert where there are any."""
        import torch
        from rlkernel_bench.suites.experts import ends_of

        K = self.given["weight"].shape[-1]
        found: dict[str, Any] = {}
        if self.experts > 1:
            found["ends"] = ends_of(rows, EXPERTS, TOP, "cuda", rows)
            rows *= TOP
        return {"x": torch.randn(rows, K, device="cuda", dtype=torch.bfloat16), **found}

    def exact(self, values: Any, inputs: dict[str, Any]) -> Any:
        """The product in float64."""
        import torch

        x = inputs["x"].double()
        if "ends" not in inputs:
            return x @ values.double().t()
        bounds = [0, *inputs["ends"].tolist()]
        each = values.view(self.experts, -1, values.shape[-1])
        return torch.cat([x[a:b] @ each[e].double().t() for e, (a, b) in enumerate(pairwise(bounds))])

    def judged(self, rows: int) -> dict[str, float]:
        """Relative error of the peer and the share of their bound that ours use."""
        import torch

        import rlkernel as rlk
        from rlkernel_core.errors import ResolutionError
        from rlkernel_core.quant import dequantize
        from rlkernel_core.quant.activations import quantize_activation
        from rlkernel_core.spec.qmatmul import UNITS, accumulation_bound

        inputs = self.inputs(rows)
        values, spec = dequantize(self.given["w"], dtype=torch.float32), self.given["w"].spec
        coded = inputs if spec.act == "none" else {"x": quantize_activation(inputs["x"].float(), spec).value()}
        want = self.exact(values, coded)
        theirs = self.exact(self.given["weight"].flatten(0, -2), inputs) if self.product.own else want
        y = self.product.multiply({**self.given, **inputs}, self.packed).double()
        found = {self.name: float((y - theirs).norm() / theirs.norm())}
        reach = self.exact(values.abs(), {**coded, "x": coded["x"].abs()})
        bound = accumulation_bound(want, reach, unit=UNITS["bfloat16"], inner=inputs["x"].shape[1])
        share = float(((y - want).abs() / bound).nan_to_num(nan=1e9).max())
        for backend in OURS:
            with contextlib.suppress(ResolutionError), rlk.use(backend, fallback="error"):
                y = rlk.qmatmul(w=self.tiles, **inputs).double()
                found[backend] = float(((y - want).abs() / bound).nan_to_num(nan=1e9).max())
        return found if self.product.own else {**found, "share of the bound": share}

    def copies(self) -> None:
        """As many of each as exceed the cache, where few experts meet a token too."""
        import torch

        self.many: dict[str, list[Any]] = {}
        for name, one, size in (
            ("ours", self.tiles, self.tiles.nbytes),
            (self.name, self.packed, self.tiles.nbytes),
            ("bf16", self.given["weight"], self.given["weight"].nbytes),
        ):
            times = (8 if name != "bf16" else 2) if self.experts > 1 else max(2, -(-COLD // size))
            self.many[name] = [one, *(copy.deepcopy(one) for _ in range(times - 1))]
        torch.cuda.synchronize()

    def timed(self, rows: int) -> dict[str, Any]:
        """Microseconds a call of each."""
        import torch
        from rlkernel_bench.timing import Spread, Stopwatch, in_turns, recorded

        import rlkernel as rlk
        from rlkernel_core.errors import ResolutionError

        inputs = self.inputs(rows)
        given, x, ends = {**self.given, **inputs}, inputs["x"], inputs.get("ends")

        def dense(w: Any) -> Any:
            if ends is None:
                return x @ w.t()
            return torch.nn.functional.grouped_mm(x, w.transpose(1, 2), offs=ends)

        def ours(w: Any) -> Any:
            return rlk.qmatmul(w=w, **inputs)

        ways = {self.name: partial(self.product.multiply, given), "bf16": dense, **dict.fromkeys(OURS, ours)}
        graphs: dict[str, Any] = {}
        watch = Stopwatch("cuda")
        for name, call in ways.items():
            with contextlib.ExitStack() as stack:
                if name in OURS:
                    stack.enter_context(contextlib.suppress(ResolutionError))
                    stack.enter_context(rlk.use(name, fallback="error"))
                many = self.many.get(name, self.many["ours"])
                graphs[name] = recorded(watch, [partial(call, w) for w in many]), len(many)
        found = in_turns(watch, graphs, ROUNDS)
        return {name: round(Spread.of(each).median, 2) for name, each in found.items()}


def child(name: str, shapes: list[str], rows: list[int], kept: Path) -> None:
    """Check everything, wait for the word, time what was right; a line a finding."""
    import torch

    kept_compiler(kept)  # children begin with different shapes, and find what others have compiled
    first = (*NAMES, name).index(name) % len(shapes)
    shapes, rows = (["2880x5760"], list(TOKENS)) if name == "tritonllm" else (shapes[first:] + shapes[:first], rows)

    def told(kind: str, case: Case, M: int, find: Callable[[int], dict[str, float]]) -> dict[str, float]:
        try:
            found: Any = find(M)
        except Exception as error:
            found = f"{type(error).__name__}: {str(error)[:300]}"
        print("@" + json.dumps([kind, f"{case.shape} M={M}", found]), flush=True)
        return found if isinstance(found, dict) else {name: float("inf")}

    torch.manual_seed(1)
    cases: list[tuple[Case, list[int]]] = []
    for shape in shapes:
        case = Case(name, shape, FORMATS.get(name, "int4_g128"))
        limits = {name: OWN if case.product.own else SAME, **dict.fromkeys(OURS, 1.0)}
        used = {M: told("check", case, M, case.judged) for M in rows if LIMITS.get(name, M) >= M}
        cases.append((case, [M for M, u in used.items() if all(v <= limits.get(k, v) for k, v in u.items())]))
    print("@ready", flush=True)
    sys.stdin.readline()
    for case, right in cases:
        case.copies()
        for M in right:
            told("us", case, M, case.timed)
        del case.many
        torch.cuda.empty_cache()
    print("@done", flush=True)


class Child:
    """A peer's process, its lines and its place in the report."""

    def __init__(self, name: str, command: list[str], environ: dict[str, str], out: Path) -> None:
        self.name, self.found, self.lines = name, {}, queue.Queue()  # type: ignore[var-annotated]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with (out / f"peer_{name}.log").open("w") as log:
            self.process = subprocess.Popen([*command, name], stderr=log, text=True, env=environ, **pipes)
        threading.Thread(target=self.pump, daemon=True).start()

    def pump(self) -> None:
        """Lines to the queue, None at the end."""
        for line in self.process.stdout:  # type: ignore[union-attr]
            self.lines.put(line)
        self.lines.put(None)

    def follow(self, mark: str, seconds: float, note: Callable[[], None]) -> None:
        """Take findings until a mark, the end or the last second."""
        end = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while (line := self.lines.get(timeout=max(0.1, end - time.monotonic()))) is not None:
                if line.startswith(mark):
                    self.found[mark] = True
                    return
                if line.startswith("@["):
                    kind, label, found = json.loads(line[1:])
                    self.found.setdefault(kind, {})[label] = found
                    print(self.name, kind, label, json.dumps(found), flush=True)
                    note()


def main() -> None:
    """All children get ready beside one another and are timed one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--seconds", type=float, default=85.0)
    parser.add_argument("--ready", type=float, default=0.6, help="share of the time that getting ready may take")
    parser.add_argument("--peers", default=",".join(NAMES))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--name", default="gpu_quant_peers.json")
    parser.add_argument("--child")
    parser.add_argument("--kept", type=Path)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.shapes.split(","), [int(m) for m in given.rows.split(",")], given.kept)
        return
    end = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folders = distributions(Path(temporary) / "dist")
        for name in ("reference", "template"):
            folders.pop(name, None)
        packed, place = ROOT / ".peers" / "peers.tar.xz", Path(temporary) / "peers"
        if packed.exists():
            with tarfile.open(packed) as archive:
                archive.extractall(place, filter="data")
        carried = [place / "site", place / "tllm"]
        environ = environment(Path(temporary) / "dist", *(ROOT / p for p in PATHS), *folders.values(), *carried)
        environ |= {"HUMMING_CACHE_DIR": str(Path(temporary) / "humming")}
        (kept := Path(temporary) / "kernels").mkdir()
        passed = ["--kept", str(kept), "--shapes", given.shapes, "--rows", given.rows]
        command = [sys.executable, __file__, *passed, "--child"]
        children = [Child(name, command, environ, given.out) for name in given.peers.split(",")]

        def note() -> None:
            content = {c.name: c.found for c in children}
            (given.out / given.name).write_text(json.dumps(content, indent=1) + "\n")

        try:
            start = end - (1 - given.ready) * given.seconds
            for one in children:
                one.follow("@ready", start - time.monotonic(), note)
            for i, one in enumerate(children):
                with contextlib.suppress(BrokenPipeError):
                    print("go", file=one.process.stdin, flush=True)
                one.follow("@done", (end - time.monotonic()) / (len(children) - i), note)
            note()
        finally:
            for one in children:
                one.process.kill()


if __name__ == "__main__":
    main()
