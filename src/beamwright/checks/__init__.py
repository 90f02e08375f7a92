"""Checks behind `beamwright doctor`: batch invariance, speed, and parity with `transformers`."""
