"""ClusterSolver: a Solver for servers and evaluations, over engines that Ray keeps.

A search goes to the replica with the fewest candidates, and whoever listens hears what one
process would say. Of many problems a replica is given as many as it has in flight, and one more:
work is taken, not dealt.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from beamwright.cluster.mirror import Mirror
from beamwright.cluster.replica import News
from beamwright.cluster.roster import Given, Roster, Tells
from beamwright.cluster.serving import Cluster, RayServing, last_line
from beamwright.config import Settings
from beamwright.counters import Usage
from beamwright.declare import load_all
from beamwright.engine.admission import USUAL_ROWS
from beamwright.engine.prompts import Prompts, with_system_prompt
from beamwright.errors import BeamwrightError, Cancelled, InputError, UnavailableError
from beamwright.models.hf_config import find_shape
from beamwright.models.hub import resolve_folder
from beamwright.models.tokenizer import TextCodec
from beamwright.protocols import RoundCallback
from beamwright.solver.handle import Handle
from beamwright.solver.request import (
    GivenProblem,
    ProblemSettings,
    ScoreOptions,
    UserParts,
    check_problem,
    read_paths,
    read_problems,
    take_priority,
)
from beamwright.solver.solution import Solution
from beamwright.tree import Problem

MOST_DEATHS = 3
"""Replicas that may die under one search before it fails: presumably it kills them."""

CANCEL_S = 20.0
"""Timeout of a cancelled search whose replica does not answer."""

_PLACE_S = 30.0
"""Grace period beyond its deadline for a replica to take a search."""

Outcome = Solution | BaseException

PULSE_S = 2.0
_ABSENT_S = 60.0
"""Timeout of `solve_many` without a live replica; at least twice the time of their loading."""

_DECOUPLED_ROWS = 1024
"""Candidates that a replica is given where its passes take as many as they have room for."""

_WAIT_S = 1.0


class RemoteSearch:
    """One search on its way at a replica, until its outcome, whoever dies; as its `Handle` sees it,
    `begun` once a replica has it.

    Its rounds come back as what has changed, and grow a mirror of its tree. One whose replica dies
    begins again in another one: seed and problem make the tree, and rounds that were heard before
    are not told twice. All of it happens in its owner's loop, but for what listens to rounds.
    """

    def __init__(
        self,
        owner: ClusterSolver,
        given: Given,
        deadline_s: float | None,
        on_round: RoundCallback | None,
    ) -> None:
        self.given, self.on_round, self._owner = given, on_round, owner
        self.begun = self.cancelled = False
        self._ends_s = None if deadline_s is None else time.monotonic() + deadline_s
        self._mirror = Mirror()
        self._deaths = self._told = 0  # of its replicas; the last round
        self._task: asyncio.Task[Outcome] | None = None
        self._cancelling: asyncio.Task[list[Any]] | None = None

    def start(self) -> asyncio.Task[Outcome]:
        """Start the search; in the loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    def give_up(self) -> None:
        """Have its replica cancel it and return the best so far; where none has it, end it here."""
        if self._task is None or self._task.done():
            return
        if not self.begun:
            self._task.cancel()
            return
        loop = asyncio.get_running_loop()
        withdrawn = self._owner.serving.broadcast("cancel", self.given.id)
        self._cancelling = loop.create_task(withdrawn)
        loop.call_later(CANCEL_S, self._task.cancel)

    async def _run(self) -> Outcome:
        while True:
            self._owner.roster.enter(self.given)
            try:
                return await self._search()
            except self._owner.serving.died as error:
                if self.begun and self.given.replica is not None:
                    self._owner.roster.forget(self.given.replica)
                self.begun = False
                self._deaths += 1
                if self.cancelled:
                    return Cancelled()
                if self._deaths >= MOST_DEATHS:
                    return BeamwrightError(
                        f"problem {self.given.problem_id}: {self._deaths} replicas died while they "
                        f"had this search: {last_line(error)}"
                    )
            if self._ends_s is not None:
                left_s = max(0.001, self._ends_s - time.monotonic())
                self.given.options["deadline"] = left_s

    async def _search(self) -> Outcome:
        stream, ends_s = self._owner.serving.search(self.given), self._ends_s
        try:  # the loop's time is that of `monotonic`
            async with asyncio.timeout_at(None if ends_s is None else ends_s + _PLACE_S):
                replica: str = await anext(stream)
            self.begun = True
            self._owner.roster.give(self.given, replica)
            async for news in stream:
                await self._hear(news)
                if self.cancelled and not news.ended:
                    self.give_up()
        except TimeoutError:
            stream.cancel()
            return UnavailableError("no replica could take the search in its time")
        except asyncio.CancelledError:
            stream.cancel()
            raise
        return self._outcome(news)

    async def _hear(self, news: News) -> None:
        """Apply news to the mirror, which does not change until the listener has returned."""
        self._owner.roster.note(self.given.replica, news.usage)
        if news.tree is None:
            return
        self._mirror.hear(news.tree)
        number = news.tree.report.get("round", 0)
        if number > self._told:
            self._told = number
            if self.on_round is not None and not self.cancelled:
                report = self._mirror.report(news.tree)
                await asyncio.wrap_future(self._owner.teller.submit(self.on_round, report))

    def _outcome(self, ended: News) -> Outcome:
        if ended.bug is not None:
            return RuntimeError(f"in a replica: {ended.bug}")
        solution = ended.solution
        if solution is not None and ended.tree is not None:
            solution = replace(solution, tree=self._mirror.tree)
        error = ended.error
        if error is None and self.cancelled:  # it ended before its replica heard of it
            error = Cancelled()
        if error is not None:
            error.partial = solution
            return error
        assert solution is not None
        return solution


