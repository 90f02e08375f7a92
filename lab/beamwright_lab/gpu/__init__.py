"""The stages of `check.py`, their runner and their report."""
