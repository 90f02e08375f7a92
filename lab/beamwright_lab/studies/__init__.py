"""What the papers' formulas and clairvoyant bounds say, from sizes alone."""
