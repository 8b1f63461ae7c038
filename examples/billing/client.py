"""Charges an account by two jobs, the second of them submitted twice under its key."""

import asyncio
import sys
from uuid import uuid4

from actors import Billing, Charge

from dynbus import DynbusError, Runtime, call_options


async def main() -> None:
    async with Runtime.connect() as runtime:
        billing = runtime.client(Billing)
        with call_options(wait=10.0):
            before = await billing.balance("Ada")
        tea, cake = Charge(account="Ada", cents=250), Charge(account="Ada", cents=400)
        order = f"order-{uuid4()}"
        first = await billing.charge.submit(tea)
        second = await billing.charge.submit(cake, idempotency_key=order)
        again = await billing.charge.submit(cake, idempotency_key=order)
        await first.result()
        assert await second.result() == await again.result()
        print(f"Ada was charged {await billing.balance('Ada') - before} cents")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except DynbusError as error:
        sys.exit(f"{error.code}: {error}")
