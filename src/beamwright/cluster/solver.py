"""ClusterSolver: a Solver that runs searches on several engines, for servers and evaluations.

Ray runs the engines as replicas. A search goes to the replica with the smallest load. Callbacks get
the same reports as in a single process. `solve_many` keeps on each replica only the problems in
flight and one more, so that faster replicas solve more problems.
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
from beamwright.cluster.replica import SearchMessage
from beamwright.cluster.roster import Roster, SearchRequest, SentTree
from beamwright.cluster.serving import Cluster, RayServing, last_line
from beamwright.config import Settings
from beamwright.counters import Usage
from beamwright.declare import load_plugins
from beamwright.engine.admission import USUAL_ROWS
from beamwright.engine.prompts import PromptRenderer, with_system_prompt
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

# Number of replicas that may die while they run a search. Then the search fails, because it
# probably kills replicas.
MOST_DEATHS = 3

# Seconds to wait for a replica's answer after its search was cancelled.
CANCEL_S = 20.0

# Grace period in seconds, after a search's deadline, for a replica to start the search.
_PLACE_S = 30.0

Outcome = Solution | BaseException

# Seconds between two checks of the replicas.
HEARTBEAT_S = 2.0

# Seconds without a live replica after which `solve_many` fails, or twice a replica's loading time.
_ABSENT_S = 60.0

# With decoupled exploration, `solve_many` keeps searches with this many paths in total at each
# replica; with other explorations, searches with `USUAL_ROWS` paths.
_DECOUPLED_PATHS = 1024

# Seconds between two checks by `solve_many` that a replica is alive.
_WAIT_S = 1.0


class RemoteSearch:
    """Runs one search on replicas, and keeps a mirror of its tree.

    The replica sends the changes of each round. If the replica dies, the search restarts on another
    replica and grows the same tree; rounds that were reported before are not reported again. All
    code except the callback runs in the event loop of the owner.

    begun: True while a replica runs the search.
    """

    def __init__(
        self,
        owner: ClusterSolver,
        given: SearchRequest,
        deadline_s: float | None,
        on_round: RoundCallback | None,
    ) -> None:
        self.given, self.on_round, self._owner = given, on_round, owner
        self.begun = self.cancelled = False
        self._ends_s = None if deadline_s is None else time.monotonic() + deadline_s
        self._mirror = Mirror()
        self._deaths = self._last_round = 0  # deaths of its replicas, and the last reported round
        self._task: asyncio.Task[Outcome] | None = None
        self._cancelling: asyncio.Task[list[Any]] | None = None

    def start(self) -> asyncio.Task[Outcome]:
        """Start the search, and return its task. Call it in the owner's event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    def request_cancel(self) -> None:
        """Cancel the search on its replica, which returns the best solution so far.

        If no replica runs the search yet, its task is cancelled at once.
        """
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
        """Run the search, again on another replica if its replica dies; return its outcome."""
        while True:
            self._owner.roster.add(self.given)
            try:
                return await self._search()
            except self._owner.serving.died as error:
                if self.begun and self.given.replica is not None:
                    self._owner.roster.mark_dead(self.given.replica)
                self.begun = False
                self._deaths += 1
                if self.cancelled:
                    return Cancelled()
                if self._deaths >= MOST_DEATHS:
                    return BeamwrightError(
                        f"problem {self.given.problem_id}: {self._deaths} replicas died during "
                        f"this search: {last_line(error)}"
                    )
            if self._ends_s is not None:
                left_s = max(0.001, self._ends_s - time.monotonic())
                self.given.options["deadline"] = left_s

    async def _search(self) -> Outcome:
        """Run the search on one replica, and return its outcome.

        If the replica dies, raises one of the classes in `serving.died`.
        """
        stream, ends_s = self._owner.serving.search(self.given), self._ends_s
        try:  # `ends_s` is a time of `time.monotonic`, which is also the event loop's clock
            async with asyncio.timeout_at(None if ends_s is None else ends_s + _PLACE_S):
                replica: str = await anext(stream)
            self.begun = True
            self._owner.roster.assign(self.given, replica)
            async for news in stream:
                await self._apply_news(news)
                if self.cancelled and not news.ended:
                    self.request_cancel()
        except TimeoutError:
            stream.cancel()
            return UnavailableError("no replica took the search before its deadline")
        except asyncio.CancelledError:
            stream.cancel()
            raise
        return self._outcome(news)

    async def _apply_news(self, news: SearchMessage) -> None:
        """Apply a message to the mirror, and report a new round to the callback.

        The next message waits until the callback has returned, so that the mirror does not change
        while the callback reads the mirror.
        """
        self._owner.roster.update_usage(self.given.replica, news.usage)
        if news.tree is None:
            return
        self._mirror.apply(news.tree)
        number = news.tree.report.get("round", 0)
        if number > self._last_round:
            self._last_round = number
            if self.on_round is not None and not self.cancelled:
                report = self._mirror.report(news.tree)
                await asyncio.wrap_future(self._owner.callbacks.submit(self.on_round, report))

    def _outcome(self, ended: SearchMessage) -> Outcome:
        """Return the outcome in the last message, with the mirror as the solution's tree."""
        if ended.bug is not None:
            return RuntimeError(f"in a replica: {ended.bug}")
        solution = ended.solution
        if solution is not None and ended.tree is not None:
            solution = replace(solution, tree=self._mirror.tree)
        error = ended.error
        if error is None and self.cancelled:  # the search ended before the cancellation arrived
            error = Cancelled()
        if error is not None:
            error.partial = solution
            return error
        assert solution is not None
        return solution


