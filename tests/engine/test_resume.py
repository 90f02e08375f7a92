"""A search that is resumed grows the tree that it would have grown anyway."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import beamwright
from beamwright.errors import InputError
from beamwright.saved.checkpoint import read_checkpoint
from engines import PROBLEM, assert_nothing_allocated, check_conservation, tiny_solver
from hybrids import write_hybrid

SMALL = {"dtype": "float64", "n": 8, "max_rounds": 5, "host_memory": "4MiB"}


@pytest.fixture
def with_prm(make_solver, verifier_folder):
    def make(**changes):
        return make_solver(**{"verifier": str(verifier_folder), **SMALL, **changes})

    return make


def resume(solver, file, **options):
    """Resume, checking conservation after every round."""
    seen = []

    def on_round(report):
        # The first round was scored by the earlier process; it gets its KV after this call.
        if seen:
            check_conservation(solver, [report.tree])
        seen.append(report)

    solution = solver.resume(file, on_round=on_round, **options)
    assert_nothing_allocated(solver)
    return solution


def test_a_resumed_search_saves_its_rounds_and_counts_all_its_time(with_prm, tmp_path):
    solver, file, kept = with_prm(), tmp_path / "search.json", tmp_path / "kept.json"

    def keep(report):
        if report.round == 1:
            shutil.copy(file, kept)

    expected = solver.solve(PROBLEM, on_round=keep, checkpoint=file)
    again = resume(solver, kept, checkpoint=file, problem=f" {PROBLEM}\n")
    assert again.tree_hash == expected.tree_hash
    last = read_checkpoint(file)
    assert last.tree.rounds == expected.rounds
    assert last.elapsed_s > read_checkpoint(kept).elapsed_s
    assert resume(solver, file).time.total_s > last.elapsed_s


def test_without_a_verifier_and_from_a_synthetic_prompt(make_solver, tmp_path):
    solver, file = make_solver(**SMALL), tmp_path / "search.json"
    expected = solver.synthetic(9, checkpoint=file)
    stopped = make_solver(**SMALL, token_budget=30).synthetic(9, checkpoint=file)
    assert stopped.rounds < expected.rounds
    assert resume(solver, file).tree_hash == expected.tree_hash


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"n": 12, "seed": 1}, "was saved with --n 8, not 12"),
        ({"max_tokens": None, "delimiter": "\n"}, "was saved with --delimiter 'e', not '\\n'"),
        ({"verifier": "logprob"}, "was saved with --verifier '"),
        ({"chat_template": "Q: {{ messages[-1].content }}"}, "was saved with"),
    ],
)
def test_what_does_not_belong_together_is_named(with_prm, tmp_path, changes, complaint):
    file = tmp_path / "search.json"
    with_prm(token_budget=1).solve(PROBLEM, checkpoint=file)
    with pytest.raises(InputError, match="was saved with another problem"):
        with_prm().resume(file, problem="1+1")
    with pytest.raises(InputError) as caught:
        with_prm(**changes).resume(file)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


# --- a process that is killed ----------------------------------------------------------------

_PROCESS = """
import os, sys, torch
sys.path[:0] = {paths!r}
torch.set_num_threads(1)
from pathlib import Path
from engines import PROBLEM, tiny_solver
solver = tiny_solver({folder!r}, **{options!r})
for line in sys.stdin:  # a process of its own for every file: to load the models takes longest
    if (child := os.fork()) == 0:
        solver.solve(PROBLEM, checkpoint=Path(line.strip()))
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def kill(server, file, after_s):
    """Have a search begun, and kill it so long after its first checkpoint; True if in time."""
    server.stdin.write(f"{file}\n")
    server.stdin.flush()
    child = int(server.stdout.readline())
    give_up_s = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < give_up_s, "the search did not start"
        time.sleep(0.001)
    time.sleep(after_s)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return int(server.stdout.readline()) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("family", "num_kills"),
    [
        (None, 2),
        pytest.param("qwen3_5_text", 8, marks=pytest.mark.nightly),
        pytest.param("granitemoehybrid", 8, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_process_is_resumed_to_the_same_tree(
    family, num_kills, generator_folder, verifier_folder, tmp_path
):
    """family: of a hybrid; None: a plain decoder."""
    folder = generator_folder if family is None else write_hybrid(tmp_path, family)
    options = {**SMALL, "n": 16, "max_rounds": 8, "verifier": str(verifier_folder)}
    paths = [str(Path(beamwright.__file__).parents[1]), str(Path(__file__).parents[1] / "support")]
    code = _PROCESS.format(paths=paths, folder=str(folder), options=options)
    files = [tmp_path / f"search{number}.json" for number in range(num_kills)]
    draw = random.Random(7)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        solver = tiny_solver(folder, **options)
        began_s = time.perf_counter()
        expected = solver.solve(PROBLEM).tree_hash
        took_s = time.perf_counter() - began_s
        killed = [kill(server, file, draw.random() * took_s / 2) for file in files]
        server.stdin.close()
    assert any(killed)
    for file in files:
        assert solver.resume(file).tree_hash == expected
