"""Billing: jobs whose effects are counted once, whoever is killed and however often one is tried.

A try and its effect may be repeated: between the effect and the record of it lies a moment in which
a process can die. So the job's key and the effect are one transaction of the same database.
"""

import asyncio
import sqlite3
from contextlib import closing

from pydantic import BaseModel

from dynbus import Actor, context, handler


class Charge(BaseModel):
    account: str
    cents: int


class Receipt(BaseModel):
    number: int


class Billing(Actor, namespace="billing"):
    def __init__(self, database: str = "/tmp/dynbus-billing.sqlite") -> None:
        self.database = database

    async def on_start(self) -> None:
        with closing(sqlite3.connect(self.database, timeout=60)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript("""
                CREATE TABLE IF NOT EXISTS receipts (number INTEGER PRIMARY KEY, key TEXT UNIQUE);
                CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY, cents INTEGER);
            """)

    @handler(durable=True, tries=50, backoff=0.1)
    async def charge(self, charge: Charge) -> Receipt:
        return await asyncio.to_thread(self.book, context().idempotency_key, charge)

    def book(self, key: str, charge: Charge) -> Receipt:
        """Charge once for a key; its receipt, also where another try has charged."""
        with closing(sqlite3.connect(self.database, timeout=60)) as database, database:
            done = database.execute("INSERT OR IGNORE INTO receipts (key) VALUES (?)", (key,))
            if done.rowcount:
                database.execute(
                    "INSERT INTO accounts VALUES (?, ?)"
                    " ON CONFLICT (name) DO UPDATE SET cents = cents + excluded.cents",
                    (charge.account, charge.cents),
                )
            found = database.execute("SELECT number FROM receipts WHERE key = ?", (key,))
            return Receipt(number=found.fetchone()[0])

    @handler
    async def balance(self, account: str) -> int:
        with closing(sqlite3.connect(self.database, timeout=60)) as database:
            found = database.execute("SELECT cents FROM accounts WHERE name = ?", (account,))
            return (found.fetchone() or (0,))[0]
