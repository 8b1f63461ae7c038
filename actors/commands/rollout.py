"""The check before a restart: would callers that run go on with what is in the files now?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from dynbus.actors.compatibility.changes import Change, changes
from dynbus.actors.compatibility.endpoint_contract import EndpointContract
from dynbus.actors.compatibility.running import RunningVersion, running_versions
from dynbus.actors.compatibility.schema_difference import Fit
from dynbus.actors.running.child_messages import WorkerSettings
from dynbus.actors.running.control import Misfit
from dynbus.actors.running.plan import PlannedNode
from dynbus.actors.running.planning import (
    EndpointTold,
    NodeContracts,
    PlanFailed,
    TellContracts,
    contracts_elsewhere,
)
from dynbus.actors.running.processes import ForkServer
from dynbus.actors.running.supervisor import ChangeFailed
from dynbus.bus.commands.server import connected
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import DynbusError
from dynbus.bus.identity.credentials import own_credentials
from dynbus.bus.protocol.names import ComponentName

WITHOUT_CHECK = "`dynbus restart --force` restarts without this check"


class Rollout:
    """Compares nodes of a run, as their files are now, with what runs on the bus.

    Args:
        settings: gives those by which processes find the classes now.
        config: of the bus on which the run's instances are.
    """

    def __init__(
        self, forks: ForkServer, settings: Callable[[], WorkerSettings], config: BusConfig
    ) -> None:
        self._forks = forks
        self._settings = settings
        self._config = config

    async def misfits(self, nodes: Sequence[PlannedNode]) -> list[Misfit]:
        """The differences that would break callers, or may, if nodes were replaced now.

        Raises:
            ChangeFailed: the new classes cannot be loaded, or nobody tells what runs.
        """
        try:
            new = await contracts_elsewhere(
                self._forks, TellContracts(list(nodes), self._settings())
            )
        except PlanFailed as error:
            failure = error.failure
            raise ChangeFailed(
                f"nothing is restarted, since the new version cannot be loaded: {failure.message}",
                failure.traceback,
            ) from None
        except OSError as error:
            raise ChangeFailed(f"no process to load the new version can be made: {error}") from None
        try:
            running = await self._running(new)
        except DynbusError as error:
            raise ChangeFailed(
                f"nothing is restarted, since nobody tells what runs: {error}; {WITHOUT_CHECK}"
            ) from None
        return rollout_misfits(new, running)

    async def _running(self, new: Mapping[str, NodeContracts]) -> list[RunningVersion]:
        """The versions that run of nodes and of what they call, of a folder of credentials each
        asked with that of the node.
        """
        asked: dict[str, set[str]] = {}
        for address, node in sorted(new.items()):
            credentials = own_credentials(self._config.credentials, [address])
            asked.setdefault(credentials, set()).update((address, *node.calls))
        running: dict[str, list[RunningVersion]] = {}
        for credentials, addresses in asked.items():
            config = msgspec.structs.replace(self._config, credentials=credentials)
            unasked = [ComponentName.parse(one) for one in sorted(addresses - running.keys())]
            async with connected(config, "dynbus-restart") as server:
                for version in await running_versions(server, unasked):
                    running.setdefault(str(version.address), []).append(version)
        return [version for versions in running.values() for version in versions]


def rollout_misfits(
    new: Mapping[str, NodeContracts], running: Sequence[RunningVersion]
) -> list[Misfit]:
    """The differences that would break callers, or may, if some nodes were replaced.

    Callers that run go on with the new instances of the nodes; the new instances call those of
    other nodes that run.

    Args:
        new: by address, the nodes as they would be.
        running: the versions of these nodes, and of those that they call.
    """
    misfits: dict[str, Misfit] = {}

    def add(one: Change, text: str) -> None:
        if one.verdict is not Fit.COMPATIBLE:
            misfits.setdefault(text, Misfit(one.verdict is Fit.INCOMPATIBLE, text))

    for version in running:
        address = str(version.address)
        if version.unknown:
            misfits.setdefault(version.unknown, Misfit(False, version.unknown))
        if address in new:
            serves = _contracts(address, new[address].serves)
            for one in changes(version.contracts, serves):
                add(one, str(one))
            continue
        for caller, node in sorted(new.items()):
            if address in node.calls:
                calls = _contracts(address, node.calls[address])
                common = {name: known for name, known in calls.items() if name in version.contracts}
                for one in changes(common, version.contracts):
                    remedy = f"restart {address} too" if one.remedy else ""
                    add(one, f"the new {caller} calls {one._replace(remedy=remedy)}")
    return list(misfits.values())


def _contracts(address: str, endpoints: Mapping[str, EndpointTold]) -> dict[str, EndpointContract]:
    return {
        f"{address}.{name}": EndpointContract.of_told(one.kind, bytes(one.schemas))
        for name, one in endpoints.items()
    }
