"""Products and speed of quantised weights of the triton backend on one GPU: right first, then timed.

    PYTHONPATH=.:registry:conformance:backends/triton OUT=. python benchmarks/gpu_qmatmul.py

Writes $OUT/gpu_qmatmul.json after every section and prints a line a finding. Every section is a process of its own, so
one that fails loses itself only; several compile and check at once, and timing has the GPU for itself.
Times are medians of CUDA graph replays over copies of a weight that together exceed 256 MB. Ends within `--seconds`.
One file, since it compares ways to cut a product of which one ships per shape.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {"4096x28672": (28672, 4096), "4096x6144": (6144, 4096)}  # K x N of the table, (N, K) here
WORKERS = 14
COLD = 256 << 20


def cuts(M: int) -> Iterator[dict[str, Any]]:
    """Ways to cut a product of M tokens that are compared."""
    if M <= 16:
        for parts in (1, 2, 4, 8):
            yield {"BM": 8, "BN": 64, "parts": parts, "stages": 4, "warps": 4, "permuted": True}
            yield {"BM": 16, "BN": 64, "parts": parts, "stages": 4, "warps": 4}
            yield {"BM": 16, "BN": 128, "parts": parts, "stages": 4, "warps": 4}
            yield {"BM": 16, "BN": 128, "parts": parts, "stages": 3, "warps": 4}
        yield {"BM": 8, "BN": 64, "parts": 2, "stages": 3, "warps": 4, "permuted": True}
        yield {"BM": 8, "BN": 128, "parts": 1, "stages": 4, "warps": 4, "permuted": True}
        yield {"BM": 8, "BN": 128, "parts": 2, "stages": 4, "warps": 4, "permuted": True}
    elif M <= 64:
        BM = 32 if M <= 32 else 64
        for parts in (1, 2, 4):
            yield {"BM": BM, "BN": 64, "parts": parts, "stages": 3, "warps": 4}
            yield {"BM": BM, "BN": 128, "parts": parts, "stages": 3, "warps": 8}
            yield {"BM": BM, "BN": 128, "parts": parts, "stages": 3, "warps": 4}
        yield {"BM": BM, "BN": 128, "parts": 1, "stages": 4, "warps": 8}
        yield {"BM": BM, "BN": 128, "parts": 1, "stages": 4, "warps": 8, "fold": True, "step": 64}
    elif M <= 256:
        for parts in (1, 2):
            yield {"BM": 128, "BN": 128, "parts": parts, "stages": 4, "warps": 8, "fold": True, "step": 64}
            yield {"BM": 128, "BN": 64, "parts": parts, "stages": 3, "warps": 4}
        yield {"BM": 128, "BN": 64, "parts": 1, "stages": 4, "warps": 4, "fold": True, "step": 64}
        yield {"BM": 128, "BN": 64, "parts": 2, "stages": 4, "warps": 4, "fold": True, "step": 64}
        yield {"BM": 128, "BN": 128, "parts": 1, "stages": 3, "warps": 8}
        yield {"BM": 128, "BN": 128, "parts": 1, "stages": 5, "warps": 8, "fold": True, "step": 64}
        yield {"BM": 128, "BN": 128, "parts": 1, "stages": 4, "warps": 8, "fold": True, "step": 32}
    if M >= 256:
        yield {"BM": 256, "BN": 128, "parts": 1, "stages": 4, "warps": 8, "fold": True, "step": 64}
        yield {"BM": 256, "BN": 128, "parts": 1, "stages": 3, "warps": 8, "fold": True, "step": 64}
        yield {"BM": 256, "BN": 128, "parts": 1, "stages": 4, "warps": 8, "fold": True, "step": 32}
    if M > 256:
        yield {"BM": 128, "BN": 128, "parts": 1, "stages": 4, "warps": 8, "fold": True, "step": 64}


MS = (1, 16, 32, 64, 128, 256, 512, 1024)


def jobs() -> list[tuple[str, int, dict[str, Any]]]:
    """Every (shape, M, cut) that is timed."""
    found = []
    for shape, (N, K) in SHAPES.items():
        for M in MS:
            for cut in cuts(M):
                tiles = N // cut["BN"] * -(-M // cut["BM"])
                busy = tiles * cut["parts"] / 132
                fits = cut["BM"] >= M or cut["BM"] >= 128
                if (
                    fits
                    and (busy >= 0.6 or cut["parts"] > 1)
                    and (busy <= 16 or M > 256)
                    and K // 128 % cut["parts"] == 0
                ):
                    found.append((shape, M, cut))
    return found


def label(cut: dict[str, Any]) -> str:
    """A cut in a few characters."""
    more = ("f" if cut.get("fold") else "") + ("p" if cut.get("permuted") else "")
    return f"{cut['BM']}x{cut['BN']}x{cut.get('step', 128)}/{cut['parts']} s{cut['stages']} w{cut['warps']}{more}"


# ------------------------------------------------------------------------------------------------------------- timing


def replayed(calls: list[Callable[[], Any]], seconds: float = 0.06) -> float:
    """Microseconds of one call in a CUDA graph of all of them."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()
    torch.cuda.synchronize()
    times, until = [], time.monotonic() + seconds
    while len(times) < 7 or (time.monotonic() < until and len(times) < 200):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / len(calls))
    del kept, graph
    return round(statistics.median(times), 2)


