"""A kv-tier as a process of its own, on a real broker."""

import subprocess
import sys
from pathlib import Path

from support.system import clean_environ


class KvTierProcess:
    """`python -m halfmoon.kv_tier`. Its log lies in `folder`."""

    def __init__(self, folder: Path, nats_url: str, node: str, **settings: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / f"{node}.log"
        own = {
            "node": node,
            "host": "host-1",
            "slot_bytes": "16384",
            "arena_bytes": str(8 * 16384),
            "worker_id": f"kv-tier-{node}",
            **settings,
        }
        environ = {f"HALFMOON_KV_TIER_{name.upper()}": value for name, value in own.items()}
        environ |= {"HALFMOON_NATS_URL": nats_url, "HALFMOON_DATA_DIR": str(folder), "HALFMOON_CLUSTER_SECRET": "moon"}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "halfmoon.kv_tier"], env=clean_environ(environ), stdout=log, stderr=log
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def has_begun(self) -> bool:
        """Whether it serves, or has ended."""
        return "pool ready" in self.log or self.process.poll() is not None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 20.0) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """Kill it where it still lives."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
