"""Calls: check arguments, cache the prepared call, and choose the schedule that runs it."""
