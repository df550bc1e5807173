"""What the kernels of two or more operators share: NVRTC and the driver, tiles of matmuls, tokens quantized to e4m3."""
