"""Commands that `beamwright` has where the lab is installed."""
