"""Layer-wise offloading, the baseline of the LBS paper: KV on the host, layers streamed.

One implementation: over a card's streams, and over a copier beside compute on a CPU. Knows one
link and two budgets; which beams are decoded is not its business.
"""
