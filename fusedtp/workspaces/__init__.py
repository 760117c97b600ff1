"""Workspaces: a group's symmetric memory, with its arenas, epoch, protocol steps, timeouts and failures."""
