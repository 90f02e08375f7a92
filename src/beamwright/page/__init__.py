"""The HTML page that shows search trees: its events, its scripts, and runs saved as pages.

This package knows trees and the answers in their texts. It knows no HTTP (`serve` shows the page
live) and no models.
"""
