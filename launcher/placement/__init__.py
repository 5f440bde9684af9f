"""Computes ranks, GPUs, processors and variables of workers from the request and the hosts. Pure."""
