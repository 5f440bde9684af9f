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
_INFO_BYTES = 104
_RETRANSMITS, _PROBES = 2, 3  # bytes of struct tcp_info, both unanswered ones in a row
_LAST_ACK_RECV = struct.Struct("=56xI")  # ms ago


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
    """Say whether the other machine has not acknowledged for SILENCE_S what was sent again and again."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _LAST_ACK_RECV.size:
        return False
    unanswered = max(info[_RETRANSMITS], info[_PROBES])
    return bool(unanswered >= _UNANSWERED and _LAST_ACK_RECV.unpack_from(info)[0] > 1000 * SILENCE_S)
