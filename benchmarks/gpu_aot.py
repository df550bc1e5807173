"""Bundles on a GPU: conformance of their operators, and how long a first call takes with one and without.

    python benchmarks/gpu_aot.py --out $OUT/first --limit 90 --only first
    python benchmarks/gpu_aot.py --out $OUT/aot --limit 400 --only grow,conformance --share 0.5
    python benchmarks/gpu_aot.py --out $OUT/aot --only grow --ops policy_loss --bundle sm_90.zip --bundle sm_87.zip

`first`: the first call of every operator from a bundle, and compiled on the spot. `board`: the same calls on as few
multiprocessors and as little memory as a board has, and clauses of two operators there. `conformance`: every
operator against its clauses, from cubins and from PTX, on all GPUs that are there; what a bundle lacked is built, and
clauses that met it are tried again. `grow`: the same, and what a bundle lacks is compiled when it is asked for;
`conformance` after it runs from what grew. `wheel`: the bundle that rlkernel-jetson carries, and what its kernels need.

Bundles named by --bundle, which may have been compiled on another machine, stand for those that `first`, `board` and
`grow` compile before they begin. Of first calls what they lack is still recorded and compiled here: targets that none
has, and kernels that have changed since.

`aot` runs cubins of this GPU, `orin-ptx` the sm_87 PTX through the driver's compiler: sm_87 code on this GPU. Nothing
here is measured on a Jetson. What is found is written under --out as it is found.

One file over 400 lines, since its sections share bundles and one machine's cores; what runs in processes of its own
stands in aot_*.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = (".", "registry", "conformance", "backends/triton", "backends/cuda", "backends/jetson", "benchmarks")
PATHS = [str(ROOT / p) for p in PARTS]
MANIFESTS = {"aot": "rlkernel_triton.aot.backend:backend", "orin-ptx": "rlkernel_jetson.elsewhere:backend"}
# Operators, and for how many processes each is work beside the others.
OPS = {
    "sample": 6, "qmatmul": 6, "policy_loss": 6, "advantage": 3, "linear_logprob": 3, "logprob": 3, "quantize": 2,
    "dequantize": 2, "prepack": 1,
}  # fmt: skip
WEIGHTS = {"orin-ptx": 2}  # the driver compiles what it loads
CODE_OF = {"orin-ptx": "sm_87"}  # other backends run this GPU's own
CORES = len(os.sched_getaffinity(0))
LAST = 12.0  # seconds for a run of the suite to write its report when its time is over
AGAIN = 40.0  # seconds that are left to try clauses again
BUILD = """
import json, sys
from pathlib import Path
from rlkernel_triton.aot import tables
from rlkernel_triton.aot.command import build
if __name__ == "__main__":
    ops, out, table, jobs, *targets = sys.argv[1:]
    if table:  # of some targets, it may be
        targets = [t for t in targets if tables.chosen(tables.read(Path(table)), t)]
    found = build(targets, ops.split(",") if ops else [], out=out, jobs=int(jobs), configurations=table or None,
                  keep_going=True)
    print(json.dumps(found))
"""


def child(command: list[str], limit: float, environ: dict[str, str], log: Path) -> tuple[int | str, str]:
    """Exit status and standard output of a process that is ended after `limit` seconds."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, cwd=ROOT, env=environ, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=max(1.0, limit))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return "out of time", process.communicate()[0] or ""
    return process.returncode, said


