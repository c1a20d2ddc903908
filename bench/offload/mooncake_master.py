"""A Mooncake master on loopback, for tests and benchmarks."""

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.harness.processes import free_port
from jaxkv.offload import MooncakeTier

START_WITHIN_S = 30.0


class Master:
    """Runs from now on; `kill` it and `start` it again, on the same ports."""

    def __init__(self, directory: Path) -> None:
        self._log = directory / "master.log"
        self._rpc, self._http, self._metrics = free_port(), free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        options = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self._rpc,
            "enable_http_metadata_server": "true",
            "http_metadata_server_host": "127.0.0.1",
            "http_metadata_server_port": self._http,
            "metrics_port": self._metrics,
            "client_ttl": "60",  # seconds of silence after which its memory is given up
        }
        program = Path(sys.executable).with_name("mooncake_master")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, *(f"--{name}={value}" for name, value in options.items())],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_WITHIN_S
        for port in (self._rpc, self._http):
            while not listens(port):
                ended = self._process.poll() is not None or time.monotonic() > deadline
                assert not ended, self._log.read_text(errors="replace")[-2000:]
                time.sleep(0.02)

    def __enter__(self) -> "Master":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    def tier(self, block_bytes: int, segment_bytes: int = 64 << 20, **options: Any) -> MooncakeTier:
        return MooncakeTier(
            block_bytes,
            host="127.0.0.1",
            master=f"127.0.0.1:{self._rpc}",
            metadata=f"http://127.0.0.1:{self._http}/metadata",
            segment_bytes=segment_bytes,
            **options,
        )


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