def weights(name: str, kind: str = "int4_g128") -> tuple[Any, list[Any]]:
    """A bf16 weight, and packed copies of it that exceed the cache together."""
    import torch
    from rlkernel_bench.direct import of_triton

    torch.manual_seed(1)
    N, K = SHAPES[name]
    full = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
    first = of_triton.prepack(of_triton.quantize(full, kind))
    copies = [first]
    while sum(w.nbytes for w in copies) < COLD:
        parts = {n: t.clone() for n, t in first.parts.items()}
        copies.append(type(first)(first.spec, first.shape, first.dtype, parts, first.layout))
    return full, copies


def caller(x: Any, w: Any, cut: dict[str, Any], y: Any) -> Callable[[], Any]:
    """A call of the kernel with a cut."""
    from rlkernel_triton.quant import product
    from rlkernel_triton.quant.choice import Cut

    options = dict(cut)
    permuted = options.pop("permuted", False)
    chosen = Cut(**options)
    return lambda: product.by_words(x, w, product.After(), chosen, y, permuted=permuted)


# ------------------------------------------------------------------------------------------------------------ sections


def right_products() -> dict[str, Any]:
    """Products of every format against float64, as the share of the contract's bound that is used."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_core import quant as reference
    from rlkernel_core.quant.activations import quantize_activation
    from rlkernel_core.spec.qmatmul import UNITS, LoRA, accumulation_bound
    from rlkernel_triton.quant import product

    torch.manual_seed(0)
    named = reference.QuantSpec.named
    found: dict[str, Any] = {}

    def one(kind: str, spec: Any, N: int, K: int, M: int, dtype: Any, tiled: bool, rounding: str, **more: Any) -> None:
        key = f"{spec} {N}x{K} M={M} {str(dtype)[6:]} {'tiles' if tiled else 'bytes'} {rounding} {kind}"
        try:
            full = torch.randn(N, K, device="cuda")
            x = torch.randn(M, K, device="cuda").to(dtype)
            w = reference.quantize(full, spec, dtype=dtype if dtype != torch.float64 else torch.float32)
            v = of_triton.prepack(w) if tiled else w
            y = product.product(x, v, product.After(**more), rounding)
            exact = reference.dequantize(w, dtype=dtype if rounding == "dtype" else torch.float32).double()
            left = x.double() if spec.act == "none" else quantize_activation(x.float(), spec).value().double()
            h = left @ exact.t()
            reach = left.abs() @ exact.abs().t()
            bias, lora = more.get("bias"), more.get("lora")
            if lora is not None:
                h = h + lora.scale * (x.double() @ lora.A.double().t()) @ lora.B.double().t()
                reach = (
                    reach + 3 * lora.scale * (x.double().abs() @ lora.A.double().abs().t()) @ lora.B.double().abs().t()
                )
            if bias is not None:
                h = h + bias.double()
            if more.get("activation") == "swiglu":
                gate, value = h.chunk(2, 1)
                h = torch.nn.functional.silu(gate) * value
                reach = 2 * (reach[:, : N // 2] * (value.abs() + 1) + reach[:, N // 2 :] * (gate.abs() + 1))
            if more.get("residual") is not None:
                h = h + more["residual"].double()
            bound = accumulation_bound(h, reach, unit=UNITS[str(dtype)[6:]], inner=K, weight_rounding=rounding)
            found[key] = round(float(((y.double() - h).abs() / bound).max()), 3)
        except Exception as error:
            found[key] = f"{type(error).__name__}: {str(error)[-300:]}"

    B, H, F = torch.bfloat16, torch.float16, torch.float32
    g = named("int4_g128")
    for M in (1, 7, 16, 33, 64, 100, 200, 700):
        one("", g, 256, 1024, M, B, True, "any")
    for dtype in (B, H):
        for rounding in ("none", "dtype"):
            one("", g, 256, 1024, 5, dtype, True, rounding)
    for spec in (named("int4_g64_asym"), named("int4_g32"), named("int4_channel_asym"), named("nf4"),
                 named("nf4", double_quant=True), named("int4_g32_asym", scale_dtype="float32")):  # fmt: skip
        for dtype in (B, H):
            one("", spec, 128, 512, 5, dtype, True, "any")
        one("", spec, 128, 512, 5, B, True, "dtype")
        one("", spec, 70, 301, 5, B, False, "any")
    for spec in (named("int8_channel"), named("int8_w8a8"), named("fp8_tensor"), named("fp8_channel", element="e5m2"),
                 named("fp8_block128"), named("fp8_block128", act="block128_fp8"),
                 named("fp8_channel", act="token_fp8")):  # fmt: skip
        for dtype in (B, H, F):
            one("", spec, 192, 640, 20, dtype, False, "any")
    one("", g, 70, 301, 5, F, False, "any")
    rank = {
        "lora": LoRA(torch.randn(8, 512, device="cuda", dtype=B) / 16, torch.randn(256, 8, device="cuda", dtype=B), 0.5)
    }
    bias = {"bias": torch.randn(256, device="cuda", dtype=B)}
    for M in (5, 64, 200, 700):
        one("lora", g, 256, 512, M, B, True, "any", **rank)
        one("swiglu", g, 256, 512, M, B, True, "any", **rank, **bias, activation="swiglu")
        one("bias", g, 256, 512, M, B, True, "any", **bias, residual=torch.randn(M, 256, device="cuda", dtype=B))
    numbers = [v for v in found.values() if isinstance(v, float)]
    failed = {k: v for k, v in found.items() if not isinstance(v, float) or not v <= 1}
    return {"worst": max(numbers, default=None), "failed": failed, "used": found}


def check_cuts(part: int) -> dict[str, Any]:
    """Every cut of this part compiled, checked against a product of the dequantised weight, and run twice."""
    import torch
    from rlkernel_bench.direct import of_triton

    found: dict[str, Any] = {}
    cache: dict[str, Any] = {}
    for i, (shape, M, cut) in enumerate(jobs()):
        if i % WORKERS != part:
            continue
        key = f"{shape} M={M} {label(cut)}"
        try:
            if shape not in cache:
                torch.manual_seed(1)
                N, K = SHAPES[shape]
                full = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
                w = of_triton.prepack(of_triton.quantize(full, "int4_g128"))
                cache[shape] = w, of_triton.dequantize(w, dtype=torch.float32)
            w, exact = cache[shape]
            torch.manual_seed(M)
            x = torch.randn(M, exact.shape[1], device="cuda", dtype=torch.bfloat16)
            y = torch.full((M, exact.shape[0]), torch.nan, device="cuda", dtype=torch.bfloat16)
            call = caller(x, w, cut, y)
            call()
            first = y.clone()
            call()
            want = x.float() @ exact.t()
            error = float((first.float() - want).abs().max() / want.abs().max())
            row = bool(torch.equal(first, y))
            found[key] = {"error": error, "repeats": row}
            if M > 1:
                alone = torch.empty_like(y[:1])
                caller(x[:1].contiguous(), w, cut, alone)()
                found[key]["alone"] = bool(torch.equal(alone, y[:1]))
        except Exception as error:
            found[key] = {"failed": f"{type(error).__name__}: {str(error)[-300:]}"}
    return found


def time_cuts(shape: str) -> dict[str, Any]:
    """Microseconds of every cut, and of cuBLAS on the bf16 weight."""
    import torch

    full, copies = weights(shape)
    N, K = SHAPES[shape]
    found: dict[str, Any] = {}
    dense = [full.clone() for _ in range(2)]
    for M in MS:
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
        found[f"M={M}"] = {"cublas bf16": replayed([partial(torch.mm, x, d.t(), out=y) for d in dense])}
        for other, m, cut in jobs():
            if (other, m) != (shape, M):
                continue
            try:
                found[f"M={M}"][label(cut)] = replayed([caller(x, w, cut, y) for w in copies])
            except Exception as error:
                found[f"M={M}"][label(cut)] = f"{type(error).__name__}: {str(error)[-200:]}"
        ranked = sorted((v, k) for k, v in found[f"M={M}"].items() if isinstance(v, float))
        print(shape, f"M={M}", "cublas", found[f"M={M}"]["cublas bf16"], ranked[:5], flush=True)
    return found


def time_large() -> dict[str, Any]:
    """Dequantise in pieces and multiply, against cuBLAS on a bf16 weight."""
    import torch

    from rlkernel_triton.quant import product

    found: dict[str, Any] = {}
    for shape, (N, K) in SHAPES.items():
        full, copies = weights(shape)
        for M in (1024, 4096):
            x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
            y = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
            row = {"cublas bf16": replayed([partial(torch.mm, x, full.t(), out=y)] * 2)}
            for size in (32, 256):
                product.PIECE = size << 20  # type: ignore[misc]
                row[f"{size} MiB"] = replayed(
                    [partial(product.by_pieces, x, w, product.After(), y) for w in copies[:4]]
                )
            found[f"{shape} M={M}"] = row
            print(shape, M, row, flush=True)
    return found


def time_codecs() -> dict[str, Any]:
    """TB/s of quantising bf16 and dequantising to bf16, all bytes read and written."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_triton.quant import storage

    found: dict[str, Any] = {}
    full = torch.randn(28672, 4096, device="cuda", dtype=torch.bfloat16)
    other = full.clone()
    copied = replayed([lambda: other.copy_(full)] * 4)
    found["copy"] = round(2 * full.numel() * 2 / copied / 1e6, 3)
    for kind in (
        "int4_g128",
        "int4_g32",
        "int4_g128_asym",
        "int4_channel",
        "nf4",
        "int8_channel",
        "fp8_channel",
        "fp8_block128",
        "fp8_tensor",
    ):
        try:
            w = of_triton.quantize(full, kind)
            moved = w.nbytes + full.numel() * 2
            took = replayed([lambda w=w: of_triton.quantize(full, w.spec, out=w)] * 4)
            back = replayed([lambda w=w: of_triton.dequantize(w)] * 4)
            found[kind] = {"quantise": round(moved / took / 1e6, 3), "dequantise": round(moved / back / 1e6, 3)}
            if storage.tiles(w.spec, w.shape):
                p = of_triton.prepack(w)
                took = replayed([lambda p=p: of_triton.quantize(full, p.spec, out=p)] * 4)
                back = replayed([lambda p=p: of_triton.dequantize(p)] * 4)
                move = replayed([lambda w=w: of_triton.prepack(w)] * 4)
                found[kind] |= {"quantise tiles": round(moved / took / 1e6, 3), "prepack us": move}
                found[kind] |= {"dequantise tiles": round(moved / back / 1e6, 3)}
        except Exception as error:
            found[kind] = f"{type(error).__name__}: {str(error)[-300:]}"
        print(kind, found[kind], flush=True)
    return found


