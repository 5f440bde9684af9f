"""Gradient compression: `make_compression(name)` returns a communication hook; the classes have the options."""

from ddp.compression.compressors import Half, Int8, PowerSGD, make_compression

__all__ = ["Half", "Int8", "PowerSGD", "make_compression"]
