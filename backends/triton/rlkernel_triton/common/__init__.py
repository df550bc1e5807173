"""What the kernels of two or more operators share."""
