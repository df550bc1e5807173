"""`glu` on Triton: an activation of half a row times the other half, with IEEE arithmetic."""
