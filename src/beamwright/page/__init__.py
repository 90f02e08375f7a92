"""The HTML page that shows search trees: its events, its scripts, and runs saved as pages.

This package reads search trees, and uses no HTTP and no models. `serve` shows the live page.
"""
