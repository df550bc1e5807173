"""The process in which attacks run: python -m rlkernel_conformance.worker CHANNEL CASE, the job on standard input.

It speaks on a pipe of its own, one JSON line before and after every clause, each with the job's secret and a number;
whatever the tested code prints cannot be taken for a word of it, and a process that just ends has said nothing. A
script of the case at hand lies in a file, so that a case that ends the process can be told.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from rlkernel.discover import brief, guarded
from rlkernel_conformance import faults, health, process_reaper


def main(channel: int, case: int, job: dict[str, Any]) -> None:
    """Carry out the job's clauses in order.

    Words, by `kind`: "sick" (the device) or "healthy" first; then "unable" (the backend cannot be had at all), or
    "begin" and "end" of each clause; "done" last, early where a fault may have left the process unfit.
    """
    secret, number = job.pop("secret"), 0

    def say(kind: str, **words: Any) -> None:
        nonlocal number
        line = json.dumps({"secret": secret, "number": number, "kind": kind, **words}) + "\n"
        os.write(channel, line.encode())
        number += 1

    os.register_at_fork(after_in_child=lambda: os.close(channel))  # a child of the tested code has no say
    if job["memory"]:
        resource.setrlimit(resource.RLIMIT_AS, (job["memory"], job["memory"]))
    if complaint := health.complaint(job["device"]):
        say("sick", message=complaint)
        return
    say("healthy")

    from rlkernel_conformance.clause_runner import ClauseRunner
    from rlkernel_conformance.harness import Outcome

    with ExitStack() as scope:
        runner, error = guarded(lambda: ClauseRunner(job, case, scope))
        if runner is None:
            say("unable", fault=faults.of_error(error), message=brief(error))
            return
        gc.collect()
        gc.freeze()  # attacks on memory collect garbage: what is loaded by now need not be looked through each time
        for clause, scale in job["clauses"].items():
            say("begin", clause=clause)
            outcome, error = guarded(lambda: runner.run(clause, scale))  # noqa: B023  called at once
            if outcome is None:  # the suite's own mistake, or one that only looks like it
                text = f"its attack could not be carried out: {brief(error)}"
                outcome = Outcome(job["op"], clause, clause, "fault", faults.of_error(error), text)
            say("end", clause=clause, outcome=asdict(outcome))
            if outcome.fault is not None and faults.needs_new_process(outcome.fault, job["device"]):
                break
    say("done")


if __name__ == "__main__":
    process_reaper.fork_under_reaper()
    main(int(sys.argv[1]), int(sys.argv[2]), json.load(sys.stdin))
