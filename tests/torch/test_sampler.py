"""Every sample once per epoch, whatever becomes of the size of the group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.seeds import examples
from tests.support.torch_ranks import run_torch_ranks

from covey.base.errors import ConfigError
from covey.torch.training.sampler import ElasticSampler

BATCHES = st.lists(
    st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any), min_size=1, max_size=30
)  # one list a step: the samples of each rank


def take_all(sampler: ElasticSampler, counts: list[int]) -> list[list[int]]:
    """Take one batch as every rank would, each with a sampler of its own, and keep `sampler` in step with them."""
    shares = []
    for rank in range(len(counts)):
        own = ElasticSampler(sampler._length, seed=99, drop_last=sampler._drop_last)
        own.load_state_dict(sampler.state_dict())
        shares.append(own.take(counts, rank=rank, size=len(counts)))
    sampler.take(counts, rank=0, size=len(counts))
    assert own.state_dict() == sampler.state_dict()
    return shares


@settings(max_examples=examples(60), deadline=None)
@given(length=st.integers(0, 120), batches=BATCHES, seed=st.integers(0, 2**40))
def test_every_sample_is_given_once_per_epoch_while_the_size_changes(
    length: int, batches: list[list[int]], seed: int
) -> None:
    sampler = ElasticSampler(length, seed=seed)
    for epoch in range(2):
        seen: list[int] = []
        step = 0
        while sampler.remaining:
            counts = batches[step % len(batches)]
            before = sampler.remaining
            shares = take_all(sampler, counts)
            if before >= sum(counts):
                assert [len(share) for share in shares] == counts
            seen += [index for share in shares for index in share]
            step += 1
        assert sorted(seen) == list(range(length))
        alone = ElasticSampler(length, seed=seed)
        alone.set_epoch(epoch)
        assert seen == (alone.take(length, rank=0, size=1) if length else [])  # the order is that of one rank
        sampler.next_epoch()


def test_dropping_the_last_batch_leaves_out_only_what_does_not_fill_it() -> None:
    sampler = ElasticSampler(10, drop_last=True)
    shares = take_all(sampler, [2, 2]) + take_all(sampler, [1, 2, 0])
    assert len({index for share in shares for index in share}) == 7
    assert take_all(sampler, [2, 2]) == [[], []]
    assert sampler.remaining == 0


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = ElasticSampler(50, seed=seed)
        sampler.set_epoch(epoch)
        return sampler.take(50, rank=0, size=1)

    torch.manual_seed(5)
    first = order(1, 2)
    torch.manual_seed(6)
    assert order(1, 2) == first
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert ElasticSampler(5, shuffle=False).take(2, rank=1, size=2) == [2, 3]


def test_a_data_loader_yields_an_epoch_and_goes_on_after_a_break() -> None:
    data = torch.arange(23) * 10
    sampler = ElasticSampler(23, seed=4)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    assert len(loader) == 6
    used = []
    for batch in loader:
        used += batch.tolist()
        if len(used) == 8:
            break
    saved = sampler.state_dict()
    assert saved == {"epoch": 0, "position": 8, "owed": [], "seed": 4, "length": 23}
    again = ElasticSampler(23)
    again.load_state_dict(saved)
    assert len(again) == 15
    for batch in torch.utils.data.DataLoader(data, batch_size=4, sampler=again):
        used += batch.tolist()
    assert sorted(used) == data.tolist()
    assert (again.epoch, again.position) == (1, 0)


def load_an_epoch(rank: int, size: int, store: str) -> list[tuple[int, list[int]]]:
    """Two epochs with a loader each: of everything, and of what fills batches of all ranks."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    found = []
    for drop_last in (False, True):
        sampler = ElasticSampler(23, seed=4, drop_last=drop_last)
        taken = sampler.take(2)
        count = len(sampler)
        loader = torch.utils.data.DataLoader(torch.arange(23), batch_size=3, sampler=sampler)
        found.append((count, taken + [index for batch in loader for index in batch.tolist()]))
        assert (sampler.epoch, sampler.position) == (1, 0)
    return found


def test_ranks_share_an_epoch_and_each_knows_how_long_its_part_is() -> None:
    for drop_last, parts in enumerate(zip(*run_torch_ranks(3, load_an_epoch), strict=True)):
        assert [count for count, _ in parts] == [len(own) - 2 for _, own in parts]
        # 6 are taken at first, and of the other 17 two do not make a round of three ranks.
        assert [count for count, _ in parts] == ([5, 5, 5] if drop_last else [5, 6, 6])
        seen = sorted(index for _, own in parts for index in own)
        assert len(set(seen)) == len(seen) == (21 if drop_last else 23)


def test_going_back_gives_the_samples_of_a_failed_step_again() -> None:
    sampler = ElasticSampler(12, seed=1)
    start = sampler.position
    lost = sampler.take([1, 3], rank=1, size=2)
    sampler.seek(start)
    assert sampler.take(4, rank=0, size=1)[1:] == lost
    sampler.set_epoch(0)
    assert sampler.position == 4  # the present epoch: stays


@settings(max_examples=examples(60), deadline=None)
@given(length=st.integers(1, 120), batches=BATCHES, data=st.data())
def test_what_lost_ranks_give_back_is_given_again_before_the_epoch_ends(
    length: int, batches: list[list[int]], data: st.DataObject
) -> None:
    sampler = ElasticSampler(length, seed=5)
    trained: list[int] = []
    step = 0
    while sampler.remaining:
        shares = sampler.deal(batches[step % len(batches)])
        lost = data.draw(st.sets(st.integers(0, len(shares) - 1))) if step < 20 else set()
        sampler.give_back([index for rank in sorted(lost) for index in shares[rank]])
        trained += [index for rank, share in enumerate(shares) if rank not in lost for index in share]
        again = ElasticSampler(length)
        again.load_state_dict(sampler.state_dict())
        assert again.remaining == sampler.remaining == length - len(trained)
        sampler, step = again, step + 1
    assert sorted(trained) == list(range(length))


def test_calls_that_cannot_work_are_refused() -> None:
    sampler = ElasticSampler(10)
    with pytest.raises(ConfigError, match="3 counts for 2 ranks"):
        sampler.take([1, 1, 1], rank=0, size=2)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        sampler.take(1, rank=2, size=2)
    with pytest.raises(ConfigError, match="not negative"):
        sampler.take([-1, 2], rank=0, size=2)
    with pytest.raises(ConfigError, match="one above 0"):
        sampler.take([0, 0], rank=0, size=2)
    with pytest.raises(ConfigError, match="no sample 11"):
        sampler.seek(11)
    with pytest.raises(ConfigError, match="1 samples to give back, but only 0"):
        sampler.give_back([3])
    with pytest.raises(ConfigError, match="11 samples and this one has 10"):
        sampler.load_state_dict(ElasticSampler(11).state_dict())
    assert sampler.position == 0
