"""Checks of this machine and of checkpoints: exactness and parity."""
