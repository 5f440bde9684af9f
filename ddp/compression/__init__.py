"""Gradient compression: `make_compression(name)` returns a communication hook; the classes have the options."""

from ddp.compression.compressors import make_compression
from ddp.compression.half import Half
from ddp.compression.int8 import Int8
from ddp.compression.powersgd import PowerSGD

__all__ = ["Half", "Int8", "PowerSGD", "make_compression"]
