"""What the requests of one conductor share."""

from dataclasses import dataclass

import structlog

from halfmoon.conductor.config import ConductorConfig
from halfmoon.conductor.dispatch import Dispatcher
from halfmoon.conductor.flights import Flights
from halfmoon.conductor.gate import Gate
from halfmoon.conductor.instruments import Instruments
from halfmoon.conductor.members import Members
from halfmoon.conductor.planning import Planner
from halfmoon.conductor.requests import OpenRequests
from halfmoon.conductor.speaker import Speaker
from halfmoon.conductor.texts import Texts
from halfmoon.tracing import Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    config: ConductorConfig
    planner: Planner
    gate: Gate
    dispatcher: Dispatcher
    members: Members
    flights: Flights
    requests: OpenRequests
    speaker: Speaker
    texts: Texts
    tracer: Tracer
    instruments: Instruments
    log: structlog.stdlib.BoundLogger
