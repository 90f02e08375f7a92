"""Baselines that the papers compare with, for their methods to be measured against.

An entry point of this package: what it declares joins the wheel's own wherever the lab is installed.
"""
