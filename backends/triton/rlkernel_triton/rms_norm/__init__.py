"""`rms_norm` on Triton: rows over their root mean square, and their gradients, with IEEE arithmetic in one order."""
