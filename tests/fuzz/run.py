"""The fuzz run: so many damaged documents over all formats, in processes of 1 GiB, and a table of what came of them.

    python -m tests.fuzz.run                        20,000 cases
    python -m tests.fuzz.run --cases 500 lock gguf  of these formats
    python -m tests.fuzz.run --seed 7 --keep DIR    others, with what broke written to a folder

Exit code 1 where anything but a typed error or acceptance came of a case.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from tests.fuzz.attack import HEAD, Outcome, attacked, limit_memory
from tests.fuzz.formats import FORMATS, ROOT, Format


def of_format(form: Format, count: int, number: int) -> Outcome:
    """The cases of a format, in this process, whose memory is limited once all is imported."""
    torch.set_num_threads(1)
    sys.path.append(str(ROOT / "backends" / "triton"))  # bundles are read where its package is not installed, too
    parts = form.parts()
    with tempfile.TemporaryDirectory() as folder:  # the valid document is read, and imports what reading needs
        for name, data in form.join(parts).items():
            (Path(folder) / name).write_bytes(data)
        form.read(Path(folder))
    limit_memory()
    whole = Outcome(form.name)
    while whole.cases < count:  # hypothesis ends where it has seen all that it can think of
        whole.add(attacked(form.name, parts, form.join, form.read, count - whole.cases, number))
        number += 1000
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", metavar="FORMAT")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for the smallest input of each place where reading broke")
    asked = parser.parse_args()
    chosen = [f for f in FORMATS if not asked.formats or any(f.name.startswith(name) for name in asked.formats)]
    counts = [asked.cases // len(chosen) + (i < asked.cases % len(chosen)) for i in range(len(chosen))]
    done: list[Outcome] = []
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = [pool.submit(of_format, f, n, asked.seed) for f, n in zip(chosen, counts, strict=True)]
        for form, count, future in zip(chosen, counts, waiting, strict=True):
            try:
                done.append(future.result())
            except (BrokenProcessPool, MemoryError) as error:
                # Ended by a signal: an access out of bounds, or the kernel's memory killer; or no room for a case.
                done.append(Outcome(form.name, broken=Counter({f"{type(error).__name__} within {count} cases": 1})))
            print(done[-1].line(), flush=True)
    print(Outcome.total(done).line())
    for outcome in done:
        for where, (text, files) in outcome.found.items():
            lines = [line[:200] for line in text.splitlines()[-12:]]
            print("\n".join([f"\n{outcome.format}: {where}, {outcome.broken[where]} times", *lines]))
            if asked.keep:
                folder = asked.keep / re.sub(r"\W+", "-", f"{outcome.format} {where}")
                folder.mkdir(parents=True, exist_ok=True)
                for name, data in files.items():
                    (folder / name).write_bytes(data)
    return int(any(outcome.broken for outcome in done))


if __name__ == "__main__":
    print(HEAD)
    sys.exit(main())
