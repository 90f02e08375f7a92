"""FlashTTS's baseline, simulated: generator and verifier as two vLLM instances, half the KV each.

A round sends every step in random order, with the whole path as prompt. When all steps are decoded,
every path goes to the verifier as a prompt. When all are scored, the next round begins. The rules
and constants below were fixed before anything was compared with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from beamwright.errors import CapacityError
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.fits import MARK_TOKENS
from beamwright.plan.machines import HardwareProfile, find_profile
from beamwright.tree import NodeState
from beamwright_lab.flashtts.split import costs_of, kv_bytes
from beamwright_lab.rivals.requests import StepRequest, requests_by_round
from beamwright_lab.rivals.vllm import VllmEngine
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.engines import EngineMeter, EngineRun
from beamwright_lab.simulator.recorded import RecordedTree
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow

CARD = "rtx-4090"
BEAMS = (8, 16, 64, 128, 256, 512)
# Share of the card's 24 GB that each pair gets (section 6.1).
MEMORY: Mapping[str, float] = MappingProxyType({"1.5B+1.5B": 0.4, "1.5B+7B": 0.9, "7B+1.5B": 0.9})

# --- frozen: the rules ------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """Settings of the baseline; `SOURCES` says where each comes from.

    The scheduler is `rivals.vllm`. Not modelled, and so free: Python, tokenisation, and contention
    between the two processes.
    """

    block_tokens: int = 16
    max_running: int = 256
    max_batched_tokens: int = 8192
    generator_share: float = 0.5
    random_order: bool = True
    verifier_prefix_cache: bool = True
    host_tier: bool = False


SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "block_tokens": "vLLM: block_size on CUDA; prefix hits are full blocks",
        "max_running": "vLLM: max_num_seqs, the default below 70 GiB",
        "max_batched_tokens": "vLLM: max_num_batched_tokens of `LLM`, the default below 70 GiB",
        "generator_share": "FlashTTS 3.2.3, 4.3: a static partition, size not stated",
        "random_order": "FlashTTS 6.4.3: the vLLM baseline uses random scheduling",
        "verifier_prefix_cache": (
            "FlashTTS 4.1.3 mentions the verifier's KV cache. vLLM 0.9.2 turns prefix caching off "
            "for token-wise pooling, so False is a variant"
        ),
        "host_tier": "vLLM: off by default",
    }
)

# --- frozen: the search -----------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Settings of synthetic searches. About step lengths the paper only says "extreme" disparity.

    step_sigma: standard deviation of the logarithm of step lengths. The longest of 64 steps has
        about 6 times the mean length with 0.9, 3 times with 0.5.
    inherited: weight of the parent's score in a step's score.
    """

    width: int = 4
    prompt_tokens: int = 128
    generate_tokens: int = 1536
    step_tokens: int = 128
    step_sigma: float = 0.9
    inherited: float = 0.9

    def tree(self, num_beams: int, seed: int = 0) -> RecordedTree:
        """Generate the search tree; the best-scored steps survive."""
        return grow(
            SyntheticSearch(
                num_beams=num_beams,
                width=self.width,
                prompt_tokens=self.prompt_tokens,
                generate_tokens=self.generate_tokens,
                step_tokens=self.step_tokens,
                step_sigma=self.step_sigma,
                survival="score",
                seed=seed,
                inherited=self.inherited,
            )
        )


# --- the simulation ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Baseline:
    """A search on two vLLM instances.

    kv_bytes: KV memory of both together.
    seed: seed of the random request order.
    """

    tree: RecordedTree
    generator: ModelCosts
    verifier: ModelCosts
    hardware: HardwareProfile
    kv_bytes: int
    rules: Rules = Rules()
    seed: int = 0


@dataclass(frozen=True)
class BaselineResult:
    """Measurements of one search on the baseline.

    goodput_tok_s: see `SimulationResult.goodput_tok_s`.
    recomputed_tokens: tokens that the generator prefilled although their KV had been computed
        before.
    verified_tokens: tokens that the verifier prefilled.
    step_tokens: those that even an unlimited prefix cache would prefill.
    """

    time_s: float
    decode_s: float
    verify_s: float
    goodput_tok_s: float
    preemptions: int
    recomputed_tokens: int
    verified_tokens: int
    step_tokens: int


