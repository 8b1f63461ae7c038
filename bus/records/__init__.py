"""Records in JetStream: those of instances, each with a lease that its process renews, and objects.

`Lease` decides whose record holds, and `InstanceView` who may be chosen; `LeasedRecord`,
`LeaseKeeper` and `Discovery` carry it out.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        abroad,
        discovery,
        expired_records,
        instance_records,
        instance_view,
        leased_record,
        objects,
        reading,
    )

__all__ = [
    "abroad",
    "discovery",
    "expired_records",
    "instance_records",
    "instance_view",
    "leased_record",
    "objects",
    "reading",
]