class ClusterSolver:
    """Several engines as one. Use as a context: it ends what it has started.

    in_flight: problems in each replica, None for what keeps it busy. serving: whoever keeps them,
    None for Ray. roster: who is there. teller: a thread in which whoever listens hears of rounds.

    Raises:
        InputError, BeamwrightError: what a Solver with these settings would, or what Ray says.
    """

    remote = None

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        *,
        in_flight: int | None = None,
        serving: RayServing | None = None,
    ) -> None:
        load_all(cluster.plugins)
        self.serving = serving = serving or RayServing(cluster, settings, in_flight)
        default = ProblemSettings.of(settings, UserParts())
        self.codec, self.context, vocab = _known(settings)
        self.settings = with_system_prompt(default.settings, self.codec)
        self._default = default.settled(self.settings)
        self._prompts = Prompts(self.codec, self.context, vocab, self.settings.model)
        self.roster, self._in_flight = Roster(), in_flight
        self._searches: dict[RemoteSearch, Handle] = {}
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster", daemon=True)
        self._teller_name = f"rounds {id(self)}"
        self.teller = ThreadPoolExecutor(1, self._teller_name)
        self._thread.start()
        begun_s = time.monotonic()
        try:
            self.roster.wanted = serving.start()
            self._call(self._look()).result()
            self._loading_s = time.monotonic() - begun_s
            self._call(self._look_on())
        except BaseException:
            self.close()
            raise
        replicas = self.roster.replicas()
        self.exact = bool(replicas) and all(replica.exact for replica in replicas)

    def close(self) -> None:
        """Cancel all searches, and end the replicas."""
        if self._closed:
            return
        self._closed = True
        with suppress(TimeoutError):
            self._call(self._end()).result(CANCEL_S)
        self.serving.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.teller.shutdown(wait=False, cancel_futures=True)
        self._loop.close()

    def __enter__(self) -> ClusterSolver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- as a Solver -------------------------------------------------------------------------

    def prompt_tokens(self, problem: Problem) -> int:
        """Count the tokens of a problem's prompt; any thread may. Raises what is wrong with it."""
        return len(self._prompts.tree(0, problem).root.token_ids)

    def submit(
        self,
        problem: Problem,
        *,
        problem_id: str | int = 0,
        on_round: RoundCallback | None = None,
        tells: Tells = "rounds",
        **options: Any,
    ) -> Handle:
        """Submit a problem to a replica; as `Solver.submit`. tells: see `Tells`.

        What is wrong with a request is said at once; but of a generator that runs elsewhere, which
        replicas ask, nothing is known here. on_round is called in a thread of this solver's, with a
        mirror of the tree.
        """
        check_problem(problem, problem_id, on_round)
        options = {name: value for name, value in options.items() if value is not None}
        take_priority(wanted := dict(options))
        asked = self._default.changed(wanted)  # what `auto` stands for is every replica's affair
        if self.context:
            self._prompts.check_turns(asked.strategy, asked.settings.step.thinking)
        n, deadline_s = asked.settings.search.n, asked.settings.stop.deadline
        given = Given(uuid.uuid4().hex, problem, problem_id, options, n, self.roster, tells)
        return self._send(given, deadline_s, on_round)

    def submit_score(
        self,
        problem: Problem,
        paths: Sequence[Sequence[str]],
        *,
        problem_id: str | int = 0,
        on_round: RoundCallback | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Handle:
        """Submit given paths to be scored by a replica; as `Solver.submit_score`, but what its
        verifier or tokenizer refuses is the handle's result."""
        check_problem(problem, problem_id, on_round)
        named = dict[str, Any](options)
        take_priority(named)
        named.pop("delimiter", None)
        deadline_s = self._default.for_given_paths(1, 1, named).settings.stop.deadline
        name, n = uuid.uuid4().hex, len(read_paths(paths, ""))
        given = Given(name, problem, problem_id, {**options}, n, self.roster, paths=paths)
        return self._send(given, deadline_s, on_round)

    def _send(
        self, given: Given, deadline_s: float | None, on_round: RoundCallback | None
    ) -> Handle:
        """Send a search to a replica."""
        search, problem_id = RemoteSearch(self, given, deadline_s, on_round), given.problem_id

        def withdraw() -> None:
            self._loop.call_soon_threadsafe(search.give_up)

        handle = Handle(problem_id, search, withdraw, self._check_outside)
        self._loop.call_soon_threadsafe(self._begin, search, handle)
        return handle

    def solve_many(
        self, problems: Iterable[GivenProblem], *, tells: Tells = "nothing"
    ) -> Iterator[tuple[str | int, Solution | BeamwrightError]]:
        """Yield (id, outcome) as problems end, an outcome being a solution or the problem's error.

        Raises:
            BeamwrightError: for a bug in a replica;
            UnavailableError: if none is there any more, and none comes.
        """
        waiting, going = deque(read_problems(problems)), dict[Future[Solution], Handle]()
        try:
            while waiting or going:
                while waiting and len(going) < self._most_given():
                    problem_id, text, options = waiting.popleft()
                    handle = self.submit(text, problem_id=problem_id, tells=tells, **options)
                    going[handle.future] = handle
                ended, _ = wait(going, _WAIT_S, FIRST_COMPLETED)
                if not ended:
                    absent_s = self.roster.absent_s
                    if absent_s > max(_ABSENT_S, 2 * self._loading_s):
                        said = f"--ray: no replica has been there for {absent_s:.0f} s"
                        raise UnavailableError(said)
                    continue
                handle = going.pop(next(future for future in going if future in ended))
                try:
                    yield handle.problem_id, handle.result()
                except BeamwrightError as error:
                    yield handle.problem_id, error
                except RuntimeError as error:
                    raise BeamwrightError(f"a replica failed: {error}") from error
        finally:
            for handle in going.values():
                handle.cancel()

    def _check_outside(self) -> None:
        """Raises InputError in the thread that hears of rounds."""
        if threading.current_thread().name.startswith(self._teller_name):
            raise InputError("a callback of a search cannot wait for one of the same ClusterSolver")

    def usage(self) -> Usage:
        """Sum over all replicas, with the counts of dead ones."""
        return self.roster.usage()

    # --- in the loop -------------------------------------------------------------------------

    def _most_given(self) -> int:
        """Number of problems in flight over all live replicas."""
        n, most = self.settings.search.n, self._in_flight
        if most is None:
            decoupled = self.settings.schedule.explore == "decoupled"
            most = -(-(_DECOUPLED_ROWS if decoupled else USUAL_ROWS) // n)
        return (most + 1) * max(1, len(self.roster.replicas()))

    def _begin(self, search: RemoteSearch, handle: Handle) -> None:
        self._searches[search] = handle
        search.start().add_done_callback(partial(self._over, search, handle))

    def _over(self, search: RemoteSearch, handle: Handle, task: asyncio.Task[Outcome]) -> None:
        self.roster.take_back(search.given)
        del self._searches[search]
        if task.cancelled():  # maybe before it began
            handle.settle(Cancelled())
        else:
            handle.settle(task.exception() or task.result())

    async def _look(self) -> None:
        """Look which replicas are alive."""
        self.roster.update(await self.serving.broadcast("pulse"))

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            with suppress(Exception):  # who does not answer in time is looked for again
                await self._look()

    async def _end(self) -> None:
        for handle in self._searches.values():
            handle.cancel()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _call(self, what: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(what, self._loop)


def _known(settings: Settings) -> tuple[TextCodec | None, int, int]:
    """Return tokenizer, context and vocabulary of the replicas' generator, without its weights; a
    context of 0 where it runs elsewhere."""
    model, spec = settings.model, settings.model.model
    if model.runs_elsewhere:
        return None, 0, 0
    shape, codec = find_shape(model), None
    if not model.is_random:
        folder = resolve_folder(spec, "generator")
        codec = TextCodec.load(folder, model.chat_template, model.template_args)
    return codec, shape.context, shape.vocab
