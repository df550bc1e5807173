"""Host memory taken over by a GPU, on a card that has memory of its own: the calls, their lifetime, what they save.

    python benchmarks/gpu_jetson_memory.py --out $OUT

What rlkernel_jetson.adopt and .mapped do on a Jetson, done over PCIe: whether the driver takes the memory, whether the
GPU sees the same bytes, whether it is given back, and what the peak is when a model is quantised from its file's pages.
It says nothing of speed on a Jetson, and nothing of its driver. Writes a file a section; one that fails
loses itself only. Needs torch and the packages of this clone.

Predictions, written before the first run (H200): registering works, read-only too; every byte equal; an address can be
registered anew once its tensors are gone; 8 layers of 4096 x 4096 in bf16 to int4_g128: 66 MiB stay; over them 40 MiB
at the peak where layers are copied to the card first, 8 to 30 MiB where they are quantised from their pages.
Found: all of it, and 32 MiB (one layer) over what stays where layers are copied, nothing where they are quantised from
their pages: Triton's quantiser takes no room of its own. benchmarks/results/h200/jetson_memory.json.

Second run, prediction: a cap of 4.9 GiB on a card of 140 is refused beyond, told with numbers, and the card is still
free. Found: so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_all import PATHS, ROOT, distributions, environment

DEVICE = "cuda:0"
LAYERS, WIDTH = 8, 4096


def adopter() -> Any:
    """What takes memory over, across the bus too, and refuses rather than copies."""
    from rlkernel_jetson.adopt import Adopter

    return Adopter(DEVICE, over_pcie=True, copy=False)


def write(path: Path, tensors: dict[str, Any]) -> None:
    """A safetensors file."""
    import torch

    names = {torch.bfloat16: "BF16", torch.float32: "F32"}
    header, at = {}, 0
    for name, t in tensors.items():
        header[name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for t in tensors.values():
            file.write(t.contiguous().view(torch.uint8).numpy().tobytes())


def properties() -> dict[str, Any]:
    """What the driver says of the card, and what the two stages of detection make of it."""
    import torch

    from rlkernel_jetson import driver
    from rlkernel_jetson.detect import detect

    torch.zeros(1, device=DEVICE)
    ask = driver.Cuda()
    names = ("INTEGRATED", "CAN_MAP_HOST_MEMORY", "HOST_REGISTER", "READ_ONLY_HOST_REGISTER", "MEMORY_POOLS")
    found = detect(Path("/"), os.environ, torch.cuda.get_device_properties(0))
    told = {name.lower(): ask.attribute(getattr(driver, name), 0) for name in names}
    return {**told, "jetson": found.jetson, "arch": found.arch, "right": not found.jetson}


def refusals() -> dict[str, Any]:
    """Without being asked to, nothing crosses the bus: the tensor is copied, and that is counted."""
    import torch

    from rlkernel_jetson.adopt import Adopter

    take, x = Adopter(DEVICE), torch.randn(1024, 1024)
    y = take(x)
    right = torch.equal(y.cpu(), x) and take.adopted == 0 and take.copied == x.nbytes
    return {"right": right, "refusals": take.refusals}


def tensors() -> dict[str, Any]:
    """The same bytes, parts of one storage, what the host writes later, and memory that is given back."""
    import torch

    take = adopter()
    x = torch.randn(2048, 1024).to(torch.bfloat16)
    before = torch.cuda.memory_allocated(DEVICE)
    there, part = take(x), take(x[5:7])
    grown = torch.cuda.memory_allocated(DEVICE) - before
    same = torch.equal(there.cpu(), x) and torch.equal(part.cpu(), x[5:7]) and there.device.type == "cuda"
    product = torch.equal(there @ there.T, x.to(DEVICE) @ x.to(DEVICE).T)
    x[5, 3] = 42.0
    later = float(part[0, 3]) == 42.0
    del there, part
    gc.collect()
    again = take(x)  # fails where the first registration still stands
    kept = take(torch.full((1 << 20,), 7.0))  # the host's own tensor is gone at once
    gc.collect()
    lives = bool((kept == 7.0).all())
    ok = same and product and later and lives and grown == 0 and torch.equal(again.cpu(), x)
    return {"right": ok, "same": same, "product": product, "later": later, "lives": lives, "allocated": grown}


def files() -> dict[str, Any]:
    """A file's pages, registered read-only; a model quantised from them beside one whose layers are copied first."""
    import torch

    from rlkernel import nn
    from rlkernel_jetson.mapped import MappedFile

    g = torch.Generator().manual_seed(0)
    state = {f"{i}.weight": (torch.randn(WIDTH, WIDTH, generator=g) / 64).to(torch.bfloat16) for i in range(LAYERS)}
    found: dict[str, Any] = {}
    models = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write(path, state)
        for name in ("pages", "copied", "pages again"):
            with torch.device("meta"):
                model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
            source = MappedFile(path, adopter()) if name != "copied" else _Loaded(state)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before, start = torch.cuda.memory_allocated(), time.perf_counter()
            nn.load_quantized(model, source, "int4_g128", place=lambda t: t.to(DEVICE))
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            stays = sum(layer.weight.nbytes for layer in model)
            over = torch.cuda.max_memory_allocated() - before - stays
            found[name] = {"seconds": round(seconds, 3), "stays_mib": stays / 2**20, "over_mib": over / 2**20}
            models[name] = model
            del source
        equal = all(a.weight.same_bits(b.weight) for a, b in zip(models["pages"], models["copied"], strict=True))
        whole = MappedFile(path, adopter())
        same = all(torch.equal(whole.load(name).cpu(), t) for name, t in state.items())
        del whole
    import rlkernel as rlk

    served = rlk.last_decision("quantize")
    return {"right": equal and same, "bits_equal": equal, "bytes_equal": same, "by": str(served.target), **found}


