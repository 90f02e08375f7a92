"""The server and its page on this machine."""
