"""`linear_policy_loss` on Hopper: the policy loss over the kernels of linear_logprob."""
