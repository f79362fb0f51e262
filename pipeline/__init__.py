"""Measure how data-parallel training scales: a grid of configurations, Slurm arrays, JSON records, tables."""

import os
import signal
import sys

__version__ = "0.4.0"

# Under python -m pipeline.NAME the command is imported next, and a package that it imports may be missing.
if sys.argv[:1] == ["-m"]:
    if not sys.flags.safe_path:  # the current folder is first, and a msgspec.py in it would be imported
        current_folder = sys.path.pop(0)
        if __path__[0] == os.path.join(current_folder, __name__):  # a checkout that is not installed
            sys.path.append(current_folder)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run_command: Ctrl-C within an import leaves a traceback
    from pipeline.system import errors

    errors.open_closed_streams()
    sys.excepthook = errors.report_uncaught
