"""What search buys: accuracy of each method at equal tokens and at equal seconds."""
