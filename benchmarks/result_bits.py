"""The bits of every operator's results on one device, in a file, and a comparison of two such files.

    python benchmarks/result_bits.py --device cpu --order reference --out before.json
    python benchmarks/result_bits.py --device cuda --order triton --plugin rlkernel_triton:backend --jobs 14 \
        --out gpu.json
    TRITON_INTERPRET=1 python benchmarks/result_bits.py --small --device cpu --order triton-interpreter \
        --plugin rlkernel_triton.interpreted:backend --out interpreter.json
    python benchmarks/result_bits.py --compare before.json after.json

A change of the code that is not about arithmetic must leave every bit as it was. The table of calls (`result_calls.py`)
is fixed, inputs are drawn on the CPU from seeds and moved, and nothing but the public API is used: the same script runs
before and after a change of the code behind it. The file holds, by operator and call, the SHA-256 of every
output's and every gradient's dtype, shape and bytes, and the backend that ran; a call that is refused or fails, its
class of error. Each call is made twice in its process (`--times`): what differs between the two is listed as unstable,
and is not compared. With `--jobs` parts of the table run in processes of their own, which a broken device ends alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from result_calls import SMALL, TABLES, WHOLE, Given, Size, draw, ids, logprobs
from torch import Tensor

import rlkernel as rlk

DIFFERENTIABLE: Final = {
    "logprob": ("logits",),
    "linear_logprob": ("hidden", "weight", "bias"),
    "policy_loss": ("logprob", "entropy"),
    "linear_policy_loss": ("hidden", "weight", "bias"),
    "qmatmul": ("x", "bias", "lora", "residual"),
    "affine_suffix_scan": ("b", "a", "init"),
}
RENAMED: Final = {"reference": "torch"}  # backends that changed their names; results must not
EMPTY: Final = "no tensor"


# What a call gives, as digests.


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A nested argument with every tensor changed; one object for one tensor is not kept."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, rlk.QuantTensor):
        return dataclasses.replace(value, parts={k: change(x) for k, x in value.parts.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        held = {k: x for k, x in fields.items() if isinstance(x, Tensor)}
        return dataclasses.replace(value, **{k: change(x) for k, x in held.items()}) if held else value
    if isinstance(value, dict):
        return {k: mapped(x, change) for k, x in value.items()}
    return type(value)(mapped(x, change) for x in value) if type(value) in {list, tuple} else value


def moved(x: Tensor, device: torch.device | str, *, copy: bool = False) -> Tensor:
    """The same tensor elsewhere, with its strides and its wish for a gradient."""
    base = x.detach()
    if x.is_contiguous():
        return base.to(device, copy=copy).requires_grad_(x.requires_grad)
    whole = base.as_strided((base.untyped_storage().nbytes() // base.element_size(),), (1,), 0)
    there = whole.to(device, copy=copy).as_strided(x.shape, x.stride(), x.storage_offset())
    return there.requires_grad_(x.requires_grad)


def named(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a result under its path."""
    if isinstance(value, rlk.QuantTensor):
        yield f"{path}.about", f"{value.spec} {tuple(value.shape)} {value.dtype} {value.layout}"
        value = value.parts
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict | list | tuple):
        for key, x in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named(x, f"{path}.{key}" if path else str(key))
    elif value is not None:
        yield path or "result", value


def digest(value: Any) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes; of another leaf's text."""
    if not isinstance(value, Tensor):
        return sha256(repr(value).encode()).hexdigest()
    x = value.detach().cpu().contiguous().reshape(-1)
    data = x.view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return sha256(f"{value.dtype} {tuple(value.shape)}\n".encode() + data).hexdigest()


def digests(value: Any) -> dict[str, str]:
    """The digest of every leaf."""
    return {path: digest(leaf) for path, leaf in named(value)} or {EMPTY: digest(None)}


def called(op: str, given: Given) -> dict[str, dict[str, str]]:
    """Digests of a call without gradients."""
    with torch.no_grad():
        return {"forward": digests(getattr(rlk, op)(**given))}


