"""`affine_suffix_scan` on Triton: linear recurrences over the tokens of sequences, from the last to the first."""
