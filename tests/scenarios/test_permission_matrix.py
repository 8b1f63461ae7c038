"""Roles by what they may do: what is meant, what the grants say, and what a server does."""

from __future__ import annotations

import pytest

from .guarded import KINDS
from .permission_matrix import ALL_ROWS, GRANTS, PAGE, ROLES, Row, granted, measured, page

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=KINDS)
async def allowed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, set[Row]]:
    """What a server allows, by role: with a key of each, and with a token of each."""
    return await measured(KINDS[request.param](tmp_path_factory.mktemp("matrix") / "auth"))


def test_there_are_500_cells() -> None:
    assert len(ROLES) * len(ALL_ROWS) >= 500
    assert len({(row.verb, row.subject, row.stream) for row in ALL_ROWS}) == len(ALL_ROWS)


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_may_do_at_a_server_what_is_meant(
    role: str, allowed: dict[str, set[Row]]
) -> None:
    meant = {row for row in ALL_ROWS if role in row.allowed}

    assert sorted(row.what for row in allowed[role] - meant) == [], "more than is meant"
    assert sorted(row.what for row in meant - allowed[role]) == [], "less than is meant"


@pytest.mark.parametrize("role", ROLES)
async def test_the_grants_say_why_a_server_allows_it(
    role: str, allowed: dict[str, set[Row]]
) -> None:
    explained = {row for row in ALL_ROWS if granted(role, row)}

    assert explained == allowed[role]


async def test_the_page_has_what_was_measured(allowed: dict[str, set[Row]]) -> None:
    assert PAGE.read_text() == page(allowed), (
        "write it again: python -m tests.scenarios.permission_matrix > docs/permissions.md"
    )


def test_no_actor_makes_or_changes_more_than_a_consumer_of_its_own() -> None:
    """Who made a stream could give it subjects of others, and who changes one have it
    republished; the one consumer that takers share could be made to deliver elsewhere."""
    made = {
        subject
        for role in ROLES
        if role != "operator"
        for grant in GRANTS[role]
        for subject in grant.publish
        if "CREATE" in subject or "UPDATE" in subject
    }

    assert made
    assert [one for one in made if not one.startswith("$JS.API.CONSUMER.CREATE.")] == []
    assert [one for one in made if "DYNBUS_WORK" in one] == []
