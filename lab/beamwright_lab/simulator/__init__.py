"""The simulator: the real loop, schedules and residency on a virtual clock, without tensors.

Trees are recorded or made up; costs come from the roofline.
"""
