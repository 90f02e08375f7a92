"""Generators that run somewhere else: behind an OpenAI-compatible server, or in vLLM's engine.

They write steps and say what they drew; trees, verifiers, selection and accounting are those of
every other generator. Their KV is their own.
"""

from beamwright.remote.generator import FarGenerator, find_generator
from beamwright.remote.named import FarModel, far_model
from beamwright.remote.source import Continuation, PromptRequest, Reply, TextSource
from beamwright.remote.writer import RemoteCounts, RemoteSteps, ServedSchedule

__all__ = [
    "Continuation",
    "FarGenerator",
    "FarModel",
    "PromptRequest",
    "RemoteCounts",
    "RemoteSteps",
    "Reply",
    "ServedSchedule",
    "TextSource",
    "far_model",
    "find_generator",
]
