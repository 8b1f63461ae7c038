"""Calls an actor with bare nats-py: no dynbus here, and so for any NATS client in any language.

A request is JSON on `namespace.component.endpoint`. A unary handler sends one reply. A stream
sends one message per item and an empty one at the end. An error is an empty message with the
headers `Nats-Service-Error` and `Nats-Service-Error-Code`.

dynbus run actors.py
python client.py
"""

import asyncio
import json
import os
from pathlib import Path

import nats

# The server that `dynbus run` starts says in its folder how it is reached.
URL = os.environ.get("NATS_URL") or Path(".dynbus/nats.url").read_text().strip()


async def main() -> None:
    client = await nats.connect(URL)
    try:
        # Unary: NATS request and reply.
        reply = await client.request("plain.Counter.count", b'{"text": "a b c"}', timeout=5)
        print("count:", json.loads(reply.data))

        # Stream: an inbox of our own, read until the empty message.
        inbox = client.new_inbox()
        items = await client.subscribe(inbox)
        await client.publish("plain.Counter.words", b'{"text": "a b c"}', reply=inbox)
        while (item := await items.next_msg(timeout=5)).data:
            print("word:", json.loads(item.data))
        await items.unsubscribe()

        # Error: the text is empty, which the actor's model does not allow.
        reply = await client.request("plain.Counter.count", b'{"text": ""}', timeout=5)
        headers = reply.headers or {}
        print("code:", headers["Nats-Service-Error-Code"])
        print("error:", headers["Nats-Service-Error"])
    finally:
        await client.close()


if __name__ == "__main__":
    asyncio.run(main())
