"""Commands that the lab adds to `beamwright`: `simulate` and `probe`."""
