"""Planted bugs in sample@1, most of them seen in released code."""

from rlkernel_conformance.mutants.sample import draws, filters, results

__all__ = ["draws", "filters", "results"]
