"""What the operators cost: workloads as data, checked results, measured ceilings, peers in the same run.

    rlkernel bench run --suite logprob --size toy
    rlkernel bench compare OLD NEW

Imports nothing heavy; may use everything of the project, and nothing of the project imports it.
"""
