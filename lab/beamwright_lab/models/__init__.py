"""Checks of model and file support: which architectures and formats run, and how fast."""
