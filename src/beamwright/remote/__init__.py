"""Generators that run somewhere else: behind an OpenAI-compatible server, or in vLLM's engine.

They write steps and say what they drew; trees, verifiers, selection and accounting are those of
every other generator. Their KV is their own.
"""

from beamwright.remote.generator import FarGenerator, find_generator
from beamwright.remote.named import FarModel, far_model
from beamwright.remote.source import Asked, Reply, Source, Written
from beamwright.remote.writer import RemoteCounts, RemoteSteps, ServedSchedule

__all__ = [
    "Asked",
    "FarGenerator",
    "FarModel",
    "RemoteCounts",
    "RemoteSteps",
    "Reply",
    "ServedSchedule",
    "Source",
    "Written",
    "far_model",
    "find_generator",
]
