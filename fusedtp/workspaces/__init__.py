"""A group's symmetric memory as its ops see it: arenas, the epoch, the protocol's steps, and what goes wrong."""
