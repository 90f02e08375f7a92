"""`--ray` of `eval` and `serve`: its options, and where problems are solved."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from beamwright.cli.options import option
from beamwright.cli.output import first_import
from beamwright.config import Settings
from beamwright.errors import BeamwrightError, InputError
from beamwright.evaluate.run import InFlight, Solved, SolveMany

if TYPE_CHECKING:
    from beamwright.cli.views import TreePages
    from beamwright.cluster.ledger import Tells
    from beamwright.cluster.serving import Cluster
    from beamwright.solver.spread import SentProblem

_MOST_CHECKERS = 16  # each takes 63 MB

RayOption = Annotated[
    str | None,
    option(
        "--ray",
        "Engines on Ray's workers: local (processes of this machine), auto, or the address of a "
        "cluster.",
        "ADDRESS",
    ),
]
ReplicasOption = Annotated[
    str | None,
    option(
        "--replicas",
        "Engines with --ray (default: auto, one per GPU, or per --replica-cores).",
        "N",
    ),
]
CoresOption = Annotated[
    int | None, option("--replica-cores", "Cores of each with --ray (default: 1).", "N", min=1)
]


def find_cluster(
    address: str | None, replicas: str | None, cores: int | None, plugins: Sequence[Path]
) -> Cluster | None:
    """Raises InputError for what means nothing."""
    if address is None:
        for name, value in (("replicas", replicas), ("replica-cores", cores)):
            if value is not None:
                raise InputError(f"--{name} {value}: does nothing without --ray")
        return None
    if replicas is not None and replicas != "auto" and not replicas.isdecimal():
        raise InputError(f"--replicas {replicas}: give a number, or auto")
    from beamwright.cluster.serving import Cluster

    number = None if replicas in (None, "auto") else int(replicas)
    files = tuple(str(file.resolve()) for file in plugins)
    return Cluster(None if address == "local" else address, number, cores or 1, files)


def checker_processes(cluster: Cluster | None) -> int:
    """That judge answers: on a cluster the driver's cores have nothing else to do."""
    if cluster is None or cluster.address is None:
        return 2
    return max(2, min(_MOST_CHECKERS, (os.cpu_count() or 1) - 1))


def solving_far(
    settings: Settings, cluster: Cluster, pages: TreePages | None, stack: ExitStack
) -> SolveMany:
    """Solves on a cluster; loads at the first unfinished problem. pages: of the trees it writes."""

    def solve_many(
        problems: Sequence[tuple[str | int, str]], /, *, in_flight: InFlight
    ) -> Iterator[tuple[str | int, Solved | BeamwrightError]]:
        with first_import("torch"):
            from beamwright.cluster.solver import ClusterSolver

        most = None if in_flight == "auto" else in_flight
        solver = stack.enter_context(ClusterSolver.on(cluster, settings, in_flight=most))
        tells: Tells = "nothing" if pages is None else "tree"
        given: list[SentProblem] = [(problem_id, text, {}) for problem_id, text in problems]
        for problem_id, outcome in solver.solve_many(given, tells=tells):
            if pages is not None:
                pages.write([outcome])  # what fails there is reported at the end
            yield problem_id, outcome

    return solve_many
