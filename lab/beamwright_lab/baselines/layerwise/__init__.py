"""Layer-wise offloading, the baseline of the LBS paper: KV on the host, streamed layer by layer.

One implementation serves GPUs (CUDA streams) and CPUs (a copying thread). The schedule decides
which beams are decoded; this package only places and moves their KV.
"""
