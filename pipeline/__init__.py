"""Measure how data-parallel training scales: a grid of points, Slurm arrays, JSON records, tables."""

import sys

__version__ = "0.2.0"

if sys.argv[:1] == [
    "-m"
]:  # python -m pipeline.NAME: the command that is imported next may need a package that is not installed
    from pipeline.system import errors

    sys.excepthook = errors.report_uncaught
