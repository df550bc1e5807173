"""The demo: a small transformer learns arithmetic by GRPO, every step through the operators.

    rlkernel demo                       # on the GPU if there is one, in about a minute; else on one CPU core, in two
    rlkernel demo --order acme,auto     # with your backend first

It is first fitted to text of a careless writer, then improved on problems whose answers can be verified. Rollouts run
on int4 weights with a KV cache under `capture` and `sample`; the trainer uses `linear_logprob`, `advantage` and
`policy_loss`; weights are re-quantized after every update, and the gap between the two sides is measured and
corrected (truncated importance sampling). `run.run(options)` is the whole of it.
"""
