"""The way of a version from the trainer to the nodes: fan-out in time and traffic, size and cost of deltas.

Fan-out: a version of random bytes goes from a real depot to 1 and to 8 nodes, which fetch it as a real coordinator
plans. Each node is a process without engine. Ingress and egress of each process are limited to the same rate. Deltas: a
model is trained here, and each version is compared with the one before, chunk by chunk. The last part is the bench
`publish_to_active`.

How to read it: `time of 8` is the time until the last of 8 nodes has all bytes verified, over the time of one node at
the same rate; 1 is the minimum. `egress of 8` is what the depot sends to 8 nodes, over what it sends to one; without
forwarding it would be 8. All processes share the cores of this machine. If 8 nodes at the nominal rate need more CPU
than `CPU_SHARE` of the cores, both cases run at the largest lower rate of `RATES` that fits, because otherwise the time
would be that of the CPU and not of the plan. The small version then also runs at the nominal rate, without a target.
The table has the rate, the CPU and the limit of each lap: `link` if it took about the time of its links, `machine` if
it took longer. `bytes per update` is the sum of the deltas, and of the chunks that are sent whole, over the size of a
version. `encode` and `apply` are CPU times over that of reading a chunk from the page cache and hashing it, which every
chunk costs anyway.
"""

from __future__ import annotations

import os
from statistics import median

from benchmarks.report import BenchTarget, Report
from benchmarks.weights import publish_to_active
from benchmarks.weights.delta import CASES, DeltaFigures, measure
from benchmarks.weights.fanout import FanOut, fan_out
from rollmesh.shared.weights.manifest import CHUNK_BYTES

MB = 1e6
RATES = (100 * MB, 50 * MB, 25 * MB, 12.5 * MB)
"""Bytes per second and link, the nominal one first."""
CPU_SHARE = 0.6
"""Largest share of this machine's cores that the transfers may need for their time to count."""
SIZES = {"64 MB": (64_000_000, 2_000_000), "1 GB": (1_000_000_000, CHUNK_BYTES)}
"""Bytes of a version and of its chunks."""
NODES = 8
TIME_MOST, EGRESS_MOST = 1.5, 2.0
UPDATES = {"100M": 50, "demo": 5}
SHARE_MOST = {"100M": 0.06}
"""Most bytes of an update, as a share of the whole version, median. The demo's model has no target: it is small and
trains in float32."""


def run(quick: bool) -> Report:
    report = Report("weights", f"fan-out to 1 and {NODES} nodes on one host; deltas of {', '.join(UPDATES)}")
    rate = _rate(report)
    if rate != RATES[0]:
        for nodes in (1, NODES):
            report.rows += _rows("64 MB", fan_out(*SIZES["64 MB"], nodes, RATES[0]))
    for name in ["64 MB"] if quick else SIZES:
        _fan_out(report, name, rate)
    for name in ["demo"] if quick else CASES:
        _delta(report, name, measure(name, 2 if quick else UPDATES[name]))
    _publish_to_active(report, publish_to_active.run(quick))
    return report


def _publish_to_active(report: Report, found: Report) -> None:
    for row in found.rows:
        case = f"{found.bench}, {row['mesh']}, {row['kv']}"
        report.rows += [
            {"case": case, "what": what, "value": value} for what, value in row.items() if what not in ("mesh", "kv")
        ]
    report.notes += [f"{found.bench}: {found.setting}", *found.notes]
    report.targets += found.targets


def _rate(report: Report) -> float:
    """Return the rate of all laps, by the CPU of one node at the nominal rate."""
    trial = fan_out(*SIZES["64 MB"], 1, RATES[0])
    cpu_per_byte = trial.cpu_s / trial.received_bytes
    bound = CPU_SHARE * len(os.sched_getaffinity(0))
    rate = next((rate for rate in RATES if NODES * rate * cpu_per_byte <= bound), RATES[-1])
    if rate != RATES[0]:
        report.notes.append(
            f"{NODES} nodes at {RATES[0] / MB:g} MB/s would need {NODES * RATES[0] * cpu_per_byte:.1f} cores "
            f"({cpu_per_byte * 1e9:.1f} ms of CPU per MB and link), so the laps with a target ran at {rate / MB:g} MB/s"
        )
    return rate


def _fan_out(report: Report, name: str, rate: float) -> None:
    one, many = (fan_out(*SIZES[name], nodes, rate) for nodes in (1, NODES))
    for laps in (one, many):
        report.rows += _rows(name, laps)
        if laps.limit == "machine":
            report.notes.append(
                f"{name} to {laps.nodes}: this machine was the limit ({laps.wall_s:.2f} s, the links alone take "
                f"{laps.link_s:.2f} s), so its time says nothing about the plan"
            )
    time_ratio, egress_ratio = many.wall_s / one.wall_s, many.egress_bytes / one.egress_bytes
    report.targets += [
        BenchTarget(f"{name}, {rate / MB:g} MB/s: time of {NODES} nodes over that of 1", time_ratio, TIME_MOST),
        BenchTarget(f"{name}: egress of the depot for {NODES} nodes over that for 1", egress_ratio, EGRESS_MOST),
    ]


def _rows(name: str, laps: FanOut) -> list[dict[str, object]]:
    case = f"{name} to {laps.nodes}, {laps.rate / MB:g} MB/s"
    values = {
        "limit": laps.limit,
        "s until all bytes are verified": laps.wall_s,
        "s of the links alone": laps.link_s,
        "s until all nodes are active": laps.active_s,
        "MB sent by the depot": laps.egress_bytes / MB,
        "MB received by all nodes": laps.received_bytes / MB,
        "CPU s of all processes": laps.cpu_s,
        "CPU ms per MB received": laps.cpu_s * 1e3 / (laps.received_bytes / MB),
    }
    return [{"case": case, "what": what, "value": value} for what, value in values.items()]


def _delta(report: Report, name: str, figures: DeltaFigures) -> None:
    case, updates = CASES[name], len(figures.shares)
    values = {
        "% of a version sent per update, median": 100 * median(figures.shares),
        "% of a version sent per update, largest": 100 * max(figures.shares),
        "% of the values with other bits, median": 100 * median(figures.changed),
        "encode, over reading and hashing": figures.encode_s / figures.hash_s,
        "apply, over reading and hashing": figures.apply_s / figures.hash_s,
        "reading and hashing, CPU ms per MB": 1e3 * figures.hash_s / (figures.bytes_measured / MB),
        "loss of the first and last update, nats": f"{figures.losses[0]:.3f}, {figures.losses[-1]:.3f}",
    }
    report.rows += [{"case": f"delta, {name}", "what": what, "value": value} for what, value in values.items()]
    report.notes.append(
        f"{name}: {figures.num_parameters:,} parameters, {figures.full_bytes / MB:.1f} MB as "
        f"{str(case.dtype).removeprefix('torch.')}, "
        f"{updates} updates at learning rate {case.lr:g}, {case.batch_size} demonstrations each"
    )
    report.targets.append(
        BenchTarget(f"{name}: updates of {updates} that are exact bit by bit", figures.exact, updates, at_most=False)
    )
    if name in SHARE_MOST:
        share = median(figures.shares)
        report.targets.append(BenchTarget(f"{name}: share of a version sent, median", share, SHARE_MOST[name]))
