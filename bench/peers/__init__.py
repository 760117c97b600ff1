"""Bundled providers, one module each, named after its provider.

A module imports its dependencies only when it runs. Its docstring names the versions of the functions that it calls.
"""
