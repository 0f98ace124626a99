"""Values as the advice commands read and write them."""

import re

import typer

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str) -> int:
    """`68719476736`, `64GiB`, `1.5 TB`. Raises `typer.BadParameter`."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]I?|)B?", text.strip().upper())
    if found is None or (size := int(float(found[1]) * _UNITS[found[2]])) < 1:
        raise typer.BadParameter(f"{text!r} is no size: expected bytes, or a number with KiB, MiB, GiB, TiB")
    return size


def parse_counts(text: str) -> list[int]:
    """`4096,32768`: positive numbers. Raises `typer.BadParameter`."""
    try:
        counts = [int(each) for each in text.replace("_", "").split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise typer.BadParameter(f"{text!r} is no list of token counts: expected something like 4096,32768")
    return counts


def show_bytes(num_bytes: float) -> str:
    """In binary units, four digits at most."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while num_bytes >= 1024 and power + 1 < len(units):
        num_bytes /= 1024
        power += 1
    unit = units[power]
    digits = 0 if unit == "B" or num_bytes >= 100 else 1 if num_bytes >= 10 else 2
    return f"{num_bytes:.{digits}f} {unit}"
