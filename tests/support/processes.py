"""What becomes of processes that tests start, on Linux."""

from pathlib import Path


def is_alive(pid):
    """False of one that is gone, or waits to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
