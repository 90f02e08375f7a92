"""KV on two tiers: bytes, their lower bound, seconds, plans."""
