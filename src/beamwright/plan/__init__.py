"""Predict from model and machine sizes whether a search fits the memory, and how long it takes."""
