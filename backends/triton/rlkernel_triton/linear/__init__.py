"""The operator linear@1: `launch.prepare`."""
