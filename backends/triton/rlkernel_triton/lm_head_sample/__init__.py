"""`lm_head_sample` on Triton: tokens drawn from hidden states and an output head."""
