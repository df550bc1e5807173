"""Everything that a GPU has to say, in one call of at most ten minutes on a machine without a network.

    python tools/gpu_all.py --out $OUT                      # tests, conformance, benchmarks
    python tools/gpu_all.py --out $OUT --only bench --suites linear_logprob,logprob
    python tools/gpu_all.py --out /tmp/x --device cpu --size toy --only bench --suites dispatch
    python tools/gpu_all.py --out $OUT --only conformance --missing --reports triton,orin-ptx

Nothing needs to be installed but the dependencies. Distributions of the clone (rlkernel and every folder of `backends/`
with a pyproject.toml) are made visible to discovery by metadata written on the fly. Tests and conformance share the
card; the benchmarks have it alone. What runs out of time is ended and said so.

With --missing it carries out the commands of `rlkernel conformance evidence` for reports of this kind of GPU, on all
GPUs that are here, and begins with what took longest. What comes back renews a committed report:
`rlkernel conformance report conformance-NAME.json --report conformance/reports/NAME`.

Writes summary.json, log.txt, tests.json, conformance-NAME.json and bench/results.json under --out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # runs where nothing is installed

from rlkernel_core.files import write_json

if TYPE_CHECKING:
    from rlkernel_conformance.evidence import Evidence

PATHS = (".", "registry", "conformance", "benchmarks", "backends/common", "backends/torch")
NEEDED = ("torch", "numpy", "packaging", "pluggy", "pydantic", "rich", "typer", "hypothesis", "pytest")
# The most wanted first: what comes last may find no time.
SUITES = (
    "linear_logprob", "linear_policy_loss", "logprob", "advantage", "sample", "policy_loss", "capture", "qmatmul",
    "quantize", "lm_head_sample", "verify", "dispatch", "seeds", "host", "experts", "rollout", "trainers", "ranks",
    "adapters", "grouped_linear", "divergence", "linear_divergence",
)  # fmt: skip
LARGE = {"linear_logprob", "linear_policy_loss"}  # where plain torch would take most of the time
LIMIT = 240  # seconds for a clause: many compile at the same time, on a cold cache
LAST = 15.0  # seconds for a run of the suite to write its report when its time is over
CORES = len(os.sched_getaffinity(0))
JOBS = max(2, CORES - 2)  # processes that share the card: most of their time is compilation
PIECES = 3  # times its share of the processes that an operator of --missing gets: then none runs long after the others


def distributions(into: Path, *, backends: bool = True) -> dict[str, Path]:
    """Write metadata of rlkernel, and of every backend of the clone where wanted; backend -> its folder."""
    found = {}
    others = sorted((ROOT / "backends").glob("*/pyproject.toml")) if backends else []
    for file in (ROOT / "pyproject.toml", *others):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        name, version = project["name"], project["version"]
        info = into / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
        lines = [
            line for g, entries in groups.items() for line in (f"[{g}]", *(f"{k} = {v}" for k, v in entries.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        backends = project.get("entry-points", {}).get("rlkernel.backends", {})
        found |= dict.fromkeys(backends, file.parent)
    return found


def made_for(folders: dict[str, Path], device: str) -> list[str]:
    """Backends that one would install for the device; those in a folder with one that is for others are left out."""
    from rlkernel.discover import FIRST_PARTY
    from rlkernel.probe import arch_of

    kind, arch = device.partition(":")[0], arch_of(device)
    other = {folders[n] for n, ours in FIRST_PARTY.items() if n in folders and not ours.made_for(kind, arch)}
    return [n for n, folder in folders.items() if folder not in other]


@dataclass
class Session:
    """One call: where things are, how long it may take, what has happened."""

    out: Path
    work: Path
    until: float
    environ: dict[str, str]  # all backends of the clone are installed
    bare: dict[str, str]  # none is but plain torch: tests register what they test
    log: Any
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds until everything has to be done."""
        return self.until - time.monotonic()

    def run(
        self,
        name: str,
        command: list[str],
        limit: float,
        *,
        bare: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """One process with a time limit; it and what it started are ended when that is over."""
        start = time.monotonic()
        step: dict[str, Any] = {"step": name, "command": command, "limit_s": round(limit)}
        log = self.work / f"{len(self.steps)}-{abs(hash(name))}.log"
        with log.open("wb") as said:
            child = subprocess.Popen(
                command,
                stdout=said,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**(self.bare if bare else self.environ), **(variables or {})},
                start_new_session=True,
            )
            try:
                step["rc"] = child.wait(timeout=max(1.0, limit))
            except subprocess.TimeoutExpired:
                step["rc"] = "out of time"
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, 9)
                    child.wait()
        step["seconds"] = round(time.monotonic() - start, 1)
        text = log.read_text(encoding="utf-8", errors="replace")
        self.log.write(f"\n===== {name}: {step['rc']} after {step['seconds']} s\n{text[-40000:]}\n")
        self.log.flush()
        print(f"{name:44} {step['rc']!s:12} {step['seconds']:6} s", flush=True)
        self.steps.append(step)
        return step


