"""The GPU check: benchmark stages for one card, their runner and their report."""
