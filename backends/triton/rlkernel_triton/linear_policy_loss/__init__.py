"""`linear_policy_loss` on Triton: the policy loss from hidden states and an output head."""
