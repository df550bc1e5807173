"""The Triton kernels as AMD machine code, run on a CPU: backends for tests, labelled "simulated"."""
