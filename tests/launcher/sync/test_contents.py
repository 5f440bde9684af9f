"""Which blocks are compressed, by the pace of the link."""

import os

import pytest

from launcher.sync import receiver
from launcher.sync.contents import BLOCK_BYTES, Block, Pace

TEXT = b"name_12 = name_7(0.123456)\n" * (BLOCK_BYTES // 27)


def _compressed(data: bytes, bytes_per_s: float) -> list[bool]:
    pace, found = Pace(), []
    for _ in range(5):
        frame = pace.frame(Block(data))
        pace.wrote(len(frame), len(frame) / bytes_per_s)
        found.append(bool(receiver.LENGTH.unpack_from(frame)[0] & receiver.COMPRESSED))
    return found


@pytest.mark.parametrize(
    ("data", "bytes_per_s", "compressed"),
    [
        (TEXT, 1e6, [False, True, True, True, True]),
        (TEXT, 1e11, [False] * 5),
        (os.urandom(BLOCK_BYTES), 1e6, [False] * 5),
    ],
    ids=["slow link", "fast link", "nothing to gain"],
)
def test_a_block_is_compressed_if_that_saves_time(data: bytes, bytes_per_s: float, compressed: list[bool]) -> None:
    assert _compressed(data, bytes_per_s) == compressed
