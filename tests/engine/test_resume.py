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
from beamwright.errors import CapacityError, InputError, Interrupted
from beamwright.saved.checkpoint import read_checkpoint
from engines import PROBLEM, assert_nothing_allocated, check_conservation, tiny_solver
from hybrids import write_hybrid

SMALL = {"dtype": "float64", "n": 8, "max_rounds": 5, "host_memory": "4MiB"}


@pytest.fixture
def with_prm(make_solver, verifier_folder):
    def make(**changes):
        return make_solver(**{"verifier": str(verifier_folder), **SMALL, **changes})

    return make


def saved_rounds(solver, folder):
    """Solve; returns the solution, its tree and a checkpoint file per round."""
    file, files = folder / "search.json", []

    def keep(_):
        files.append(shutil.copy(file, folder / f"round{len(files) + 1}.json"))

    solution, tree = None, {}

    def on_round(report):
        keep(report)
        tree["grown"] = report.tree

    solution = solver.solve(PROBLEM, on_round=on_round, checkpoint=file)
    return solution, tree["grown"], files


def resume(solver, file, **options):
    """Resume, checking conservation after every round; returns the solution and the tree."""
    seen = {}

    def on_round(report):
        # The first round was scored by the earlier process; it gets its KV after this call.
        if "tree" in seen:
            check_conservation(solver, [report.tree])
        seen["tree"] = report.tree

    solution = solver.resume(file, on_round=on_round, **options)
    assert_nothing_allocated(solver)
    return solution, seen.get("tree")


def test_a_resumed_search_saves_its_rounds_and_counts_all_its_time(with_prm, tmp_path):
    solver = with_prm()
    expected, _, files = saved_rounds(solver, tmp_path)
    file = tmp_path / "again.json"
    assert resume(solver, files[0], checkpoint=file)[0].tree_hash == expected.tree_hash
    last = read_checkpoint(file)
    assert last.tree.rounds == expected.rounds
    assert last.elapsed_s > read_checkpoint(files[0]).elapsed_s
    assert resume(solver, file)[0].tree_hash == expected.tree_hash
    assert resume(solver, file)[0].time.total_s > last.elapsed_s


@pytest.mark.parametrize("at", [1, 2, 4])
def test_ctrl_c_leaves_a_checkpoint(with_prm, tmp_path, at):
    solver, file = with_prm(), tmp_path / "search.json"
    expected = solver.solve(PROBLEM).tree_hash
    finished = []

    def on_round(report):
        finished.extend(report.finished)
        if report.round == at:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        solver.solve(PROBLEM, on_round=on_round, checkpoint=file)
    partial = caught.value.partial
    assert (len(partial.candidates) if partial else 0) == len(finished)
    assert resume(solver, file)[0].tree_hash == expected


def test_running_out_of_room_while_resuming_leaves_nothing_behind(with_prm, tmp_path):
    _, _, files = saved_rounds(with_prm(), tmp_path)
    solver = with_prm(schedule="in-gpu", kv_memory=16 * 4096)
    with pytest.raises(CapacityError):
        solver.resume(files[2])
    assert_nothing_allocated(solver)


def test_without_a_verifier_and_from_a_synthetic_prompt(make_solver, tmp_path):
    solver, file = make_solver(**SMALL), tmp_path / "search.json"
    expected = solver.synthetic(9, checkpoint=file)
    stopped = make_solver(**SMALL, token_budget=30).synthetic(9, checkpoint=file)
    assert stopped.rounds < expected.rounds
    assert resume(solver, file)[0].tree_hash == expected.tree_hash


# --- what does not belong together -----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"seed": 1}, "was saved with --seed 0, not 1"),
        ({"n": 12, "seed": 1}, "was saved with --n 8, not 12"),
        ({"search": "dvts"}, "was saved with --search 'beam', not 'dvts'"),
        ({"dtype": "float32"}, "was saved with --dtype 'float64', not 'float32'"),
        ({"temperature": 0.5}, "was saved with --temperature 1.0, not 0.5"),
        ({"max_tokens": None, "delimiter": "\n"}, "was saved with --delimiter 'e', not '\\n'"),
        ({"verifier": "logprob"}, "was saved with --verifier '"),
        ({"top_k": 3}, "was saved with --top-k unset, not 3"),
    ],
)
def test_other_settings_are_named(with_prm, tmp_path, changes, complaint):
    file = tmp_path / "search.json"
    with_prm(token_budget=1).solve(PROBLEM, checkpoint=file)
    solver = with_prm(**changes)
    with pytest.raises(InputError) as caught:
        solver.resume(file)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_that_do_not_decide_the_tree_may_differ(with_prm, tmp_path):
    file = tmp_path / "search.json"
    with_prm(token_budget=1).solve(PROBLEM, checkpoint=file)
    assert with_prm(choose="majority", max_batch=3).resume(file, problem=f" {PROBLEM}\n").rounds


def test_another_problem_or_tokenizer_is_an_error(with_prm, tmp_path):
    solver, file = with_prm(), tmp_path / "search.json"
    with_prm(token_budget=1).solve(PROBLEM, checkpoint=file)
    with pytest.raises(InputError, match="was saved with another problem"):
        solver.resume(file, problem="1+1")
    solver._prompts._codec = with_prm(
        chat_template="Q: {{ messages[-1].content }}"
    )._machinery.reader.codec
    with pytest.raises(InputError, match="another tokenizer or chat template"):
        solver.resume(file)


def test_a_checkpoint_that_cannot_be_written_stops_the_search_at_once(with_prm, tmp_path):
    solver = with_prm()
    with pytest.raises(InputError, match=r"--checkpoint .*cannot be written"):
        solver.solve(PROBLEM, checkpoint=tmp_path / "nowhere" / "search.json")
    assert_nothing_allocated(solver)


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
        (None, 3),
        pytest.param("qwen3_5_text", 30, marks=pytest.mark.nightly),
        pytest.param("granitemoehybrid", 30, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_process_is_resumed_to_the_same_tree(
    family, num_kills, generator_folder, verifier_folder, tmp_path
):
    """family: of a hybrid; None: a plain decoder."""
    folder = generator_folder if family is None else write_hybrid(tmp_path, family)
    options = {**SMALL, "n": 32, "max_rounds": 8, "verifier": str(verifier_folder)}
    paths = [str(Path(beamwright.__file__).parents[1]), str(Path(__file__).parents[1])]
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
