"""Problem sets, answer equivalence, metrics and resumable runs. Knows no models and no torch.

Solving is injected (`SolveMany`); everything that is reported comes from the solutions' JSON.
"""
