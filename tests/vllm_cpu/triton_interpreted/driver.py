"""The class that Triton looks for in a backend."""

from triton.backends.nvidia.driver import CudaDriver

__all__ = ["CudaDriver"]
