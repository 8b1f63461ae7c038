"""Records in JetStream: instances, leases, and objects.

`Lease` decides whose record holds, and `InstanceView` who may be chosen; `LeasedRecord`,
`LeaseKeeper` and `Discovery` carry it out.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        discovery,
        expired_records,
        instance_view,
        leased_record,
        leases,
        objects,
        reading,
    )

__all__ = [
    "discovery",
    "expired_records",
    "instance_view",
    "leased_record",
    "leases",
    "objects",
    "reading",
]
