"""The users of a guarded server, with the permissions that the protocol's page lists for each."""

from __future__ import annotations

from dynbus import Runtime
from dynbus.actors.runtime import Connecting
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.records.instance_records import INSTANCES_STREAM

from .stream_maker import OPERATOR

BUCKET = INSTANCES_STREAM.name


def instance(component: str) -> list[str]:
    """What an instance of a component may publish."""
    return [
        "_R.>",
        "_INBOX.>",
        f"$KV.dynbus_instances.scenario.{component}.*",
        f"$JS.API.STREAM.INFO.{BUCKET}",
        f"$JS.API.STREAM.MSG.GET.{BUCKET}",
    ]


CLIENT = [
    "scenario.*.*",
    "scenario.*.*.*",
    f"$JS.API.STREAM.INFO.{BUCKET}",
    f"$JS.API.CONSUMER.CREATE.{BUCKET}.*.>",
    f"$JS.API.CONSUMER.DELETE.{BUCKET}.>",
    f"$JS.API.DIRECT.GET.{BUCKET}",
    "$JS.FC.>",
]
PUBLISH = {
    "serving": instance("Source"),
    "relaying": instance("Relay") + CLIENT,
    "calling": CLIENT,
}
SUBSCRIBE = {
    "serving": ["scenario.Source.>", "scenario._cancel", "$SRV.>", "_R.serving.>"],
    "relaying": ["scenario.Relay.>", "scenario._cancel", "$SRV.>", "_R.relaying.>"],
    "calling": ["_R.calling.>", "scenario._cancel"],
}


def users(subscribe: dict[str, list[str]] = SUBSCRIBE) -> str:
    def quoted(subjects: list[str]) -> str:
        return ", ".join(f'"{subject}"' for subject in subjects)

    entries = [
        f'{{ user: "{name}", password: "secret", permissions: {{ '
        f"publish: {{ allow: [{quoted(PUBLISH[name])}] }}, "
        f"subscribe: {{ allow: [{quoted(subscribe[name])}] }} }} }}"
        for name in PUBLISH
    ]
    return "authorization { users = [\n" + "\n".join([OPERATOR, *entries]) + "\n] }"


def url_of(server: RunningServer, user: str) -> str:
    return f"nats://{user}:secret@127.0.0.1:{server.port}"


def connect(server: RunningServer, user: str) -> Connecting:
    return Runtime.connect(url_of(server, user), principal=user, drain_grace=1.0)
