"""The live system beside the simulator, on the same five minutes: `make bench ARGS=live`; about six and a half.

`PYTHONPATH=tests python -m benchmarks.live 60 2` takes a minute of the trace, twice as slow; exits with 1 where the two
disagree.
"""

import sys

from support.agreement import APART, MEASURES, TOLERANCES, disagreements
from support.beside import ARENA_MIB, Setup, compare
from support.beside import Figures as Figures

HEADING = "## The live system beside the simulator"


def run() -> Figures:
    return compare(Setup())


def section(figures: Figures) -> list[str]:
    live, setup = figures.live, figures.setup
    slower = "" if setup.stretch == 1 else f", {setup.stretch:g} times as slow"
    lines = [
        HEADING,
        "",
        f"{len(live):,} requests of {setup.seconds / 60:g} min of Mooncake's conversation trace{slower}, an eighth as "
        f"long ({sum(each.prompt_tokens for each in live):,} prompt tokens), 2 prefill and 2 decode workers with the "
        f"`sim` engine ({setup.prefill_tokens_per_s:,.0f} prompt tokens/s, steps of {setup.step_s * 1000:g} ms), pools "
        f"of {ARENA_MIB} MiB, `kv_centric`. Nothing but the engine's time is simulated in the live system; in the "
        f"simulator everything is. Services add {figures.lone_s * 1000:.0f} ms to a lone request's first token, as was "
        f"measured before, which the simulator is told. Requests were sent {figures.late_s * 1000:.1f} ms late at p99.",
        "",
        "| | live | simulated | live, of that | tolerance |",
        "|---|---|---|---|---|",
    ]
    for name, of in MEASURES.items():
        ours, theirs = of(live), of(figures.simulated)
        tolerance = f"{TOLERANCES[name]:.0%}" if name in TOLERANCES else f"± {APART[name]:g}" if name in APART else ""
        ratio = f"{ours / theirs:.2f}×" if theirs else ""
        lines.append(f"| {name} | {ours:.3g} | {theirs:.3g} | {ratio} | {tolerance} |")
    lines += ["", "Times in seconds, else shares."]
    return lines


if __name__ == "__main__":
    given = [float(each) for each in sys.argv[1:]]
    found = compare(Setup(**dict(zip(("seconds", "stretch"), given, strict=False))))
    print("\n".join(section(found)))
    sys.exit("; ".join(disagreements(found.live, found.simulated)) or 0)
