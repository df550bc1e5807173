"""`sample` on Triton: one pass over the logits, one program a row, noise keyed by request, step and token."""
