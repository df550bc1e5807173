"""`logprob` on Triton: the log-probability of chosen tokens from logits, in one pass over them."""
