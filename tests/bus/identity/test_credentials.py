"""The credential of a process: which file it is, and whose."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError
from dynbus.bus.identity.credentials import (
    CredentialFile,
    credential_options,
    identified,
    own_credentials,
)
from dynbus.bus.identity.keys import new_key, write_seed


@pytest.fixture
def seed(tmp_path: Path) -> Path:
    """The key of `billing`."""
    path = tmp_path / "seeds" / "billing.nk"
    write_seed(path, new_key().seed)
    return path


def test_a_key_is_for_its_owner_alone(seed: Path) -> None:
    assert stat.S_IMODE(seed.stat().st_mode) == 0o600
    assert stat.S_IMODE(seed.parent.stat().st_mode) == 0o700
    assert [path.name for path in seed.parent.iterdir()] == ["billing.nk"]


def test_two_keys_differ_and_no_seed_is_shown() -> None:
    one, other = new_key(), new_key()

    assert one.public.startswith("U")
    assert one.seed.startswith("SU")
    assert one.seed != other.seed
    assert one.seed not in repr(one)


def test_a_key_says_whose_it_is_by_the_name_of_its_file(seed: Path) -> None:
    assert identified(BusConfig(credentials=str(seed))).principal == "billing"


def test_a_principal_that_is_set_stays(seed: Path) -> None:
    config = BusConfig(credentials=str(seed), principal="other")

    assert identified(config).principal == "other"


def test_what_is_no_key_is_taken_for_a_credentials_file_of_nats(tmp_path: Path) -> None:
    path = tmp_path / "worker.creds"
    path.write_text("-----BEGIN NATS USER JWT-----\n")

    assert credential_options(str(path)) == {"user_credentials": str(path)}
    assert identified(BusConfig(credentials=str(path))).principal == "-"


def test_a_connection_takes_the_key_and_not_its_file(seed: Path) -> None:
    assert credential_options(str(seed)) == {"nkeys_seed_str": seed.read_text().strip()}
    assert credential_options("") == {}


def test_a_key_that_was_replaced_counts_from_the_next_connection_on(
    seed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, before = CredentialFile(str(seed)), seed.read_text().strip()
    assert file.options() == {"nkeys_seed_str": before}

    after = new_key().seed
    seed.write_text(after[:20])
    assert file.options() == {"nkeys_seed_str": before}, "it is being copied"
    assert "what it had before is used" in caplog.text
    assert after[:20] not in caplog.text

    seed.write_text(after)
    assert file.options() == {"nkeys_seed_str": after.strip()}


def test_a_broken_key_is_refused_without_being_shown(seed: Path) -> None:
    text = seed.read_text().strip()
    seed.write_text(text[:-4])

    with pytest.raises(ConfigError, match="is no NKEY of a user") as raised:
        credential_options(str(seed))
    assert text[:-4] not in str(raised.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.nk' cannot be read: No such file"):
        credential_options(str(tmp_path / "none.nk"))


def test_a_folder_is_for_runs_and_its_files_are_named(seed: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder: name a file in it; .*billing\.nk"):
        credential_options(str(seed.parent))


def test_a_process_of_a_run_finds_its_own_file_in_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "demo_Printer.nk"
    write_seed(path, new_key().seed)

    assert own_credentials(str(tmp_path), ["demo.Printer"]) == str(path)
    assert own_credentials(str(path), ["demo.Printer"]) == str(path)
    assert own_credentials("", ["demo.Printer"]) == ""


def test_a_component_without_a_file_is_told_how_to_get_one(tmp_path: Path) -> None:
    remedies = r"with `dynbus auth add` and bring it here, .*--Printer\.workers=0"
    with pytest.raises(ConfigError, match=rf"no .*demo_Printer\.nk.* {remedies}"):
        own_credentials(str(tmp_path), ["demo.Printer"])


def test_a_process_with_several_components_takes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"serves demo\.A, demo\.B: run them in processes"):
        own_credentials(str(tmp_path), ["demo.A", "demo.B"])
