"""DeepSpeed's --include and --exclude over a list of hosts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.hosts.host import Host, HostKind, own_name, parse_hosts
from launcher.hosts.include_exclude import filter_hosts

HOSTS = parse_hosts("worker-0:4,worker-1:4,free,n[1-3]:2,[fe80::1]:2")


def kept(hosts: tuple[Host, ...]) -> dict[str, tuple[int | None, tuple[int, ...] | None]]:
    return {host.name: (host.slots, host.chosen) for host in hosts}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("worker-0@worker-1:0,2", {"worker-0": (4, None), "worker-1": (2, (0, 2))}),
        ("worker-1@worker-0", {"worker-0": (4, None), "worker-1": (4, None)}),  # in the order of the list
        ("worker-1:3,0,3", {"worker-1": (2, (0, 3))}),
        ("worker-1:3@worker-1:0", {"worker-1": (2, (0, 3))}),
        ("worker-1@worker-1:0", {"worker-1": (4, None)}),
        ("free:9,8,1", {"free": (3, (1, 8, 9))}),  # how many it has is not known
        ("n[1-2]:1 @ worker-0", {"worker-0": (4, None), "n1": (1, (1,)), "n2": (1, (1,))}),
        ("[fe80::1]:1", {"fe80::1": (1, (1,))}),
    ],
)
def test_include_keeps_what_it_names(text: str, expected: dict[str, tuple[int | None, tuple[int, ...] | None]]) -> None:
    left = filter_hosts(HOSTS, include=text, exclude=None)
    assert kept(left) == expected
    assert list(kept(left)) == list(expected)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("worker-1:0", {"worker-0": (4, None), "worker-1": (3, (1, 2, 3))}),
        ("worker-1", {"worker-0": (4, None)}),
        ("worker-1:0,1@worker-1:2,3", {"worker-0": (4, None)}),  # a host without a slot left
        ("worker-[0-1]:0,1,2", {"worker-0": (1, (3,)), "worker-1": (1, (3,))}),
    ],
)
def test_exclude_takes_away_what_it_names(
    text: str, left: dict[str, tuple[int | None, tuple[int, ...] | None]]
) -> None:
    assert kept(filter_hosts(HOSTS, include=None, exclude=f"free@n[1-3]@[fe80::1]@{text}")) == left


@pytest.mark.parametrize(("include", "exclude"), [(None, None), ("", ""), (" ", None)])
def test_without_a_filter_nothing_changes(include: str | None, exclude: str | None) -> None:
    assert filter_hosts(HOSTS, include=include, exclude=exclude) is HOSTS


def test_a_host_keeps_all_else_but_its_greater_limit() -> None:
    host = Host("a", HostKind.SSH, slots=4, max_slots=8, user="me", port=2222)
    assert filter_hosts((host,), include="a", exclude=None) == (host,)
    assert filter_hosts((host,), include="a:1", exclude=None) == (replace(host, slots=1, max_slots=None, chosen=(1,)),)


def test_localhost_is_this_machine_whatever_its_name_in_the_list() -> None:
    here = (Host(own_name(), HostKind.LOCAL), Host("a", HostKind.SSH))
    assert kept(filter_hosts(here, include="localhost:0,2", exclude=None)) == {own_name(): (2, (0, 2))}
    assert kept(filter_hosts(here, include=None, exclude="localhost")) == {"a": (None, None)}


@pytest.mark.parametrize(
    ("include", "exclude", "complaint"),
    [
        ("a", "b", "--include and --exclude cannot be used together"),
        ("worker-0@x", None, "--include: column 10: no host is named 'x'; there are: worker-0, worker-1, free, n1"),
        ("worker-0,worker-1", None, "'worker-0,worker-1'; hosts are separated by '@', not by ','; there are:"),
        ("n[1-4]", None, "no host is named 'n4'"),
        (None, "n[1-2", "--exclude: column 2: in 'n[1-2' this '[' is not closed"),
        ("worker-0:4", None, "--include: column 1: host worker-0 has no slot 4; it has 0, 1, 2, 3"),
        (None, "n1@n2:0,7", "--exclude: column 4: host n2 has no slot 7; it has 0, 1"),
        (None, "free:0", "--exclude: column 1: the number of slots of free is not known; give it, as in free:8"),
        (
            "worker-0:",
            None,
            "'worker-0:' is not a host with slots; write NAME or NAME:SLOT,SLOT, and '@' between hosts",
        ),
        ("worker-0@", None, "column 10: '' is not a host with slots"),
        ("worker-0 worker-1", None, "'worker-0 worker-1' is not a host with slots"),
        (None, "worker-[0-1]@free@n[1-3]@[fe80::1]", "leaves none of the hosts; there are: worker-0, worker-1, free"),
    ],
)
def test_what_a_filter_cannot_mean_is_refused_with_what_there_is(
    include: str | None, exclude: str | None, complaint: str
) -> None:
    with pytest.raises(UsageError) as raised:
        filter_hosts(HOSTS, include=include, exclude=exclude)
    assert complaint in str(raised.value)


SLOTS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5), min_size=1)


@settings(deadline=None, max_examples=80)
@given(SLOTS, st.data())
def test_include_and_exclude_divide_the_slots_between_them(slots: dict[str, int], data: st.DataObject) -> None:
    hosts = tuple(Host(name, HostKind.SSH, slots=count) for name, count in slots.items())
    named = data.draw(st.lists(st.sampled_from(sorted(slots)), min_size=1, max_size=5))
    parts = []
    for name in named:
        some = data.draw(st.none() | st.lists(st.integers(0, slots[name] - 1), min_size=1, max_size=4))
        parts.append(name if some is None else f"{name}:{','.join(map(str, some))}")
    text = "@".join(parts)

    def slots_left(**chosen: str) -> list[tuple[str, int]]:
        try:
            left = filter_hosts(hosts, include=chosen.get("include"), exclude=chosen.get("exclude"))
        except UsageError as error:
            assert "leaves none" in str(error)  # noqa: PT017 (any other error fails the test, as it should)
            return []
        assert all(host.chosen is None or host.slots == len(host.chosen) > 0 for host in left)
        assert [host.name for host in left] == [name for name in slots if name in {host.name for host in left}]
        return [(host.name, slot) for host in left for slot in host.chosen or range(host.slots or 0)]

    inside, outside = slots_left(include=text), slots_left(exclude=text)
    assert sorted(inside + outside) == sorted((host.name, slot) for host in hosts for slot in range(host.slots or 0))
    assert inside


@settings(deadline=None, max_examples=200)
@given(st.text("worke-01@:,[] ", max_size=16) | st.text(max_size=16), st.booleans())
def test_any_text_is_a_filter_or_a_usage_error(text: str, include: bool) -> None:
    message = ""
    try:
        assert filter_hosts(HOSTS, include=text if include else None, exclude=None if include else text)
    except UsageError as error:
        message = str(error)
    assert not message or message.startswith("--include" if include else "--exclude")
