"""The transports' figures, as a section of docs/benchmarks.md."""

import os

from benchmarks import transport_bandwidth as bandwidth
from benchmarks.transport_bandwidth import Figures, Speed

HEADING = "## Moving chunks between two processes"


def section(figures: Figures) -> list[str]:
    lines = [
        HEADING,
        "",
        "Into touched, page-aligned arenas, slots in mixed order: 64 chunks of 4 MiB, 20 of 12 MiB. All that is "
        f"compared takes turns; medians of {bandwidth.ROUNDS} rounds, also of the ratios within each round; processor "
        "seconds of both ends together. Readers read at once, in one process, and share the chunks out. Busy: the "
        "event loop of the reading process computes all the time, in steps of 0.2 ms, and so takes one of the "
        f"machine's {os.cpu_count()} cores.",
    ]
    for slice_bytes, speeds in figures.speeds.items():
        lines += [
            "",
            f"Chunks of {slice_bytes >> 20} MiB:",
            "",
            "| | GB/s | CPU s per GB | of the limit | busy, GB/s | of not busy |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {label} | {speeds[name].gb_per_s:.2f} | {speeds[name].cpu_s_per_gb:.3f} "
            f"| {_share(speeds, name, limit)} | {_busy(speeds, name)} |"
            for name, label, limit in _rows(figures.speeds[bandwidth.SIZES[0][0]])
            if name in speeds
        ]
    lines += [""] + [f"Not measured: {name}, {reason}." for name, reason in figures.skipped.items()]
    small = figures.latencies_us
    lines += [
        *([""] if figures.skipped else []),
        "| microseconds, p50 | one slice of 4 KiB | a batch of 64 of them | aim for the batch |",
        "|---|---|---|---|",
        *(f"| {name} | {small[name]:.0f} | {small[f'{name} batch']:.0f} | ≤ 1000 |" for name in ("shm", "tcp")),
    ]
    return lines


def replaced(page: str, heading: str, lines: list[str]) -> str:
    """The page with this section (up to the next of its level) in place of the old one, or at its end."""
    text = "\n".join(lines).rstrip("\n") + "\n"
    before, found, rest = page.partition(heading + "\n")
    if not found:
        return page.rstrip("\n") + "\n\n" + text
    _, following, after = rest.partition("\n## ")
    return before + text + following + after


def _rows(measured: dict[str, Speed]) -> list[tuple[str, str, str | None]]:
    """What was measured, how it is called, and what limits it."""
    readers, streams = bandwidth.READERS, [f"iperf3 {number}" for number in bandwidth.READERS]
    against = [name if name in measured else None for name in streams]
    return [
        ("memcpy", "memcpy, one thread", None),
        ("memcpy, all cores", "memcpy, all cores", None),
        *((f"shm {number}", f"shm, {_many(number, 'reader')} (aim: ≥ 80 % of memcpy)", "memcpy") for number in readers),
        ("shm verified", "shm, 1 reader, checksums verified", "memcpy"),
        *((f"iperf3 {number}", f"iperf3, {_many(number, 'stream')}", None) for number in readers),
        *(
            (f"tcp {number}", f"tcp, {_many(number, 'reader')} (aim: ≥ 80 % of iperf3)", limit)
            for number, limit in zip(readers, against, strict=True)
        ),
        ("tcp verified", "tcp, 1 reader, checksums verified", against[0]),
        *(
            (f"tcp {lanes} lanes", f"tcp, 1 reader over {_many(lanes, 'connection')}", None)
            for lanes in bandwidth.LANES
        ),
        ("mooncake", "Mooncake's engine over tcp, one batch", None),
        ("tcp 1", "tcp, 1 reader, against Mooncake (aim: ≥ 200 %)", "mooncake" if "mooncake" in measured else None),
    ]


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _share(speeds: dict[str, Speed], name: str, limit: str | None) -> str:
    return "" if limit is None or limit not in speeds else f"{speeds[name].of(speeds[limit]):.0%}"


def _busy(speeds: dict[str, Speed], name: str) -> str:
    busy = speeds.get(f"{name} busy")
    return " | " if busy is None else f"{busy.gb_per_s:.2f} | {busy.of(speeds[name]):.0%}"
