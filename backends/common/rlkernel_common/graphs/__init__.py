"""The engine of capture, shared by every device: keys, buckets, static buffers, guards, statistics, life cycle.

An implementation supplies a `Recorder` (recorder.py): how to warm up, how to record, how to replay. `EagerRecorder`
is the one that needs no graphs; a CUDA or HIP backend supplies another and imports the rest from here.
"""
