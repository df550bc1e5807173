"""linear_divergence@1 on Hopper."""
