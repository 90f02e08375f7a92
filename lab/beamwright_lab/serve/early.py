"""Streams of every method: are they the whole answer, piece by piece, and how early.

Problems of `bundled:test`, one at a time. A stream's text is compared with the answer that the same
request has without streaming. *First*: share of the search's time at which text came first;
*early*: mean share of the time at which a character came (a server that says all at the end has
1 for both).

    python -m beamwright_lab.serve.early --runs 200
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import mean
from typing import Any

import httpx

from beamwright.evaluate import load_problems
from beamwright_lab.common import finish, say, table
from beamwright_lab.serve.running import server

COLUMNS = ("method", "runs", "equal", "first", "early", "chunks of text")


def streamed(http: httpx.Client, body: dict[str, Any]) -> tuple[list[tuple[float, str]], float]:
    """Pieces of text with their times, and the time of the end, in seconds."""
    began, pieces = time.perf_counter(), []
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                if text := choice["delta"].get("content"):
                    pieces.append((time.perf_counter() - began, text))
    return pieces, time.perf_counter() - began


def measured(http: httpx.Client, model: str, problems: list[str]) -> dict[str, Any]:
    """One method on these problems."""
    first, early, counts, equal = [], [], [], 0
    for seed, problem in enumerate(problems):
        body = {
            "model": model, "seed": seed, "messages": [{"role": "user", "content": problem}]
        }  # fmt: skip
        pieces, total_s = streamed(http, body)
        answer = http.post("/v1/chat/completions", json=body).json()
        whole = answer["choices"][0]["message"]["content"]
        equal += "".join(text for _, text in pieces) == whole
        if pieces:
            first.append(pieces[0][0] / total_s)
            characters = sum(len(text) for _, text in pieces)
            early.append(sum(at / total_s * len(text) for at, text in pieces) / characters)
        counts.append(len(pieces))
    return {
        "method": model.partition(":")[2],
        "runs": len(problems),
        "equal": equal,
        "first": round(mean(first), 2),
        "early": round(mean(early), 2),
        "chunks of text": round(mean(counts), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=200, help="of all methods together")
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--width", type=int, default=4)
    args = parser.parse_args()
    rows = []
    with server("--n", str(args.n), "--width", str(args.width)) as running:
        models = [model for model in running.facts["models"] if ":" in model]
        count = -(-args.runs // len(models))
        problems = [each.problem for each in load_problems("bundled:test", limit=count).problems]
        with httpx.Client(base_url=running.url, timeout=120) as http:
            for model in models:
                rows.append(measured(http, model, problems))
                say(*rows[-1].values())
    say(table(rows, COLUMNS))
    finish("serve_early", {"rows": rows, "settings": vars(args)})


if __name__ == "__main__":
    main()
