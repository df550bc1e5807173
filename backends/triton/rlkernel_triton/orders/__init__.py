"""In which order the sums of an operator are taken, derived from its compiled code without a GPU.

    trace = Trace(OrderLauncher("sm_90", "bits"), "logprob")
    trace.name(logits, leaf("logits", ...))      # floats of the call get names; all else is known
    result = trace.run(call)
    trace.hashes(result.logprob)                 # what each number was computed from, and in which order

Two numbers with one hash are made by the same operations on the same operands in the same order, so they have the same
bits wherever operands do. Two hashes say nothing: other orders may agree. Levels:

    "bits"     operations as an architecture names them: equal hashes are equal bits on one architecture
    "order"    additions, products and functions alone, whoever computes them: comparable across architectures

What cannot be derived is refused (`errors`): an instruction that is not modeled, a branch or an address that depends on
data, an atomic addition of floats.

    expressions    hashes, and how operations combine them
    memory         tensors, each 16 bits with a hash
    ptx            PTX text to instructions
    machine        threads in step
    arithmetic, movement, matrix, instructions    what instructions do
    launcher       compiles and runs launches
    trace          one call of an operator
"""
