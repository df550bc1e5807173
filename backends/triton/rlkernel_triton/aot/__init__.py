"""Kernels compiled ahead of time: a bundle holds machine code, and a launch finds it there, without Triton.

    workloads               calls of a run of post-training, whose launches bundles hold
    configuration_recorder  a launcher that lists which configurations launches need, and launches nothing
    recordings              configurations in a file; recording: a backend that records those of any run
    compiling               configurations into machine code, specialized and not; needs Triton
    command                 what `rlkernel aot` does
    configurations          one configuration of a kernel, which calls it serves, and its machine code
    bundle                  the file: written reproducibly, read lazily, checked
    driver                  the CUDA driver, by ctypes
    bundle_launcher         the launcher over a bundle: from a launch to machine code on a device
    dry_run                 calls whose launches are looked up and not made: what a bundle lacks for one
    backend                 the operators over a bundle, and the backend named `aot`
    source_digest           hash of what a kernel was compiled from

Importing this loads neither torch nor Triton.
"""
