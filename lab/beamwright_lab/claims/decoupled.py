"""Decoupled tree exploration: McCreanor's thesis on a runtime for test-time compute."""

from __future__ import annotations

from typing import Any

from beamwright_lab.claims import Found, Judged, grade, is_near, read_claims

EVICTION_RULES = "lru", "tree"


def _runs(found: Found, victims: str) -> dict[float, dict[str, Any]]:
    """Return the runs that fit, by memory split. victims: the eviction rule."""
    return {
        row["split"]: row
        for row in found["split"]
        if row["victims"] == victims and not isinstance(row["tok/s"], str)
    }


def _peak(found: Found) -> Judged:
    runs = _runs(found, "lru")
    rates = {split: row["tok/s"] for split, row in runs.items()}
    best = max(rates, key=rates.__getitem__)
    said = ", ".join(f"{rate:,.0f} with {split}" for split, rate in rates.items())
    return f"{best}; tokens/s on a 24 GB GPU: {said}", grade(is_near(best, 0.3), "partly")


def _hits(found: Found) -> Judged:
    rows = [*_runs(found, "lru").values()]
    own, other = (sorted(row[name] for row in rows) for name in ("hits", "verifier hits"))
    said = f"generator {own[0]:.3f} to {own[-1]:.3f}, verifier {other[0]:.3f} to {other[-1]:.3f}"
    return said, grade(min(own[0], other[0]) > 0.8)


def _thrash(found: Found) -> Judged:
    rows = [*_runs(found, "lru").values()]
    most = max(max(row["thrash"], row["verifier thrash"]) for row in rows)
    none = [f"{row['split']}" for row in rows if not row["thrash"] and not row["verifier thrash"]]
    said = (
        f"none at a split of {' and '.join(none)}, at others up to {100 * most:.1f} % of all tokens"
    )
    return said, grade(most < 0.01)


def _eviction(found: Found) -> Judged:
    plain, tree = (_runs(found, victims) for victims in EVICTION_RULES)
    gains = {split: tree[split]["tok/s"] / plain[split]["tok/s"] for split in plain}
    most = max(gains, key=gains.__getitem__)
    said = (
        f"evicting in tree order is up to {100 * (gains[most] - 1):.0f} % faster than LRU "
        f"(at a split of {most})"
    )
    return said, grade(gains[most] < 1.02, "not reproduced")


def _requests(found: Found) -> Judged:
    own, other = found["batches"]
    said = (
        f"{100 * own['requests of 1']:.2f} % of the generator's requests, "
        f"{100 * other['requests of 1']:.0f} % of the verifier's"
    )
    return said, grade(own["requests of 1"] > 0.9 > other["requests of 1"])


def _underfilled(found: Found) -> Judged:
    own, other = found["batches"]
    said = (
        f"a pass of the generator is {100 * own['of 2,048']:.1f} % full (vLLM's limit is 2,048 "
        f"tokens), one of the verifier {100 * other['of 2,048']:.0f} %"
    )
    return said, grade(own["of 2,048"] < 0.2)


def _sizes(found: Found) -> Judged:
    rows = {row["requests"]: row for row in found["sizes"]}
    own, other = rows[16]["of its most"], rows[16]["of the verifier's most"]
    said = (
        f"with 16 requests the generator reaches {100 * own:.0f} % of its highest throughput, the "
    )
    said += f"verifier {100 * other:.0f} %"
    return said, grade(other > 2 * own, "partly")


def _hybrid(found: Found) -> Judged:
    row = next(row for row in found["hybrid"] if row["rows"] == 64)
    said = (
        f"a pass of 64 rows takes {row['times, 200']} times as long with a prompt of 200 tokens, "
        f"{row['times, 1000']} times with one of 1,000"
    )
    return said, grade(row["times, 200"] > 1)


def _settings(found: Found) -> dict[str, dict[str, Any]]:
    return {row["setting"]: row for row in found["settings"]}


def _batching(found: Found) -> Judged:
    rows = _settings(found)
    few, many = (rows[f"lockstep{each}"]["seconds"] for each in ("", ", more"))
    gains = [
        few / rows["continuous"]["seconds"],
        many / rows["continuous, more"]["seconds"],
    ]
    said = (
        f"{gains[0]:.2f}x lockstep's throughput with 4 problems in flight, {gains[1]:.2f}x with 16"
    )
    return said, grade(min(gains) > 1.1, "partly")


def _utilisation(found: Found) -> Judged:
    times = {row["share"]: row["times"] for row in found["utilisation"]}
    return f"{times[0.4]}x", grade(is_near(times[0.4], 4), "partly")


def _invocations(found: Found) -> Judged:
    rows = [row for row in found["invocations"] if row["in flight"] == 1]
    said = ", ".join(f"{row['passes']:.2f} if {row['kept']:.2f} are kept" for row in rows)
    least = min(row["passes"] for row in rows)
    return (
        f"passes, relative to a run without speculation: {said}",
        grade(is_near(least, 0.5), "partly"),
    )


def _decoupled(found: Found) -> Judged:
    rows = _settings(found)
    one, other = rows["decoupled, eager"], rows["continuous, more"]
    gain = other["seconds"] / one["seconds"]
    said = (
        f"{one['times']}x the speed of one problem at a time, {gain:.2f}x that of continuous "
        "batching with as many problems"
    )
    return said, "beyond the paper"


def _pipelining(found: Found) -> Judged:
    rows = _settings(found)
    turns, both = rows["decoupled, eager"], rows["decoupled, eager + overlap"]
    two, own = rows["the same, two PRMs"], rows["the same, a card for the PRM"]
    said = (
        f"{turns['seconds'] / both['seconds']:.2f}x the speed of taking turns; on top of that, a "
        f"second verifier on the same GPU gives {both['seconds'] / two['seconds']:.2f}x, a "
        f"verifier on its own GPU {both['seconds'] / own['seconds']:.2f}x"
    )
    return said, "beyond the paper"


def _loop(found: Found) -> Judged:
    rows = [row for row in found["settings"] if not row["setting"].startswith("the same")]
    shares = [100 * row["loop_cpu_s"] / row["seconds"] for row in rows]
    said = (
        f"{min(shares):.1f} to {max(shares):.1f} % (CPU time of our Python loop, including the "
        "simulator's bookkeeping, divided by the simulated time)"
    )
    return said, grade(max(shares) < 1, "partly")


CLAIMS = read_claims(__name__)
