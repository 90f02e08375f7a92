"""Helpers that run the server and show its page in a browser on this machine."""
