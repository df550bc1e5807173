"""Sampling in Triton: one pass over the logits, one finish per row, draws keyed by request, step and token."""
