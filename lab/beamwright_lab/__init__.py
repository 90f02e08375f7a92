"""Measurements and checks that take longer than a test; README.md lists them."""
