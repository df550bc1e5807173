"""`advantage` on Triton: along the tokens of a sequence by a suffix scan, within a group in one launch."""
