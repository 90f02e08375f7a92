"""Which models and files run, and how fast, with tiny random checkpoints that are written here."""
