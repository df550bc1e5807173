"""Parts of the rollout buffer: allocation on the host, pages on the device, the batch handed out."""