def capped() -> dict[str, Any]:
    """An allocation beyond the budget is refused before the driver is asked, and told as what it is."""
    import torch

    from rlkernel_core.errors import MemoryBudgetError
    from rlkernel_jetson.cap import cap, told

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "proc").mkdir()
        rows = "MemTotal: 8181760 kB\nMemFree: 300000 kB\nMemAvailable: 6348800 kB\n"  # a board of 8 GB
        (root / "proc/meminfo").write_text(rows)
        allowed = cap(DEVICE, root=root)
        held = torch.empty(allowed // 2, dtype=torch.uint8, device=DEVICE)
        try:
            with told("a second half and more", root=root):
                torch.empty(allowed // 2 + (64 << 20), dtype=torch.uint8, device=DEVICE)
            said = ""
        except MemoryBudgetError as error:
            said = str(error)
        free = torch.cuda.mem_get_info(DEVICE)[0]
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    right = "ran out of memory" in said and held.nbytes == allowed // 2 and free > allowed
    return {"right": right, "allowed_gib": allowed / 2**30, "free_gib": free / 2**30, "said": said[:300]}


class _Loaded:
    """A checkpoint whose tensors are in the host's memory."""

    def __init__(self, state: dict[str, Any]) -> None:
        from rlkernel.checkpoints.schemes import Entry

        self.state, self.config = state, dict[str, Any]()
        self.entries = {n: Entry("BF16", tuple(t.shape), t.nbytes) for n, t in state.items()}

    def load(self, name: str) -> Any:
        """One tensor."""
        return self.state[name]

    weight = load


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "properties": properties,
    "refusals": refusals,
    "tensors": tensors,
    "files": files,
    "capped": capped,
}


def one(name: str, out: Path) -> None:
    """A section in this process."""
    start = time.perf_counter()
    try:
        found = SECTIONS[name]()
    except Exception:  # a section loses itself only
        found = {"right": False, "error": traceback.format_exc(limit=4)}
    found["took_s"] = round(time.perf_counter() - start, 1)
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(name, found, flush=True)


def main() -> None:
    """Every section in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "jetson_memory")
    parser.add_argument("--only", choices=[*SECTIONS], help="one section, in this process")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only:
        one(args.only, args.out)
        return
    with tempfile.TemporaryDirectory() as site:
        folders = distributions(Path(site))  # so that the backends of the clone are found as if installed
        env = environment(Path(site), *(ROOT / p for p in PATHS), *folders.values())
        for name in SECTIONS:
            try:
                subprocess.run(
                    [sys.executable, __file__, "--only", name, "--out", args.out], check=False, env=env, timeout=15
                )
            except subprocess.TimeoutExpired:
                print(name, "ran past its time", flush=True)


if __name__ == "__main__":
    main()
