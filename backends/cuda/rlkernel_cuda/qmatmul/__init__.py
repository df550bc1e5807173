"""Products with 4-bit weights in CUDA C++ for Hopper."""
