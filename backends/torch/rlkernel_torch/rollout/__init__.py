"""Parts of the rollout buffer: the ledger on the host, the pages on the device, the batch handed out."""
