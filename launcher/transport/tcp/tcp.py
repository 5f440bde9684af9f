"""The TCP connection between the door and a node: its options, and whether the other machine is still there.

TCP_USER_TIMEOUT is not used: Linux also counts the time in which the other end answers but takes no more, and a run
whose output waits in `less`, or that was stopped by Ctrl-Z, is not lost (https://blog.cloudflare.com/when-tcp-sockets-
refuse-to-die). So an idle connection is watched by keepalives, one with something under way by `dead`.
"""

from __future__ import annotations

import socket
import struct

__all__ = ["LOOK_S", "SILENCE_S", "dead", "tune"]

SILENCE_S = 20.0  # without an answer of the other machine's kernel, a connection is dead
LOOK_S = 2.0  # how often that is looked at
_KEEPALIVES = 3
_UNANSWERED = 3
_INFO_BYTES = 148
_INFO = struct.Struct("=2x2B20xI24x2I84xI")  # of struct tcp_info: as `dead` names them


def tune(connection: socket.socket) -> None:
    """Make it non-blocking, prompt, and end by itself when the other machine is gone while nothing is under way."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause_s = int(SILENCE_S / (_KEEPALIVES + 1))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVES)


def dead(connection: socket.socket) -> bool:
    """Say whether nothing of the other machine's kernel was heard for SILENCE_S, though it was asked.

    Where nothing is under way it was asked by keepalives, whether they got out or not: the kernel does not count those
    that it could not send, and tries for ever.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO.size:
        return False
    retransmits, probes, unacked, last_data_ms, last_ack_ms, unsent = _INFO.unpack_from(info)
    if min(last_data_ms, last_ack_ms) <= 1000 * SILENCE_S:
        return False
    return max(retransmits, probes) >= _UNANSWERED or not (unacked or unsent)
