"""The region of a rank's slots: slots do not overlap, free space is never lost, and memory is given back."""

from __future__ import annotations

import random

import numpy as np
import pytest
from compiled import testing

_KIB, _MIB, _PAGE = 1 << 10, 1 << 20, 4096
_WARM = 16 * _MIB  # that a region keeps for the next operations
_BYTES = 160 * _MIB


class _Slots:
    """Allocated slots of a region, and the resulting free space."""

    def __init__(self, nbytes: int, keeps: bool = False) -> None:
        self.region = testing.Region(nbytes, keeps)
        self.nbytes = nbytes
        self.memory = np.frombuffer(self.region, dtype=np.uint8)
        self.held: dict[int, tuple[int, bool]] = {}  # offset: bytes, whether it is only reserved
        self.small_pages: set[int] = set()  # pages once of slots that are smaller, which stay

    def take(self, nbytes: int, reserved: bool) -> bool:
        """Whether there was room; there must be if a gap is large enough."""
        whole = (nbytes + _PAGE - 1) // _PAGE * _PAGE
        try:
            offset = self.region.reserve(nbytes) if reserved else self.region.allocate(nbytes)
        except RuntimeError as error:
            assert "used up" in str(error)
            rounded = max(whole, 4 * _MIB + _PAGE) if reserved else self.rounded(whole)  # reserved: more than 4 MiB
            assert self.largest_gap() < rounded, "room that is free is not found"
            return False
        assert offset % (_PAGE if nbytes >= _PAGE else 64) == 0 and offset + nbytes <= self.nbytes
        for other, (length, _) in self.held.items():
            assert offset + nbytes <= other or other + length <= offset, "two slots overlap"
        if nbytes <= _PAGE // 2:
            self.small_pages.add(offset // _PAGE)
        ends = self.memory[[offset, offset + nbytes - 1]]
        assert not reserved or not ends.any(), "what is reserved is not zeroed"
        self.held[offset] = nbytes, reserved
        self.memory[[offset, offset + nbytes - 1]] = self.mark(offset)
        return True

    def give(self, offset: int) -> None:
        nbytes, reserved = self.held.pop(offset)
        assert (self.memory[[offset, offset + nbytes - 1]] == self.mark(offset)).all(), "somebody else wrote there"
        (self.region.release_reserved if reserved else self.region.release)(offset, nbytes)

    @staticmethod
    def rounded(nbytes: int) -> int:
        """Slots of more than 64 KiB and of 4 MiB at most have whole multiples of 64 KiB."""
        return -(-nbytes // (64 * _KIB)) * 64 * _KIB if 64 * _KIB < nbytes <= 4 * _MIB else nbytes

    @staticmethod
    def mark(offset: int) -> int:
        return offset // 64 % 251 + 1

    def largest_gap(self) -> int:
        """Bytes of whole pages between what is held."""
        taken = [(begin, begin + self.rounded(nbytes)) for begin, (nbytes, _) in self.held.items()]
        taken += [(page * _PAGE, (page + 1) * _PAGE) for page in self.small_pages]
        largest = end = 0
        for begin, stop in [*sorted(taken), (self.nbytes, self.nbytes)]:
            largest = max(largest, begin // _PAGE * _PAGE - end)
            end = max(end, (stop + _PAGE - 1) // _PAGE * _PAGE)
        return largest


def _size(chance: random.Random) -> tuple[int, bool]:
    kind = chance.random()
    if kind < 0.3:
        return chance.randint(1, _PAGE), False
    if kind < 0.6:
        return chance.randint(1, 2 * _MIB), False
    return chance.randint(4 * _MIB, 40 * _MIB), kind > 0.7


@pytest.mark.ranks(1)
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_slots_of_random_sizes_against_a_model(seed, keeps):
    chance, slots, refused = random.Random(seed), _Slots(_BYTES, keeps), 0
    for turn in range(3000):
        # In turns it fills up, and empties to some part.
        if chance.random() < (0.7 if turn // 300 % 2 == 0 else 0.3) or not slots.held:
            refused += not slots.take(*_size(chance))
        else:
            slots.give(chance.choice(list(slots.held)))
    assert refused > 20  # or nothing was tried in a full region
    for offset in list(slots.held):
        slots.give(offset)
    assert keeps or slots.region.taken() <= _WARM + 2 * _MIB + _PAGE * len(slots.small_pages)
    assert slots.take(slots.largest_gap(), True), "all that is free is one piece again"


@pytest.mark.ranks(1)
def test_buckets_of_ever_other_sizes_come_and_go():
    """On a region as large as a rank's with 1 GiB; nothing is held between them."""
    region = testing.Region(1 << 30)
    for number in range(2000):
        nbytes = 256 * _MIB + 4 * _KIB * number
        region.release_reserved(region.reserve(nbytes), nbytes)
    whole = (1 << 30) - _PAGE
    region.release_reserved(region.reserve(whole), whole)


@pytest.mark.ranks(1)
def test_memory_of_large_slots_is_given_back():
    region = testing.Region(_BYTES)
    memory = np.frombuffer(region, dtype=np.uint8)
    for number in range(5):
        nbytes = 20 * _MIB + number * _PAGE
        offset = region.allocate(nbytes)
        assert region.taken() >= nbytes
        memory[offset : offset + nbytes] = 7
        region.release(offset, nbytes)
        assert region.taken() == 0


@pytest.mark.ranks(1)
def test_with_several_hosts_memory_stays_where_it_is_and_serves_again():
    """MPI may have registered its pages with a network card, which does not notice that others are in their place."""
    region = testing.Region(_BYTES, keeps_memory=True)
    memory = np.frombuffer(region, dtype=np.uint8)
    sizes = [20 * _MIB, 3 * _MIB, 300 * _KIB, 5 * _PAGE]
    offsets = [region.allocate(nbytes) for nbytes in sizes * 3]
    taken = region.taken()
    for offset, nbytes in zip(offsets, sizes * 3):
        memory[offset : offset + nbytes] = 7
    for offset, nbytes in zip(offsets, sizes * 3):
        region.release(offset, nbytes)
        assert region.taken() == taken
    for number in range(200):  # ever other sizes, one after the other, take no memory beside it
        nbytes = 10_000 * number + 5_000
        region.release(region.allocate(nbytes), nbytes)
    assert region.taken() <= taken + 2 * _MIB
    reserved = region.reserve(18 * _MIB)
    assert not memory[reserved : reserved + 18 * _MIB].any() and region.taken() <= taken + 2 * _MIB


@pytest.mark.ranks(1)
def test_room_that_many_small_slots_have_left_serves_a_large_one_and_the_other_way_round():
    region = testing.Region(64 * _MIB)
    offsets = [region.allocate(_MIB) for _ in range(64)]
    with pytest.raises(RuntimeError, match="used up"):
        region.allocate(_MIB)
    for offset in offsets:
        region.release(offset, _MIB)
    first = region.reserve(30 * _MIB)
    second = region.reserve(34 * _MIB)
    region.release_reserved(first, 30 * _MIB)
    assert len({region.allocate(256) for _ in range(30 * _MIB // _PAGE * 16)}) == 30 * _MIB // 256
    with pytest.raises(RuntimeError, match="used up"):
        region.allocate(256)
    region.release_reserved(second, 34 * _MIB)
    assert region.reserve(34 * _MIB) == second
