"""Decoupled tree exploration: McCreanor's thesis on a runtime for test-time compute."""

from __future__ import annotations

from typing import Any

from beamwright_lab.claims import Found, Judged, Verdict, near, of, read_claims

CALM = "lru", "tree"


def _runs(found: Found, victims: str) -> dict[float, dict[str, Any]]:
    """By split, of what fits."""
    return {
        row["split"]: row
        for row in found["split"]
        if row["victims"] == victims and not isinstance(row["tok/s"], str)
    }


def _peak(found: Found) -> Judged:
    runs = _runs(found, "lru")
    rates = {split: row["tok/s"] for split, row in runs.items()}
    best = max(rates, key=rates.__getitem__)
    said = "; ".join(f"{split}: {rate:,.0f} tok/s" for split, rate in rates.items())
    return f"{said} (24 GB)", of(near(best, 0.3), "partly")


def _hits(found: Found) -> Judged:
    rows = [*_runs(found, "lru").values()]
    own, other = (sorted(row[name] for row in rows) for name in ("hits", "verifier hits"))
    said = f"{own[0]:.3f} to {own[-1]:.3f}; the verifier {other[0]:.3f} to {other[-1]:.3f}"
    return said, of(min(own[0], other[0]) > 0.8)


def _thrash(found: Found) -> Judged:
    rows = [*_runs(found, "lru").values()]
    most = max(max(row["thrash"], row["verifier thrash"]) for row in rows)
    none = [f"{row['split']}" for row in rows if not row["thrash"] and not row["verifier thrash"]]
    said = f"none at a split of {' and '.join(none)}, elsewhere up to {100 * most:.1f} % of tokens"
    return said, of(most < 0.01)


def _held(found: Found) -> Judged:
    rows = sorted(found["vllm"], key=lambda row: row["verifier blocks"])
    held = [row["verifier held"] for row in rows]
    said = ", ".join(f"{row['verifier held']} of {row['verifier blocks']:,}" for row in rows)
    said = f"on average requests hold {said} blocks, under vLLM's rules"
    return said, of(held == sorted(held) and held[0] < 0.9 * held[-1], "not reproduced")


def _thrash_by_hash(found: Found) -> Judged:
    rows = found["vllm"]
    shares = {row["split"]: max(row["thrash"], row["verifier thrash"]) for row in rows}
    said = ", ".join(f"{split}: {100 * share:.1f} %" for split, share in shares.items())
    otherwise: Verdict = "partly" if min(shares.values()) < 0.01 else "not reproduced"
    return f"of blocks, by split: {said}", of(max(shares.values()) < 0.01, otherwise)


def _eviction(found: Found) -> Judged:
    plain, tree = (_runs(found, victims) for victims in CALM)
    gains = {split: tree[split]["tok/s"] / plain[split]["tok/s"] for split in plain}
    most = max(gains, key=gains.__getitem__)
    said = (
        f"evicting by the tree is up to {100 * (gains[most] - 1):.0f} % faster than LRU "
        f"(split {most})"
    )
    return said, of(gains[most] < 1.02, "not reproduced")


def _requests(found: Found) -> Judged:
    own, other = found["batches"]
    said = f"{100 * own['requests of 1']:.2f} % of the generator's, "
    said += f"{100 * other['requests of 1']:.0f} % of the verifier's"
    return said, of(own["requests of 1"] > 0.9 > other["requests of 1"])


def _underfilled(found: Found) -> Judged:
    own, other = found["batches"]
    said = f"a pass has {100 * own['of 2,048']:.1f} % of 2,048 tokens, "
    said += f"the verifier's {100 * other['of 2,048']:.0f} %"
    return said, of(own["of 2,048"] < 0.2)


def _sizes(found: Found) -> Judged:
    rows = {row["requests"]: row for row in found["sizes"]}
    own, other = rows[16]["of its most"], rows[16]["of the verifier's most"]
    said = f"at 16 requests {100 * own:.0f} % of its most; the verifier {100 * other:.0f} %"
    return said, of(other > 2 * own, "partly")


def _hybrid(found: Found) -> Judged:
    row = next(row for row in found["hybrid"] if row["rows"] == 64)
    said = (
        f"a step of 64 rows takes {row['times, 200']}x with a prompt of 200 tokens in it, "
        f"{row['times, 1000']}x with 1,000"
    )
    return said, of(row["times, 200"] > 1)


def _settings(found: Found) -> dict[str, dict[str, Any]]:
    return {row["setting"]: row for row in found["settings"]}


def _batching(found: Found) -> Judged:
    rows = _settings(found)
    few, many = (rows[f"lockstep{each}"]["seconds"] for each in ("", ", more"))
    gains = [
        few / rows["continuous"]["seconds"],
        many / rows["continuous, more"]["seconds"],
    ]
    said = f"{gains[0]:.2f}x over lockstep with 4 problems at a time, {gains[1]:.2f}x with 16"
    return said, of(min(gains) > 1.1, "partly")


def _utilisation(found: Found) -> Judged:
    times = {row["share"]: row["times"] for row in found["utilisation"]}
    return f"{times[0.4]}x", of(near(times[0.4], 4), "partly")


def _invocations(found: Found) -> Judged:
    rows = [row for row in found["invocations"] if row["in flight"] == 1]
    said = ", ".join(f"{row['kept']:.2f} kept leaves {row['passes']:.2f}" for row in rows)
    least = min(row["passes"] for row in rows)
    return f"{said} of the passes", of(near(least, 0.5), "partly")


def _decoupled(found: Found) -> Judged:
    rows = _settings(found)
    one, other = rows["decoupled, eager"], rows["continuous, more"]
    gain = other["seconds"] / one["seconds"]
    said = f"{one['times']}x one problem at a time; {gain:.2f}x continuous batching with as many"
    return said, "beyond the paper"


def _pipelining(found: Found) -> Judged:
    rows = _settings(found)
    turns, both = rows["decoupled, eager"], rows["decoupled, eager + overlap"]
    two, own = rows["the same, two PRMs"], rows["the same, a card for the PRM"]
    said = (
        f"both models at once {turns['seconds'] / both['seconds']:.2f}x; a second verifier on the "
        f"card {both['seconds'] / two['seconds']:.2f}x more, a card of its own "
        f"{both['seconds'] / own['seconds']:.2f}x"
    )
    return said, "beyond the paper"


def _several(found: Found) -> Judged:
    """Of the last number of verifiers, against one."""
    rows = {row["verifier"]: row for row in found["rows"]}
    said = ", ".join(f"{name} {row['times']:.2f}x" for name, row in rows.items())
    most, equal = next(iter(rows.values()))["verifiers"], all(row["same"] for row in rows.values())
    trees = "equal trees" if equal else "other trees"
    return f"{most} lanes against one, by verifier: {said}; {trees}", "beyond the paper"


def _loop(found: Found) -> Judged:
    rows = [row for row in found["settings"] if not row["setting"].startswith("the same")]
    shares = [100 * row["loop_cpu_s"] / row["seconds"] for row in rows]
    said = (
        f"{min(shares):.1f} to {max(shares):.1f} % of the time, in Python (CPU seconds of the loop "
    )
    said += "and of the simulator's counting, over simulated seconds)"
    return said, of(max(shares) < 1, "partly")


CLAIMS = read_claims(__name__)
