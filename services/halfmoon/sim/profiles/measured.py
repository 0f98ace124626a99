"""A machine as a running system measured itself: what its workers said while `halfmoon record` listened."""

from pathlib import Path

from halfmoon.engine.sim.timing import Timing
from halfmoon.sim.errors import SimError
from halfmoon.sim.profiles.machine import Machine
from halfmoon.traces import TraceError, open_trace

MEASURED = "measured"
_CACHE_TOKENS = 1 << 20
_NIC_BYTES_PER_S = 1e9
"""Between nodes, where nobody has said. What the tcp transport does on one machine is in docs/benchmarks.md."""


def measured(recording: Path, *, only: str | None = None) -> Machine:
    """From the recording's word on the model. Raises `SimError` where it has none."""
    try:
        trace = open_trace(recording, model=only)
    except TraceError as error:
        raise SimError(str(error)) from None
    if not trace.models:
        raise SimError(
            f"{recording} doesn't say how fast its workers were: --hardware {MEASURED} takes a recording of "
            "`halfmoon record`"
        )
    model = trace.models[0]
    if model.prefill_fit is None or model.step_fit is None or model.kv_tokens is None:
        raise SimError(
            f"{recording} was made while no worker had measured both its prefill and its decode: record again while "
            "requests are served"
        )
    prompt_s, token_s, pair_s = model.prefill_fit
    step_s, sequence_s, context_s = model.step_fit
    return Machine(
        model=model.name,
        hardware=MEASURED,
        timing=Timing(
            prefill_overhead_s=prompt_s,
            token_s=token_s,
            pair_s=pair_s,
            step_overhead_s=step_s,
            step_token_s=sequence_s,
            step_context_s=context_s,
        ),
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_tokens=model.kv_tokens,
        cache_tokens=_CACHE_TOKENS,
        nic_bytes_per_s=_NIC_BYTES_PER_S,
        request_s=model.request_s or 0.0,
        assumptions=(
            f"fitted to what the workers measured: a prompt takes {prompt_s:.3g} s, {token_s:.3g} s a new token and "
            f"{pair_s:.3g} s a pair of tokens; a step {step_s:.3g} s, {sequence_s:.3g} s a sequence and "
            f"{context_s:.3g} s a token of context",
            "what services add to a first token isn't known: the recording has too few requests"
            if model.request_s is None
            else f"services add {model.request_s:.3g} s to each first token, as was measured",
        ),
    )
