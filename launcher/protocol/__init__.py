"""The framed protocol between controller and agent, the same on every byte stream.

A stream begins with PREAMBLE in each direction (output of a login shell before it is skipped), then frames: 4 bytes
header length, 4 bytes payload length (big endian), a JSON header, raw payload bytes, a line feed (srun passes on only
whole lines). The payload is the field `data` of a message that has one. No frame is a pickle, and only a worker and
the caller of launcher.launch() ever unpickle a payload. Messages are flat dataclasses; decode.py checks received ones
against their annotations.
"""
