"""Benchmarks of single features of the engine on this machine."""
