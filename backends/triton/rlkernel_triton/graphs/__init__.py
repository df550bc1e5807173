"""capture on CUDA and HIP: the engine of the reference over `torch.cuda.CUDAGraph`.

Keys, buckets, static buffers, guards, statistics and life cycle are those of every implementation; this package adds a
recorder: where graphs are recorded and replayed (`lane`), one graph and what a failed one leaves to mend (`taking`),
what a graph holds (`recording`), and how a program becomes one (`recorder`).
"""
