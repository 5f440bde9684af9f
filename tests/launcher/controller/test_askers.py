"""The connections of commands that ask something: whatever comes, and whenever the run ends, the loop goes on."""

import queue
import socket
import threading
import time

from launcher.controller.askers import Askers
from launcher.job.events import Asked, AskerSent, CloseAsker, Event, TookInput

WAIT_S = 20.0
STACKS = {"ask": "stacks"}
DEBUG = {"ask": "debug", "rank": 0, "debugger": "pdb"}


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(WAIT_S)
    return ours, theirs


def test_the_end_may_come_while_a_command_is_taken_over() -> None:
    ours, theirs = pair()
    told, go_on = threading.Event(), threading.Event()

    def put(event: Event) -> None:
        if isinstance(event, Asked):
            told.set()
            go_on.wait(WAIT_S)

    askers = Askers(put)
    begin = threading.Thread(target=askers.add, args=(ours, STACKS))
    close = threading.Thread(target=askers.close)
    begin.start()
    assert told.wait(WAIT_S)
    close.start()
    time.sleep(0.1)  # either order is right: `close` gets a chance to be first
    go_on.set()
    begin.join(WAIT_S)
    close.join(WAIT_S)
    assert not begin.is_alive()
    assert not close.is_alive()
    assert theirs.recv(1) == b"", "the connection is closed"
    theirs.close()


def test_an_agent_that_acknowledges_more_than_it_was_sent_ends_that_connection_only() -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    askers = Askers(events.put)
    ours, theirs = pair()
    askers.add(ours, DEBUG)
    theirs.send(b"four")
    asked, sent = events.get(timeout=WAIT_S), events.get(timeout=WAIT_S)
    assert isinstance(asked, Asked)
    assert isinstance(sent, AskerSent)
    askers.carry_out(TookInput(asked.asker, 1000))
    assert theirs.recv(1) == b"", "the connection is closed"
    askers.carry_out(CloseAsker(asked.asker))
    askers.close()
    theirs.close()
