"""Helpers that show the server's page in a browser on this machine."""
