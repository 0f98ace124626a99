"""What an arena's owner says of slots and leases, as those who map the arena see it."""

import pytest

from halfmoon.pool.tables import ArenaTables, table_bytes
from halfmoon.schemas.ids import LeaseId


def two_views(num_slots: int) -> tuple[ArenaTables, ArenaTables]:
    memory = bytearray(table_bytes(num_slots))
    return ArenaTables(memoryview(memory), num_slots), ArenaTables(memoryview(memory).toreadonly(), num_slots)


def test_what_the_owner_says_is_read_through_another_view() -> None:
    owner, reader = two_views(3)
    lease = LeaseId("lease-1")
    owner.set_generation(2, 2**63 + 5)
    owner.set_readable_bytes(0, 77)
    owner.set_lease(lease, 1000)
    assert [reader.generation(slot) for slot in range(3)] == [0, 0, 2**63 + 5]
    assert [reader.readable_bytes(slot) for slot in range(3)] == [77, 0, 0]
    assert reader.lease_expires_ns(lease) == 1000
    owner.set_lease(lease, 2000)
    assert reader.lease_expires_ns(lease) == 2000
    owner.set_lease(lease, None)
    owner.set_lease(lease, None)
    assert reader.lease_expires_ns(lease) is None
    assert reader.num_unlisted_leases == 0


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_that_is_not_there_is_refused(slot: int) -> None:
    owner, _ = two_views(3)
    for attempt in (owner.generation, owner.readable_bytes):
        with pytest.raises(ValueError, match=f"slot {slot} of an arena of 3"):
            attempt(slot)


def test_a_read_only_view_can_not_write_and_a_released_one_says_so() -> None:
    _, reader = two_views(1)
    with pytest.raises(TypeError):
        reader.set_lease(LeaseId("lease-1"), 5)
    reader.release()
    reader.release()
    with pytest.raises(ValueError, match="released"):
        reader.generation(0)


def test_leases_that_find_no_room_are_counted_and_listed_once_there_is_room() -> None:
    owner, reader = two_views(1)
    leases = [LeaseId(f"lease-{number}") for number in range(10_000)]
    for number, lease in enumerate(leases):
        owner.set_lease(lease, number + 1)
    listed = {lease for lease in leases if reader.lease_expires_ns(lease) is not None}
    assert 3000 < len(listed) <= 4096
    assert reader.num_unlisted_leases == len(leases) - len(listed)
    assert all(reader.lease_expires_ns(lease) in (None, number + 1) for number, lease in enumerate(leases))
    for lease in listed:
        owner.set_lease(lease, None)
    for number, lease in enumerate(leases):  # Renewed, those that were unlisted find room.
        if lease not in listed:
            owner.set_lease(lease, number + 10)
    now_listed = [lease for lease in leases if reader.lease_expires_ns(lease) is not None]
    assert not listed & set(now_listed)
    assert reader.num_unlisted_leases == len(leases) - len(listed) - len(now_listed)
    for lease in leases:
        owner.set_lease(lease, None)
    assert reader.num_unlisted_leases == 0
    assert not any(reader.lease_expires_ns(lease) for lease in leases)
