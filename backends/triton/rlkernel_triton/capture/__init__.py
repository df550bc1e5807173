"""`capture` on CUDA and HIP: the graph engine of rlkernel_common over `torch.cuda.CUDAGraph`.

Keys, buckets, static buffers, guards, statistics and life cycle are those of every backend; this package adds a
recorder: where graphs are recorded and replayed (`capture_stream`), one graph, and what a failed one leaves behind
(`cuda_capture`), what a graph holds (`recording`), and how a program becomes one (`recorder`).
"""