def time_formats() -> dict[str, Any]:
    """Microseconds of the operator as it ships, in every family of formats, at 4096 x 28672."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_triton.quant import product
    from rlkernel_triton.quant.product import After

    found: dict[str, Any] = {}
    N, K = SHAPES["4096x28672"]
    for kind in (
        "int4_g128",
        "int4_g32",
        "int4_g128_asym",
        "int4_channel",
        "nf4",
        "int8_channel",
        "int8_w8a8",
        "fp8_channel",
    ):
        try:
            full = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
            first = of_triton.prepack(of_triton.quantize(full, kind))
            copies = [first]
            while sum(w.nbytes for w in copies) < COLD:
                parts = {n: t.clone() for n, t in first.parts.items()}
                copies.append(type(first)(first.spec, first.shape, first.dtype, parts, first.layout))
            for M in (1, 16, 64):
                x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
                calls = [partial(product.product, x, w, After(), "any") for w in copies]
                found[f"{kind} M={M}"] = replayed(calls)
            if kind == "int4_g128":
                pair = After(activation="swiglu")
                for M in (1, 16, 64):
                    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
                    found[f"swiglu M={M}"] = replayed([partial(product.product, x, w, pair, "any") for w in copies])
        except Exception as error:
            found[kind] = f"{type(error).__name__}: {str(error)[-300:]}"
        print(kind, {k: v for k, v in found.items() if k.startswith(kind)}, flush=True)
    return found


SECTIONS: dict[str, Callable[..., Any]] = {
    "right_products": right_products,
    "check_cuts": check_cuts,
    "time_cuts": time_cuts,
    "time_large": time_large,
    "time_codecs": time_codecs,
    "time_formats": time_formats,
}


def child(name: str, argument: str) -> None:
    """Run one section and print its finding as the last line."""
    given = () if not argument else (int(argument) if argument.isdigit() else argument,)
    try:
        found = SECTIONS[name](*given)
    except Exception:
        found = {"failed": traceback.format_exc()[-2000:]}
    print("\n@@" + json.dumps(found))


def start(name: str, argument: object = "") -> subprocess.Popen[str]:
    """A section in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--argument", str(argument)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def result(process: subprocess.Popen[str], seconds: float) -> tuple[Any, str]:
    """(what a section found, what else it printed)."""
    try:
        text, _ = process.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        return {"failed": "out of time"}, text
    head, _, last = text.rpartition("\n@@")
    try:
        return json.loads(last), head
    except ValueError:
        return {"failed": text[-1500:]}, ""