class ClusterSolver:
    """Solver that runs searches on replicas; leaving its context manager ends the replicas.

    in_flight: maximum number of problems on each replica; None: as many as keep its engine busy.
    serving: starts and calls the replicas; None: Ray Serve.
    roster: the live replicas and their loads.
    callbacks: executor with one thread, which calls the users' callbacks.

    Raises:
        InputError, BeamwrightError: the error that a Solver with these settings would raise, or an
            error of Ray.
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
        load_plugins(cluster.plugins)
        self.serving = serving = serving or RayServing(cluster, settings, in_flight)
        default = ProblemSettings.of(settings, UserParts())
        self.codec, self.context, vocab = _load_tokenizer(settings)
        self.settings = with_system_prompt(default.settings, self.codec)
        self._default = default.with_settings(self.settings)
        self._prompts = PromptRenderer(self.codec, self.context, vocab, self.settings.model)
        self.roster, self._in_flight = Roster(), in_flight
        self._searches: dict[RemoteSearch, Handle] = {}
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster", daemon=True)
        self._callback_thread = f"rounds {id(self)}"
        self.callbacks = ThreadPoolExecutor(1, self._callback_thread)
        self._thread.start()
        begun_s = time.monotonic()
        try:
            self.roster.wanted = serving.start()
            self._run_in_loop(self._update_roster()).result()
            self._loading_s = time.monotonic() - begun_s
            self._run_in_loop(self._poll_replicas())
        except BaseException:
            self.close()
            raise
        replicas = self.roster.replicas()
        self.exact = bool(replicas) and all(replica.exact for replica in replicas)

    def close(self) -> None:
        """Cancel all searches, and end the replicas. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        with suppress(TimeoutError):
            self._run_in_loop(self._cancel_all()).result(CANCEL_S)
        self.serving.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.callbacks.shutdown(wait=False, cancel_futures=True)
        self._loop.close()

    def __enter__(self) -> ClusterSolver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- interface of a Solver ---------------------------------------------------------------

    def prompt_tokens(self, problem: Problem) -> int:
        """Return the number of tokens of a problem's prompt. Any thread may call this.

        Raises:
            InputError: if the problem is not valid.
        """
        return len(self._prompts.make_tree(0, problem).root.token_ids)

    def submit(
        self,
        problem: Problem,
        *,
        problem_id: str | int = 0,
        on_round: RoundCallback | None = None,
        tells: SentTree = "rounds",
        **options: Any,
    ) -> Handle:
        """Submit a problem to a replica; arguments and handle as of `Solver.submit`.

        An error that only a remote generator's server can detect becomes the result of the handle,
        because replicas call the server. Other errors in a request are raised at once.

        on_round: called in a thread of this solver, with a mirror of the tree.
        tells: what the replica sends of the tree: changes after each round, the whole, or nothing.
        """
        check_problem(problem, problem_id, on_round)
        options = {name: value for name, value in options.items() if value is not None}
        take_priority(wanted := dict(options))
        chosen = self._default.changed(wanted)  # values of "auto" stay: each replica resolves them
        if self.context:
            self._prompts.check_turns(chosen.strategy, chosen.settings.step.thinking)
        n, deadline_s = chosen.settings.search.n, chosen.settings.stop.deadline
        given = SearchRequest(uuid.uuid4().hex, problem, problem_id, options, n, self.roster, tells)
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
        """Submit given paths to a replica that scores them, as `Solver.submit_score` does.

        Unlike with a Solver, an error of verifier or tokenizer becomes the result of the handle.
        """
        check_problem(problem, problem_id, on_round)
        named = dict[str, Any](options)
        take_priority(named)
        named.pop("delimiter", None)
        deadline_s = self._default.for_given_paths(1, 1, named).settings.stop.deadline
        name, n = uuid.uuid4().hex, len(read_paths(paths, ""))
        given = SearchRequest(name, problem, problem_id, {**options}, n, self.roster, paths=paths)
        return self._send(given, deadline_s, on_round)

    def _send(
        self, given: SearchRequest, deadline_s: float | None, on_round: RoundCallback | None
    ) -> Handle:
        """Start sending a search to a replica, and return its handle."""
        search, problem_id = RemoteSearch(self, given, deadline_s, on_round), given.problem_id

        def withdraw() -> None:
            self._loop.call_soon_threadsafe(search.request_cancel)

        handle = Handle(problem_id, search, withdraw, self._check_outside)
        self._loop.call_soon_threadsafe(self._begin, search, handle)
        return handle

    def solve_many(
        self, problems: Iterable[GivenProblem], *, tells: SentTree = "nothing"
    ) -> Iterator[tuple[str | int, Solution | BeamwrightError]]:
        """Solve problems, and yield (problem id, solution or error) in the order in which they end.

        Raises:
            BeamwrightError: for a bug in a replica.
            UnavailableError: if no replica was alive for `_ABSENT_S` s or twice its loading time.
        """
        waiting, going = deque(read_problems(problems)), dict[Future[Solution], Handle]()
        try:
            while waiting or going:
                while waiting and len(going) < self._most_in_flight():
                    problem_id, text, options = waiting.popleft()
                    handle = self.submit(text, problem_id=problem_id, tells=tells, **options)
                    going[handle.future] = handle
                ended, _ = wait(going, _WAIT_S, FIRST_COMPLETED)
                if not ended:
                    silent_s = self.roster.silent_s
                    if silent_s > max(_ABSENT_S, 2 * self._loading_s):
                        said = f"--ray: no replica was available for {silent_s:.0f} s"
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
        """Check that the calling thread may wait for a search.

        Raises:
            InputError: in the thread of the callbacks, which would block all other callbacks.
        """
        if threading.current_thread().name.startswith(self._callback_thread):
            raise InputError("a callback cannot wait for a search of the same ClusterSolver")

    def usage(self) -> Usage:
        """Return the sum of the usage of all replicas, including the counts of dead ones."""
        return self.roster.usage()

    # --- in the event loop -------------------------------------------------------------------

    def _most_in_flight(self) -> int:
        """Return the number of problems that `solve_many` keeps on all live replicas together."""
        n, most = self.settings.search.n, self._in_flight
        if most is None:
            decoupled = self.settings.schedule.explore == "decoupled"
            most = -(-(_DECOUPLED_PATHS if decoupled else USUAL_ROWS) // n)
        return (most + 1) * max(1, len(self.roster.replicas()))

    def _begin(self, search: RemoteSearch, handle: Handle) -> None:
        """Start a search, and set the result of its handle when it ends."""
        self._searches[search] = handle
        search.start().add_done_callback(partial(self._finish, search, handle))

    def _finish(self, search: RemoteSearch, handle: Handle, task: asyncio.Task[Outcome]) -> None:
        """Remove a search that has ended, and set the result of its handle."""
        self.roster.remove(search.given)
        del self._searches[search]
        if task.cancelled():  # possibly before it began, so that it has no outcome
            handle.set_outcome(Cancelled())
        else:
            handle.set_outcome(task.exception() or task.result())

    async def _update_roster(self) -> None:
        """Ask all replicas for a heartbeat, and update the roster with those that answer."""
        self.roster.update(await self.serving.broadcast("heartbeat"))

    async def _poll_replicas(self) -> None:
        """Update the roster every `HEARTBEAT_S` seconds until the task is cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            with suppress(Exception):  # for example a timeout; the next iteration tries again
                await self._update_roster()

    async def _cancel_all(self) -> None:
        """Cancel all searches and all other tasks of the event loop, and wait for them."""
        for handle in self._searches.values():
            handle.cancel()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run_in_loop(self, coroutine: Any) -> Future[Any]:
        """Run a coroutine in the event loop, and return the future of its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


def _load_tokenizer(settings: Settings) -> tuple[TextCodec | None, int, int]:
    """Return the tokenizer, context and vocabulary size of the generator, without its weights.

    If the generator is on a remote server, the result is None, 0 and 0.
    """
    model, spec = settings.model, settings.model.model
    if model.runs_elsewhere:
        return None, 0, 0
    shape, codec = find_shape(model), None
    if not model.is_random:
        folder = resolve_folder(spec, "generator")
        codec = TextCodec.load(folder, model.chat_template, model.template_args)
    return codec, shape.context, shape.vocab