class Run:
    """Folders, environment and clock of one call."""

    def __init__(self, asked: argparse.Namespace, work: Path) -> None:
        self.out, self.work, self.ops, self.profile = asked.out, work, asked.ops, asked.profile
        self.share, self.tables, self.then, self.limit = asked.share, asked.table, asked.then, asked.limit
        self.bundles, self.jobs = asked.bundle, asked.jobs
        self.pairs = [(backend, op) for op in self.ops for backend in asked.backends]
        self.until = time.monotonic() + asked.limit - 3
        inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self.environ = {
            **kept,
            "PYTHONPATH": os.pathsep.join([*PATHS, *inherited]),
            "TRITON_CACHE_DIR": str(work / "triton"),
            # The driver keeps what it compiled from PTX, for all processes.
            "CUDA_CACHE_PATH": str(work / "nv"),
            "CUDA_CACHE_MAXSIZE": str(4 << 30),
            "OMP_NUM_THREADS": "2",  # of many processes
        }
        self.used: dict[str, Any] = {}  # name of a bundle -> how it was built
        self.lock = Lock()
        self.target, gpus = here()
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self.visible = named.split(",") if named else [str(i) for i in range(gpus)]

    @property
    def left(self) -> float:
        """Seconds until everything has to be done."""
        return self.until - time.monotonic()

    def save(self, name: str, content: Any) -> None:
        """Write a section's JSON."""
        (self.out / f"{name}.json").write_text(json.dumps(content, indent=1))

    def home(self, name: str) -> Path:
        """Where the bundles of a name lie."""
        return self.work / "data" / name / "rlkernel" / "bundles"

    def with_bundle(self, name: str, of: str = "") -> dict[str, str]:
        """The environment of a process that finds the bundles of a name; the outcome of a self-test is kept by `of`."""
        homes = {
            "XDG_DATA_HOME": str(self.work / "data" / name),
            "XDG_CACHE_HOME": str(self.work / "cache" / name / of),
        }
        return {**self.environ, **homes}

    def build(
        self, name: str, targets: list[str], ops: str = "", table: Path | None = None, file: str = "here",
        share: float = 1.0,
    ) -> Path:  # fmt: skip
        """A bundle, compiled on all cores in a share of the time that is left; where it lies."""
        start, script = time.monotonic(), self.work / "build.py"
        script.write_text(BUILD)  # a file, as the processes that compile import it
        out = self.home(name) / f"{file}.zip"
        command = [sys.executable, str(script), ops, str(out), str(table or ""), str(CORES), *targets]
        log = self.out / f"build-{name}-{file}.log"
        status, text = child(command, self.left * share, self.environ, log)
        how: dict[str, Any] = {"status": status, "seconds": time.monotonic() - start}
        if status == 0:
            found = json.loads(text.splitlines()[-1])
            how |= {k: found[k] for k in ("builds", "bytes", "compiler", "kernels")}
            how |= {"failed": len(found["failed"]), "why": found["failed"][:3]}
        else:
            how["log"] = log.read_text(errors="replace")[-1500:]
        self.used[f"{name} {file}"] = how
        self.save("bundles", self.used)
        print(f"bundle {name} {file}: { {k: v for k, v in how.items() if k != 'kernels'} }"[:900], flush=True)
        return out


def here() -> tuple[str, int]:
    """The target of this GPU, and how many there are."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}", torch.cuda.device_count()


def calls(run: Run, module: str, name: str, environ: dict[str, str], *more: str) -> dict[str, Any]:
    """What `aot_first_calls` says over the bundle of first calls."""
    log = run.out / f"{name.replace(' ', '-').replace(',', '')}.log"
    script = str(ROOT / "benchmarks" / "aot_first_calls.py")
    status, text = child([sys.executable, script, module, ",".join(run.ops), "cuda", *more], run.left, environ, log)
    if status != 0:
        found = {"status": status, "log": log.read_text(errors="replace")[-2500:]}
        print(f"{name}: {status} {found['log'][-900:]}", flush=True)
        return found
    found = json.loads(text.splitlines()[-1])
    by = {op: round(s, 3) for op, s in found["by"].items()}
    rest = {k: v for k, v in found.items() if k not in {"seconds", "by", "results", "device"}}
    print(f"{name}: {found['seconds']:.3f} s {by} {rest}", flush=True)
    return found


def close(a: dict[str, Any], b: dict[str, Any]) -> dict[str, float]:
    """Operator -> the largest relative difference of two runs' sums."""
    a, b = a.get("results", {}), b.get("results", {})
    return {
        op: max((abs(x - y) / max(abs(y), 1e-6) for x, y in zip(a[op], b[op], strict=True)), default=0.0)
        for op in a
        if op in b
    }


