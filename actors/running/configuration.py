"""Configuration of a run: the constructor arguments of actors, how many instances, the bus.

Precedence, highest first: command line (`--Splitter.separator=,`), environment
(`DYNBUS_Splitter__separator`), YAML file, the constructor's default. The YAML file has a key
for each actor class, whose keys are constructor arguments and `ServiceArgs`, and a key `bus`
for the fields of `BusConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from dynbus.actors.declaring.arguments import Text, build_arguments, parameters_of
from dynbus.actors.declaring.restart_policy import OnCrash, check_on_crash
from dynbus.bus.config import check_field, suggestion, variable
from dynbus.bus.errors import ConfigError

from .config_file import ConfigFile, mapping

MAX_WORKERS: Final = 1024

BUS_KEY: Final = "bus"
SERVICE_KEY: Final = "ServiceArgs"
WORKERS: Final = "workers"
ON_CRASH: Final = "on_crash"
_OPTION = re.compile(r"--([A-Za-z_]\w*)\.([A-Za-z_][\w.]*)(?:=(.*))?", re.DOTALL)
_VARIABLE = re.compile(r"DYNBUS_(\w+?)__\w+")


class ActorOption(NamedTuple):
    """`--Actor.key=value` of the command line."""

    actor: str
    key: str
    value: str

    def __str__(self) -> str:
        return f"--{self.actor}.{self.key}"


class ActorSettings(NamedTuple):
    """What a run gives one actor class.

    Attributes:
        arguments: of the constructor, as written: values of the YAML file, and `Text`.
        workers: the number of instances.
        on_crash: what follows when one of them ends by itself.
    """

    arguments: dict[str, Any]
    workers: int
    on_crash: OnCrash = "restart"


class BusSettings(NamedTuple):
    """Fields of `BusConfig` for `load_config`, and where each came from as a user names it."""

    values: dict[str, Any]
    sources: dict[str, str]


def split_options(words: Sequence[str]) -> tuple[list[ActorOption], list[str]]:
    """Take the `--Actor.key=value` (or `--Actor.key value`) out of a command line.

    Nothing after `--` is taken.

    Raises:
        ConfigError: one of them has no value.
    """
    options: list[ActorOption] = []
    rest: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            rest += words[position:]
            break
        found = _OPTION.fullmatch(word)
        position += 1
        if found is None:
            rest.append(word)
            continue
        actor, key, value = found.groups()
        if value is None:
            if position == len(words):
                raise ConfigError(f"{word} has no value: write {word}=VALUE")
            value = words[position]
            position += 1
        options.append(ActorOption(actor, key, value))
    return options, rest


def actor_settings(
    actors: Sequence[type[Any]],
    *,
    file: ConfigFile,
    options: Sequence[ActorOption],
    environment: Mapping[str, str],
) -> dict[type[Any], ActorSettings]:
    """What each actor of a run gets, checked against its constructor.

    Args:
        environment: variables of actors that are not started are not looked at.

    Raises:
        ConfigError: an actor is not started by the run, an argument does not exist or is
            missing, or a value does not fit; the message names where it came from.
    """
    names = {actor.__name__: actor for actor in actors}
    for key in file.keys:
        if key != BUS_KEY:
            _check_actor(key, names, file.place(key))
    for option in options:
        _check_actor(option.actor, names, str(option))
    settings: dict[type[Any], ActorSettings] = {}
    for name, actor in names.items():
        given = _Given(actor)
        given.take_section(file, file.keys.get(name))
        for variable_name, value in environment.items():
            if variable_name.startswith(prefix := _prefix(name)):
                key = variable_name.removeprefix(prefix).replace("__", ".")
                given.take_text(key, value, variable_name)
        for option in options:
            if option.actor == name:
                given.take_text(option.key, option.value, str(option))
        build_arguments(actor, given.arguments, given.sources)
        settings[actor] = ActorSettings(given.arguments, given.workers(), given.on_crash())
    return settings


def misspelt_variables(actors: Sequence[type[Any]], environment: Mapping[str, str]) -> list[str]:
    """A warning for each variable whose actor is not of this run but has nearly a name of it.

    Others may belong to another run that shares the environment.
    """
    names = [actor.__name__ for actor in actors]
    prefixes = tuple(map(_prefix, names))
    return [
        f"the environment variable {name} is not used: this run has no actor {found[1]}{near}"
        for name in environment
        if not name.startswith(prefixes)
        and (found := _VARIABLE.fullmatch(name))
        and (near := suggestion(found[1], names))
    ]


def _prefix(actor: str) -> str:
    return f"DYNBUS_{actor}__"


def bus_settings(
    file: ConfigFile, environment: Mapping[str, str], *, nats: str | None = None
) -> BusSettings:
    """The fields of the bus that go before the environment: those of the file that the
    environment does not have, and the servers of `--nats`.

    Raises:
        ConfigError: the file names a field that does not exist.
    """
    section = mapping(file.keys.get(BUS_KEY) or {})
    if section is None:
        raise ConfigError(
            f"{file.place(BUS_KEY)} must have fields as its keys, for example "
            f"`{BUS_KEY}: {{drain_grace: 10}}`"
        )
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, value in section.items():
        place = file.place(BUS_KEY, key)
        check_field(key, place)
        if variable(key) in environment or (key == "servers" and environment.get("NATS_URL")):
            continue
        values[key], sources[key] = value, place
    if nats is not None:
        values["servers"], sources["servers"] = nats, "--nats"
    return BusSettings(values, sources)


class _Given:
    """What one actor is given; what is taken later replaces what was taken before."""

    def __init__(self, actor: type[Any]) -> None:
        self.arguments: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self._actor = actor
        self._workers: Any = 1
        self._workers_source = ""
        self._on_crash: OnCrash = actor.__dynbus_on_crash__

    def take_section(self, file: ConfigFile, section: Any) -> None:
        """Take the actor's section of the YAML file."""
        name = self._actor.__name__
        given = mapping({} if section is None else section)
        if given is None:
            raise ConfigError(f"{file.place(name)} must have constructor arguments as its keys")
        service = mapping(given.pop(SERVICE_KEY, None) or {})
        if service is None:
            raise ConfigError(
                f"{file.place(name, SERVICE_KEY)} must be a mapping, for example {{{WORKERS}: 2}}"
            )
        for key, value in given.items():
            self._take(key, value, file.place(name, key))
        for key, value in service.items():
            self._take_service(key, value, file.place(name, SERVICE_KEY, key))

    def take_text(self, key: str, text: str, source: str) -> None:
        """Take a value that was given by its dotted key."""
        first, _, rest = key.partition(".")
        if first == SERVICE_KEY:
            self._take_service(rest, Text(text), source)
        elif rest:
            raise ConfigError(f"{source}: only whole arguments can be set: give {first} as JSON")
        else:
            self._take(key, Text(text), source)

    def workers(self) -> int:
        """The number of instances."""
        value = self._workers
        if isinstance(value, Text) and value.isascii() and value.isdigit():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_WORKERS:
            raise ConfigError(
                f"{self._workers_source} = {value!r} must be a number of instances from 0 to "
                f"{MAX_WORKERS}"
            )
        return value

    def on_crash(self) -> OnCrash:
        """What follows when an instance ends by itself."""
        return self._on_crash

    def _take(self, key: str, value: Any, source: str) -> None:
        if key == WORKERS and WORKERS not in parameters_of(self._actor):
            self._workers, self._workers_source = value, source
        else:
            self.arguments[key], self.sources[key] = value, source

    def _take_service(self, key: str, value: Any, source: str) -> None:
        if key == WORKERS:
            self._workers, self._workers_source = value, source
        elif key == ON_CRASH:
            self._on_crash = check_on_crash(value, source)
        else:
            raise ConfigError(
                f"{source} does not exist; there are: {SERVICE_KEY}.{WORKERS} and "
                f"{SERVICE_KEY}.{ON_CRASH}"
            )


def _check_actor(name: str, known: Mapping[str, Any], source: str) -> None:
    if name not in known:
        raise ConfigError(
            f"{source}: {name} is no actor of this run{suggestion(name, known)}; there are: "
            f"{', '.join(known) or 'none'}"
        )