def differentiated(op: str, given: Given) -> dict[str, dict[str, str]]:
    """Digests of a call with gradients wanted, and of the gradients, each output weighed by noise of its own."""
    leaves: dict[str, Tensor] = {}

    def leaf(name: str) -> Callable[[Tensor], Tensor]:
        def change(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            made = leaves[f"{name}{len(leaves)}"] = moved(x.detach(), x.device, copy=True).requires_grad_()
            return made

        return change

    wanted = {name: mapped(given[name], leaf(name)) for name in DIFFERENTIABLE[op] if name in given}
    out = dict(named(getattr(rlk, op)(**(given | wanted))))
    used = {path: x for path, x in out.items() if isinstance(x, Tensor) and x.requires_grad}
    if not used:
        return {"with gradients": digests(out)}
    ups = [draw(*x.shape, seed=100 + i).to(x) for i, x in enumerate(used.values())]
    found = torch.autograd.grad(list(used.values()), list(leaves.values()), ups, allow_unused=True)
    return {"with gradients": digests(out), "gradients": digests(dict(zip(leaves, found, strict=True)))}


def replayed(given: Given) -> dict[str, dict[str, str]]:
    """Digests of a graph's life: calls of two sizes, and gradients where it has them."""
    device = given["example"][0].device
    torch.manual_seed(0)
    graphed = rlk.capture(**given)
    found: dict[str, Any] = {}
    for i, x in enumerate((draw(4, 3, seed=1), draw(4, 3, seed=2), draw(3, 3, seed=3))):
        x = x.to(device).requires_grad_(bool(given.get("autograd")))  # noqa: PLW2901
        y = graphed(x)
        found[f"call {i}"] = y.detach().clone()
        if y.requires_grad:
            y.backward(draw(*y.shape, seed=4).to(y))
            found[f"gradient {i}"] = x.grad
    graphed.close()
    return {"forward": digests(found)}


def filled(given: Given) -> dict[str, dict[str, str]]:
    """Digests of a buffer's life: two groups go in, one batch comes out."""
    buffer = rlk.rollout_buffer(**given)
    slots = buffer.reserve(9, [0, 0, 1, 1] if given.get("group_size") != 1 else [0, 1, 2, 3])
    device = slots.ids.device
    for i in range(3):
        buffer.append(
            slots,
            {"token": ids(4, below=99, seed=i).to(device, torch.int32), "logprob": logprobs(4, seed=i).to(device)},
            alive=(torch.arange(4) != i).to(device),
        )
    rewards = draw(4, *((given["rewards"],) if "rewards" in given else ()))
    buffer.finish(slots, rewards.to(device))
    batch = buffer.pop(groups=2)
    found: dict[str, Any] = {"popped": batch is not None}
    if batch is not None:
        fields = ("cu_seqlens", "group", "group_ids", "reward", "valid", "weight", "status", "version")
        found |= {name: batch[name].clone() for name in ("token", "logprob")}
        found |= {name: getattr(batch, name).clone() for name in fields}
        batch.release()
    stats = buffer.stats
    found |= {name: getattr(stats, name) for name in ("appended", "popped", "stored", "reserved_seqs", "popped_seqs")}
    return {"forward": digests(found)}


def ways(op: str) -> list[Callable[[Given], dict[str, dict[str, str]]]]:
    """How an operator is called."""
    lives: dict[str, Callable[[Given], dict[str, dict[str, str]]]] = {"capture": replayed, "rollout_buffer": filled}
    if op in lives:
        return [lives[op]]
    both = [lambda given: called(op, given)]
    return [*both, lambda given: differentiated(op, given)] if op in DIFFERENTIABLE else both


def seen(op: str, make: Callable[[], Given], device: str, times: int = 2) -> dict[str, Any]:
    """All there is to say of one call: made so many times, with and without gradients."""
    record: dict[str, Any] = {}
    for way in ways(op):
        try:
            first, *others = [way(_on(make(), op, device)) for _ in range(times)]
        except Exception as error:
            part = "error" if not record else "error with gradients"
            record |= {part: type(error).__name__, f"{part} says": str(error)[:300]}
            continue
        record |= first
        unstable = [
            f"{part} {path}"
            for part in first
            for path, found in first[part].items()
            if any(other[part].get(path) != found for other in others)
        ]
        if unstable:
            record["unstable"] = record.get("unstable", []) + unstable
    decision = rlk.last_decision(op)
    if "error" not in record and decision is not None:
        record["backend"] = str(decision.backend)
    return record


def _on(given: Given, op: str, device: str) -> Given:
    if op == "rollout_buffer":
        return {**given, "device": device}
    return {k: mapped(x, lambda t: moved(t, device)) for k, x in given.items()}


# Runs.


def listed(size: Size, operators: list[str]) -> list[tuple[str, str]]:
    """Every call of the table by operator and name."""
    return [(op, name) for op in operators for name in TABLES[op](size)]


def run(pairs: list[tuple[str, str]], asked: argparse.Namespace, until: float) -> dict[str, Any]:
    """Records of some calls in this process; written down as each operator ends."""
    size = SMALL if asked.small else WHOLE
    found: dict[str, Any] = {}
    if asked.device == "cpu":
        torch.set_num_threads(1)  # sums must not depend on how many cores are free
    with ExitStack() as scope:
        warnings.simplefilter("ignore")
        for plugin in asked.plugin:
            module, _, name = plugin.partition(":")
            scope.enter_context(rlk.registered(getattr(import_module(module), name)))
        scope.enter_context(rlk.use(*asked.order.split(","), fallback=asked.fallback))
        for i, (op, name) in enumerate(pairs):
            if time.monotonic() > until:
                break
            start = time.perf_counter()
            record = seen(op, TABLES[op](size)[name], asked.device, asked.times)
            found.setdefault(op, {})[name] = record | {"seconds": round(time.perf_counter() - start, 3)}
            if asked.part or i + 1 == len(pairs) or pairs[i + 1][0] != op:
                write(asked.out, asked, found)
    return found


def apart(pairs: list[tuple[str, str]], asked: argparse.Namespace, until: float) -> dict[str, Any]:
    """The same with parts of the table in processes of their own; what a process did not come to has crashed it."""
    size = max(4, min(16, len(pairs) // (2 * asked.jobs)))
    parts: list[list[int]] = []
    for i, (op, _) in enumerate(pairs):
        if not parts or len(parts[-1]) == size or pairs[parts[-1][0]][0] != op:
            parts.append([])
        parts[-1].append(i)
    found: dict[str, Any] = {}

    def one(part: list[int], folder: Path) -> None:
        left = until - time.monotonic()
        if left <= 0:
            return
        out = folder / f"{part[0]}.json"
        command = [sys.executable, __file__, "--device", asked.device, "--order", asked.order, "--out", str(out)]
        command += [
            "--times",
            str(asked.times),
            "--fallback",
            asked.fallback,
            "--within",
            str(left),
            "--part",
            f"{part[0]}:{part[-1] + 1}",
        ]
        command += [word for plugin in asked.plugin for word in ("--plugin", plugin)]
        command += ["--operators", asked.operators] if asked.operators else []
        command += ["--small"] if asked.small else []
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left + 60, check=False)
            ended = f"exit {done.returncode}: {done.stderr[-300:]}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            ended = "out of time"
        got = json.loads(out.read_text(encoding="utf-8"))["operators"] if out.exists() else {}
        for op, name in (pairs[i] for i in part):
            record = got.get(op, {}).get(name)
            if record is None and ended:
                record = {"error": "ended", "error says": ended}
            if record is not None:
                found.setdefault(op, {})[name] = record
        write(asked.out, asked, found)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(lambda part: one(part, Path(folder)), parts))
    return found


def write(file: Path, asked: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """The file so far; whole at any time."""
    device = torch.cuda.get_device_name(asked.device) if asked.device.startswith("cuda") else "cpu"
    about = {
        "device": asked.device,
        "device_name": device,
        "order": asked.order,
        "small": asked.small,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "interpreted": os.environ.get("TRITON_INTERPRET", ""),
    }
    content = {"about": about, "operators": {op: dict(sorted(found[op].items())) for op in TABLES if op in found}}
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}.{id(content)}.tmp")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(file)


# Two files.


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """A line for whatever differs between two files, calls that one of them lacks included."""
    before, after = old["operators"], new["operators"]
    for op in dict.fromkeys((*before, *after)):
        names = dict.fromkeys((*before.get(op, {}), *after.get(op, {})))
        for name in names:
            was, now = before.get(op, {}).get(name), after.get(op, {}).get(name)
            if was is None or now is None:
                yield f"{op}, {name}: only in the {'second' if was is None else 'first'}"
            else:
                yield from (f"{op}, {name}: {line}" for line in _between(was, now))


def _between(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for part in ("error", "error with gradients"):
        if was.get(part) != now.get(part):
            said = "; ".join(str(x[f"{part} says"]) for x in (was, now) if f"{part} says" in x)
            yield f"{part} {was.get(part)} -> {now.get(part)} ({said})"
    a, b = (RENAMED.get(x.get("backend"), x.get("backend")) for x in (was, now))
    if a != b:
        yield f"backend {a} -> {b}"
    unstable = {*was.get("unstable", ()), *now.get("unstable", ())}
    for part in ("forward", "with gradients", "gradients"):
        if part in was and part in now:
            for path in dict.fromkeys((*was[part], *now[part])):
                one, other = was[part].get(path), now[part].get(path)
                if one != other and f"{part} {path}" not in unstable:
                    verb = "differs" if one and other else "is gone" if one else "is new"
                    yield f"{part}: {path} {verb}"


def compared(old: Path, new: Path) -> int:
    """Print what differs; 1 if anything does."""
    files = [json.loads(file.read_text(encoding="utf-8")) for file in (old, new)]
    if files[0]["about"]["device_name"] != files[1]["about"]["device_name"]:
        print(f"devices differ: {files[0]['about']['device_name']}, {files[1]['about']['device_name']}")
    lines = list(differences(*files))
    print("\n".join(lines))
    counts = [sum(len(calls) for calls in file["operators"].values()) for file in files]
    shaky = sum(
        "unstable" in record for file in files for calls in file["operators"].values() for record in calls.values()
    )
    print(f"{counts[0]} and {counts[1]} calls, {len(lines)} differences; {shaky} calls with unstable outputs, left out")
    return int(bool(lines))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--order", default="reference", help="backends with commas, best first")
    parser.add_argument("--fallback", default="error", help="as of rlkernel.use")
    parser.add_argument("--plugin", action="append", default=[], help="module:attribute of a manifest to register")
    parser.add_argument("--operators", help="with commas; all unless given")
    parser.add_argument("--small", action="store_true", help="tiny sizes and few formats, for interpreters")
    parser.add_argument("--times", type=int, default=2, help="how often each call is made; 1 finds nothing unstable")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once; 1 stays in this one")
    parser.add_argument("--within", type=float, default=3600.0, help="seconds; what comes later is left out")
    parser.add_argument("--part", help="first:last of the calls, as --jobs gives its processes")
    parser.add_argument("--out", type=Path, default=Path("bits.json"))
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    return parser.parse_args()


def main() -> int:
    """Run the table, or compare two files."""
    asked = options()
    if asked.compare:
        return compared(*asked.compare)
    until = time.monotonic() + asked.within
    operators = asked.operators.split(",") if asked.operators else list(TABLES)
    pairs = listed(SMALL if asked.small else WHOLE, operators)
    if asked.part:
        first, last = map(int, asked.part.split(":"))
        pairs = pairs[first:last]
    start = time.monotonic()
    found = (apart if asked.jobs > 1 else run)(pairs, asked, until)
    if asked.part:
        return 0
    done = [record for calls in found.values() for record in calls.values()]
    errors = sum("error" in record for record in done)
    shaky = sum("unstable" in record for record in done)
    print(
        f"{len(done)} of {len(pairs)} calls in {time.monotonic() - start:.0f} s, {errors} refused or failed, "
        f"{shaky} with unstable outputs: {asked.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
