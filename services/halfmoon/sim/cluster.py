"""The simulated cluster: instances, their nodes' pools, and the network between."""

from collections.abc import Callable

from halfmoon.schemas.chunks import ChunkEvent
from halfmoon.schemas.ids import ModelName, NodeId, WorkerId
from halfmoon.schemas.model import ModelCard
from halfmoon.sim.cache import EPOCH, NodeCache
from halfmoon.sim.clock import Clock
from halfmoon.sim.colocated import ColocatedInstance
from halfmoon.sim.decode import DecodeInstance, Listener
from halfmoon.sim.network import Network
from halfmoon.sim.options import SimOptions
from halfmoon.sim.prefill import PrefillInstance
from halfmoon.sim.profiles.machine import Machine
from halfmoon.sim.request import SimRequest
from halfmoon.sim.tally import Tally

MODEL = ModelName("simulated")


class SimCluster:
    """Every instance has a node of its own. Pools are those of nodes that prefill."""

    def __init__(
        self,
        options: SimOptions,
        machine: Machine,
        chunk_tokens: int,
        clock: Clock,
        tally: Tally,
        tell: Callable[[ChunkEvent], None],
        listener: Listener,
    ) -> None:
        self.card = ModelCard(
            name=MODEL,
            engine="sim",
            fingerprint="simulated",
            kv_dtype="bfloat16",
            layout="simulated",
            kv_bytes_per_token=machine.kv_bytes_per_token,
            chunk_tokens=chunk_tokens,
            max_model_tokens=machine.max_model_tokens,
            vocab_size=machine.vocab_size,
        )
        self.nodes: dict[NodeId, int] = {}
        self.caches: dict[NodeId, NodeCache] = {}
        self.network = Network(machine.nic_bytes_per_s)
        self.prefills: dict[WorkerId, PrefillInstance] = {}
        self.decodes: dict[WorkerId, DecodeInstance] = {}
        self.colocated: dict[WorkerId, ColocatedInstance] = {}
        self._options = options
        self._machine = machine
        self._clock = clock
        self._tally = tally
        self._tell = tell
        tokens = machine.cache_tokens if options.cache_tokens is None else options.cache_tokens
        self._num_chunks = tokens // chunk_tokens
        if options.colocated:
            for number in range(options.colocated):
                self._add_colocated(number, listener)
        else:
            for number in range(options.decode):
                self._add_decode(number, listener)
            for _ in range(options.prefill):
                self.add_prefill()

    def add_prefill(self) -> PrefillInstance:
        number = len(self.prefills)
        worker, node = WorkerId(f"prefill-{number:04}"), NodeId(f"node-{number:04}")
        self._add_cache(node)
        instance = self.prefills[worker] = PrefillInstance(
            worker,
            node,
            self._machine,
            self.card,
            self.caches,
            self.network,
            self._clock,
            self._tally,
        )
        return instance

    def replicate(self, request: SimRequest, source: NodeId, destination: NodeId, num_chunks: int) -> None:
        """Copy the leading chunks of a prompt from one pool to another, as far as they are still there."""
        keys = request.keys[:num_chunks]
        there = self.caches[source].num_leading(keys)
        missing = sum(key not in self.caches[destination] for key in keys[:there])
        if not missing:
            return
        num_bytes = missing * self.card.payload_bytes(self.card.chunk_tokens)
        self._tally.bytes_replicated += num_bytes
        come_s = self.network.send(source, destination, num_bytes, self._clock.now_s)
        self._clock.at(come_s, lambda: self.caches[destination].store(keys[:there], self._clock.now_s))

    def _add_decode(self, number: int, listener: Listener) -> None:
        worker = WorkerId(f"decode-{number:04}")
        self.decodes[worker] = DecodeInstance(
            worker,
            NodeId(f"decode-node-{number:04}"),
            self._machine,
            self.card,
            self._clock,
            self._tally,
            listener,
            max_batch=self._options.max_batch,
            max_tbt_s=self._options.slo.tbt_s if self._options.second_look else None,
        )

    def _add_colocated(self, number: int, listener: Listener) -> None:
        worker, node = WorkerId(f"colocated-{number:04}"), NodeId(f"node-{number:04}")
        self._add_cache(node)
        instance = self.colocated[worker] = ColocatedInstance(
            worker,
            node,
            self._machine,
            self.card,
            self.caches[node],
            self._clock,
            self._tally,
            listener,
            max_batch=self._options.max_batch,
            step_tokens=self._options.step_tokens,
        )
        self.decodes[worker] = instance

    def _add_cache(self, node: NodeId) -> None:
        self.nodes[node] = EPOCH
        self.caches[node] = NodeCache(node, self._num_chunks, self._options.eviction, self._tell)
