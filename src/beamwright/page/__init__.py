"""The one page that shows trees: what it hears of them, and runs that are saved as such pages.

Knows trees and the answers in their texts; no HTTP (`serve` has it live), no models.
"""
