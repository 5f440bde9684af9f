"""The framed protocol between controller and agent, the same on every byte stream.

A stream begins with PREAMBLE in each direction (whatever a login shell prints before it is skipped), then frames:
4 bytes header length, 4 bytes payload length (big endian), a JSON header, raw payload bytes, a line feed (srun passes
only whole lines on). The payload is the field `data` of a message that has one. Nothing here is a pickle, nor is a
payload ever read as one but by a worker and by who called launcher.launch(). Messages are flat dataclasses, by whose
annotations decode.py checks what arrives.
"""
