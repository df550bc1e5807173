"""The judge: one file with a candidate kernel in, a verdict that a trainer can use as a reward out.

    rlkernel judge candidate.py --op logprob
    rlkernel judge serve

Three processes, so that a candidate cannot reach what judges it:

    server or command line ──▶ trial (clauses, reference, clocks) ──▶ worker (the candidate, in a sandbox)
                                       └──────────────────────────────▶ worker (the baseline)

The candidate's process gives back tensors and nothing else that counts: whether they are right, and how long they
took, is measured in a process that runs no line of the candidate's.
"""
