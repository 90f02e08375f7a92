"""Save a search: checkpoints to resume from, receipts to verify, and the identity of user code.

Import from the modules: `checkpoint` and `receipt` load torch, `identity` does not.
"""
