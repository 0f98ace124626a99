"""vLLM as an engine: `AsyncLLM` in the worker, and a KV connector that copies between its blocks and the pool.

    worker process             EngineCore process            one Worker process per rank
    VllmEngine ── requests ──▶ scheduler                     model, paged KV
        │                      SchedulerSide ── metadata ──▶ WorkerSide ─▶ BlockCopier ⇄ arena
        └────────────────── orders and reports, over a Unix socket ──────────┘

Requests go through vLLM; where chunks lie and what became of them goes over the socket, since chunks arrive and are
finished while a request is under way.
"""

from halfmoon.engine.vllm.config import VllmEngineConfig
from halfmoon.engine.vllm.engine import VllmEngine

__all__ = ["VllmEngine", "VllmEngineConfig"]
