"""The compiled path: every operator as one opaque node of a graph, with the chosen implementation in its arguments.

    torch.ops.rlkernel.logprob([logits, ids], [0], [0.7], 'reference rlkernel_torch.logprob:logprob [...] ...',
                               '{"logits": {"g": 0}, "ids": {"t": 1}, "temperature": {"f": 0}, ...}')

Under torch.compile the front door comes here. The decision is taken once, while Dynamo traces, by the same cold path as
in eager mode; the graph is guarded on the policy, so that another policy traces once more and the first one finds its
graph again. The node runs the raw implementation: the same bits as in eager mode. What may not run is refused with
the same errors, raised when the graph runs, since Dynamo would wrap them while it traces.

    call_codec.py  a call as JSON and its leaves
    tracing.py     what Dynamo reads, and the decision
    nodes.py       the nodes: forward and backward
    fakes.py       what they return

Imports torch and its compiler: rlkernel.dispatch imports this package under torch.compile alone.
"""

from rlkernel.torchlib.tracing import compiled as compiled
