"""`linear_logprob` on Triton: log-probabilities from hidden states and an output head, logits never stored."""
