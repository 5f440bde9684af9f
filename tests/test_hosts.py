"""Hosts as the user names them."""

import socket

import pytest

from launcher.errors import UsageError
from launcher.hosts import Host, HostKind, parse_hosts
from launcher.sources import choose_hosts


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("alpha", Host("alpha", HostKind.SSH)),
        ("alpha:4", Host("alpha", HostKind.SSH, slots=4)),
        ("user@alpha", Host("alpha", HostKind.SSH, user="user")),
        ("user.name@alpha.example.org:16", Host("alpha.example.org", HostKind.SSH, slots=16, user="user.name")),
        ("10.0.0.7:2", Host("10.0.0.7", HostKind.SSH, slots=2)),
        ("[fe80::1]", Host("fe80::1", HostKind.SSH)),
        ("[fe80::1%eth0]:2", Host("fe80::1%eth0", HostKind.SSH, slots=2)),
        ("user@[2001:db8::2]:8", Host("2001:db8::2", HostKind.SSH, slots=8, user="user")),
        ("localhost", Host("localhost", HostKind.LOCAL)),
        ("[::1]:3", Host("::1", HostKind.LOCAL, slots=3)),
        (socket.gethostname(), Host(socket.gethostname(), HostKind.LOCAL)),
        ("me@localhost", Host("localhost", HostKind.SSH, user="me")),
        (" alpha ", Host("alpha", HostKind.SSH)),
    ],
)
def test_a_host_is_a_name_with_optional_user_and_slots(text: str, host: Host) -> None:
    assert parse_hosts(text) == (host,)


def test_hosts_keep_their_order() -> None:
    assert [(host.name, host.slots) for host in parse_hosts("b:2, a ,c:1")] == [("b", 2), ("a", None), ("c", 1)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "'' is not a host"),
        ("alpha,,beta", "'' is not a host"),
        ("alpha,", "'' is not a host"),
        ("al pha", "'al pha' is not a host"),
        ("alpha:", "'alpha:' is not a host"),
        ("alpha:x", "'alpha:x' is not a host"),
        ("alpha:-1", "'alpha:-1' is not a host"),
        ("alpha:1.5", "'alpha:1.5' is not a host"),
        ("alpha:4:4", "'alpha:4:4' is not a host"),
        ("alpha:" + "9" * 5000, "is not a host"),
        ("alpha:٣", "is not a host"),  # a digit, but not of ours
        ("älpha", "'älpha' is not a host"),
        ("alpha/../beta", "is not a host"),
        ("$(reboot)", "is not a host"),
        ("@alpha", "'@alpha' is not a host"),
        ("fe80::1", "write NAME, NAME:SLOTS, USER@NAME or [IPV6]:SLOTS"),
        ("[alpha", "'[alpha' is not a host"),
        ("alpha:0", "'alpha:0' has no slots"),
        ("-oProxyCommand=x", "is not a host"),
        ("-alpha", "begins with '-'"),
        ("alpha,beta,alpha", "host alpha is named twice; give it more slots instead: alpha:2"),
        ("alpha:1,me@alpha:3", "host alpha is named twice"),
        ("localhost,127.0.0.1", "hosts localhost and 127.0.0.1 are both this machine"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused_with_a_reason(text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_hosts(text)
    assert complaint in str(raised.value)


def test_without_a_list_the_host_is_this_machine() -> None:
    for listed in (None,):
        (host,) = choose_hosts(listed, nnodes=None, simulate=False)
        assert (host.kind, host.name) == (HostKind.LOCAL, socket.gethostname().split(".")[0])
    assert choose_hosts(None, nnodes=(1, 1), simulate=False) == (host,)


def test_nnodes_takes_the_first_hosts_of_the_list() -> None:
    assert choose_hosts("a,b,c", nnodes=(2, 2), simulate=False) == parse_hosts("a,b")
    assert choose_hosts("a,b,c", nnodes=None, simulate=False) == parse_hosts("a,b,c")


def test_an_elastic_run_takes_what_is_there_and_keeps_spares() -> None:
    assert choose_hosts("a,b,c", nnodes=(1, 2), simulate=False, spares=True) == parse_hosts("a,b,c")
    assert choose_hosts("a,b", nnodes=(1, 4), simulate=False, spares=True) == parse_hosts("a,b")


def test_simulated_hosts_are_equal_parts_of_this_machine() -> None:
    hosts = choose_hosts(None, nnodes=(3, 3), simulate=True)
    assert [(host.name, host.kind, host.part, host.parts) for host in hosts] == [
        (f"sim{part}", HostKind.SIMULATED, part, 3) for part in range(3)
    ]


@pytest.mark.parametrize(
    ("listed", "nnodes", "simulate", "complaint"),
    [
        (None, (2, 2), False, "--nnodes 2, but no hosts are known. Name them: --hosts a,b (or DTRAIN_HOSTS"),
        (None, (2, 4), False, "--nnodes 2, but no hosts are known"),
        ("a", (2, 2), False, "--nnodes 2, but only 1 hosts are named: a"),
        (None, None, True, "--simulate needs to know between how many hosts to divide this machine: --nnodes N"),
        ("a,b", (2, 2), True, "--simulate divides this machine; it cannot be used together with hosts, which are: a,b"),
    ],
)
def test_hosts_that_are_not_there_are_never_invented(
    listed: str | None, nnodes: tuple[int, int] | None, simulate: bool, complaint: str
) -> None:
    with pytest.raises(UsageError) as raised:
        choose_hosts(listed, nnodes=nnodes, simulate=simulate)
    assert str(raised.value).startswith(complaint)
