"""The operator grouped_linear@1: `launch.prepare`."""
