"""The bits of every operator's results on one device, in a file, and a comparison of two such files.

    rlkernel bench bits --device cpu --backend torch --out before.json
    rlkernel bench bits --device cuda --backend triton --jobs 14 --out after.json
    rlkernel bench bits before.json after.json

A change of the code that is not about arithmetic must leave every bit as it was. The table of calls (`calls`) is fixed,
inputs are drawn on the CPU from seeds and moved, and nothing but the public API is used, so that the same calls are
made before and after a change of the code behind it. The file holds, by operator and call, digests of what came out and
the backend that ran; a call that is refused or fails, its class of error. Each call is made twice in its process: what
differs between the two is listed as unstable, and is not compared. With jobs, parts of the table run in processes of
their own, which a broken device ends alone.
"""
