"""What fits and how fast, from sizes alone: machines' profiles, bytes and seconds of schedules."""
