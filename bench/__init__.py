"""Measuring fusedtp: rank processes, cases, timing, rows, tables, the command line. Installed as `fusedtp.bench`."""

if __name__ != "fusedtp.bench":
    raise ImportError(
        f"this folder is the package fusedtp.bench, imported here as {__name__!r}: "
        "install the project (python -m pip install -e .) and import fusedtp.bench"
    )