def tests(session: Session, folders: dict[str, Path], until: float) -> list[Any]:
    """The GPU tests of plain torch and of every backend, as jobs; each returns its counts and failures."""
    targets = {"torch": ROOT / "tests" / "test_cuda.py", "bench": ROOT / "tests" / "test_bench_cuda.py"}
    # Compilation takes the time: one process a file. What runs kernels in an interpreter needs no GPU. Several backends
    # may share a folder.
    named = {folder: name for name, folder in reversed(folders.items())}
    files = [(name, file) for folder, name in named.items() for file in sorted(folder.glob("tests/**/test_*.py"))]
    targets |= {
        f"{name}-{file.stem}": file
        for name, file in files
        if file.parent.name != "emulated" and "TRITON_INTERPRET" not in file.read_text(encoding="utf-8")
    }

    def one(name: str, target: Path) -> dict[str, Any]:
        report = session.work / f"{name}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-ra", "--no-header"]
        command += ["-p", "no:cacheprovider", f"--junit-xml={report}", str(target.relative_to(ROOT))]
        step = session.run(f"tests of {name}", command, until - time.monotonic(), bare=True)
        return {"name": name, "rc": step["rc"], "seconds": step["seconds"], **junit(report)}

    return [lambda n=n, t=t: one(n, t) for n, t in targets.items()]


