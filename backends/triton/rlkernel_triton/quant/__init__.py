"""Quantized weights on Triton: `quantize`, `dequantize`, `prepack` and `qmatmul`."""
