"""The names of KV-aware routing."""

from __future__ import annotations

from dynbus.bus.protocol.names import check_token
from dynbus.kvrouter.names import kv_snapshot_bucket


def test_the_bucket_of_snapshots_has_a_legal_name_of_its_own_whatever_the_namespace() -> None:
    long = ["n" * 63, "n" * 62 + "m"]

    names = [kv_snapshot_bucket(namespace) for namespace in ("demo", *long)]

    assert names[0] == "DYNBUS_SNAPSHOTS_demo"
    assert len(set(names)) == 3
    assert [check_token("bucket", name) for name in names] == names
