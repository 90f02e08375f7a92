"""Weights below `--memory` (`--weights-home`): predicted on cards, and measured on this CPU."""
