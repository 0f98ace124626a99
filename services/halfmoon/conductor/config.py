"""Settings of the conductor."""

from typing import Annotated

from msgspec import Meta, field

from halfmoon.config import CommonConfig
from halfmoon.scheduling.policies import PolicyName
from halfmoon.scheduling.service_class import ClassSettings, ServiceClass, classes_of
from halfmoon.scheduling.slo import AdmissionName


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
    admission: Annotated[
        AdmissionName,
        Meta(
            description="By which load a class's limits are judged: `predictive` by that at the time when a request "
            "would begin to generate, `early` by that of the moment; `none`: not at all."
        ),
    ] = AdmissionName.PREDICTIVE
    classes: Annotated[
        dict[str, ClassSettings],
        Meta(
            description="Classes of service, as JSON. Of each, `ttft_s` and `tbt_s`: the limits that it promises, none "
            "unless given; `weight`: its share where several wait; `priority` in workers' lines. There are always "
            "`interactive` (weight 16, priority 0) and `batch` (1, -1); others have 1 and 0."
        ),
    ] = field(default_factory=dict)
    tenant_weights: Annotated[
        dict[str, float],
        Meta(description="Tenant to weight, as JSON: its share where several wait. The others' weight is 1."),
    ] = field(default_factory=dict)
    max_waiting: Annotated[
        int,
        Meta(
            description="Requests for one model that wait in one conductor for a worker with room; of more, those of "
            "whoever has most are turned away.",
            ge=0,
        ),
    ] = 512
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
        int, Meta(description="Requests that one conductor has on workers at a time; more wait in it.", ge=1)
    ] = 512
    max_waiting_per_worker: Annotated[
        int,
        Meta(
            description="A worker with this many requests in its line gets no more for now; they wait in the "
            "conductor, in fair order.",
            ge=1,
        ),
    ] = 8
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
    max_replicas: Annotated[
        int, Meta(description="Copies of a chunk, in all, that demand can bring about. 1: none beside the first.", ge=1)
    ] = 3
    uses_per_copy: Annotated[
        float,
        Meta(
            description="Uses of a chunk that one copy is to serve: beyond, there is to be another. A use counts half "
            "after demand_half_life_s.",
            gt=0,
        ),
    ] = 8.0
    demand_half_life_s: Annotated[
        float, Meta(description="Time in which the count of a chunk's uses halves.", gt=0)
    ] = 60.0
    pin_replicas: Annotated[
        int, Meta(description="Copies of a pinned chunk, in all, however rarely it is used. 1: what there is.", ge=1)
    ] = 2
    replicate_every_s: Annotated[
        float, Meta(description="How often it is looked which prefixes should have another copy.", gt=0)
    ] = 1.0
    replication_bytes_per_s: Annotated[
        float, Meta(description="Bytes a second, at most, of copies that any one node is told to bring.", gt=0)
    ] = 100e6
    prefetch_confidence: Annotated[
        float,
        Meta(
            description="Chunks that follow a prompt's prefix at least this often are brought to where it is computed. "
            "1: never.",
            gt=0,
            le=1,
        ),
    ] = 1.0
    snapshot_timeout_s: Annotated[
        float, Meta(description="How long the registry may take for one page of its snapshot.", gt=0)
    ] = 2.0

    def __post_init__(self) -> None:
        if any(weight <= 0 for weight in self.tenant_weights.values()):
            raise ValueError("tenant_weights: a weight must be above 0")

    @property
    def service_classes(self) -> dict[str, ServiceClass]:
        return classes_of(self.classes)
