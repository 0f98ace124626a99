"""Settings of prefill and decode workers."""

import socket
from typing import Annotated

import msgspec
from msgspec import Meta

from halfmoon.config import CommonConfig


class WorkerConfig(CommonConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of worker have."""

    node: Annotated[
        str, Meta(description="Node whose pool this worker uses: the name of the kv-tier on this host.", min_length=1)
    ] = msgspec.field(default_factory=socket.gethostname)
    engine: Annotated[
        str, Meta(description="`torch`, `vllm`; or `sim`, a timing model that computes nothing, for load tests.")
    ] = "torch"
    device: Annotated[
        str,
        Meta(description="Where the engine computes: `cpu`, `cuda`, `cuda:1`; `auto` takes a GPU where there is one."),
    ] = "auto"
    dtype: Annotated[
        str, Meta(description="Type of weights and KV: `float32`, `bfloat16`, `float16`; `auto` takes what suits.")
    ] = "auto"
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Threads that compute, on a CPU. None: one per core.")
    ] = None
    kv_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Size of the engine's own KV cache, in tokens of all running requests. None: 16,384; for "
            "`vllm` on a GPU, what its memory leaves."
        ),
    ] = None
    block_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Engine `vllm`: tokens per block of its KV cache; chunk_tokens must be a multiple. None: the "
            "largest of 128, 64, 32 that fits on a CPU, 16 on a GPU."
        ),
    ] = None
    step_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Engine `vllm`: tokens computed in one step at most. None: one chunk on a CPU, vLLM's own "
            "choice on a GPU."
        ),
    ] = None
    completion_reserve_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Engine `vllm`: room claimed for a completion before it begins. Longer ones may be preempted, "
            "and computed again. None: claim all that may be generated."
        ),
    ] = 256
    tensor_parallel: Annotated[int, Meta(description="Engine `vllm`: GPUs that share each layer.", ge=1)] = 1
    vllm_args: Annotated[str, Meta(description="Engine `vllm`: more of its own command-line flags, as in a shell.")] = (
        ""
    )
    max_requests: Annotated[int, Meta(description="Requests that this worker works on at a time.", ge=1)] = 16
    max_queue: Annotated[
        int, Meta(description="Requests that may wait here for their turn; more are refused as busy.", ge=0)
    ] = 64
    lease_s: Annotated[
        float, Meta(description="Length of a lease on the pool's slots; renewed while it is needed.", ge=0.1)
    ] = 10.0
    pool_timeout_s: Annotated[
        float, Meta(description="Longest wait for the pool's answer; then what was asked for counts as lost.", gt=0)
    ] = 15.0
    pool_start_timeout_s: Annotated[
        float, Meta(description="At start: how long to wait for this node's kv-tier.", gt=0)
    ] = 60.0
    listen_first_s: Annotated[
        float,
        Meta(description="At start: how long to hear who serves the model already, and with which KV.", ge=0),
    ] = 0.6
    allow_other_kv: Annotated[
        bool,
        Meta(
            description="Start also where all partners have KV that this worker can't exchange with them, to replace "
            "a model's workers one after the other."
        ),
    ] = False
    request_timeout_s: Annotated[
        float, Meta(description="Deadline for requests that come without one, from their arrival here.", gt=0)
    ] = 600.0
    sim_prefill_tokens_per_s: Annotated[float, Meta(description="Engine `sim`: speed of prompt computation.", gt=0)] = (
        20_000.0
    )
    sim_decode_step_s: Annotated[float, Meta(description="Engine `sim`: time of one decode step.", ge=0)] = 0.02
    sim_load_s: Annotated[float, Meta(description="Engine `sim`: time that loading the model takes.", ge=0)] = 0.0
