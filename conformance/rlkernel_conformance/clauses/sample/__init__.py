"""Attacks on sample@1, by what they look at: the law, the filters, the edits, the results, where a row stands."""

from rlkernel_conformance.clauses.sample import edits, filters, invariance, law, results

__all__ = ["edits", "filters", "invariance", "law", "results"]
