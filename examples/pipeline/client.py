"""Calls the last stage; the other two are called by the stages themselves."""

import asyncio

from actors import Numberer, Text

from dynbus import Runtime, call_options


async def main() -> None:
    async with Runtime.connect() as runtime:
        numberer = runtime.client(Numberer)
        with call_options(wait=10.0, timeout=30.0, metadata={"tenant": "ada"}):
            async for line in numberer.number(Text(text="one class one decorator one command")):
                print(line.number, line.text)


if __name__ == "__main__":
    asyncio.run(main())
