"""The judge: one file with a candidate kernel in, a verdict that a trainer can use as a reward out.

    rlkernel judge candidate.py --op logprob
    rlkernel judge serve

Three processes, so that a candidate cannot reach what judges it:

    server or command line ──▶ trial (clauses, definitions, clocks) ──▶ host (the candidate, behind a sandbox)
                                       └──────────────────────────────▶ host (the baseline)

The candidate's process gives back tensors and nothing else that counts: whether they are right, and how long they
took, is found out where no line of the candidate's ever runs.
"""