def simulate_baseline(case: Baseline) -> BaselineResult:
    """Simulate the search on the baseline; attention reads KV row by row, as in vLLM.

    Raises:
        CapacityError: if an instance cannot hold the longest path and one more block.
    """
    rules, tree = case.rules, case.tree
    rounds = requests_by_round(tree.prompt_tokens, tree.nodes)
    own = int(rules.generator_share * case.kv_bytes)
    longest = max(each.final_tokens for requests in rounds for each in requests)
    generator = _Instance(case.generator, case.hardware, own, rules, longest)
    verifier = _Instance(
        case.verifier,
        case.hardware,
        case.kv_bytes - own,
        rules,
        longest + MARK_TOKENS * len(rounds),
    )
    random = Random(case.seed)
    ends: list[float] = []
    new_tokens = tree.prompt_tokens
    for requests in rounds:
        order = list(requests)
        if rules.random_order:
            random.shuffle(order)
        new_tokens += sum(each.step_tokens + MARK_TOKENS for each in order)
        generator.run.run_round(order)
        # A barrier: no path is scored before all are decoded.
        verifier.run.run_round(
            [scoring_request(each, rules.verifier_prefix_cache) for each in order]
        )
        ends.append(generator.meter.now_s + verifier.meter.now_s)
    return BaselineResult(
        time_s=ends[-1],
        decode_s=generator.meter.now_s,
        verify_s=verifier.meter.now_s,
        goodput_tok_s=_goodput(tree, ends),
        preemptions=generator.run.engine.preemptions,
        recomputed_tokens=generator.run.prefilled - generator.run.needed_prefill,
        verified_tokens=verifier.run.prefilled,
        step_tokens=new_tokens,
    )


class _Instance:
    """A vLLM instance with its own KV and clock."""

    def __init__(
        self,
        model: ModelCosts,
        hardware: HardwareProfile,
        num_bytes: int,
        rules: Rules,
        longest: int,
    ) -> None:
        needed = (longest + rules.block_tokens) * model.kv_bytes_per_token
        if needed > num_bytes:
            raise CapacityError("the longest path", needed, num_bytes, num_bytes)
        costs = RooflineCosts.of(model, hardware, Layout.TREE)
        self.meter = EngineMeter(costs, reads_once=False)
        engine = VllmEngine(
            num_bytes // (rules.block_tokens * model.kv_bytes_per_token),
            block_tokens=rules.block_tokens,
            offload=rules.host_tier,
            max_running=rules.max_running,
            max_batched_tokens=rules.max_batched_tokens,
        )
        self.run = EngineRun(engine, [self.meter])


def scoring_request(step: StepRequest, prefix_cache: bool = True) -> StepRequest:
    """Return the request that scores a decoded step: its whole path, one mark after each step.

    prefix_cache: False: the request gets unique keys, so no request hits another one's KV.
    """
    marked = [length + MARK_TOKENS for length in (*step.lengths[1:], step.step_tokens)]
    lengths = (step.lengths[0], *marked)
    scored = (*step.node, -1)
    if not prefix_cache:
        return StepRequest((scored,), (sum(lengths),), (*scored, -1), 1)
    return StepRequest((*step.path, step.node), lengths, scored, 1)


def _goodput(tree: RecordedTree, ends: Sequence[float]) -> float:
    """Return the mean tokens of finished paths over the mean time to the end of their rounds.

    ends: time at which each round ended.
    """
    lengths = {node.lineage: node.tokens for node in tree.nodes}
    tokens = seconds = 0.0
    for node in tree.nodes:
        if node.state is NodeState.FINISHED:
            depth = len(node.lineage)
            tokens += sum(lengths[node.lineage[: i + 1]] for i in range(depth))
            seconds += ends[depth - 1]
    return tokens / seconds if seconds else 0.0


def baseline_of(
    pair: str, tree: RecordedTree, num_beams: int, rules: Rules | None = None
) -> Baseline:
    """Create the baseline of a model pair, with the paper's card and share of memory."""
    card = find_profile(CARD)
    generator, verifier = costs_of(pair)
    memory = kv_bytes(pair, MEMORY[pair], num_beams, card)
    return Baseline(tree, generator, verifier, card, memory, rules or Rules())
