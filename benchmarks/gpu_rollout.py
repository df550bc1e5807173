"""The rollout suite of `rlkernel bench` on one GPU, with FlashInfer where it was carried along.

    python benchmarks/gpu_rollout.py --out $OUT [--seconds 80] [--only small,large,compiled]

Parts run in processes of their own and leave what they measured when they are ended: `small` (0.6B shapes), `large` (8B
shapes), `compiled` (torch.compile's graphs around the chain, whose compilation takes most of the time). FlashInfer is
looked for in `.fi/fi_carry.tar.xz`, a folder of it with prebuilt modules and the shell lines that set it up.

Predictions, written before the first run (H200; tokens a second of our graph; B = 64 unless said): 0.6B bf16 90 000,
int4_g128 110 000; 8B bf16 14 000, int4_g128 26 000; 0.6B bf16 at B = 256 280 000; 0.6B int4_g64 at B = 4 9 000.
Launched one by one: 0.6B 12 000, 8B 9 000. FlashInfer's draw in the same graph costs 4 % at 0.6B and 1 % at 8B.
torch.compile's graphs are within 10 % of ours, ahead for bf16, where it fuses norms and residuals.
Found: 48 000, 47 000; 12 300, 16 800; 159 000; 4 000. Launched 14 000 and 10 000. FlashInfer's draw 4 % and 1 %.
Small shapes are bound by small kernels, which a graph does not remove (benchmarks/notes/rollout.md). torch.compile's
graphs 29 800 at 0.6B and 4 950 at 8B in bf16, where they copy weights that are no parameters; told to leave them in
place, 29 800 and 13 500 (predicted 47 000 and 12 000); int4 at 0.6B 26 900.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]
from gpu_all import PATHS, distributions, environment  # noqa: E402  the script beside this one

BESIDE = "torch,flashinfer's draw"
# part -> (texts that its workloads hold, peers)
PARTS: dict[str, tuple[tuple[str, ...], str]] = {
    "small": (("x28x1024x",), BESIDE),
    "large": (("x36x4096x",), BESIDE),
    "compiled": (("64x32x28x1024x",), "reduce-overhead"),
    "compiled large": (("x36x4096x4096x1024x12288x151936 bfloat16 decode weights=bfloat16",), "reduce-overhead"),
    "in place": (
        (
            "64x32x28x1024x2048x1024x3072x151936 bfloat16 decode weights=bfloat16",
            "x36x4096x4096x1024x12288x151936 bfloat16 decode weights=bfloat16",
        ),
        "reduce-overhead in place",
    ),
}


def main() -> int:
    """Each part, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")))
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="full")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + asked.seconds
    summary: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folders = distributions(Path(temporary))
        for name in ("reference", "template"):
            folders.pop(name, None)
        environ = environment(Path(temporary), *(ROOT / p for p in PATHS), *folders.values())
        for part in asked.only.split(","):
            texts, peers = PARTS[part]
            folder = asked.out / f"rollout-{part.replace(' ', '-')}"
            command = [sys.executable, "-m", "rlkernel", "bench", "run", "--suite", "rollout", "--size", asked.size]
            command += ["--device", asked.device, "--peers", peers, "--seconds", "0.3", "--out", str(folder)]
            command += ["--backend", "triton" if asked.device.startswith("cuda") else "reference"]
            command += [word for text in texts if asked.size == "full" for word in ("--work", text)]
            summary[part] = measured(with_flashinfer(command), environ, folder, until - time.monotonic())
            (asked.out / "gpu_rollout.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
            print(f"== {part}: {json.dumps(summary[part])[:3000]}", flush=True)
    return 0


def measured(command: list[str], environ: dict[str, str], folder: Path, limit: float) -> dict[str, Any]:
    """Run one part; tokens a second of every candidate of every workload that it finished."""
    began = time.monotonic()
    if limit < 10:
        return {"rc": "no time left"}
    log = folder.with_suffix(".log")
    with log.open("wb") as said:
        try:
            rc: Any = subprocess.run(
                command, cwd=ROOT, env=environ, stdout=said, stderr=subprocess.STDOUT, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            rc = "out of time"
    found: dict[str, Any] = {"rc": rc, "seconds": round(time.monotonic() - began, 1)}
    results = folder / "results.json"
    if not results.exists():
        return found | {"tail": log.read_text(encoding="utf-8", errors="replace")[-1500:]}
    for result in json.loads(results.read_text(encoding="utf-8"))["results"]:
        found[result["work"]] = {
            c["name"]: c.get("tokens_s") or f"{c['status']}: {c['message']}"[:300] for c in result["candidates"]
        } or result.get("message")
    return found


def with_flashinfer(command: list[str]) -> list[str]:
    """The command with FlashInfer on its path, where it was carried along."""
    if not (ROOT / ".fi" / "fi_carry.tar.xz").exists():
        return command
    place = Path(tempfile.gettempdir()) / "flashinfer"
    unpack = f"mkdir -p {place} && ([ -d {place}/fi_carry ] || tar xf .fi/fi_carry.tar.xz -C {place})"
    return ["bash", "-c", f'{unpack} && . .fi/fi_env.sh {place}/fi_carry && exec "$@"', "part", *command]


if __name__ == "__main__":
    sys.exit(main())
