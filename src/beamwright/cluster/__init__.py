"""Run searches on several devices: one engine per device, as Ray Serve replicas (extra `ray`).

Ray places the engines, and replaces engines that fail. This package decides which engine runs which
search. The trees are equal to those of a single process.
"""
