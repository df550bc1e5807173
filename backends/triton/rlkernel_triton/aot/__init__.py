"""Kernels compiled ahead of time: a bundle holds machine code, and a launch finds it there, without Triton.

    targets      what a bundle can be made for
    builds       one compiled configuration, and what an argument says about itself
    bundle       the file: written reproducibly, read lazily, checked
    recording    which configurations a run launches
    compiling    configurations into a bundle, with the promises that kernels declare and without; alone imports Triton
    standin      what stands for `triton` in host code that launches from a bundle
    hosts        the host modules of rlkernel_triton once more, over the stand-in
    driver       the CUDA driver, by ctypes
    launching    from a launch to machine code on a device
    rehearsal    calls planned before they are run: what a bundle lacks for one
    backend      the operators over a bundle, and the backend named `aot`
    tables       the configurations that are shipped; workloads: calls that they were recorded of, beside conformance
    planning     for which machine host code plans; sources: what a kernel was compiled from

Importing this loads neither torch nor Triton.
"""
