"""What the peers are driven by."""
