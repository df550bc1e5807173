"""`linear_divergence` on Triton: torch's products of a block of rows, and the launches of `divergence` between them."""
