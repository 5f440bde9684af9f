"""Sends the script's code, and the environment, to hosts that have neither (`dtrain run --sync`).

tree.py and environment.py find what is sent; transport/synced.py sends it over the stream to a host; receiver.py is
the program that takes it there. On a host every sent file lies at the path that it has here, below a folder of the
user's cache: so a path here and its path there differ by a prefix only.
"""
