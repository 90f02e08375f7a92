"""What comes back to a store over its link is compared with what went, sum by sum."""

import zlib

import torch


def check_transfers(store):
    """Compare from now on; gives a list whose length is how many blocks were compared."""
    host, sums, coming, compared = store.host, {}, {}, []
    storing, loading, making = host.store, host.load, store._make_resident

    def store_(segment, until, device):
        first = segment.host_length // segment.group.block_tokens
        storing(segment, until, device)
        sent = segment.blocks[first : segment.blocks_for(until)]
        sums.setdefault(segment, [])[first:] = [_sum(device, block) for block in sent]

    def load(segment, blocks, kind, device):
        loading(segment, blocks, kind, device)
        coming[segment] = None

    def make_resident(needs):
        """All of it is there then, and nobody has written to it yet."""
        making(needs)
        for segment in [each for each in needs if each in coming]:
            del coming[segment]
            found = [_sum(store.device, block) for block in segment.blocks]
            assert found == sums[segment], f"{segment.name!r} came back changed"
            compared.extend(found)

    host.store, host.load, store._make_resident = store_, load, make_resident
    return compared


def _sum(device, block):
    held = device.block_memory(block)
    return zlib.crc32(held.cpu().numpy() if isinstance(held, torch.Tensor) else held)
