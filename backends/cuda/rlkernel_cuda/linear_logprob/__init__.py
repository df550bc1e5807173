"""`linear_logprob` on Hopper: logits tile by tile on the matrix units, never stored whole."""
