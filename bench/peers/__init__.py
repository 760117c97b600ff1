"""The providers that come with the benchmark, a module each, named as its provider.

None imports what it needs before it runs. Each docstring says which version's functions it calls.
"""
