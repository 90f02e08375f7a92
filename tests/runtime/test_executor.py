from beamwright.protocols import DecodeWork, ScheduleView, StepDecoded, StepScored, VerifyWork
from beamwright.runtime import Accounting, TorchExecutor
from beamwright.tree import StopReason
from fakes import new_tree


class Decoder:
    def __init__(self):
        self.released = []

    def decode(self, work):
        return [StepDecoded(node, (1,), (-0.1,), StopReason.EOS, "x") for node in work.beams]

    def view(self, beams):
        return ScheduleView(beams)

    def release(self, nodes):
        self.released.extend(nodes)


class Scorer(Decoder):
    default_aggregate = "last"
    probabilities = False

    def score(self, nodes):
        return [float(node.lineage[-1]) for node in nodes]


def test_work_is_done_in_order_and_only_when_waited_for():
    tree, accounting = new_tree(), Accounting()
    first, second, third = tree.expand(tree.root, 3)
    executor = TorchExecutor(Decoder(), Scorer(), accounting)
    executor.submit(DecodeWork((second, first)))
    cancelled = executor.submit(DecodeWork((third,)))
    executor.submit(VerifyWork((first, second)))
    executor.cancel(cancelled)
    executor.cancel(cancelled)
    assert accounting.num_groups == 0
    events = executor.wait()
    assert [(type(e), e.node) for e in events] == [
        (StepDecoded, second),
        (StepDecoded, first),
        (StepScored, first),
        (StepScored, second),
    ]
    assert [e.score for e in events[2:]] == [0.0, 1.0]
    assert executor.wait() == []
    assert accounting.num_groups == 1
    assert set(accounting.seconds) == {"decode", "verify", "stall"}


def test_release_reaches_both_owners():
    tree = new_tree()
    decoder, scorer = Decoder(), Scorer()
    TorchExecutor(decoder, scorer, Accounting()).release([tree.root])
    assert decoder.released == scorer.released == [tree.root]
