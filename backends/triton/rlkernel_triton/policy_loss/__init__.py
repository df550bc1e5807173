"""`policy_loss` on Triton: the loss of all tokens, its statistics and its gradient in one kernel."""
