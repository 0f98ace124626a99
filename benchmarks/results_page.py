"""docs/results.md, from the figures of the last runs."""

import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Found = Mapping[str, Mapping[str, Any]]

_POLICIES = (
    ("random", "random", 92.07, 19.65),
    ("least_loaded", "load balance", 60.41, 5.27),
    ("prefix_affinity", "cache-aware, local", 14.36, 3.58),
    ("kv_centric", "KV-centric, global", 6.26, 3.07),
)
_REJECTED = (
    ("none", "at each stage, when it is due", 4183),
    ("early", "early", 3771),
    ("predictive", "predictive", 3589),
)
_POOLS = (("conversation", 2.22, 0.76), ("synthetic", 2.36, 0.52))
_AIMS = (0.9, 0.97)


def page(found: Found) -> str:
    sections: Sequence[Callable[[Found], list[str]]] = (_policies, _overload, _colocated, _pools, _reuse)
    lines = _paragraphs(
        "# Published results, redone in the simulator",
        "Written by `make results`. **Everything of ours on this page is simulated** (docs/simulator.md): the "
        "system's own policies on a virtual clock, no model. Theirs were measured, on real machines with a "
        "dummy model. So compare the order of the rows and the ratios, not seconds.",
        "Unless a section says otherwise: Mooncake's published `conversation` trace (12,031 requests in 59 "
        "minutes, `tests/data/mooncake`), 8 prefill and 8 decode instances of 8 × A800 with `llama2-70b`, the "
        "shape of their dummy; half of the peak FLOP/s, 70 % of HBM's and 80 % of the NICs' bandwidth; pools "
        "of 3.05M tokens a node; the balancing threshold tunes itself; each prompt is computed by one "
        "instance, whole.",
        "**The traces aren't those of the papers.** arXiv 2407.00079 used 23,608 requests of a trace that it "
        "published by itself and that isn't used here; the FAST'25 paper published the two used here, but ran "
        "them on its own system.",
    )
    for section in sections:
        try:
            lines += section(found)
        except KeyError as error:
            lines += _paragraphs(f"A section is left out: {error} hasn't been run. `make results` runs all.")
    return "\n".join(map(_wrapped, lines)).lstrip() + "\n"


def _wrapped(line: str) -> str:
    is_text = line and line[0] not in "|#!"
    return textwrap.fill(line, 140, break_long_words=False, break_on_hyphens=False) if is_text else line


def _paragraphs(*texts: str) -> list[str]:
    return [line for text in texts for line in ("", text)]


def _head(*columns: str) -> str:
    return f"{_row(*columns)}\n|{'---|' * len(columns)}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _policies(found: Found) -> list[str]:
    lines = _paragraphs(
        "## Mean TTFT by policy",
        "TTFT as theirs: from arrival until the prompt is computed.",
        _head(
            "ours",
            "theirs",
            "arXiv fig. 8",
            "FAST fig. 5, 16 nodes, conversation",
            "simulated",
            "simulated, 1.25 times as fast",
            "reused",
        ),
    )
    times = {}
    for name, theirs, arxiv, fast in _POLICIES:
        usual, fast_trace = found[f"policies {name} 1"], found[f"policies {name} 1.25"]
        times[name] = (usual["prompt_s"]["mean"], fast_trace["prompt_s"]["mean"])
        lines.append(
            _row(
                f"`{name}`",
                theirs,
                f"{arxiv:.2f} s",
                f"{fast:.2f} s",
                f"{times[name][0]:.2f} s",
                f"{times[name][1]:.2f} s",
                f"{usual['hit_ratio']:.3f}",
            )
        )
    ours, faster = (times["random"][at] / times["kv_centric"][at] for at in (0, 1))
    lines += _paragraphs(
        f"Random placing takes {ours:.1f} times as long as `kv_centric` (FAST: 6.4, arXiv: 14.7), and "
        f"{faster:.1f} times where the trace comes 1.25 times as fast.",
        "Where this differs by more than 20 %: absolute times, since the waiting depends on how near to its "
        "limit the cluster is, and theirs must have been nearer: at its recorded speed the trace keeps our "
        "eight prefill instances about two thirds busy with random placing. The figures are for the trace's "
        "own speed and for a faster one, where queues matter more. `prefix_affinity` and `kv_centric` are "
        "nearer to each other than theirs: by its own estimates `prefix_affinity` keeps conversations "
        "together and spreads what all share already, so there is little left to move; what moving gains "
        "shows in the reuse.",
    )
    return lines