def main() -> None:
    """All sections, in the order of their use."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=88.0)
    parser.add_argument("--only", default="", help="sections, between commas, one after the other")
    parser.add_argument("--child")
    parser.add_argument("--argument", default="")
    given = parser.parse_args()
    if given.child:
        child(given.child, given.argument)
        return
    begun = time.monotonic()

    def left() -> float:
        return given.seconds - (time.monotonic() - begun)

    out = Path(os.environ.get("OUT", ".")) / "gpu_qmatmul.json"
    report: dict[str, Any] = {}

    def note(key: str, found: Any, text: str = "") -> None:
        report[key] = found
        report["seconds"] = round(time.monotonic() - begun, 1)
        out.write_text(json.dumps(report, indent=1) + "\n")
        if text.strip():
            print(text.strip()[-3000:], flush=True)

    if given.only:
        for name in given.only.split(","):
            found, text = result(start(name), left() - 1)
            note(name, found, text + (str(found)[-1500:] if "failed" in found else ""))
            print(name, json.dumps({k: v for k, v in found.items() if k != "used"})[:2500], f"{left():.0f} s left")
        return
    running = [start("check_cuts", i) for i in range(WORKERS)]
    products, warm = start("right_products"), start("time_formats")
    chosen = "what_follows or every_cut or same_bits or lose_nothing"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen]
    command.append("backends/triton/tests/kernels/test_quant.py")
    tests = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    checked: dict[str, Any] = {}
    for process in running:
        found, _ = result(process, left() - 45)
        checked |= found
    note("check_cuts", checked)
    bad = {
        k: v
        for k, v in checked.items()
        if not isinstance(v, dict) or "failed" in v or v["error"] > 6e-3 or not v["repeats"]
    }
    print("cuts checked", len(checked), "bad", json.dumps(bad)[:1500], f"{left():.0f} s left", flush=True)
    found, text = result(products, left() - 45)
    note("right_products", found, text if found.get("failed") == "out of time" else "")
    told = json.dumps({k: v for k, v in found.items() if k != "used"})
    print("right_products", told[:2500], f"{left():.0f} s left", flush=True)
    for name, process in (("tests", tests), ("warm", warm)):
        try:
            text, _ = process.communicate(timeout=max(1.0, left() - 42))
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        if name == "tests":
            note("tests", text[-3000:], text[-1200:])
    print(f"{left():.0f} s left", flush=True)
    for name, argument in (
        ("time_cuts", "4096x28672"),
        ("time_cuts", "4096x6144"),
        ("time_codecs", ""),
        ("time_formats", ""),
        ("time_large", ""),
    ):
        if left() < 6:
            print("no time for", name, argument)
            continue
        found, text = result(start(name, argument), left() - 1)
        note(f"{name} {argument}".strip(), found, text + (str(found) if "failed" in found else ""))
    print("seconds", report["seconds"])


if __name__ == "__main__":
    main()
