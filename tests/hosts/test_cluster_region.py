"""A region that is a cluster of three servers, each a leaf node of the backbone, while one of them
is killed after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conditions import wait_until

from .abroad import MANY
from .lab import Lab
from .records import NOT_REPEATED, Record, broken_promises, read_records, repeated
from .regions import Regions

CLUSTER = "abc"
"""The hosts of the servers of eu; that of us is u, and workers of eu are on v and w."""
KINDS = {"resumed", "replayed", "plain", "repeatable", "once"}


@pytest.fixture
def regions(namespaces: None, tmp_path: Path) -> Iterator[Regions]:
    """Regions eu and us, which know what they keep."""
    with Lab("abcuvwxy", tmp_path / "hosts") as lab:
        made = Regions(lab, tmp_path, {"eu": CLUSTER, "us": "u"}, {"eu": "x", "us": "y"})
        for region in ("eu", "us"):
            made.start(region)
        wait_until(lambda: keeps(made, "eu"), what="eu has a leader")
        for region in ("eu", "us"):
            made.ask("u", region, "setup", "hosts")
        yield made
        for host in lab:
            host.check()


def keeps(regions: Regions, region: str) -> bool:
    """True if a region can keep streams, each by all of its servers."""
    try:
        regions.ask("u", region, "doctor")
    except AssertionError:
        return False
    return True


def kept(regions: Regions, speaker: str, other: str) -> str:
    """The numbers of messages that two regions kept of those that the first has said to all."""
    urls = (regions.url(speaker), regions.url(other))
    program = regions.begin(regions.lab["u"], "hosts_Counter", "tests.hosts.abroad", *urls)
    program.says("kept ")
    return program.output.splitlines()[-1]


def is_kept_once(regions: Regions) -> bool:
    """True if each region keeps what the other says once."""
    each = {kept(regions, "us", "eu"), kept(regions, "eu", "us")}
    assert each == {f"kept {MANY} {MANY}"}
    return True


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_what_instances_say_abroad_is_kept_once_whichever_server_is_killed(
    regions: Regions,
) -> None:
    assert is_kept_once(regions)

    for name in CLUSTER:
        regions.running[name].kill()
        assert is_kept_once(regions)
        regions.begin_server(name)
        regions.running[name].says("Server is ready")
        assert is_kept_once(regions)


class Calling:
    """A caller in us, whose calls go abroad when nobody is at home."""

    def __init__(self, regions: Regions) -> None:
        host = regions.lab["u"]
        self._journal = host.folder / "calls.jsonl"
        arguments = (regions.url("us"), self._journal, "caller", "--items", 60)
        self.program = regions.begin(
            host, "web", "tests.hosts.caller", *arguments, DYNBUS_SPILL="region"
        )
        self.program.says("calling through")

    @property
    def records(self) -> list[Record]:
        """All calls that have ended."""
        return read_records([self._journal])

    def goes_on(self) -> None:
        """Wait until a call of each kind has ended well that was begun after now."""
        known = {one.tag for one in self.records}
        latest = max((one.ended for one in self.records), default=0.0)

        def answered() -> bool:
            return {
                one.kind
                for one in self.records
                if one.tag not in known and one.begun > latest and not one.error
            } >= KINDS

        wait_until(answered, what=lambda: f"calls go on: {self.program.output[-2000:]}")

    def end(self) -> list[Record]:
        """Call no more; all calls."""
        assert self.program.end() == 0, self.program.output[-2000:]
        return self.records


@pytest.fixture
def calling(regions: Regions) -> Calling:
    """A caller in us of two workers in eu."""
    for name in "vw":
        regions.begin_worker(regions.lab[name], "eu", f"in-eu-{name}").says("ready")
    wait_until(lambda: regions.ask("u", "us", "ps").count("in-eu") == 2, what="us knows both")
    made = Calling(regions)
    made.goes_on()
    return made


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_calls_from_abroad_go_on_when_the_backbone_server_of_their_region_is_lost(
    regions: Regions, calling: Calling
) -> None:
    # The servers of eu join by that of us, and by their own when it is back.
    regions.running["x"].kill()
    calling.goes_on()
    regions.begin_server("x")
    regions.running["x"].says("Server is ready")
    calling.goes_on()
    records = calling.end()

    # Who does not wait is refused at once meanwhile.
    refused = [one for one in records if one.error.startswith("NoInstances")]
    failed = [one for one in records if one.error and one not in refused]
    print(f"{len(records)} calls and streams, {len(refused)} refused;", *failed, sep="\n")
    assert broken_promises(records) == []
    assert repeated(host.folder / "effects" for host in regions.lab) == []
    assert {one.kind for one in failed} <= {*NOT_REPEATED}
    assert refused


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_calls_from_abroad_go_on_whichever_server_is_killed_and_at_home_when_all_are(
    regions: Regions, calling: Calling
) -> None:
    lab = regions.lab
    for name in CLUSTER:
        regions.running[name].kill()
        calling.goes_on()
        regions.begin_server(name)
        wait_until(lambda: keeps(regions, "eu"), what=f"{name} is back")
        calling.goes_on()
    abroad = len(calling.records)
    regions.begin_worker(lab["u"], "us", "in-us").says("ready")
    calling.goes_on()
    for name in (*CLUSTER, *"vwx"):
        lab.power_off(lab[name])
    calling.goes_on()
    records = calling.end()

    failed = [one for one in records[:abroad] if one.error]
    print(f"{abroad} calls and streams abroad, {len(records) - abroad} more;", *failed, sep="\n")
    assert broken_promises(records) == []
    assert repeated(host.folder / "effects" for host in lab) == []
    assert {one.kind for one in records if one.error} <= {*NOT_REPEATED}
    assert all(one.error.startswith("UnknownOutcome") for one in failed)