def junit(report: Path) -> dict[str, Any]:
    """Counts and failures of a report of pytest; nothing where it was not written."""
    if not report.exists():
        return {}
    suite = next(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314 written by our own pytest
    failed = [
        {"test": f"{case.get('classname')}::{case.get('name')}", "message": (problem.get("message") or "")[:500]}
        for case in suite.iter("testcase")
        for problem in (*case.findall("failure"), *case.findall("error"))
    ]
    return {k: int(suite.get(k) or 0) for k in ("tests", "failures", "errors", "skipped")} | {"failed": failed}


def conformance(session: Session, backends: list[str], asked: argparse.Namespace, until: float) -> list[Any]:
    """Every operator of every backend against its clauses, as jobs, each in processes of its own."""
    from rlkernel import policy
    from rlkernel_core.spec import OPERATORS

    manifests = {backend: policy.installed()[backend].manifest for backend in backends}
    claimed = {backend: {i.op.partition("@")[0] for i in m.impls} for backend, m in manifests.items() if m}
    wanted = asked.ops.split(",") if asked.ops else OPERATORS
    pairs = [(backend, op) for backend, ops in claimed.items() for op in wanted if op in ops]
    workers = str(max(1, CORES // max(1, len(pairs))))
    jobs = []
    for profile in (asked.profile or "standard").split(","):
        for backend, op in pairs:
            folder = session.work / "conformance" / f"{backend}-{profile}" / op
            command = [sys.executable, "-m", "rlkernel", "conformance", "run", backend, "--op", op]
            command += [
                "--profile",
                profile,
                "--device",
                asked.device,
                "--jobs",
                workers,
                "--limit",
                str(LIMIT),
                "--report",
                str(folder),
            ]
            name = f"conformance of {backend} {op}, {profile}"
            jobs.append(lambda c=command, n=name: attacked(session, n, c, until))
    return jobs


def renewals(session: Session, asked: argparse.Namespace, until: float) -> list[Any]:
    """What committed reports of this kind of device lack, as jobs: the commands of `rlkernel conformance evidence`."""
    from rlkernel.probe import arch_of
    from rlkernel_conformance.documents import read, write
    from rlkernel_conformance.evidence import RENEWABLE, evidence
    from rlkernel_conformance.report import architectures, only

    reports, arch = ROOT / "conformance" / "reports", str(arch_of(asked.device))
    contents = {f.parent.name: read(f) for f in sorted(reports.glob("*/report.json"))}
    here = (asked.device.partition(":")[0], [arch])
    mine = {n: c for n, c in contents.items() if (c["device"].partition(":")[0], architectures(c)) == here}
    names = asked.reports.split(",") if asked.reports else list(contents)
    # tools/simulated_reports.py renews those of simulators
    due = [e for e in evidence(reports) if e.state in RENEWABLE and "rlkernel" in shlex.split(e.command)]
    due = [e for e in due if e.report in mine and e.report in names]
    if asked.ops:
        due = [e for e in due if e.op.partition("@")[0] in asked.ops.split(",")]
    if not due:
        print(f"nothing to renew on {asked.device} ({arch}) in {', '.join(names)}: see rlkernel conformance evidence")
    if any(word.startswith("AOT_MISSING=") for e in due for word in shlex.split(e.command)):  # what compiles needs one
        build = [sys.executable, "-m", "rlkernel", "aot", "build", "--op", "whiten", "--out", str(bundle(session.work))]
        targets = dict.fromkeys(("sm_87", arch.replace("sm", "sm_")))
        session.run("a bundle", [*build, *(w for t in targets for w in ("--target", t))], until - time.monotonic())
    took = weights(due, mine.values())
    longest = sorted(due, key=lambda e: -took[e])
    in_all, gpus, limit = sum(took.values()), cards(), str(max(1.0, until - time.monotonic()))
    jobs = []
    for number, e in enumerate(longest):
        op = e.op.partition("@")[0]
        folder = session.work / "conformance" / e.report / op
        if e.op in contents[e.report]["operators"]:
            write(only(contents[e.report], [e.op]), folder)
        variables, command = renewing(e.command, folder, session)
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
        if asked.profile:
            command[command.index("--profile") + 1] = asked.profile
        processes = min(JOBS, max(1, round(PIECES * JOBS * took[e] / in_all)))
        command += ["--limit", limit, "--jobs", str(processes)]
        name = f"conformance of {e.report} {op}"
        jobs.append(lambda c=command, n=name, v=variables: attacked(session, n, c, until, v))
    return jobs


def weights(due: list[Evidence], contents: Iterable[dict[str, Any]]) -> dict[Evidence, float]:
    """Expected seconds of each: those of its report, else the most in any of these, else the median of all."""
    elsewhere: dict[str, float] = {}
    for content in contents:
        for op, found in content["operators"].items():
            elsewhere[op] = max(elsewhere.get(op, 0.0), sum(c["seconds"] for c in found["clauses"]))
    known = {e: e.seconds or elsewhere.get(e.op, 0.0) for e in due}
    usual = median([seconds for seconds in known.values() if seconds] or [1.0])
    return {e: seconds or usual for e, seconds in known.items()}


def bundle(work: Path) -> Path:
    """The first bundle's file: XDG_DATA_HOME=work/data has backends over bundles find it."""
    return work / "data" / "rlkernel" / "bundles" / "first.zip"


def renewing(command: str, folder: Path, session: Session) -> tuple[dict[str, str], list[str]]:
    """The variables and the words of a command that renews a report, which is written to a folder instead."""
    words = shlex.split(command)
    variables = dict(w.split("=", 1) for w in words[: words.index("rlkernel")])
    if "PYTHONPATH" in variables:
        variables["PYTHONPATH"] += os.pathsep + session.environ["PYTHONPATH"]
    if "AOT_MISSING" in variables:
        folder.mkdir(parents=True, exist_ok=True)
        variables |= {"AOT_MISSING": str(folder / "missing.jsonl"), "XDG_DATA_HOME": str(session.work / "data")}
    words = [sys.executable, "-m", *words[words.index("rlkernel") :]]
    words[words.index("--report") + 1] = str(folder)
    return variables, words


def cards() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    return asked.split(",") if asked else [str(i) for i in range(torch.cuda.device_count())]


def attacked(
    session: Session, name: str, command: list[str], until: float, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A run that ends by itself and says which clauses it had no time for."""
    left = until - time.monotonic()
    return session.run(name, [*command, "--within", str(max(1.0, left - LAST))], left, variables=variables)


def conformance_reports(session: Session) -> dict[str, dict[str, Any]]:
    """Name of a report -> what was found of its operators; what was not finished is not in it."""
    from rlkernel_conformance.documents import read
    from rlkernel_conformance.report import merged

    found: dict[str, list[Path]] = {}
    for file in sorted((session.work / "conformance").glob("*/*/report.json")):
        found.setdefault(file.parents[1].name, []).append(file)
    return {name: reduce(merged, map(read, files)) for name, files in found.items()}


def bench(session: Session, asked: argparse.Namespace, backends: list[str]) -> None:
    """All suites in one process, alone on the card; what takes it along is left out, and another does the rest."""
    from rlkernel_bench.results import joined, read, write

    contents: list[dict[str, Any]] = []
    for use, group in groups(asked.suites.split(",") if asked.suites else list(SUITES), backends):
        left = list(group)
        while left and session.left > 5:
            folder = session.work / "bench" / str(len(contents))
            command = [sys.executable, "-m", "rlkernel", "bench", "run", "--size", asked.size, "--out", str(folder)]
            command += ["--device", asked.device, "--backend", ",".join(use)]
            command += [word for suite in left for word in ("--suite", suite)]
            command += ["--peers", asked.peers] if asked.peers else []
            command += ["--seconds", str(asked.seconds)] if asked.seconds else []
            step = session.run(f"bench {','.join(left)}", command, session.left - 3)
            found = read(folder) if (folder / "results.json").exists() else {"results": [], "ended": ""}
            if found["results"]:
                contents.append(found)
            begun = [suite for suite in left if any(r["suite"] == suite for r in found["results"])]
            # The last suite begun was not finished, if the process or its device did not live to the end.
            finished = step["rc"] in {0, 1, "out of time"} and not found["ended"]
            left = [] if finished else [s for s in left if s not in begun][not begun :]
        if left:
            session.steps.append({"step": f"bench {','.join(left)}", "rc": "no time left", "seconds": 0})
    if contents:
        write(joined(contents), session.out / "bench")


def groups(suites: list[str], backends: list[str]) -> list[tuple[list[str], list[str]]]:
    """Neighboring suites with the backends that they share: large ones do without plain torch."""
    fast = [b for b in backends if b != "torch"] or backends
    found: list[tuple[list[str], list[str]]] = []
    for suite in suites:
        use = fast if suite in LARGE else backends
        if found and found[-1][0] == use:
            found[-1][1].append(suite)
        else:
            found.append((use, [suite]))
    return found


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")))
    parser.add_argument("--budget", type=float, default=560.0, help="seconds in all")
    parser.add_argument("--only", default="tests,conformance,bench", help="which parts, with commas")
    parser.add_argument("--suites", help="benchmark suites with commas, in that order")
    parser.add_argument("--backends", help="with commas; all of the clone unless given")
    parser.add_argument("--missing", action="store_true", help="conformance: only what conformance/reports lacks")
    parser.add_argument(
        "--reports", help="with --missing: folders of conformance/reports with commas; all unless given"
    )
    parser.add_argument("--ops", help="operators of the conformance, with commas; all unless given")
    parser.add_argument("--peers", help="as of rlkernel bench run")
    parser.add_argument("--seconds", type=float, help="as of rlkernel bench run")
    parser.add_argument("--size", default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", help="of conformance, standard unless given; with --missing as the reports say")
    parser.add_argument("--checking", type=float, default=0.45, help="share of the time for tests and conformance")
    asked = parser.parse_args()
    if asked.missing and asked.backends:
        parser.error("--backends: with --missing name folders of conformance/reports, by --reports")
    if asked.reports and not asked.missing:
        parser.error("--reports: it names what --missing renews; add --missing")
    there = sorted(f.parent.name for f in (ROOT / "conformance" / "reports").glob("*/report.json"))
    unknown = set(asked.reports.split(",")) - set(there) if asked.reports else None
    if unknown:
        parser.error(f"--reports: no {', '.join(sorted(unknown))} in conformance/reports; there are {', '.join(there)}")
    if asked.missing and "," in (asked.profile or ""):
        parser.error("--profile: one with --missing")
    return asked


def main() -> int:
    """Run the parts that were asked for."""
    asked = options()
    asked.out.mkdir(parents=True, exist_ok=True)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"missing here: {', '.join(missing)}; bring them as wheels on PYTHONPATH")
        return 2
    with tempfile.TemporaryDirectory() as temporary, (asked.out / "log.txt").open("w", encoding="utf-8") as log:
        work = Path(temporary)
        folders = distributions(work / "dist")
        del folders["torch"]
        folders.pop("template", None)  # an example of a third party's
        distributions(work / "bare", backends=False)
        paths = [*(ROOT / p for p in PATHS), *folders.values()]
        sys.path[:0] = [str(p) for p in (work / "dist", *paths)]
        environ, bare = (environment(work / which, *paths) for which in ("dist", "bare"))
        session = Session(asked.out, work, time.monotonic() + asked.budget, environ, bare, log)
        names = asked.backends.split(",") if asked.backends else [*made_for(folders, asked.device), "torch"]
        parts = asked.only.split(",")
        limit = asked.budget * (asked.checking if "bench" in parts else 0.97)
        until = time.monotonic() + limit
        checks = tests(session, {n: f for n, f in folders.items() if n in names}, until) if "tests" in parts else []
        attacks = []
        if "conformance" in parts and asked.missing:
            attacks = renewals(session, asked, until)
        elif "conformance" in parts:
            attacks = conformance(session, [n for n in names if n != "torch"], asked, until)
        found = in_parallel([*attacks, *checks], session, until)
        if checks:
            kept = [report for report in found if report and "name" in report]
            write_json(asked.out / "tests.json", kept)
        for name, report in conformance_reports(session).items() if attacks else ():
            write_json(asked.out / f"conformance-{name}.json", report)
        if "bench" in parts:
            bench(session, asked, names)
        summary = {"steps": session.steps, "seconds_left": round(session.left, 1)}
        write_json(asked.out / "summary.json", summary)
    return int(any(step["rc"] != 0 for step in session.steps))


def environment(*paths: Path) -> dict[str, str]:
    """This process's environment with these paths first, and kernels compiled, not interpreted."""
    inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {**kept, "PYTHONPATH": os.pathsep.join([*map(str, paths), *inherited])}


def in_parallel(jobs: list[Any], session: Session, until: float) -> list[Any]:
    """Carry out jobs several at a time; those whose turn comes after `until` are left out and said so."""

    def one(job: Any) -> Any:
        if time.monotonic() < until:
            return job()
        session.steps.append({"step": "a check that found no time", "rc": "no time left", "seconds": 0})
        return None

    with ThreadPoolExecutor(max_workers=JOBS) as pool:
        return list(pool.map(one, jobs))


if __name__ == "__main__":
    sys.exit(main())
