"""A search in a file: a checkpoint to go on from, a receipt to check it by, whose code it was.

Import from the files: `checkpoint` and `receipt` load torch, `identity` does not.
"""
