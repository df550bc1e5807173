"""Mutants by machine: plain torch with one small change of its source each, drawn by seed, against the suite.

The operators' own bugs in `rlkernel_conformance.mutants` show that every attack finds something. These show what share
of the bugs that nobody thought of the clauses find. `run.run` draws and attacks them:

1. `plugin_copy` writes plain torch, and what it computes with, as packages of other names: a plugin like any other.
2. `trials` attacks the unchanged copy, and notes the lines that each clause executes.
3. `mutations` lists the changes of these lines, by `kinds`; `draws` draws from them, evenly over kinds.
4. `trials` attacks each mutant with the clauses that execute its line, up to the first that fails: those first that are
   cheap and killed others.
5. `differences` looks for a call (of `drawn_calls`, or like those of the clauses) that tells one that fails none
   from the original.

Every trial is a process of its own, forked by a server that has imported torch and the suite (`processes`).
"""
