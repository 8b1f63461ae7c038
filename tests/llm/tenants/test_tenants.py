"""`Tenants`: keys and limits of several sources, while the bus has not told its own yet."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.conditions import eventually

from dynbus import Unavailable
from dynbus.llm.tenants.keys import tenant_token
from dynbus.llm.tenants.limits import Limits
from dynbus.llm.tenants.records import KEYS_BUCKET, KEYS_STREAM, KeyRecord, LimitsRecord, hash_of
from dynbus.llm.tenants.tenants import Tenants
from dynbus.testing import TestKit

pytestmark = pytest.mark.anyio


async def test_no_tenant_is_without_the_limits_on_the_bus_before_they_are_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("ada key-of-ada\nbob key-of-bob max_priority=1\n")
    stated = LimitsRecord(tenant="ada", limits=Limits(models=("tiny",)))
    async with TestKit(connect_timeout=0.05) as kit:
        jetstream = kit.caller.bus.data.jetstream
        await jetstream.ensure_stream(KEYS_STREAM)
        prefix = f"$KV.{KEYS_BUCKET}"
        subject = f"{prefix}.limits.{tenant_token('ada')}"
        await jetstream.publish(subject, msgspec.json.encode(stated))
        record = msgspec.json.encode(KeyRecord(tenant="eve"))
        await jetstream.publish(f"{prefix}.key.{hash_of('key-of-eve')}", record)
        kit.bus.jetstream.stall()
        async with Tenants(kit.caller, file=file, from_bus=True) as known:
            holders = [await known.holder_of(f"key-of-{name}") for name in ("ada", "bob")]
            with pytest.raises(Unavailable, match="keys on the bus are not known yet"):
                await known.holder_of("key-of-eve")
            with pytest.raises(Unavailable, match="limits of ada on the bus are not known yet"):
                known.limits_of("ada")
            in_file = known.limits_of("bob")
            warned = known.problem
            kit.bus.jetstream.stall(False)
            await eventually(lambda: not known.problem)
            eve = await known.holder_of("key-of-eve")
            limits = known.limits_of("ada")

    assert [one.tenant for one in holders if one is not None] == ["ada", "bob"]
    assert in_file == Limits(max_priority=1)
    assert "the keys on the bus cannot be read" in warned
    assert eve is not None
    assert limits == stated.limits
    assert "only tenants whose limits are in the file of keys are answered" in caplog.text
