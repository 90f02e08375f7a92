"""Benchmarks of Beamwright beside other engines."""
