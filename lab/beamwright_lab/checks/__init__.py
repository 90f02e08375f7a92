"""Checks that trees stay the same under many options, on more cases than the tests have."""
