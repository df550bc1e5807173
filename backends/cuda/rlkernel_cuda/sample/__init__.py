"""Sampling in CUDA C++ for Hopper: one launch, a cluster of blocks per row."""
