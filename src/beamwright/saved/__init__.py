"""A search in a file: a checkpoint to go on from, and who a user's own code is.

Import from the files: `checkpoint` loads torch, `identity` does not.
"""
