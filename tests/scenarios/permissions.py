"""The users of a guarded server, each with the grants of its role."""

from __future__ import annotations

from dynbus import Runtime
from dynbus.actors.runtime import Connecting
from dynbus.bus.identity.grants import (
    Grant,
    calls_all,
    finds_instances,
    hears_cancels,
    hears_replies,
    serves,
)
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import ComponentName

from .stream_maker import OPERATOR

CLIENT = [finds_instances(), calls_all("scenario"), hears_cancels("scenario")]
GRANTS: dict[str, list[Grant]] = {
    "serving": [hears_replies("serving"), *serves(ComponentName("scenario", "Source"))],
    "relaying": [hears_replies("relaying"), *serves(ComponentName("scenario", "Relay")), *CLIENT],
    "calling": [hears_replies("calling"), *CLIENT],
}


def users(*, hearing_cancels: bool = True) -> str:
    """The configuration of a server with these users."""
    entries = [
        entry(name, [one for one in grants if hearing_cancels or "cancels" not in one.purpose])
        for name, grants in GRANTS.items()
    ]
    return "authorization { users = [\n" + "\n".join([OPERATOR, *entries]) + "\n] }"


def entry(name: str, grants: list[Grant]) -> str:
    """A user, among those of a server's configuration, with the password `secret`."""
    publish = sorted({subject for grant in grants for subject in grant.publish})
    subscribe = sorted({subject for grant in grants for subject in grant.subscribe})

    def quoted(subjects: list[str]) -> str:
        return ", ".join(f'"{subject}"' for subject in subjects)

    return (
        f'{{ user: "{name}", password: "secret", permissions: {{ '
        f"publish: {{ allow: [{quoted(publish)}] }}, "
        f"subscribe: {{ allow: [{quoted(subscribe)}] }} }} }}"
    )


def url_of(server: RunningServer, user: str) -> str:
    return f"nats://{user}:secret@127.0.0.1:{server.port}"


def connect(server: RunningServer, user: str) -> Connecting:
    return Runtime.connect(url_of(server, user), principal=user, drain_grace=1.0)
