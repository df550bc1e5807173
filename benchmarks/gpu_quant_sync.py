"""How fast a whole quantised model is renewed on its device: formats by GB/s, and the bits beside the definition's.

    python benchmarks/gpu_quant_sync.py          on a GPU; writes quant_sync.json into $OUT

The model is four decoder layers of Llama-3-8B (fused qkv, o, gate_up, down; 872 M weights) in bf16. Each format is
checked first: the parts of one renewed layer have the bits of the reference on the same device, codes apart that are
within 2^-20 of a border. Then the whole model is renewed five times and the best is kept: bytes read and written over
the time of the device; and the same under a CUDA graph, which leaves the host out. `copy` is what a copy of one layer's
bf16 weights reaches in the same process. Formats are made ready and checked in processes at the same time, and timed
one at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from gpu_all import PATHS, ROOT, distributions, environment

import rlkernel as rlk
from rlkernel import nn
from rlkernel_core.quant import codec

FORMATS = (
    *("mxfp4", "nvfp4", "mxfp8", "int4_g128", "fp8_channel", "int8_channel", "nf4", "hqq4", "gguf_q8_0", "gguf_q4_0"),
    *("int4_g32_asym", "fp8_block128", "fp4", "q4l", "gguf_q4_k", "gguf_q5_k", "gguf_q6_k"),
)
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LAYERS, TIMES, LIMIT_S = 4, 5, 80


def model(device: str) -> torch.nn.Module:
    """Layers of random weights."""
    layers = {
        f"{i}_{name}": torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device=device)
        for i in range(LAYERS)
        for name, (n, k) in SHAPES.items()
    }
    return torch.nn.ModuleDict(layers)


def renewed(kind: str, device: str) -> dict[str, object]:
    """One format: checked, which others may do at the same time, then timed alone."""
    with Path(os.environ.get("QUANT_SYNC_TURN", os.devnull)).open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_SH)
        return _renewed(kind, device, turn.fileno())


def _renewed(kind: str, device: str, turn: int) -> dict[str, object]:
    torch.manual_seed(0)
    policy, trainer = model(device), {name: w.detach() * 1.5 for name, w in model(device).state_dict().items()}
    nn.quantize_model(policy, nn.QuantPolicy(kind, skip=()))
    nn.requantize_(policy, trainer)
    layer: nn.QuantLinear = policy["0_o"]
    expected = codec.quantize(trainer["0_o.weight"], layer.weight.spec)
    scales_same = all(
        torch.equal(expected.parts[n].view(torch.uint8), p.view(torch.uint8))
        for n, p in layer.weight.parts.items()
        if n != "codes"
    )
    other = expected.parts["codes"].view(torch.uint8) != layer.weight.parts["codes"].view(torch.uint8)
    fcntl.flock(turn, fcntl.LOCK_UN)
    fcntl.flock(turn, fcntl.LOCK_EX)  # the GPU for itself
    reports = [nn.requantize_(policy, trainer) for _ in range(TIMES)]
    best = max(reports, key=lambda report: report.gb_per_s)
    decision = rlk.last_decision("quantize")
    graph, copy = (captured(policy, trainer), copied(trainer)) if device == "cuda" else (None, None)
    moved = best.bytes_read + best.bytes_written
    return {
        "gb_per_s_in_a_graph": graph and moved / graph / 1e9,
        "copy_gb_per_s": copy,
        "bytes": moved,
        "format": kind,
        "scales_same": scales_same,
        "bytes_of_codes_that_differ": other.float().mean().item(),
        "ms": best.seconds * 1e3,
        "gb_per_s": best.gb_per_s,
        "backend": getattr(decision, "backend", None),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
    }


def replayed(work: Callable[[], object]) -> float:
    """Seconds of a replay of it, the best of some."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        work()
    times = []
    for _ in range(TIMES + 2):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return min(times)


def captured(policy: torch.nn.Module, trainer: Mapping[str, torch.Tensor]) -> float:
    """Seconds of renewing every layer in a graph."""
    layers = dict(policy.named_children())

    def renew() -> None:
        for name, weight in trainer.items():
            layers[name.removesuffix(".weight")].update_(weight)

    return replayed(renew)


def copied(trainer: Mapping[str, torch.Tensor]) -> float:
    """GB/s, read and written, of copies of bf16 weights."""
    weights = [w for name, w in trainer.items() if name.startswith("0_")]
    targets = [torch.empty_like(w) for w in weights]

    def copy() -> None:
        for target, weight in zip(targets, weights, strict=True):
            target.copy_(weight)

    return 2e-9 * sum(w.nbytes for w in weights) / replayed(copy)


def main() -> None:
    """Every format, each in a process of its own."""
    with tempfile.TemporaryDirectory() as site:
        folders = distributions(Path(site))  # so that the backends of the clone are found as if installed
        tried(environment(Path(site), *(ROOT / p for p in PATHS), *folders.values()))


def tried(environ: dict[str, str]) -> None:
    """Try each format and write what came of it."""
    out = Path(os.environ.get("OUT", ".")) / "quant_sync.json"
    rows: list[dict[str, object]] = []
    begun = time.monotonic()
    with tempfile.NamedTemporaryFile() as turn:
        environ = {**environ, "QUANT_SYNC_TURN": turn.name}
        running = {}
        for kind in FORMATS:
            command = [sys.executable, __file__, kind]
            running[kind] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
            )
        for kind, process in running.items():
            try:
                text, errors = process.communicate(timeout=max(0.1, LIMIT_S - (time.monotonic() - begun)))
                said = text.strip().splitlines()
                failed = {"format": kind, "error": errors[-600:]}
                rows.append(json.loads(said[-1]) if process.returncode == 0 and said else failed)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                rows.append({"format": kind, "error": f"more than {LIMIT_S} s"})
            out.write_text(json.dumps(rows, indent=1) + "\n")
            shown = {
                "format",
                "gb_per_s",
                "gb_per_s_in_a_graph",
                "copy_gb_per_s",
                "ms",
                "scales_same",
                "error",
                "backend",
            }
            print({k: v for k, v in rows[-1].items() if k in shown}, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(renewed(sys.argv[1], "cuda" if torch.cuda.is_available() else "cpu")))
    else:
        main()
