"""Measure how data-parallel training scales: a grid of points, Slurm arrays, JSON records, tables."""

__version__ = "0.2.0"
