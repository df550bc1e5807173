"""Planted bugs in capture@1."""

from rlkernel_conformance.mutants.capture import conduct, replays

__all__ = ["conduct", "replays"]
