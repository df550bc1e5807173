"""The class that Triton looks for in a backend."""

from triton.backends.nvidia.compiler import CUDABackend

__all__ = ["CUDABackend"]
