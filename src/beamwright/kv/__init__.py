"""Block pools, segments, two tiers and the link between them. Knows no models, no strategies.

`cache` decides where each segment resides, `store` holds the tensors, `link` and `streams` move
them.
"""
