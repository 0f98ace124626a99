"""The gateway runs where there is no torch."""

import subprocess
import sys
from pathlib import Path

from support import tiny_tokenizer


def test_a_started_gateway_has_not_imported_torch(tmp_path: Path) -> None:
    """In a process of its own: other tests import torch."""
    folder = tiny_tokenizer.byte_level(tmp_path / "model")
    program = f"""
import asyncio, sys, time
from pathlib import Path
import httpx, structlog
from halfmoon.bus.memory import MemoryBus
from halfmoon.gateway.config import GatewayConfig
from halfmoon.gateway.service import Gateway
from halfmoon.lifecycle import Runtime
from halfmoon.schemas.ids import WorkerId
from halfmoon.tracing import setup
from halfmoon.tracing.metrics import Metrics
import halfmoon.gateway.__main__

async def main():
    runtime = Runtime(
        service="gateway", worker_id=WorkerId("g"), config=GatewayConfig(model=Path({str(folder)!r}), port=0),
        bus=MemoryBus(), telemetry=setup("gateway"), metrics=Metrics(), log=structlog.stdlib.get_logger(),
        started_ns=time.time_ns(), fail=print,
    )
    gateway = Gateway(runtime)
    await gateway.start()
    async with httpx.AsyncClient(base_url=gateway.address) as http:
        assert (await http.get("/health")).json() == {{"status": "ok"}}
    await gateway.stop()
    await runtime.telemetry.aclose()
    await runtime.bus.close()

asyncio.run(main())
assert "torch" not in sys.modules, "torch was imported"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
