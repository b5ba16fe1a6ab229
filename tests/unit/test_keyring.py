"""Keys on disk: who may read them, what is allowed, and that nothing of a secret is shown."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kbrl_async import cli
from kbrl_async.errors import UserError
from kbrl_async.keyring import Keyring, client_keys, peer_of
from protocols.auth import Role


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path / "keys")


def test_a_new_key_is_allowed_and_its_holder_knows_the_broker(ring: Keyring) -> None:
    issued = ring.new(Role.BENCH, "host7")
    keys, (peers, wrong) = client_keys(issued), ring.peers()
    assert peers[keys.public.decode()].owner == "bench/host7"
    assert not wrong
    assert keys.server == ring.server().public
    assert peer_of(issued).role is Role.BENCH


def test_every_file_with_a_secret_is_the_users_alone(ring: Keyring) -> None:
    ring.new(Role.BENCH, "host7")
    secret = [path for path in ring.folder.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    assert len(secret) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}


def test_the_allow_list_holds_no_secret(ring: Keyring) -> None:
    secret = client_keys(ring.new(Role.BENCH, "host7")).secret
    assert all(secret not in path.read_bytes() for path in (ring.folder / "allowed").rglob("*.pub"))


@pytest.mark.parametrize("file", ["broker.key", "issued/bench/host7/peer.key"])
def test_a_secret_that_others_can_read_is_refused(ring: Keyring, file: str) -> None:
    issued = ring.new(Role.BENCH, "host7")
    (ring.folder / file).chmod(0o640)
    with pytest.raises(UserError, match=r"others may read it. Run: chmod 600"):
        client_keys(issued) if "peer" in file else ring.server()


@pytest.mark.parametrize("name", ["", "a.b", "../x", "A", "x" * 33, "-a", "a/b"])
def test_a_name_that_could_be_part_of_another_is_refused(ring: Keyring, name: str) -> None:
    with pytest.raises(UserError, match="can't name a key"):
        ring.new(Role.BENCH, name)


def test_a_key_is_not_replaced_by_accident(ring: Keyring) -> None:
    ring.new(Role.BENCH, "host7")
    with pytest.raises(UserError, match="Revoke it first"):
        ring.new(Role.BENCH, "host7")


def test_a_revoked_key_is_on_the_list_no_longer_and_the_stamp_says_so(ring: Keyring) -> None:
    ring.new(Role.BENCH, "host7")
    before = ring.stamp()
    ring.revoke(Role.BENCH, "host7")
    assert ring.peers() == ({}, [])
    assert ring.stamp() != before


@pytest.mark.parametrize("content", [b"", b"nonsense", b"{}", b'{"public": "short"}', b"\xff" * 5000, b'{"public":"'
                                     + b"#" * 40 + b'"}'])  # fmt: skip
def test_a_file_that_is_no_key_allows_nobody_and_is_named(ring: Keyring, content: bytes) -> None:
    ring.new(Role.BENCH, "host7")
    (ring.folder / "allowed" / "bench" / "bad.pub").write_bytes(content)
    peers, wrong = ring.peers()
    assert len(peers) == 1
    assert len(wrong) == 1
    assert "bad.pub" in wrong[0]


def test_one_key_has_one_role(ring: Keyring) -> None:
    ring.new(Role.BENCH, "host7")
    copied = ring.folder / "allowed" / "learner" / "host7.pub"
    copied.parent.mkdir()
    copied.write_bytes((ring.folder / "allowed" / "bench" / "host7.pub").read_bytes())
    peers, wrong = ring.peers()
    assert [peer.owner for peer in peers.values()] == ["bench/host7"]
    assert len(wrong) == 1


def test_an_error_shows_nothing_of_the_file(ring: Keyring) -> None:
    issued = ring.new(Role.BENCH, "host7")
    (issued / "peer.key").write_text('{"secret": "s3cr3t", "public": 7}')
    with pytest.raises(UserError) as caught:
        client_keys(issued)
    assert "s3cr3t" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_the_command_makes_lists_and_revokes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "keys")
    assert cli.main(["keys", "new", "all", "--folder", folder]) == 0
    assert cli.main(["keys", "new", "bench", "--name", "host7", "--folder", folder]) == 0
    assert "kbrl worker bench --connect" in capsys.readouterr().out
    assert cli.main(["keys", "list", "--folder", folder]) == 0
    assert capsys.readouterr().out.count("\n") == len(Role) + 1
    assert cli.main(["keys", "revoke", "bench", "--name", "host7", "--folder", folder]) == 0
    assert cli.main(["keys", "revoke", "bench", "--name", "host7", "--folder", folder]) == 2


def test_the_command_prints_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    cli.main(["keys", "new", "all", "--folder", str(folder)])
    cli.main(["keys", "list", "--folder", str(folder)])
    printed = capsys.readouterr().out
    ring = Keyring(folder)
    for secret in (ring.server().secret, *(ring.local(role).secret for role in Role)):
        assert secret.decode() not in printed


def test_a_second_new_all_keeps_what_is_there(tmp_path: Path) -> None:
    folder = str(tmp_path / "keys")
    cli.main(["keys", "new", "all", "--folder", folder])
    before = Keyring(folder).peers()
    assert cli.main(["keys", "new", "all", "--folder", folder]) == 0
    assert Keyring(folder).peers() == before


def test_a_role_that_there_is_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "new", "king"]) == 2
    assert "'king' is no role" in capsys.readouterr().err
