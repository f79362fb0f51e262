"""Measure how data-parallel training scales: a grid of points, Slurm arrays, JSON records, tables."""

import sys

__version__ = "0.2.0"

if sys.argv[:1] == ["-m"]:  # python -m pipeline.NAME is about to import the command, which may lack a package
    from pipeline.system import errors

    sys.excepthook = errors.report_uncaught
