"""Block pools, segments, two tiers and the link between them. Knows no models, no strategies.

`cache` decides what is where, `store` has the tensors, `link` and `streams` move them.
"""
