"""The stages of `gpu_check.py`, their runner and their report."""
