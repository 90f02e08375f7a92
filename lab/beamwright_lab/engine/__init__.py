"""Where the time of the engine goes on this machine."""
