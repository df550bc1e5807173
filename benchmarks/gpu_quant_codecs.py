"""Bits of quantise, dequantise, prepack and updates on one GPU against the definition's, a process a format.

    PYTHONPATH=.:registry:conformance:backends/triton:benchmarks OUT=. python benchmarks/gpu_quant_codecs.py

Random weights with inf, NaN, zeros, subnormal numbers and ties are quantised and dequantised; then every code meets
scales of every exponent. Writes $OUT/gpu_quant_codecs.json as processes end; ends within `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SPECS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((f"int4_{group}{zero}", {}) for group in ("g128", "g64", "g32", "channel") for zero in ("", "_asym")),
    ("int4_g64", {"scale_rule": "absmax/7"}),
    ("int4_g32", {"scale_dtype": "float16"}),
    ("nf4", {}),
    ("nf4", {"double_quant": True}),
    ("int8_channel", {}),
    ("int8_channel", {"scale_dtype": "float16"}),
    ("fp8_tensor", {}),
    ("fp8_channel", {}),
    ("fp8_block128", {}),
    ("fp8_block128", {"scale_rule": "absmax/max_pow2"}),
    *(("fp8_channel", {"element": e}) for e in ("e5m2", "e4m3fnuz", "e5m2fnuz")),
)
SHAPES = ((256, 1024), (7, 301))


def same(a: Any, b: Any) -> bool:
    """Equal, NaN where the other is."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def compared(index: int, device: str) -> dict[str, Any]:
    """One format: {tried, wrong}."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_core import quant as reference
    from rlkernel_triton.quant import storage

    torch.manual_seed(index)
    format_, options = SPECS[index]
    spec = reference.QuantSpec.named(format_, **options)
    wrong: list[str] = []
    tried = 0

    def parts_same(a: Any, b: Any) -> bool:
        return all(same(a.parts[n].float(), b.parts[n].float()) for n in a.parts)

    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            full = torch.randn(shape, device=device)
            full[0, 0], full[1, 3], full[2] = torch.inf, torch.nan, 0
            full[2, 1] = 1e-40
            if shape[0] > 7:
                full[20] = torch.randint(-15, 16, (shape[1],), device=device) / 2
                full[20, ::32] = 7.5
                full[33] *= 1e-38
                full[34] *= 1e37
            full = full.to(dtype)
            want, found = reference.quantize(full, spec), of_triton.quantize(full, spec)
            tried += 1
            if not parts_same(want, found):
                share = [float((want.parts[n].float() != found.parts[n].float()).float().mean()) for n in want.parts]
                wrong.append(f"quantize {shape} {dtype} {share}")
            if not same(reference.dequantize(want, dtype=dtype), of_triton.dequantize(want, dtype=dtype)):
                wrong.append(f"dequantize {shape} {dtype}")
            if storage.tiles(spec, shape) and dtype == torch.bfloat16:
                packed = of_triton.prepack(want)
                if not of_triton.prepack(packed, layout="canonical").same_bits(want):
                    wrong.append(f"prepack {shape}")
                of_triton.quantize(full * 2, spec, out=packed)
                if not parts_same(reference.quantize(full * 2, spec), of_triton.prepack(packed, layout="canonical")):
                    wrong.append(f"update {shape} {dtype}")
    # Every code with scales of every exponent.
    every = reference.quantize(torch.randn(256, 1024, device=device), spec)
    codes = every.parts["codes"].view(torch.uint8)
    codes.copy_(torch.arange(codes.numel(), device=device).view(codes.shape).to(torch.uint8))
    for name in ("scale", "absmax"):
        part = every.parts.get(name)
        if part is not None and part.is_floating_point():
            exponent = torch.linspace(-149.0, 127.0, part.numel(), device=device, dtype=torch.float64).round()
            fraction = 1 + torch.rand(part.numel(), device=device, dtype=torch.float64)
            part.copy_((fraction * exponent.exp2()).view(part.shape).to(part.dtype))
    for to in (torch.float32, torch.bfloat16, torch.float16):
        want = reference.dequantize(every, dtype=to)
        tried += 1
        if not same(want, of_triton.dequantize(every, dtype=to)):
            wrong.append(f"every code {to}")
        if storage.tiles(spec, (256, 1024)) and not same(
            want, of_triton.dequantize(of_triton.prepack(every), dtype=to)
        ):
            wrong.append(f"every code of tiles {to}")
    return {"tried": tried, "wrong": wrong}


def main() -> None:
    """Every format at once, and what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--child", type=int)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.child is not None:
        try:
            found = compared(given.child, given.device)
        except Exception:
            found = {"failed": traceback.format_exc()[-1500:]}
        print("@@" + json.dumps(found))
        return
    begun = time.monotonic()
    place = Path(os.environ.get("OUT", ".")) / "gpu_quant_codecs.json"
    report: dict[str, Any] = {}
    waiting = {}
    for i, (format_, options) in enumerate(SPECS):
        command = [sys.executable, __file__, "--child", str(i), "--device", given.device]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        waiting[f"{format_} {options or ''}".strip()] = process
    while waiting and time.monotonic() - begun < given.seconds:
        for name, process in list(waiting.items()):
            if process.poll() is None:
                continue
            text, _ = waiting.pop(name).communicate()
            last = text.strip().rpartition("\n")[2]
            report[name] = json.loads(last[2:]) if last.startswith("@@") else {"failed": text[-800:]}
            report[name]["seconds"] = round(time.monotonic() - begun, 1)
            place.write_text(json.dumps(report, indent=1) + "\n")
            print(name, json.dumps(report[name])[:400], flush=True)
        time.sleep(0.1)
    for name, process in waiting.items():
        process.kill()
        report[name] = {"failed": "out of time"}
        print(name, report[name])
    place.write_text(json.dumps(report, indent=1) + "\n")
    print("formats", len(report), "right", sum(r.get("wrong") == [] for r in report.values()))


if __name__ == "__main__":
    main()
