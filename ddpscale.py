"""The installed command `ddpscale`: runs the package beside this file, whatever else is called `pipeline`."""

import sys
from pathlib import Path
from typing import NoReturn

HERE = str(Path(__file__).resolve().parent)


def run() -> NoReturn:
    sys.path.insert(0, HERE)
    from pipeline.__main__ import main
    from pipeline.system import errors

    sys.path.remove(HERE)
    errors.open_closed_streams()
    sys.excepthook = errors.report_uncaught
    errors.run_command(main)


if __name__ == "__main__":
    run()
