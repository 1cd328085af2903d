"""Estimates how programs scale to many GPUs: `python -m benchmarks parallel --paper`.

A row's compute is a measurement on one GPU, or its FLOPs at a measured rate; communication is counted in
bytes. Collectives are rings within a host, and rings of hosts, in which each GPU has its own network
port; a collective takes its bytes at the links' rate and a latency for each step. There are two bounds:
none of the communication overlaps the compute, or all that can does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GPUS = (1, 2, 4, 8, 64, 1024)


@dataclass(frozen=True)
class Machine:
    """Hosts of eight H200s."""

    flops: float = 600e12
    """FLOP/s of bfloat16 matrix products of these models' sizes; measured."""
    host: int = 8
    link: float = 370e9
    """Bytes a second that a GPU receives through NVLink, whose peak is 450e9."""
    network: float = 45e9
    """Bytes a second that a GPU receives through its port of 400 Gb/s."""
    link_latency: float = 3e-6
    network_latency: float = 12e-6
    """Latency in seconds of a ring's step between hosts; `link_latency` is the one within a host."""
    launch: float = 8e-6
    """Seconds that a collective takes before its first byte is sent."""
    memory: float = 141e9

    def gather(self, size: float, count: int) -> float:
        """Returns the seconds of an all-gather of `size` bytes in all on `count` GPUs.

        A reduce-scatter takes as long. First GPUs with the same index in each host exchange their parts,
        then those of a host, so that a port carries an eighth of the bytes that a host receives.
        """
        if count == 1:
            return 0.0
        inside = min(count, self.host)
        hosts = -(-count // self.host)
        seconds = self.launch + (inside - 1) * (size / inside / self.link + self.link_latency)
        if hosts > 1:
            part = size / inside / hosts
            seconds += (hosts - 1) * (part / self.network + self.network_latency)
        return seconds

    def all_reduce(self, size: float, count: int) -> float:
        return 2 * self.gather(size, count)


@dataclass(frozen=True)
class Row:
    """An estimate of a workload on some GPUs; seconds and bytes are per GPU."""

    name: str
    gpus: int
    compute: float
    collectives: float
    hideable: float
    """Seconds of compute that collectives can overlap."""
    received: float
    memory: float

    @property
    def hidden(self) -> float:
        """Share of the time that is compute, if all communication that can overlap compute does."""
        return self.compute / (self.compute + max(0.0, self.collectives - self.hideable))

    @property
    def apart(self) -> float:
        """Share of the time that is compute, if no communication overlaps it."""
        return self.compute / (self.compute + self.collectives)


def _gathered(size: float, count: int) -> float:
    return size * (count - 1) / count


def data_parallel(
    name: str, parameters: float, compute: float, count: int, machine: Machine, wire: int = 4
) -> Row:
    """Estimates a data-parallel step whose gradients are all-reduced at `wire` bytes a number."""
    size = wire * parameters
    return Row(
        name,
        count,
        compute,
        machine.all_reduce(size, count),
        compute
        * 2
        / 3
        * 0.9,  # The all-reduce of the gradients computed last, the first layers', overlaps no compute.
        2 * _gathered(size, count),
        # Parameters, gradients and two moments in float32; activations are not counted.
        16 * parameters,
    )


def fully_sharded(parameters: float, tokens: int, count: int, machine: Machine) -> Row:
    """Estimates an FSDP step of a language model: two all-gathers of parameters, one reduce-scatter.

    Parameters are sent in 16 bits and gradients in 32; a GPU also holds one of 24 layers unsharded.
    """
    compute = 6 * parameters * tokens / machine.flops
    size = 2 * parameters
    return Row(
        "FSDP, lm-1b",
        count,
        compute,
        2 * machine.gather(size, count) + machine.gather(2 * size, count),
        compute * 0.95,
        4 * _gathered(size, count),
        16 * parameters / count + (0 if count == 1 else 3 * size / 24),
    )


def context_parallel(tokens: int, count: int, machine: Machine) -> Row:
    """Estimates causal attention, forward and backward, with keys and values sent around a ring."""
    heads, key_heads, features = 32, 8, 128
    flops = 3.5 * 4 * tokens**2 / 2 * heads * features / count
    size = 2 * 2 * tokens * key_heads * features
    compute = flops / (machine.flops * 0.8)
    # The ring passes keys and values in 16 bits, forward and backward, and their gradients in float32.
    hops = machine.gather(size, count) * 2 + machine.gather(2 * size, count)
    return Row(
        f"attention, T {tokens:,}",
        count,
        compute,
        hops,
        compute * (1 - 1 / count),
        4 * _gathered(size, count),
        4 * size / count,
    )


def tensor_parallel(count: int, machine: Machine) -> Row:
    """Estimates gated_mlp with gradients, with hidden features split and all tokens on every GPU."""
    rows, width, hidden = 8192, 4096, 14336
    compute = 3 * 3 * 2 * rows * width * hidden / count / machine.flops
    size = 2 * rows * width
    return Row(
        "tensor parallel gated_mlp",
        count,
        compute,
        4 * machine.gather(size, count),
        compute * (1 - 1 / (2 * count)),
        4 * _gathered(size, count),
        3 * 2 * width * hidden / count + 4 * size,
    )


VIT_B = (86.6e6, 51.7e-3)
"""Parameters, and seconds of a step of 256 images on an H200; measured."""
VIT_L = (304e6, 90e-3)
"""Parameters, and seconds of a step of 128 images on an H200; estimated from FLOPs."""
LANGUAGE_MODEL = (1.2336e9, 16_384)
"""Parameters of `lm-1b`, and tokens a GPU."""


def rows(counts: Sequence[int] = GPUS, machine: Machine | None = None) -> list[Row]:
    """Returns the estimates of all workloads."""
    machine = Machine() if machine is None else machine
    found: list[Row] = []
    for make in (
        lambda n: data_parallel("ViT-B, 256 images a GPU", *VIT_B, n, machine),
        lambda n: data_parallel("ViT-B, sums in 16 bits", *VIT_B, n, machine, wire=2),
        lambda n: data_parallel("ViT-L, 128 images a GPU", *VIT_L, n, machine),
        lambda n: data_parallel(
            "ViT-B, 2,048 images in all", VIT_B[0], VIT_B[1] * 8 / n, n, machine
        ),
        lambda n: fully_sharded(*LANGUAGE_MODEL, n, machine),
        lambda n: context_parallel(262_144, n, machine),
        lambda n: tensor_parallel(n, machine),
    ):
        found += map(make, counts)
    return found


def table(found: Sequence[Row]) -> str:
    """Returns the estimates as a table in Markdown."""
    lines = [
        "| workload | GPUs | compute, ms | collectives, ms | received, MB | memory, GB | used, apart"
        " | used, hidden |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.name} | {row.gpus:,} | {row.compute * 1e3:.2f} | {row.collectives * 1e3:.2f}"
        f" | {row.received / 1e6:,.0f} | {row.memory / 1e9:.2f} | {row.apart:.0%} | {row.hidden:.0%} |"
        for row in found
    ]
    return "\n".join(lines)
