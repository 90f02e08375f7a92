"""Costs from sizes alone. Knows no torch and no models."""

from beamwright.cost.transfers import dm_lower_bound_bytes

__all__ = ["dm_lower_bound_bytes"]
