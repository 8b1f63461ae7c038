"""`dynbus keys`: the keys of front ends that are on the bus, and the limits of their tenants."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dynbus.spi import terminal

if TYPE_CHECKING:
    from dynbus.llm.tenants.limits import Limits
    from dynbus.llm.tenants.records import KeyRecord, StoredKey, TenantBucket, TenantView

T = TypeVar("T")

_HELP: Final = """Make, list and revoke the keys of front ends that are on the bus.

    A front end with --keys-from-bus follows them: what is changed holds within a second, without a
    restart. A key is shown once, when it is made; the bus has its hash alone.

    \b
    dynbus keys add ada --limit requests_per_minute=60 --limit tokens_per_month=1000000
    dynbus keys limit ada requests_per_minute=120
    dynbus keys ls
    dynbus keys revoke 3f1c09a2b7de
    """


@click.group(help=_HELP, epilog=terminal.EXIT_CODES)
def keys() -> None:
    pass


@keys.command()
@click.argument("tenant")
@click.option("--name", metavar="TEXT", help="What the key is for: `dynbus keys ls` shows it.")
@click.option(
    "--expires",
    metavar="TIME",
    help=f"When it lets nobody in any more: {terminal.TIMES_AHEAD} Default: never.",
)
@click.option("--operator", is_flag=True, help="A key that may see what all tenants do.")
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=VALUE",
    help="A limit of the tenant; all of them take the place of those it had.",
)
@click.option(
    "--key-limit",
    "key_limits",
    multiple=True,
    metavar="NAME=VALUE",
    help="A limit of this key alone, within those of the tenant.",
)
@terminal.json_option
@terminal.nats_option
def add(
    tenant: str,
    name: str | None,
    expires: str | None,
    operator: bool,
    limits: tuple[str, ...],
    key_limits: tuple[str, ...],
    as_json: bool,
    nats: str | None,
) -> None:
    """Make a key for a tenant, and print it: it can never be read again.

    Limits are the tenant's, for all of its keys. Without --limit it keeps those that it has. The
    key may have others with --key-limit: a request has to keep to both.
    """
    from dynbus.llm.tenants.keys import key_id, time_text
    from dynbus.llm.tenants.limits import read_limits
    from dynbus.llm.tenants.records import (
        KeyRecord,
        check_key_limits,
        check_name,
        check_tenant,
        hash_of,
    )
    from dynbus.spi import unix_time

    now = unix_time()
    record = KeyRecord(
        tenant=check_tenant(tenant),
        is_operator=operator,
        created=now,
        name="" if name is None else check_name(name),
        expires=0.0 if expires is None else _expiry(expires, now),
        limits=check_key_limits(read_limits(key_limits)) if key_limits else None,
    )
    stated = read_limits(limits) if limits else None

    async def work(bucket: TenantBucket) -> tuple[str, Limits | None]:
        before = (await bucket.read()).limits_of(tenant)
        if stated is not None:
            # First: the key counts at once.
            await bucket.set_limits(tenant, stated)
        return await bucket.add_key(record), before

    key, before = _run(work, nats)
    id = key_id(hash_of(key))
    if as_json:
        terminal.print_json({**_key_json(id, record), "key": key})
        return
    click.echo(key)
    terminal.notice(f"the key {id} of {tenant}: keep it now, it is shown this once")
    if record.expires:
        terminal.notice(f"it expires at {time_text(record.expires)}")
    if stated is not None:
        _tell_limits(tenant, before, stated)


@keys.command()
@click.argument("tenant")
@click.argument("limits", metavar="[NAME=VALUE]...", nargs=-1)
@click.option("--unset", is_flag=True, help="Have it have those of '*' again.")
@terminal.nats_option
def limit(tenant: str, limits: tuple[str, ...], unset: bool, nats: str | None) -> None:
    """State all limits of a tenant, in place of those it had; none for no limits.

    The tenant '*' has the limits of all for whom none are stated. Limits that a file of
    --api-keys states of a tenant go first at the front ends that read it.

    There are requests_per_minute, prompt_tokens_per_minute, completion_tokens_per_minute,
    cached_tokens_per_minute, tokens_per_month, requests_at_a_time, open_streams, kept_answers,
    max_prompt_tokens, max_priority, and models=ONE,OTHER.
    """
    from dynbus import ConfigError
    from dynbus.llm.tenants.keys import ALL_TENANTS
    from dynbus.llm.tenants.limits import read_limits
    from dynbus.spi import suggestion

    if unset and limits:
        raise ConfigError(f"--unset states nothing: leave out {limits[0][:80]!r}, or --unset")
    stated = None if unset else read_limits(limits)

    async def work(bucket: TenantBucket) -> TenantView:
        before = await bucket.read()
        if stated is None:
            await bucket.unset_limits(tenant)
        else:
            await bucket.set_limits(tenant, stated)
        return before

    view = _run(work, nats)
    _tell_limits(tenant, view.limits_of(tenant), stated)
    if stated is not None and tenant not in (ALL_TENANTS, *view.tenants):
        terminal.notice(
            f"warning: no key on the bus is of {tenant}{suggestion(tenant, view.tenants)}: these "
            "limits are for its keys in files of front ends, unless such a file states limits of "
            "its own, for its tokens of a provider, and for keys that "
            f"`dynbus keys add {tenant}` makes; `dynbus keys limit {tenant} --unset` takes them "
            "back"
        )


def _expiry(text: str, now: float) -> float:
    """The time at which a key ends, in Unix seconds."""
    from dynbus import ConfigError

    at = terminal.parse_time(text, "--expires", ahead=True)(now)
    if at <= now:
        raise ConfigError(f"--expires {text!r} is over: nobody would be let in by the key")
    return at


def _tell_limits(tenant: str, before: Limits | None, now: Limits | None) -> None:
    """Say what is stated now, and what is no longer: a limit that was left out is gone."""
    terminal.notice(f"limits of {tenant}: {_stated(now)}")
    if before is not None and before != now:
        terminal.notice(f"before: {_stated(before)}")


def _stated(limits: Limits | None) -> str:
    """Limits in words."""
    return "none are stated" if limits is None else str(limits) or "none"


@keys.command()
@click.argument("id")
@terminal.nats_option
def revoke(id: str, nats: str | None) -> None:
    """Have a key be none any more, by the id that `dynbus keys ls` shows.

    The beginning of an id does where it is that of one key alone.

    Requests that run with it are finished.
    """
    from dynbus import ConfigError
    from dynbus.llm.tenants.keys import key_id

    if not id:
        raise ConfigError("the id is empty: `dynbus keys ls` shows those of all keys")

    async def work(bucket: TenantBucket) -> tuple[StoredKey, TenantView]:
        view = await bucket.read()
        known = [one for one in view.keys if one.hash.startswith(id)]
        if len(known) != 1:
            why = "there is no key" if not known else f"{len(known)} keys have an id"
            raise ConfigError(f"{why} that begins with {id[:80]!r}: see `dynbus keys ls`")
        await bucket.revoke(known[0].hash)
        return known[0], view

    key, before = _run(work, nats)
    tenant = key.record.tenant
    terminal.notice(f"the key {key_id(key.hash)} of {tenant} is none any more")
    limits = before.limits_of(tenant)
    if limits is not None and [one.record.tenant for one in before.keys].count(tenant) == 1:
        terminal.notice(
            f"it was the last one of {tenant}, whose limits stay ({_stated(limits)}): "
            f"`dynbus keys limit {tenant} --unset` takes them back"
        )


@keys.command()
@terminal.json_option
@terminal.nats_option
def ls(as_json: bool, nats: str | None) -> None:
    """List the keys by their ids, with their names, age and end, and the limits of tenants."""
    from dynbus.spi import unix_time

    view = _run(lambda bucket: bucket.read(), nats)
    if as_json:
        terminal.print_json(_json(view))
        return
    if not view.keys and not view.limits:
        terminal.notice("no key")
        return
    now = unix_time()
    rows = [_row(key, view, now) for key in view.keys]
    rows += [
        ("-", terminal.plain(tenant), "-", "-", "-", "-", "-", terminal.plain(_stated(limits)))
        for tenant, limits in view.limits.items()
        if tenant not in view.tenants
    ]
    terminal.print_table(
        ("ID", "TENANT", "NAME", "ROLE", "AGE", "EXPIRES", "KEY LIMITS", "LIMITS"), rows
    )


def _row(key: StoredKey, view: TenantView, now: float) -> tuple[str, ...]:
    from dynbus.llm.tenants.keys import ALL_TENANTS, key_id

    record = key.record
    limits = "-"
    if (own := view.limits_of(record.tenant)) is not None:
        limits = _stated(own)
    elif (of_all := view.limits_of(ALL_TENANTS)) is not None:
        limits = f"those of {ALL_TENANTS}: {_stated(of_all)}"
    return (
        key_id(key.hash),
        terminal.plain(record.tenant),
        terminal.plain(record.name) or "-",
        "operator" if record.is_operator else "-",
        terminal.duration(now - record.created),
        _end(record.expires, now),
        terminal.plain(str(record.limits)) if record.limits is not None else "-",
        terminal.plain(limits),
    )


def _end(expires: float, now: float) -> str:
    if not expires:
        return "never"
    return f"in {terminal.duration(expires - now)}" if expires > now else "expired"


def _key_json(id: str, record: KeyRecord) -> dict[str, Any]:
    import msgspec

    return {
        "id": id,
        "tenant": record.tenant,
        "name": record.name,
        "is_operator": record.is_operator,
        "created": record.created,
        "expires": record.expires or None,
        "limits": msgspec.to_builtins(record.limits),
    }


def _json(view: TenantView) -> dict[str, Any]:
    import msgspec

    from dynbus.llm.tenants.keys import key_id

    return {
        "keys": [_key_json(key_id(key.hash), key.record) for key in view.keys],
        "limits": {tenant: msgspec.to_builtins(one) for tenant, one in view.limits.items()},
    }


def _run(work: Callable[[TenantBucket], Awaitable[T]], nats: str | None) -> T:
    from dynbus.llm.tenants.records import TenantBucket

    return terminal.at_server(nats, "dynbus-keys", lambda one: work(TenantBucket(one.jetstream)))
