"""Beamwright beside other engines, and beside models of their rules."""
