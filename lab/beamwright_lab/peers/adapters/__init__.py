"""Adapters that run other engines."""
