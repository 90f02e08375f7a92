"""Formulas of the papers, and lower bounds on traffic and time, computed from sizes alone."""
