"""The LBS paper: its figures beside ours, simulated and over an emulated link."""
