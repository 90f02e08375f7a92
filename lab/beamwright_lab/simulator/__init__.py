"""Simulator: the real engine loop, schedules and KV residency on a virtual clock, without tensors.

Trees are recorded from real searches or synthetic. Times come from the roofline cost model.
"""
