"""Warnings that a solution is doubtful: unfamiliar problem, useless scores, no answer, weak vote.

A search with an unsuitable verifier still ends with an answer, but chance has chosen it. These
warnings tell the user. The functions read a finished tree and the settings. Each returns its
warnings as a list of lines, which is empty if all is well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from beamwright.config import Settings
from beamwright.search import strategy_entry
from beamwright.search.rounds import TIE
from beamwright.sections import GRAMMAR
from beamwright.tree import COMPLETE_STOPS, SearchTree

_FEWEST = 4  # minimum number of distinct steps for a warning that all scores are equal
_OF_LOGPROBS = ("logprob", "min-logprob")  # verifiers that read the generator's log-probabilities
_TRUSTED = 1e-3  # a best score below this probability means that the verifier trusts no candidate

_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_VERB = "[a-z]+(?: [a-z]+){0,2}"
_EVENTS = (
    rf"{_VERB} \d{{1,3}} (?:more )?(?P=thing)(?: away)?",
    rf"{_VERB} \d{{1,3}} (?:bags|boxes|packs) (?:of|with) \d{{1,3}} (?P=thing)(?: each)?",
    rf"{_VERB} half of the (?P=thing)",
    r"(?:doubles|triples) the number of (?P=thing)",
)
_PROBLEM = re.compile(
    r"(?P<name>[^\W\d_a-z][\w'-]*) (?:has|had|owns|starts with) \d{1,3} "
    r"(?P<thing>[a-z]+(?: [a-z]+)?)\."
    rf"(?:\s+(?:Then in|Later in|In) {_MONTH} (?P=name) (?:{'|'.join(_EVENTS)})\.)*"
    r"\s+How many (?P=thing) does (?P=name) have(?: now| left| in the end)?\?"
)


def doubts_about_problem(problem: str, settings: Settings) -> list[str]:
    """Warn if the bundled models get a problem of a kind that they were not trained on.

    Text after the question is ignored, because a raw prompt may continue there.
    """
    if settings.model.model.partition(":")[0] != "bundled" or not problem:
        return []
    if _PROBLEM.match(problem.strip()):
        return []
    return [f'the bundled models were trained only on problems of another form: "{GRAMMAR}"']


def doubts_about_scores(tree: SearchTree, settings: Settings) -> list[str]:
    """Warn if the scores could not guide the search: most are missing, or all are equal.

    A search that reads no scores gets no warning.

    settings: the settings after `search.defaults.with_defaults`.
    """
    if not _reads_scores(settings):
        return []
    decoded = [node for node in tree.nodes() if node.parent and node.turn is None and node.stop]
    drawn = [node for node in decoded if not node.greedy and node.step_text.strip()]
    steps = [node for node in drawn if not any(child.is_continuation for child in node.children)]
    scores = [node.step_score for node in steps if node.step_score is not None]
    name = settings.model.verifier_or_default
    who = "the verifier" if name == "none" else f"--verifier {name}"
    if settings.model.runs_elsewhere and name in _OF_LOGPROBS and not scores:
        return [
            f"no step got a score from {who}: the server of --model returns no log-probabilities. "
            "Use another --verifier or server."
        ]
    if 2 * len(scores) < len(steps):
        return [
            f"{len(steps) - len(scores)} of {len(steps)} steps got no score from {who}, so the "
            "search could not rank them. Paths may be longer than the verifier's context, or a "
            "judge's critiques may lack the score that its judge.yaml describes."
        ]
    texts = {node.text or node.lineage for node in steps if node.step_score is not None}
    if len(texts) >= _FEWEST and max(scores) - min(scores) <= TIE:
        return [
            f"all {len(scores)} scores of {who} are equal ({scores[0]:.3g}), so the search could "
            "not rank steps. The verifier may not know this kind of problem."
        ]
    return []


def doubts_about_prompts(tree: SearchTree) -> list[str]:
    """Warn if a remote server has truncated a prompt."""
    worst = max(tree.nodes(), key=lambda node: node.usage["prompt_unread"])
    read = worst.start - worst.usage["prompt_unread"]
    if read == worst.start:
        return []
    return [
        f"the server of --model read only {read} of a prompt's {worst.start} tokens. Raise its "
        f"context (for Ollama, OLLAMA_CONTEXT_LENGTH), or set --context {read}."
    ]


def doubts_about_answers(
    answers: Sequence[str | None], stops: Sequence[str], settings: Settings, why: str | None = None
) -> list[str]:
    """Warn that the chosen candidate states no answer, and say what the user can change.

    answers: the answer of each final candidate.
    stops: the stop reason of each final candidate.
    why: the reason why the search ended early; None if it did not.
    """
    if why is not None:
        help = why
    elif not any(stop in COMPLETE_STOPS for stop in stops):
        help = "all were cut off; raise --max-rounds, --max-step-tokens or --max-tokens"
    elif settings.model.system_prompt:
        help = "ask more clearly for \\boxed{...} in --system-prompt"
    else:
        help = "ask for one: --system-prompt 'Put your final answer within \\boxed{}.'"
    whose = "no finished candidate" if any(answers) else "no candidate"
    return [f"{whose} states an answer, so the last step of the best one is shown ({help})"]


def doubts_about_low_scores(scores: Sequence[float | None], settings: Settings) -> list[str]:
    """Warn if the verifier considers every final candidate wrong.

    scores: the scores of the final candidates.

    Only verifiers whose scores are probabilities cause this warning: log-probabilities and
    confidences never lie between 0 and the threshold.
    """
    best = max((score for score in scores if score is not None), default=-1.0)
    if not 0 <= best < _TRUSTED or not _reads_scores(settings):
        return []
    return [
        f"the verifier trusts no candidate (best score {best:.2g}). The models may not know this "
        "kind of problem."
    ]


def doubts_about_votes(
    votes: Sequence[str | None], chosen: str | None, settings: Settings
) -> list[str]:
    """Warn if a vote has chosen an answer that only one candidate states.

    votes: the votes of the final candidates that ended by themselves.
    chosen: the vote of the chosen candidate.
    """
    how = settings.search.choose or strategy_entry(settings.search).choose
    if how in ("best", "synthesis") or chosen is None or len(votes) < 2 or votes.count(chosen) != 1:
        return []
    return [
        f"the vote was won with one vote: {len(votes) - votes.count(None)} of {len(votes)} "
        "complete candidates state an answer, and only one states this"
    ]


def doubts_about_sampling(texts: Sequence[str], settings: Settings) -> list[str]:
    """Warn if all candidates are the same text because the temperature is 0.

    texts: the texts of the final candidates.
    """
    if settings.sampling.temperature > 0 or len(texts) < 2 or len({*texts}) > 1 or not texts[0]:
        return []
    return [f"all {len(texts)} candidates have the same text, because --temperature is 0"]


def _reads_scores(settings: Settings) -> bool:
    """Return True if the search or the choice of its answer reads scores."""
    if settings.model.is_random:
        return False
    row = strategy_entry(settings.search)
    chosen = (settings.search.choose or row.choose) in ("best", "weighted")
    chosen = chosen and settings.search.n > 1
    return row.needs_scores or chosen or settings.model.verifier_or_default != "none"
