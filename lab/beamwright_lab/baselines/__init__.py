"""Baselines that the papers compare with.

An entry point of this package: what it declares joins the wheel's wherever the lab is installed.
"""