def source_of(kernel: str) -> str:
    """Hash of a kernel as it is in this tree; empty where there is none any more."""
    from rlkernel_triton.aot.sources import digest, plain

    module, _, name = kernel.partition(":")
    function = plain(getattr(import_module(module), name, None)) if find_spec(module) else None
    return digest(function) if function else ""


def given(run: Run) -> tuple[set[str], set[str]]:
    """Lay the bundles that were named where those of first calls are looked for; their targets, and what is of old.

    What is of old: kernels that have changed since, in every bundle that has them.
    """
    from rlkernel_triton.aot.bundle import Bundle

    targets: set[str] = set()
    changed: set[str] = set()
    current: set[str] = set()
    home = run.home("first")
    home.mkdir(parents=True, exist_ok=True)
    for i, path in enumerate(run.bundles):
        place = home / f"given{i}.zip"
        if not place.exists():
            place.symlink_to(path.resolve())
        bundle = Bundle(place)
        kernels = {c.build.kernel: c.source for c in bundle.codes}
        old = {kernel for kernel, source in kernels.items() if source != source_of(kernel)}
        how = {"of": path.name, "builds": len(bundle.codes), "compiler": bundle.compiler, "changed since": sorted(old)}
        run.used[f"first {place.stem}"] = how
        targets |= set(bundle.targets)
        changed |= old
        current |= set(kernels) - old
    run.save("bundles", run.used)
    return targets, changed - current


def ready(run: Run, targets: set[str]) -> None:
    """See to it that there are bundles of the first calls: those that were named, and what they lack, compiled here.

    They lack targets that none of them has, and kernels that have changed since.
    """
    there, changed = given(run)
    table = run.work / "first.jsonl"
    if table.exists() or (targets <= there and not changed):
        return

    def record(target: str) -> list[str]:
        file = run.work / f"first-{target}.jsonl"
        file.touch()
        environ = {**run.environ, "AOT_RECORDING": f"{file}:{target}"}
        script = str(ROOT / "benchmarks" / "aot_first_calls.py")
        command = [sys.executable, script, "rlkernel_triton.aot.recording", ",".join(run.ops), "cpu"]
        child(command, run.left, environ, run.out / f"record-first-{target}.log")
        lines = file.read_text().splitlines(keepends=True)
        return [line for line in lines if target not in there or json.loads(line)["kernel"] in changed]

    wanted = sorted(targets)
    with ThreadPoolExecutor(2) as pool:
        table.write_text("".join(line for lines in pool.map(record, wanted) for line in lines))
    if table.stat().st_size:
        run.build("first", wanted, table=table)


def first(run: Run) -> None:
    """First calls: from a bundle, compiled on the spot, from PTX, and again with Triton's cache on disk."""
    ready(run, {run.target, "sm_87"})
    found: dict[str, Any] = {}
    environ = {**run.with_bundle("first"), "TRITON_CACHE_DIR": str(run.work / "cold")}
    ways = {"bundle": "rlkernel_triton.aot.backend", "jit": "jit", "bundle, sm_87 PTX": "rlkernel_jetson.elsewhere"}
    ways |= {"bundle again": "rlkernel_triton.aot.backend", "jit, cached on disk": "jit"}
    for name, module in ways.items():
        # A first load of PTX is measured without what the driver kept.
        own = {**environ, "CUDA_CACHE_DISABLE": "1"} if "PTX" in name else environ
        found[name] = calls(run, module, f"first calls {name}", own)
        found[name]["apart"] = close(found[name], found["bundle"])
        run.save("first", found)
    print(f"apart from the bundle's: { {name: of['apart'] for name, of in found.items()} }", flush=True)
    if all("seconds" in found[way] for way in ("jit", "bundle")):
        print(f"jit / bundle: {found['jit']['seconds'] / found['bundle']['seconds']:.1f}", flush=True)


