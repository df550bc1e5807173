"""Planted bugs in rollout_buffer@1."""

from rlkernel_conformance.mutants.rollout_buffer import groups, storage

__all__ = ["groups", "storage"]
