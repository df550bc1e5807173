"""The proof: does a backend keep the contract it claims?

Every clause of an operator's spec is attacked by a property that hypothesis tries to refute, on inputs shaped by what
the backend's manifest claims; a refuted clause comes with a counterexample and a script that reproduces it alone. The
suite is proved in turn: `mutants` holds backends with one planted bug each, and the clause that must refute it.

    rlkernel conformance run torch --op logprob
    rlkernel conformance mutants --op logprob

Imports the contract and the choice; nothing imports it.
"""
