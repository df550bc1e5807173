"""Advantages of sequences against the rewards of their groups: kernels.py on the device, launch.py on the host."""
