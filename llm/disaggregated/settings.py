"""The settings of disaggregated serving, tuned while it runs: one record of the bus, which workers
watch."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    Self,
    TypeAlias,
    get_args,
    get_type_hints,
)

import anyio
import msgspec

from dynbus import ConfigError, DynbusError, Option, Unavailable
from dynbus.spi import (
    Bus,
    ComponentName,
    Grant,
    InstanceName,
    JetStream,
    NoStream,
    OrderedConsumer,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    WrongLastSequence,
    read_instances,
    read_latest,
    suggestion,
)
from dynbus.transfer import transfer_grants

logger = logging.getLogger(__name__)

MAX_TOKENS: Final = 1 << 40
BUCKET: Final = "dynbus_disaggregation"
OWN_KEY: Final = "disaggregation"
"""In the metadata of a decode instance: what its own settings have beside the defaults, in JSON."""
WRITES: Final = 5
RETRY_PAUSE: Final = 0.5
READ_TIMEOUT: Final = 10.0
CLOSE_SECONDS: Final = 2.0

_NUMBERS: Final[dict[Any, str]] = {int: "a whole number", float: "a number"}

SETTINGS_STREAM: Final = StreamConfig(
    name=f"KV_{BUCKET}",
    subjects=(f"$KV.{BUCKET}.>",),
    limits=StreamLimits(
        max_messages_per_subject=1, max_bytes=8 * 1024 * 1024, max_message_size=16 * 1024
    ),
    description="dynbus: settings of disaggregated serving, one record for each component",
)


class DisaggregationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules for computing prompts elsewhere.

    Attributes:
        mode: `auto` decides for each request; `local` and `remote` always say the same, as far as
            there is a prefill instance.
        through: how a prompt gets to a prefill instance: `direct` is a call of the one that the
            router chooses, `queue` a job that the first one with room takes.
        local_prompt_tokens: prompts of so many tokens at most, less those in the own cache, are
            computed locally.
        idle_local_prompt_tokens: the same while the decode instance runs nothing that a long
            prompt would hold up; at least `local_prompt_tokens` counts.
        max_queue_length: prompts that may wait for each prefill instance; with as many or more,
            further ones are computed locally.
        max_queued_tokens: tokens that may wait for each prefill instance, likewise; 0 for no limit.
        busy_decode_load: from 0 to 1; a decode instance that is as busy as that waits for queues
            of twice the length.
        resume_share: from 0 to 1; a queue that was too long is so until it is down to this share
            of its limit, lest single requests tip the decision.
    """

    mode: Literal["auto", "local", "remote"] = "auto"
    through: Literal["direct", "queue"] = "direct"
    local_prompt_tokens: int = 512
    idle_local_prompt_tokens: int = 0
    max_queue_length: int = 4
    max_queued_tokens: int = 32_768
    busy_decode_load: float = 0.9
    resume_share: float = 0.5

    def __post_init__(self) -> None:
        for name in (
            "local_prompt_tokens",
            "idle_local_prompt_tokens",
            "max_queue_length",
            "max_queued_tokens",
        ):
            value = getattr(self, name)
            if not 0 <= value <= MAX_TOKENS:
                raise ConfigError(f"{name} = {value} is not usable: give 0 or more")
        if self.max_queue_length == 0:
            raise ConfigError(
                "max_queue_length = 0 is not usable: give 1 or more, or mode = local to compute "
                "all prompts locally"
            )
        for name in ("busy_decode_load", "resume_share"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise ConfigError(f"{name} = {value} is not usable: give a number from 0 to 1")

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """These settings with some of another value.

        Raises:
            ConfigError: there is no such setting, or it cannot have that value.
        """
        known = self.__struct_fields__
        for name in changes:
            if name not in known:
                raise ConfigError(
                    f"{name!r} is not a setting of disaggregated serving"
                    f"{suggestion(name, known)}: there are {', '.join(known)}"
                )
        own = {name: getattr(self, name) for name in known}
        types = get_type_hints(type(self))
        for name, value in changes.items():
            try:
                own[name] = msgspec.convert(value, types[name])
            except msgspec.ValidationError:
                raise _not_usable(name, value) from None
        return type(self)(**own)

    def metadata(self) -> dict[str, str]:
        """The metadata of a decode instance that has these as its own."""
        default = type(self)()
        own = {name: getattr(self, name) for name in self.__struct_fields__}
        changes = {name: own[name] for name in own if own[name] != getattr(default, name)}
        return {OWN_KEY: msgspec.json.encode(changes).decode()}


DisaggregationOption: TypeAlias = Annotated[
    dict[str, Any] | None,
    Option(
        "when prompts are computed elsewhere, unless the record of the component says otherwise: "
        "fields of `DisaggregationSettings` by their names",
        wanted="settings by their names",
        guide="disaggregated.md#change-it-while-it-runs",
    ),
]
_KNOWN: Final = DisaggregationSettings.__struct_fields__


def _not_usable(name: str, value: object) -> ConfigError:
    """The refusal of a value of another type, with what may be given."""
    hint = get_type_hints(DisaggregationSettings)[name]
    choices = get_args(hint)
    wanted = f"one of {', '.join(choices)}" if choices else _NUMBERS[hint]
    return ConfigError(f"{name} = {value!r} is not usable: give {wanted}")


def parse_changes(texts: Mapping[str, str]) -> dict[str, Any]:
    """Settings from what a person has typed.

    Raises:
        ConfigError: there is no such setting, or it cannot have that value.
    """
    own = DisaggregationSettings()
    types = get_type_hints(DisaggregationSettings)
    values: dict[str, Any] = {}
    for name, text in texts.items():
        if name in types:
            try:
                values[name] = msgspec.convert(text, types[name], strict=False)
            except msgspec.ValidationError:
                raise _not_usable(name, text) from None
        else:
            values[name] = text
    changed = own.changed(values)
    return {name: getattr(changed, name) for name in values}


class StoredSettings(NamedTuple):
    """The record of a component.

    Attributes:
        changes: what it says, of the settings that this version knows.
        revision: of the record; 0 where there is none.
        others: what it says of settings that a later version may have.
    """

    changes: Mapping[str, Any]
    revision: int
    others: Mapping[str, Any] = {}

    def over(self, own: DisaggregationSettings) -> DisaggregationSettings:
        """The settings in force for a worker that has settings of its own.

        Raises:
            ConfigError: the record has a value that cannot be.
        """
        return own.changed(self.changes)


NOTHING_STORED: Final = StoredSettings({}, 0)


def _read(stored: StoredMessage | None) -> StoredSettings:
    """The settings in a record.

    Raises:
        ConfigError: it is no record of settings.
    """
    if stored is None:
        return NOTHING_STORED
    if stored.is_marker:
        return StoredSettings({}, stored.sequence)
    try:
        values = msgspec.json.decode(stored.data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        component = stored.subject.removeprefix(f"$KV.{BUCKET}.")
        raise ConfigError(
            f"the record {stored.subject} is no JSON object: {error}: "
            f"`dynbus models tune {component} --reset` removes it"
        ) from None
    others = {name: values.pop(name) for name in values.keys() - set(_KNOWN)}
    return StoredSettings(values, stored.sequence, others)


def _subject(component: ComponentName) -> str:
    return f"$KV.{BUCKET}.{component}"


async def read_settings(jetstream: JetStream, component: ComponentName) -> StoredSettings:
    """The record of a component.

    Raises:
        ConfigError: it is no record of settings.
        Unavailable: the server does not answer.
    """
    try:
        return _read(await jetstream.last(SETTINGS_STREAM.name, _subject(component)))
    except NoStream:
        return NOTHING_STORED


async def stored_components(jetstream: JetStream) -> list[ComponentName]:
    """The components that have a record, in order."""
    try:
        records = await read_latest(jetstream, SETTINGS_STREAM.name, timeout=READ_TIMEOUT)
    except NoStream:
        return []
    names = (subject.removeprefix(f"$KV.{BUCKET}.") for subject in records)
    return sorted(ComponentName.parse(name) for name in names if name.count(".") == 1)


async def change_settings(
    jetstream: JetStream,
    component: ComponentName,
    changes: Mapping[str, Any],
    unset: Collection[str] = (),
) -> StoredSettings:
    """Change the record of a component; workers follow it within a second.

    Args:
        unset: settings that are each worker's own again.

    Raises:
        ConfigError: there is no such setting, or it cannot have that value, or the record would
            have another one that cannot be; nothing is changed.
        Unavailable: the server does not answer, or others change the record all the time.
    """
    own = DisaggregationSettings()
    own.changed(changes)
    own.changed({name: getattr(own, name, None) for name in unset})
    for _ in range(WRITES):
        try:
            before = await read_settings(jetstream, component)
            after = {**before.changes, **changes}
            for name in unset:
                after.pop(name, None)
            try:
                own.changed(after)
            except ConfigError as error:
                raise ConfigError(f"the record of {component}: {error}, or unset it") from None
            written = {**before.others, **after}
            if not written and not before.changes:
                return before
            revision = await jetstream.publish(
                _subject(component),
                msgspec.json.encode(written) if written else b"",
                expected_last_subject_sequence=before.revision,
                deleted=not written,
            )
        except NoStream:
            await jetstream.ensure_stream(SETTINGS_STREAM)
        except WrongLastSequence:
            continue
        else:
            return StoredSettings(after, revision, before.others)
    raise Unavailable(f"the settings of {component} change under every write: try again")


async def remove_settings(jetstream: JetStream, component: ComponentName) -> StoredSettings:
    """Remove the record of a component, whatever it says: all settings are each worker's own.

    Raises:
        Unavailable: the server does not answer.
    """
    try:
        if await jetstream.last(SETTINGS_STREAM.name, _subject(component)) is None:
            return NOTHING_STORED
        revision = await jetstream.publish(_subject(component), b"", deleted=True)
    except NoStream:
        return NOTHING_STORED
    return StoredSettings({}, revision)


async def read_own_settings(
    jetstream: JetStream,
) -> dict[InstanceName, DisaggregationSettings]:
    """The settings that the decode instances of all components have where no record says
    otherwise.

    Raises:
        Unavailable: the server does not answer.
    """
    try:
        records = await read_instances(jetstream, timeout=READ_TIMEOUT)
    except NoStream:
        return {}
    own: dict[InstanceName, DisaggregationSettings] = {}
    for record in records:
        try:
            announced = announced_settings(record.metadata)
        except ConfigError as error:
            logger.warning("%s announces %s that cannot be read: %s", record.name, OWN_KEY, error)
            continue
        if announced is not None:
            own[record.name] = announced
    return own


def announced_settings(metadata: Mapping[str, str]) -> DisaggregationSettings | None:
    """The own settings of a decode instance, by the metadata of its record; None for another one.

    Raises:
        ConfigError: they cannot be read.
    """
    if OWN_KEY not in metadata:
        return None
    try:
        announced = msgspec.json.decode(metadata[OWN_KEY], type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(str(error)) from None
    # A later version may have more of them.
    return DisaggregationSettings().changed({n: v for n, v in announced.items() if n in _KNOWN})


class LiveSettings:
    """The settings that hold for a component at this moment.

    Attributes:
        current: those that the record changes, and the worker's own for the rest.
        revision: of the record; 0 where there is none.
    """

    def __init__(self, component: ComponentName, own: DisaggregationSettings) -> None:
        self.current: DisaggregationSettings = own
        self.revision = 0
        self._component = component
        self._own = own
        self._heard = False

    def __repr__(self) -> str:
        return f"<LiveSettings {self._component} [revision: {self.revision}]>"

    async def follow(self, jetstream: JetStream) -> OrderedConsumer:
        """Begin to follow the record.

        Raises:
            DynbusError: that is not possible now.
        """
        await jetstream.ensure_stream(SETTINGS_STREAM)
        return await jetstream.consume(
            SETTINGS_STREAM.name,
            self._read_record,
            subject=_subject(self._component),
            last_per_subject=True,
            on_restart=self._begin_again,
            on_caught_up=self._caught_up,
        )

    def _begin_again(self) -> None:
        self._heard = False

    def _caught_up(self) -> None:
        if not self._heard:
            # The bucket was made again, without the record.
            self._apply(NOTHING_STORED)

    def _read_record(self, stored: StoredMessage) -> None:
        self._heard = True
        try:
            self._apply(_read(stored))
        except ConfigError as error:
            logger.warning("%r: revision %d is ignored: %s", self, stored.sequence, error)

    def _apply(self, stored: StoredSettings) -> None:
        after = stored.over(self._own)
        if after != self.current:
            values, before = msgspec.to_builtins(after), msgspec.to_builtins(self.current)
            changed = [f"{name}={values[name]}" for name in values if values[name] != before[name]]
            logger.info("%s: from now on %s", self._component, ", ".join(changed))
        self.current, self.revision = after, stored.revision


@asynccontextmanager
async def follow_settings(
    bus: Bus,
    component: ComponentName,
    own: DisaggregationSettings = DisaggregationSettings(),  # noqa: B008 - frozen
) -> AsyncGenerator[LiveSettings]:
    """Follow the settings of a component: `current` is what they are, within a second.

    Without JetStream, and where the record cannot be read, those before hold.

    Args:
        own: what holds where the record says nothing.
    """
    live = LiveSettings(component, own)

    async def follow() -> None:
        consumer: OrderedConsumer | None = None
        last_error = ""
        try:
            while consumer is None:
                try:
                    consumer = await live.follow(bus.data.jetstream)
                except DynbusError as error:
                    level = logging.DEBUG if str(error) == last_error else logging.WARNING
                    last_error = str(error)
                    logger.log(level, "%r: cannot be followed yet: %s", live, error)
                    await anyio.sleep(RETRY_PAUSE)
            await anyio.sleep_forever()
        finally:
            if consumer is not None:
                with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                    await consumer.stop()

    work = bus.background.start(follow, name=f"follow the settings of {component}")
    try:
        yield live
    finally:
        with anyio.CancelScope(shield=True):
            await work.end()


def handing_over(address: ComponentName) -> list[Grant]:
    """The uses that a worker makes of the bus, for `dynbus auth`, whose prompts are computed
    elsewhere."""
    subjects = (*SETTINGS_STREAM.to_follow, f"$JS.API.DIRECT.GET.{SETTINGS_STREAM.name}")
    return [
        Grant("follows settings of disaggregated serving", subjects),
        *transfer_grants(f"{address.namespace}.*"),
    ]
