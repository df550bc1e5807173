"""`whiten` on Triton: the moments of masked values, and the values standardized by them."""
