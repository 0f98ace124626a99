"""What the scheduler's side of the connector tells each rank's, once a step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

PARAMETERS = "halfmoon"
"""Key in `kv_transfer_params`."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A request that has its blocks now."""

    seq: int
    request_id: str
    block_ids: list[int]
    num_hot: int
    """Tokens that came from vLLM's prefix cache."""
    num_target: int
    """Tokens that are there when the load is over; `num_hot` where nothing is loaded."""

    @property
    def is_loading(self) -> bool:
        return self.num_target > self.num_hot


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt is computed when this step is done."""

    request_id: str
    num_computed: int
    block_ids: list[int]


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    bindings: list[Binding] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Finished requests whose blocks stay until this rank reports that it has copied them."""
    is_empty: bool = False
    """The model computes nothing in this step: vLLM only asks whether a load or a copy has ended."""