def board(run: Run) -> None:
    """The sm_87 PTX on as many multiprocessors and as much memory as an Orin of 8 GB has, and on the whole GPU."""
    ready(run, {"sm_87"})
    ways = {"board whole": (), "board 8 multiprocessors, 5 GiB": ("confined",)}
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(
            lambda way: calls(run, "rlkernel_jetson.elsewhere", way, run.with_bundle("first"), *ways[way]), ways
        )
        whole, few = made
    same = "results" in few and few["results"] == whole.get("results")
    run.save("board", {"few": few, "whole": whole, "same bits": same, "apart": close(few, whole)})
    print(f"the same bits: {same}, apart {close(few, whole)}", flush=True)

    def act(op: str) -> bool:
        return attacked(
            run, "orin-small", op, "quick", CORES // 2, 0, bundle="first", manifest="aot_board:backend",
            clauses=small(op),
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(act, ("logprob", "advantage")))


def small(op: str) -> list[str]:
    """Clauses of an operator that ask for no more memory than a board has."""
    from rlkernel_conformance.leftovers import attacks_with_leftovers

    return [clause for clause, attack in attacks_with_leftovers(op).items() if not attack.memory]


def processes(pairs: list[tuple[str, str]], named: dict[str, int], cores: int) -> list[int]:
    """How many processes each (backend, op) has: as many as were named, or a share of the cores that those leave."""
    weights = [OPS[op] * WEIGHTS.get(backend, 1) for backend, op in pairs]
    names = [f"{op}-{backend}" for backend, op in pairs]
    left = cores - sum(named.get(name, 0) for name in names)
    shared = sum(w for w, name in zip(weights, names, strict=True) if name not in named)
    return [named.get(n, max(1, w * left // max(shared, 1))) for w, n in zip(weights, names, strict=True)]


def lanes(run: Run, act: Callable[[str, str, int, int], Any], pairs: list[tuple[str, str]]) -> list[Any]:
    """`act(backend, op, processes, GPU)` of all pairs at once, on all cores and GPUs, each with its share."""
    jobs = processes(pairs, run.jobs, CORES)

    def one(at: int) -> Any:
        return act(*pairs[at], jobs[at], at % len(run.visible))

    with ThreadPoolExecutor(len(pairs)) as pool:
        return list(pool.map(one, range(len(pairs))))


def grow(run: Run) -> None:
    """Every operator against its clauses; a build that the bundle of a table lacks is compiled when it is asked for."""
    ready(run, {CODE_OF.get(backend, run.target) for backend, _ in run.pairs})
    for i, table in enumerate(run.tables):
        share = 1 - 0.5 * run.limit / max(run.left, 1.0)  # half of all time is the clauses'
        if share * run.left > AGAIN:
            run.build("first", [run.target, "sm_87"], table=table, file=f"table{i}", share=share)
    summary: dict[str, Any] = {}

    def lane(backend: str, op: str, jobs: int, gpu: int) -> None:
        name = f"{op}-{backend}"
        file = run.work / "grown" / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.touch()
        environ = run.with_bundle("first", name)
        environ |= {"AOT_MISSING": str(file), "AOT_CODE": "ptx" if backend == "orin-ptx" else "cubins"}
        environ |= {"CUDA_VISIBLE_DEVICES": run.visible[gpu]}
        command = suite(backend, "aot_growing:backend", op, run.profile, jobs)
        command += ["--within", f"{max(1.0, run.left * run.share - LAST):.0f}"]
        command += ["--report", str(run.out / "conformance" / run.profile / backend / op)]
        start = time.monotonic()
        status, text = child(command, run.left, environ, run.out / f"grow-{name}.log")
        lines = sorted(set(file.read_text().splitlines()))
        (run.out / f"grown-{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        kernels = Counter(json.loads(line)["kernel"] for line in lines)
        report = run.out / "conformance" / run.profile / backend / op / "report.json"
        counts = json.loads(report.read_text())["summary"] if report.exists() else {}
        found = {"status": status, "seconds": time.monotonic() - start, "summary": counts, "builds": kernels}
        with run.lock:
            summary[name] = {**found, "end": text[-6000:]}
            run.save("grown", summary)
            whole = merged(run, backend, run.profile)
            if whole is not None:
                run.save(f"conformance-{backend}-{run.profile}", whole)
        compiled = sum(kernels.values())
        print(
            f"grown {name:24} {status!s:5} {found['seconds']:5.1f} s, {compiled} compiled meanwhile {counts}",
            flush=True,
        )

    lanes(run, lane, run.pairs)


def suite(backend: str, manifest: str, op: str, profile: str, jobs: int) -> list[str]:
    """The command that holds an operator of a backend against its clauses."""
    command = [sys.executable, "-m", "rlkernel", "conformance", "run", backend, "--manifest", manifest, "--op", op]
    return [*command, "--profile", profile, "--device", "cuda", "--jobs", str(max(1, jobs))]


def attacked(
    run: Run, backend: str, op: str, profile: str, jobs: int, gpu: int, *, bundle: str = "all", manifest: str = "",
    clauses: Sequence[str] = (),
) -> bool:  # fmt: skip
    """Hold an operator against its clauses; whether all held."""
    folder, log = run.out / "conformance" / profile / backend / op, run.out / f"{backend}-{op}.log"
    command = suite(backend, manifest or MANIFESTS[backend], op, profile, jobs)
    command += ["--within", f"{max(1.0, run.left - LAST):.0f}", "--report", str(folder)]
    command += [word for clause in clauses for word in ("--clause", clause)]
    lacking = run.work / "missing" / f"{backend}-{op}.jsonl"
    lacking.parent.mkdir(exist_ok=True)
    lacking.touch()
    environ = run.with_bundle(bundle, f"{backend}-{op}")
    environ |= {"CUDA_VISIBLE_DEVICES": run.visible[gpu], "AOT_MISSING": str(lacking)}
    start = time.monotonic()
    status, text = child(command, run.left, environ, log)
    report = folder / "report.json"
    counts = json.loads(report.read_text())["summary"] if report.exists() else {}
    missing = sorted(set(lacking.read_text().splitlines()))
    (run.out / f"missing-{backend}-{op}.jsonl").write_text("".join(f"{line}\n" for line in missing))
    seconds = time.monotonic() - start
    print(
        f"{backend:10} {op:15} {profile:9} {status!s:12} {seconds:5.1f} s lacking {len(missing)} {counts}", flush=True
    )
    of = {"status": status, "seconds": seconds, "profile": profile, "summary": counts, "lacking": len(missing)}
    with run.lock:
        file = run.out / "conformance.json"
        told = json.loads(file.read_text()) if file.exists() else {}
        run.save("conformance", {**told, f"{backend} {op}": {**of, "end": text[-6000:]}})
        whole = merged(run, backend, profile)
        if whole is not None:
            run.save(f"conformance-{backend}-{profile}", whole)
    return status == 0


def merged(run: Run, backend: str, profile: str) -> dict[str, Any] | None:
    """The reports of a backend's operators as one."""
    from gpu_all import merged_conformance

    return merged_conformance(SimpleNamespace(work=run.out), backend, profile)


def together(run: Run) -> bool:
    """A bundle of all that grew, where something did."""
    from rlkernel_triton.aot.bundle import Bundle, written

    grown = [Bundle(path) for path in sorted((run.work / "grown").glob("*/*.zip"))]
    if not grown:
        return False
    parts = [*map(Bundle, run.home("first").glob("*.zip")), *grown]
    now = {c.build.kernel: c.source for part in grown for c in part.codes}  # a named bundle may be of older kernels
    codes = {
        (c.target, c.build): (c, part)
        for part in parts
        for c in part.codes
        if c.source == now.get(c.build.kernel, c.source)
    }
    out = run.home("all") / "here.zip"
    files = [(c, {kind: part.read(at) for kind, at in c.files.items()}) for c, part in codes.values()]
    made = written(out, files, grown[0].compiler)
    run.used["all"] = {"of what grew": len(grown), "builds": len(made.codes), "bytes": out.stat().st_size}
    run.save("bundles", run.used)
    print(f"bundle of what grew: {run.used['all']}, {run.left:.0f} s left", flush=True)
    return True


def conformance(run: Run) -> None:
    """Every operator over a bundle against its clauses: of what grew, else of the shipped table."""
    run.share, run.profile = 1.0, run.then or run.profile
    shipped = not together(run)
    if shipped:
        run.build("all", [run.target, "sm_87"], ",".join(run.ops))
    held = lanes(run, lambda *lane: attacked(run, lane[0], lane[1], run.profile, *lane[2:]), run.pairs)
    lacking = sorted({line for file in run.out.glob("missing-*.jsonl") for line in file.read_text().splitlines()})
    table = run.out / "lacking.jsonl"
    table.write_text("".join(f"{line}\n" for line in lacking))
    failed = [pair for pair, good in zip(run.pairs, held, strict=True) if not good]
    if not lacking or not failed or run.left < AGAIN:
        return
    run.build("all", [run.target, "sm_87"], table=table, file="more")
    lanes(run, lambda *lane: attacked(run, lane[0], lane[1], run.profile, *lane[2:]), failed)


def wheel(run: Run) -> None:
    """The bundle of rlkernel-jetson: its size, what its kernels need, and what of it no board would take."""
    for target in ("sm_87", "sm_110"):
        log = run.out / f"wheel-{target}.log"
        command = [sys.executable, str(ROOT / "benchmarks" / "aot_wheel.py"), target, str(CORES)]
        command += [f"{max(1.0, run.left - LAST):.0f}", str(run.work / f"wheel-{target}.zip")]
        command += [str(table) for table in run.tables[:1]]
        status, text = child(command, run.left, run.environ, log)
        found = json.loads(text.splitlines()[-1]) if status == 0 else {"status": status, "log": log.read_text()[-900:]}
        run.save(f"wheel-{target}", found)
        told = {k: v for k, v in found.items() if k not in {"worst", "core seconds by kernel", "spilled"}}
        print(f"wheel {target}: {told}"[:1500], flush=True)


def shares(text: str) -> dict[str, int]:
    """Lanes of `OP-BACKEND=PROCESSES`, with commas."""
    found = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if (
            name not in {f"{op}-{backend}" for op in OPS for backend in MANIFESTS}
            or not number.isdigit()
            or number == "0"
        ):
            raise argparse.ArgumentTypeError(f"{part!r} is not like policy_loss-orin-ptx=16 (OP-BACKEND=PROCESSES)")
        found[name] = int(number)
    return found


def some_of(names: Collection[str]) -> Callable[[str], list[str]]:
    """Reads some of some names, with commas."""

    def read(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in names]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: none of {', '.join(names)}")
        return found

    return read


def existing(text: str) -> Path:
    """A file, absolute."""
    path = Path(text).resolve()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path}")
    return path


SECTIONS = {"first": first, "board": board, "grow": grow, "conformance": conformance, "wheel": wheel}


def main() -> int:
    """Run the sections; one that fails leaves the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/aot-found")))
    parser.add_argument("--limit", type=float, default=400.0, help="seconds in all")
    parser.add_argument("--ops", type=some_of(OPS), default=list(OPS))
    parser.add_argument("--only", type=some_of(SECTIONS), default=["conformance"], help="sections, with commas")
    parser.add_argument("--share", type=float, default=1.0, help="of the time for `grow`, where more follows")
    parser.add_argument(
        "--bundle", type=existing, action="append", default=[], metavar="FILE", help="what was compiled elsewhere"
    )
    parser.add_argument(
        "--table",
        type=existing,
        action="append",
        default=[],
        metavar="FILE",
        help="what `grow` compiles before, or `wheel` of",
    )
    parser.add_argument("--backends", type=some_of(MANIFESTS), default=list(MANIFESTS), help="of grow and conformance")
    parser.add_argument(
        "--jobs", type=shares, default={}, metavar="OP-BACKEND=N,...", help="processes; others share the cores left"
    )
    parser.add_argument("--profile", default="standard")
    parser.add_argument("--then", default="", help="the profile of `conformance` after `grow`, if another")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.out = asked.out.resolve()
    sys.path[:0] = PATHS
    with tempfile.TemporaryDirectory() as temporary:
        run = Run(asked, Path(temporary))
        for name in asked.only:
            try:
                SECTIONS[name](run)
            except Exception as error:  # every section is tried
                print(f"{name}: {error!r}", flush=True)
                run.save(f"{name}-failed", {"error": repr(error)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
