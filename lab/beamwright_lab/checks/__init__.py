"""Sameness, resuming, the simulator and answer equivalence, on more cases than tests have."""
