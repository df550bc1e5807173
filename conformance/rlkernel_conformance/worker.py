"""The process in which attacks run: python -m rlkernel_conformance.worker FD, with the job as JSON on standard input.

It speaks on a pipe of its own, one JSON line before and after every clause, each with the job's secret and a number;
whatever the tested code prints cannot be taken for a word of it, and a process that just ends has said nothing.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import nullcontext
from dataclasses import asdict
from importlib import import_module
from typing import Any


def main(descriptor: int, job: dict[str, Any]) -> None:
    """Carry out the job's clauses in order."""
    secret, number = job.pop("secret"), 0

    def say(**words: Any) -> None:
        nonlocal number
        line = json.dumps({"secret": secret, "number": number, **words}) + "\n"
        os.write(descriptor, line.encode())
        number += 1

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if job["memory"]:
        resource.setrlimit(resource.RLIMIT_AS, (job["memory"], job["memory"]))

    import rlkernel
    from rlkernel_conformance.clauses import attacks_on
    from rlkernel_conformance.harness import carry_out
    from rlkernel_conformance.profiles import Profile
    from rlkernel_conformance.subject import Subject

    planted = nullcontext()
    if job["manifest"]:
        module, _, name = job["manifest"].partition(":")
        planted = rlkernel.registered(getattr(import_module(module), name))
    attacks = {a.clause.id: a for a in attacks_on(job["op"])}
    effort = Profile(**job["profile"])
    subject = Subject(job["backend"], job["op"], job["device"])
    with planted, subject.chosen():
        for clause in job["clauses"]:
            say(kind="begin", clause=clause)
            say(kind="end", clause=clause, outcome=asdict(carry_out(subject, attacks[clause], effort)))
    say(kind="done")


if __name__ == "__main__":
    main(int(sys.argv[1]), json.load(sys.stdin))
