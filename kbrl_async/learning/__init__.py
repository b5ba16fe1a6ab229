"""Learning: losses, corrections, packing, log-probs, trainers, published versions and checkpoints.

Owns the policy's weights and everything that changes them. Never touches sockets, rewards or engines: a `TrainGroup`
comes in, a metrics dictionary and a policy folder go out.
"""
