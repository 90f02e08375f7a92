"""More than one device."""
