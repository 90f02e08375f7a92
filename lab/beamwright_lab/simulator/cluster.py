"""A cluster on paper: replicas that take problems from one driver, which writes the results.

Discrete events, no Ray: who has what is as on 2026-11-23 (work is taken and not dealt, the
idle take what others have not begun, a death sends its problems to the front of the queue). Every
time is given: what a problem takes on a device comes from the rest of the simulator, what it takes
the driver from a measurement.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from beamwright.errors import InputError


@dataclass(frozen=True)
class SimulatedReplicas:
    """Engines, each on a device of its own.

    held: problems that each is given at a time, begun or not. speeds: how fast each of 1, 2, ...
    problems goes on that are in flight together, 1.0 if it is alone; as many begin. start_s: until
    models are loaded. message_s: one way to the driver. give_back: the idle take from the busiest.
    """

    count: int
    held: int
    speeds: Sequence[float] = (1.0,)
    start_s: float = 0.0
    message_s: float = 0.0
    give_back: bool = True

    def __post_init__(self) -> None:
        if min(self.count, self.held, len(self.speeds)) < 1 or min(self.speeds) <= 0:
            raise InputError("a cluster needs replicas that hold problems and get on with them")

    @property
    def begun(self) -> int:
        """Most problems in flight at a time, in each."""
        return min(self.held, len(self.speeds))

    @property
    def rate(self) -> float:
        """Seconds of work (of a problem alone) that one does in a second, always full."""
        return max((j + 1) * speed for j, speed in enumerate(self.speeds[: self.begun]))


@dataclass(frozen=True)
class Driver:
    """Seconds of each result, one at a time: taking it, judging its answers, having it on disk."""

    take_s: float = 0.0
    judge_s: float = 0.0
    write_s: float = 0.0

    @property
    def result_s(self) -> float:
        return self.take_s + self.judge_s + self.write_s


@dataclass(frozen=True)
class Failures:
    """Mean seconds between deaths of a replica, and of a node of `node_size` of them.

    again_s: until a device that has failed is there again, the loading of models not included.
    """

    replica_s: float = math.inf
    node_s: float = math.inf
    node_size: int = 8
    again_s: float = 0.0


@dataclass(frozen=True)
class ClusterRun:
    """A run on paper. Seconds are from the first problem that is handed out.

    seconds: to the last result on disk. share_s: 50, 90, 99 and 100 % of the results on disk.
    work_s: of all problems, alone. lost_s: of it, done in vain by replicas that died.
    busy_s: of all replicas, with a problem in flight. driver_s: the driver's.
    waited_s, longest_wait_s: of a result for the driver, mean and most. most_results: that wait.
    deaths: of replicas. again: problems that were lost with one. most_deaths: of a problem's
    replica (`cluster.solver.MOST_DEATHS` end a run). given_back: problems.
    """

    problems: int
    replicas: SimulatedReplicas
    seconds: float
    share_s: dict[int, float]
    work_s: float
    lost_s: float
    busy_s: float
    driver_s: float
    waited_s: float
    longest_wait_s: float
    most_results: int
    deaths: int
    again: int
    most_deaths: int
    given_back: int

    @property
    def problems_per_hour(self) -> float:
        return 3600 * self.problems / self.seconds

    @property
    def efficiency(self) -> float:
        """Against as many devices, each of which is always full."""
        return self.work_s / self.replicas.rate / self.replicas.count / self.seconds

    @property
    def device_s_per_problem(self) -> float:
        """Of all devices, from the first problem to the last."""
        return self.replicas.count * self.seconds / self.problems

    @property
    def last_percent_s(self) -> float:
        """From 99 % of the results to all."""
        return self.share_s[100] - self.share_s[99]

    @property
    def driver_share(self) -> float:
        """Of the time, in which the driver is busy."""
        return self.driver_s / self.seconds


def simulate_cluster(
    work_s: Sequence[float],
    replicas: SimulatedReplicas,
    driver: Driver | None = None,
    failures: Failures | None = None,
    seed: int = 0,
) -> ClusterRun:
    """Run problems, in their order. work_s: seconds of each, alone on a device.

    Raises:
        InputError: if there are none.
    """
    if not work_s or min(work_s) <= 0:
        raise InputError("a cluster needs problems that take time")
    return _Run(work_s, replicas, driver or Driver(), failures or Failures(), seed).run()


def saturating_count(rate_per_s: float, result_s: float, per_replica_s: float = 0.0) -> float:
    """Replicas at which a server of results is always busy.

    rate_per_s: problems of one replica. result_s, per_replica_s: its seconds per result, and what
    each replica adds to them: count * rate * (result_s + count * per_replica_s) = 1.
    """
    if per_replica_s == 0:
        return 1 / (rate_per_s * result_s)
    root = math.sqrt(result_s**2 + 4 * per_replica_s / rate_per_s)
    return (root - result_s) / (2 * per_replica_s)


# --- parts -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Engine:
    """A replica: problems in flight share the device, the others wait.

    done_s: work that each in flight has got since the start, so that one that joins at `done_s`
    ends at `done_s` + its own. given: what the driver believes that it has.
    """

    given: set[int] = field(default_factory=set)
    alive: bool = True
    life: int = 0
    turn: int = 0
    in_flight: list[tuple[float, int, float]] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    done_s: float = 0.0
    now_s: float = 0.0
    busy_s: float = 0.0


class _Run:
    def __init__(
        self,
        work_s: Sequence[float],
        replicas: SimulatedReplicas,
        driver: Driver,
        failures: Failures,
        seed: int,
    ) -> None:
        self._work_s, self._replicas = work_s, replicas
        self._driver, self._failures = driver, failures
        self._random = random.Random(seed)
        self._engines = [_Engine() for _ in range(replicas.count)]
        self._queue = deque(range(len(work_s)))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._now_s = 0.0
        # Results at the driver: when they came, of which replica and problem; False: given back.
        self._results: deque[tuple[float, _Engine, int, bool]] = deque()
        self._driver_works = False
        self._driver_s = self._waited_s = self._longest_wait_s = self._lost_s = 0.0
        self._most_results = self._deaths = self._given_back = 0
        self._died: Counter[int] = Counter()
        self._ended_s: dict[int, float] = {}

    def run(self) -> ClusterRun:
        for engine in self._engines:
            self._may_die(engine)
        size = self._failures.node_size
        for start in range(0, len(self._engines), size):
            self._node_may_die(self._engines[start : start + size])
        self._hand_out()
        while len(self._ended_s) < len(self._work_s):
            self._now_s, _, event = heapq.heappop(self._events)
            event()
        total, ended_s = len(self._ended_s), list(self._ended_s.values())
        return ClusterRun(
            problems=total,
            replicas=self._replicas,
            seconds=self._now_s,
            share_s={
                share: ended_s[math.ceil(total * share / 100) - 1] for share in (50, 90, 99, 100)
            },
            work_s=math.fsum(self._work_s),
            lost_s=self._lost_s,
            busy_s=math.fsum(each.busy_s for each in self._engines),
            driver_s=self._driver_s,
            waited_s=self._waited_s / total,
            longest_wait_s=self._longest_wait_s,
            most_results=self._most_results,
            deaths=self._deaths,
            again=sum(self._died.values()),
            most_deaths=max(self._died.values(), default=0),
            given_back=self._given_back,
        )

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        self._num_events += 1  # events of one moment happen in their order
        heapq.heappush(self._events, (self._now_s + seconds, self._num_events, event))

    # --- the driver --------------------------------------------------------------------------

    def _hand_out(self) -> None:
        alive = [each for each in self._engines if each.alive]
        while self._queue and alive:
            engine = min(alive, key=lambda each: len(each.given))
            if len(engine.given) >= self._replicas.held:
                return
            self._give(engine, self._queue.popleft())
        if self._replicas.give_back and any(not each.given for each in alive):
            busiest = max(alive, key=lambda each: len(each.given))
            if len(busiest.given) > 1:
                self._ask_back(busiest, len(busiest.given) // 2)

    def _give(self, engine: _Engine, problem: int) -> None:
        engine.given.add(problem)
        life = engine.life

        def arrives() -> None:
            if engine.life == life:
                self._advance(engine)
                engine.waiting.append(problem)
                self._begin(engine)

        self._after(self._replicas.message_s, arrives)

    def _ask_back(self, engine: _Engine, most: int) -> None:
        life = engine.life

        def arrives() -> None:
            if engine.life == life:
                for _ in range(min(most, len(engine.waiting))):
                    self._send(engine, engine.waiting.pop(), finished=False)

        self._after(self._replicas.message_s, arrives)

    def _send(self, engine: _Engine, problem: int, *, finished: bool) -> None:
        life = engine.life

        def arrives() -> None:
            if engine.life == life:  # else its problems are somebody else's
                self._results.append((self._now_s, engine, problem, finished))
                self._most_results = max(self._most_results, len(self._results))
                if not self._driver_works:
                    self._serve()

        self._after(self._replicas.message_s, arrives)

    def _serve(self) -> None:
        """Take a result and do what there is to do with it; then its replica gets another one."""
        came_s, engine, problem, finished = self._results.popleft()
        self._driver_works = True
        engine.given.discard(problem)
        seconds = self._driver.result_s if finished else self._driver.take_s
        self._driver_s += seconds
        if finished:
            waited_s = self._now_s - came_s
            self._waited_s += waited_s
            self._longest_wait_s = max(self._longest_wait_s, waited_s)

        def ends() -> None:
            if finished:
                assert problem not in self._ended_s, "each once"
                self._ended_s[problem] = self._now_s
            else:
                self._given_back += 1
                self._queue.append(problem)
            self._driver_works = False
            self._hand_out()
            if self._results:
                self._serve()

        self._after(seconds, ends)

    # --- replicas ----------------------------------------------------------------------------

    def _advance(self, engine: _Engine) -> None:
        """Bring its problems to the present."""
        passed_s, engine.now_s = self._now_s - engine.now_s, self._now_s
        if engine.in_flight:
            engine.done_s += passed_s * self._replicas.speeds[len(engine.in_flight) - 1]
            engine.busy_s += passed_s

    def _begin(self, engine: _Engine) -> None:
        """Problems that wait take free places; the next one's end is foreseen."""
        while engine.waiting and len(engine.in_flight) < self._replicas.begun:
            problem = engine.waiting.popleft()
            end_s = engine.done_s + self._work_s[problem]
            heapq.heappush(engine.in_flight, (end_s, problem, engine.done_s))
        engine.turn += 1
        if not engine.in_flight:
            return
        life, turn = engine.life, engine.turn
        left_s = max(0.0, engine.in_flight[0][0] - engine.done_s)

        def ends() -> None:
            if (engine.life, engine.turn) == (life, turn):
                self._advance(engine)
                _, problem, _ = heapq.heappop(engine.in_flight)
                self._send(engine, problem, finished=True)
                self._begin(engine)

        self._after(left_s / self._replicas.speeds[len(engine.in_flight) - 1], ends)

    # --- deaths ------------------------------------------------------------------------------

    def _may_die(self, engine: _Engine) -> None:
        if self._failures.replica_s < math.inf:
            life = engine.life
            after_s = self._random.expovariate(1 / self._failures.replica_s)
            self._after(after_s, lambda: self._die(engine) if engine.life == life else None)

    def _node_may_die(self, engines: Sequence[_Engine]) -> None:
        if self._failures.node_s < math.inf:

            def dies() -> None:
                for engine in engines:
                    if engine.alive:
                        self._die(engine)
                self._node_may_die(engines)

            self._after(self._random.expovariate(1 / self._failures.node_s), dies)

    def _die(self, engine: _Engine) -> None:
        """Results that have reached the driver are safe; others have its problems."""
        self._advance(engine)
        safe = {
            problem for _, its, problem, finished in self._results if its is engine and finished
        }
        lost = [each for each in sorted(engine.given) if each not in safe]
        self._lost_s += sum(engine.done_s - joined_s for _, _, joined_s in engine.in_flight)
        self._results = deque(each for each in self._results if each[1] is not engine or each[3])
        self._died.update(lost)
        self._deaths += 1
        self._queue.extendleft(reversed(lost))
        engine.in_flight.clear()
        engine.waiting.clear()
        engine.given.clear()
        engine.alive, engine.life = False, engine.life + 1

        def comes() -> None:
            engine.alive, engine.now_s = True, self._now_s
            self._may_die(engine)
            self._hand_out()

        self._after(self._failures.again_s + self._replicas.start_s, comes)
        self._hand_out()
