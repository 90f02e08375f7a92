"""Checks of this machine and of checkpoints: exactness, speed, and parity with `transformers`."""
