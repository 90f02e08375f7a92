"""Simulations of KV on two tiers: bytes moved, seconds, and lower bounds of both."""
