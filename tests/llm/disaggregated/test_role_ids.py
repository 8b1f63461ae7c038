"""The ids by which the roles of an instance are found."""

from __future__ import annotations

from dynbus.llm.disaggregated.roles import ENDED_IDS, RoleIds
from dynbus.spi import InstanceName


def ids() -> RoleIds:
    return RoleIds(InstanceName("demo", "decode", "a"))


def test_the_first_role_that_has_its_instance_s_name_has_its_id_and_no_later_one() -> None:
    roles = ids()

    given = [roles.new(node) for node in ("hand_over", "decode", "prefill", "decode")]

    assert given == ["a-0", "a", "a-2", "a-3"]
    assert all(one in roles for one in given)
    assert "a-1" not in roles


def test_the_id_of_a_role_that_has_ended_is_known_until_so_many_have_ended_after_it() -> None:
    roles = ids()
    given = [roles.new("prefill") for _ in range(ENDED_IDS + 1)]

    for one in given[:-1]:
        roles.ended(one)
    was_known = given[0] in roles
    roles.ended(given[-1])

    assert was_known
    assert given[0] not in roles
    assert given[1] in roles
