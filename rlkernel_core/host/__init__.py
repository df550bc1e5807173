"""What a machine's own files say of it: the board, its memory, its power and temperatures.

Every function takes the root of a file system, so that a machine can be a folder in a test; nothing here imports
torch, initializes a GPU, or reads anything when it is imported. Backends, the doctor and the benchmark all read it.
"""
