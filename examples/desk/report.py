"""The nightly report, of all conversations that were closed since the last one."""

import sqlite3
from contextlib import closing
from datetime import datetime

from anyio.to_thread import run_sync
from talk import Closed, closed

from dynbus import Actor, cron, handler, subscribe

TABLE = "CREATE TABLE IF NOT EXISTS talks (talk PRIMARY KEY, summary, night)"
KEEP = "INSERT OR IGNORE INTO talks VALUES (?, ?, NULL)"
TAKE = "UPDATE talks SET night = ? WHERE night IS NULL"
READ = "SELECT talk || ': ' || summary FROM talks WHERE night = ? ORDER BY talk"


class Reports(Actor, namespace="desk"):
    def __init__(self, path: str = "desk.db") -> None:
        self.path = path

    async def on_start(self) -> None:
        await run_sync(self.change, TABLE)

    @subscribe(closed, group="reports", from_="all")
    async def keep(self, event: Closed) -> None:
        await run_sync(self.change, KEEP, event.talk, event.summary)

    @cron("0 3 * * *", tz="Europe/Berlin", missed="catch_up")
    @handler(durable=True)
    async def write(self, due: datetime) -> list[str]:
        await run_sync(self.change, TAKE, due.isoformat())
        return [line for (line,) in await run_sync(self.change, READ, due.isoformat())]

    def change(self, statement: str, *values: str) -> list[tuple[str]]:
        with closing(sqlite3.connect(self.path)) as database, database:
            return database.execute(statement, values).fetchall()