def _overload(found: Found) -> list[str]:
    lines = _paragraphs(
        "## Rejections under overload",
        "The trace at twice its speed; limits of 30 s to the first token and 40 ms between tokens; 8 prefill "
        "instances and **one** decode instance. Theirs had eight, and a limit of 100 ms; eight of ours, bound "
        "by HBM alone, never come near it, so the experiment is set where both sides are short.",
        _head(
            "admission",
            "theirs, of 23,608 at twice the speed",
            "simulated, of 12,031",
            "prefills for nothing",
            "finished in time",
        ),
    )
    counts = []
    waits: dict[str, float] = {}
    wasted: dict[str, int] = {}
    for name, words, theirs in _REJECTED:
        each = found[f"overload {name}"]
        waits[name], wasted[name] = each["prompt_s"]["mean"], each["wasted_prefills"]
        counts.append(each["rejected"])
        lines.append(
            _row(
                words,
                f"{theirs:,} ({theirs / 23608:.1%})",
                f"{each['rejected']:,} ({each['rejected'] / each['num_requests']:.1%})",
                f"{each['wasted_prefills']:,}",
                f"{each['slo_attainment']:.1%}",
            )
        )
    more = counts[2] - counts[1]

    def swing(name: str, column: str) -> float:
        """Of the time while requests come."""
        return float(statistics.pstdev(found[f"overload {name}"]["load"][column][20:330]))

    early, predictive = (count / counts[0] - 1 for count in counts[1:])
    lines += _paragraphs(
        f"Against turning away at each stage: early {early:+.1%} (theirs −9.8 %), predictive {predictive:+.1%} "
        "(theirs −14.2 %). In all three, TTFT is judged at arrival, and decode looks a second time when a "
        "prompt's KV has come (the prefills for nothing); they differ in how decode is judged at arrival: not "
        "at all, by the batch of the moment, by the batch expected when this request would join it. The "
        "shares depend on which side is shorter of what, and ours is another one than theirs.",
        f"Where this differs by more than 20 %: prediction turns away {abs(more):,} requests "
        f"{'more' if more > 0 else 'fewer'} than early, where theirs turned away 182 fewer. Here decode is "
        f"short and prefill is not: with early admission a prompt is computed {waits['early']:.1f} s after its "
        "arrival on average, of 30 s allowed. So a prefill for nothing takes nobody's place, and admitting "
        f"too many keeps the batch full. What prediction gains is the work: {wasted['predictive']:,} prefills "
        f"for nothing instead of {wasted['early']:,}, and prompts computed {waits['predictive']:.1f} s after "
        "arrival.",
        "Early rejection oscillates, since it looks at a batch that what is being prefilled hasn't joined "
        "yet, and prediction damps it (arXiv 2407.00079v3, §7.3). Here, standard deviations over the run: "
        f"prefill's seconds ahead {swing('early', 'prefill_backlog_s'):.2f} with early, "
        f"{swing('predictive', 'prefill_backlog_s'):.2f} with predictive; sequences in the decode batch "
        f"{swing('early', 'decode_batch'):.1f} and {swing('predictive', 'decode_batch'):.1f}.",
        "![Load of prefill and decode over time, early and predictive](results-load.svg)",
    )
    return lines


