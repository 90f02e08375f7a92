"""Problem sets, answer equivalence, metrics and resumable runs. Knows no models and no torch.

Solving is injected (`SolveMany`); everything that is reported comes from the solutions' JSON.
"""

from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import summarise
from beamwright.evaluate.problems import Problem, ProblemSet, load_problems
from beamwright.evaluate.results import Record
from beamwright.evaluate.run import InFlight, RunOptions, Solved, SolveMany, run

__all__ = [
    "AnswerChecker",
    "InFlight",
    "Problem",
    "ProblemSet",
    "Record",
    "RunOptions",
    "SolveMany",
    "Solved",
    "load_problems",
    "run",
    "summarise",
]
