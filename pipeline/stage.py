"""Download and check CIFAR-10 once, on a login node; jobs only read it.

    python -m pipeline.stage --data DIR

Exit codes: 0 the data is there, 2 the download failed or the data has the wrong checksum.
"""

from pipeline.data import staging
from pipeline.runner.launch_options import add_data_argument
from pipeline.system.command_line import build_parser
from pipeline.system.errors import EXIT_OK, CommandError, log_line, run_command


def main() -> int:
    parser = build_parser("stage", __doc__)
    add_data_argument(parser)
    folder = parser.parse_args().data
    try:
        is_new = staging.stage_cifar10(folder)
        staging.check_cifar10_md5(folder)
    except staging.DataNotStaged as error:
        raise CommandError(str(error)) from error
    log_line(f"CIFAR-10 {'staged' if is_new else 'was already staged'} in {folder}.")
    return EXIT_OK


if __name__ == "__main__":
    run_command(main)
