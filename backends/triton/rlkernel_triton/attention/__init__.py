"""The operator attention@1: `launch.prepare`."""
