"""Kernels compiled ahead of time: a bundle holds machine code, and a launch finds it there, without Triton.

    targets      what a bundle can be made for
    builds       one compiled configuration, and what an argument says about itself
    bundle       the file: written reproducibly, read lazily, checked
    recorder       a launcher that tells what launches would need; what a bundle is compiled from
    workloads    calls of a run of post-training, whose launches bundles hold
    recording    which configurations a run launches; tables: the file that it writes
    compiling    configurations into a bundle, with the promises that workloads keep and without; imports Triton
    fake_triton  names in place of `triton` where it is not installed
    driver       the CUDA driver, by ctypes
    launching    the launcher over a bundle: from a launch to machine code on a device
    dry_run      calls whose launches are looked up and not made: what a bundle lacks for one
    backend      the operators over a bundle, and the backend named `aot`
    sources      what a kernel was compiled from

Importing this loads neither torch nor Triton.
"""
