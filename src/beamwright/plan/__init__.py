"""Estimates from sizes alone: which searches fit a machine's memory, and how fast they run."""
