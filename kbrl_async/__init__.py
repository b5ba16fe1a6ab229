"""The verbs: everything that can be called without a socket."""
