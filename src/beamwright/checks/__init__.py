"""Checks of this machine and of checkpoints: exactness, parity, what quantised weights change."""
