"""A search in a file: a checkpoint to go on from, a recording of its shape to replay.

Import from the files: reading a recording needs no torch, a checkpoint of a run does.
"""
