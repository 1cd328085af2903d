"""How the processes of a run find each other and their devices: from arguments alone."""

import argparse

import jax

from examples.errors import ExampleError
from examples.training import whole


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what `start` reads."""
    group = parser.add_argument_group(
        "processes",
        "One process drives all GPUs of its host. For several hosts start the same command on each,"
        " with one --coordinator and --processes and a --process-id of its own; they share --out.",
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where process 0 listens for the others"
    )
    group.add_argument("--processes", type=whole(1), metavar="N", help="how many there are")
    group.add_argument("--process-id", type=whole(0), metavar="I", help="which this is, from 0")
    group.add_argument(
        "--cpu-devices",
        type=whole(1),
        metavar="N",
        help="for a trial without GPUs: this process's CPU as so many devices",
    )


def start(args: argparse.Namespace) -> None:
    """Sets JAX up as the flags say; nothing may have asked it for its devices before.

    Raises:
      ExampleError: the flags contradict each other, or the processes do not find each other.
    """
    if args.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    flags = (args.coordinator, args.processes, args.process_id)
    if all(flag is None for flag in flags):
        return
    if any(flag is None for flag in flags) or args.process_id >= args.processes:
        raise ExampleError(
            "several processes need --coordinator HOST:PORT, --processes N and --process-id below N,"
            f" but got {flags[0]}, {flags[1]} and {flags[2]}; pass all three to each process."
        )
    try:
        jax.distributed.initialize(*flags, initialization_timeout=120)
    except (RuntimeError, ValueError) as error:
        raise ExampleError(
            f"all {args.processes} processes must reach {args.coordinator} within two minutes, but"
            f" process {args.process_id} stopped waiting ({' '.join(str(error).split())[:200]});"
            " start all of them, with the address of process 0 and a free port there."
        ) from error