def _colocated(found: Found) -> list[str]:
    lines = _paragraphs(
        "## As many requests as the limits allow, apart and colocated",
        "16 instances: 12 for prefill and 4 for decode, or all 16 doing both with chunked prefill (steps of "
        "2,048 tokens, a cache of its own each, the least loaded one gets the request). The first 3,000 "
        "requests, faster and faster; limits of 30 s and 100 ms, the latter for the mean of a request's gaps.",
        _head("speed", "apart: within both limits", "colocated: within both limits"),
    )
    shares: dict[str, dict[float, float]] = {"apart": {}, "both": {}}
    for name, each in found.items():
        group, _, rest = name.partition(" ")
        if group == "colocated":
            kind, speed = rest.split()
            shares[kind][float(speed)] = each["slo_attainment"]
    if not shares["apart"] or not shares["both"]:
        raise KeyError("colocated")
    for factor in sorted({*shares["apart"], *shares["both"]}):
        cells = [f"{shares[kind][factor]:.1%}" if factor in shares[kind] else "" for kind in ("apart", "both")]
        lines.append(_row(f"{factor:g} ×", *cells))
    gains = []
    for aim in _AIMS:
        apart, both = (max((s for s, share in shares[kind].items() if share >= aim), default=0.0) for kind in shares)
        if apart and both:
            gain = f"{apart:g} × against {both:g} × ({apart / both - 1:+.0%})"
            gains.append(f"with {aim:.0%} of the requests within the limits, {gain}")
    lines += _paragraphs(
        f"At most: {'; '.join(gains)}. Speeds are a quarter apart, so each is known to within a quarter. "
        "Theirs: +75 %, 10 + 10 instances against 20 of vLLM, requests of their own traffic, the same limits.",
        "Where this differs by more than 20 %: the gain depends on how many may miss the limits, and on the "
        "baseline. Ours has chunked prefill, which spreads a long prompt over many steps; and a request's "
        "limit is for the mean of its gaps, so one long gap among many is forgiven. How many instances do "
        "what is chosen for this trace; theirs was half and half.",
    )
    return lines


def _pools(found: Found) -> list[str]:
    lines = _paragraphs(
        "## One pool against caches of their own",
        "10 prefill instances with 3M tokens each, 10 for decode. Local: each has what it computed itself, "
        "requests placed at random, or by prefix and load; global: `kv_centric`, which pulls from others.",
        _head("trace", "placed", "reused", "computing, s", "busiest over mean"),
    )
    ratios = []
    for trace, hits, compute in _POOLS:
        local = found[f"pools {trace} random"]
        shared = found[f"pools {trace} kv_centric"]
        for policy, words in (
            ("random", "local, at random"),
            ("prefix_affinity", "local, `prefix_affinity`"),
            ("kv_centric", "global, `kv_centric`"),
        ):
            each = found[f"pools {trace} {policy}"]
            lines.append(
                _row(
                    trace,
                    words,
                    f"{each['hit_ratio']:.3f}",
                    f"{each['prefill_compute_s']:,.0f}",
                    f"{each['load_max_over_mean']:.2f}",
                )
            )
        ratios.append(
            f"{trace}: reuse ×{shared['hit_ratio'] / local['hit_ratio']:.2f} (theirs ×{hits}), computing "
            f"×{shared['prefill_compute_s'] / local['prefill_compute_s']:.2f} (theirs ×{compute})"
        )
    lines += _paragraphs(
        f"Global against local at random: {'; '.join(ratios)}. How requests came to their local caches isn't "
        "known here: the better they are placed, the less a global pool has left to gain, as the rows between "
        "show. Each of ours computes one prompt at a time and keeps its chunks only when the whole prompt is "
        "done.",
    )
    return lines


def _reuse(found: Found) -> list[str]:
    lines = _paragraphs(
        "## Reuse beside Dynamo's replay",
        "Dynamo's offline replay of the same trace with eight workers of 8.4M cached tokens each, as it was "
        "reported to us: reuse .301 with KV routing, .137 round robin; one cache without bounds would reach "
        ".374. Eight of our prefill instances with pools of that size, simulated:",
        _head("policy", "Dynamo", "ours"),
    )
    for policy, theirs in (("round_robin", ".137"), ("kv_centric", ".301")):
        lines.append(_row(f"`{policy}`", theirs, f"{found[f'reuse {policy}']['hit_ratio']:.3f}"))
    lines += _paragraphs(
        "Theirs are whole workers that decode too and never fetch from one another; ours pull prefixes over "
        "the network. Blocks of 512 tokens in both; partial ones are never reused in ours.",
    )
    return lines
