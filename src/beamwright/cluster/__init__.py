"""Searches on several devices: one engine per device, placed by Ray (extra `ray`).

Ray places the engines and handles their failures. This package decides which engine runs which
search. The trees are equal to the trees of a single process.
"""
