"""Replay: what a run did, done again from its journal and its archive, without sockets or candidates."""
