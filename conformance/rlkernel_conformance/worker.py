"""The process in which attacks run: python -m rlkernel_conformance.worker CHANNEL CASE, the job on standard input.

It writes to a pipe of its own, one JSON line before and after every clause, each with the job's secret and a number:
what the tested code prints cannot be taken for a message, and a process that just ends has sent none. A script of the
current case lies in a file, so that a case that ends the process can be reported.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from rlkernel.discover import brief, guarded
from rlkernel_conformance import address_space, faults, health, process_reaper


def main(channel: int, case: int, job: dict[str, Any]) -> None:
    """Carry out the job's clauses in order.

    Messages, by `kind`: "device_error" or "healthy" first; then "no_backend" where the backend cannot be loaded, or
    "begin" and "end" of each clause; "done" last, early where a fault may have left the process unfit.
    """
    gc.disable()  # imports leave no garbage, and looking for it takes a sixth of their time
    secret, number = job.pop("secret"), 0

    def send(kind: str, **content: Any) -> None:
        nonlocal number
        line = json.dumps({"secret": secret, "number": number, "kind": kind, **content}) + "\n"
        os.write(channel, line.encode())
        number += 1

    os.register_at_fork(after_in_child=lambda: os.close(channel))  # a child of the tested code cannot write to it
    if complaint := health.complaint(job["device"]):
        send("device_error", message=complaint)
        return
    if job["memory"]:
        address_space.bound(job["memory"])
    send("healthy")

    from rlkernel_conformance.clause_runner import ClauseRunner
    from rlkernel_conformance.harness import Outcome

    with ExitStack() as scope:
        runner, error = guarded(lambda: ClauseRunner(job, case, scope))
        if runner is None:
            send("no_backend", fault=faults.of_error(error), message=brief(error))
            return
        gc.collect()
        gc.freeze()  # attacks on memory collect garbage: what is loaded by now need not be looked through each time
        gc.enable()
        for clause, (scale, part) in job["clauses"].items():
            send("begin", clause=clause)
            outcome, error = guarded(lambda: runner.run(clause, scale, tuple(part)))  # noqa: B023  called at once
            if outcome is None:  # the suite's own mistake, or one that only looks like it
                text = f"its attack could not be carried out: {brief(error)}"
                outcome = Outcome(job["op"], clause, clause, "fault", faults.of_error(error), text)
            send("end", clause=clause, outcome=asdict(outcome))
            if outcome.fault is not None and faults.needs_new_process(outcome.fault, job["device"]):
                break
    send("done")


if __name__ == "__main__":
    process_reaper.fork_under_reaper()
    main(int(sys.argv[1]), int(sys.argv[2]), json.load(sys.stdin))
