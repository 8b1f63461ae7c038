"""The billing example: a key and its effect are one transaction."""

from __future__ import annotations

from pathlib import Path

from .conftest import RunExample


def test_a_charge_that_is_submitted_twice_is_charged_once(
    run_example: RunExample, tmp_path: Path
) -> None:
    billing = run_example(
        "billing",
        "billing.Billing.charge",
        "billing.Billing.balance",
        options=["--Billing.database", str(tmp_path / "billing.sqlite")],
    )

    assert billing.run_client() == "Ada was charged 650 cents\n"
