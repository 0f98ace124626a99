"""Settings of the conductor."""

from typing import Annotated

from msgspec import Meta, field

from halfmoon.config import CommonConfig
from halfmoon.scheduling.policies import PolicyName


class ConductorConfig(CommonConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each field is the variable `HALFMOON_CONDUCTOR_<FIELD>`."""

    policy: Annotated[
        PolicyName,
        Meta(
            description="`kv_centric` weighs cached prefixes, and moving them, against load; `prefix_affinity` never "
            "moves them; `least_loaded`, `random` and `round_robin` don't look at caches: for comparison. See "
            "scheduling.md."
        ),
    ] = PolicyName.KV_CENTRIC
    balancing_threshold: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        Meta(
            description="`kv_centric` pulls a prefix only where it is so many times as long as the one at hand. None: "
            "it tunes itself, by how even the prefill workers' queues are."
        ),
    ] = None
    listen_first_s: Annotated[
        float, Meta(description="How long to hear heartbeats at start before the first request is taken.", ge=0)
    ] = 0.5
    request_timeout_s: Annotated[float, Meta(description="Deadline for requests that come without one.", gt=0)] = 120.0
    deadline_grace_s: Annotated[
        float,
        Meta(description="How long a decode worker may be late with the end of a request past its deadline.", gt=0),
    ] = 1.0
    ack_wait_s: Annotated[
        float, Meta(description="Requests of a conductor that is silent for this long go to another.", ge=0.2)
    ] = 10.0
    adopt_wait_s: Annotated[
        float,
        Meta(description="How long to listen, before a redelivered request is placed anew, for who runs it.", ge=0),
    ] = 0.6
    split_timeout_s: Annotated[
        float, Meta(description="How long a worker may take to accept or refuse its half.", gt=0)
    ] = 2.0
    split_attempts: Annotated[
        int, Meta(description="Workers asked, at most, for each half before a request is given up.", ge=1, le=64)
    ] = 4
    max_resplits: Annotated[
        int, Meta(description="How often, at most, one request moves to other workers when its own are lost.", ge=0)
    ] = 3
    max_in_flight: Annotated[
        int, Meta(description="Requests that one conductor watches at a time; more wait in the broker.", ge=1)
    ] = 512
    max_waiting_per_worker: Annotated[
        int, Meta(description="A worker with this many requests in its queue gets no more for now.", ge=1)
    ] = 64
    pull_bytes_per_s: Annotated[
        float, Meta(description="Expected speed of a KV pull between nodes, to weigh it against computing.", gt=0)
    ] = 1e9
    assumed_prefill_tokens_per_s: Annotated[
        float, Meta(description="Speed of a prefill worker that has not measured its own yet.", gt=0)
    ] = 2_000.0
    retry_after_s: Annotated[
        float, Meta(description="When to try again, as told to those turned away because all are busy.", gt=0)
    ] = 1.0
    tenant_salts: Annotated[
        dict[str, str],
        Meta(description="Tenant to salt, as JSON. Tenants with one salt share KV; the default is the tenant's id."),
    ] = field(default_factory=dict)
    snapshot_timeout_s: Annotated[
        float, Meta(description="How long the registry may take for one page of its snapshot.", gt=0)
    ] = 2.0
