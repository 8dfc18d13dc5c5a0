"""Makes the process group of a run's ranks. A rank that waits says for which ranks, and reacts to signals."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.strategies import DDPStrategy
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from lra.errors import UsageError, first_line
from lra.ranks import STARTER_VARIABLE, Launch
from lra.training.output import console

NOTICE_AFTER_S = 30.0  # then a rank says for which ranks it waits
RENDEZVOUS_LIMIT_S = 1800.0  # as long as PyTorch waits for a rank in training
POLL_S = 0.2
STORE_TIMEOUT = timedelta(seconds=60)  # for each request to rank 0's store


class RendezvousError(UsageError):
    """The ranks of a run did not meet, so the run did not begin."""


class Cluster(ClusterEnvironment):
    """Tells Lightning the ranks, which it would otherwise guess from environment variables."""

    def __init__(self, launch: Launch):
        super().__init__()
        self.launch = launch
        self._server: TCPStore | None = None

    @property
    def creates_processes_externally(self) -> bool:
        """Whether all ranks have been started."""
        return self.launch.by != "lra" or self.launch.rank > 0 or torch.distributed.is_initialized()

    @property
    def main_address(self) -> str:
        return self.launch.address

    @property
    def main_port(self) -> int:
        return self.server.port if self.launch.port is None else self.launch.port

    @property
    def server(self) -> TCPStore:
        """Rank 0's store. If lra chooses the port, the store listens before other ranks learn the port."""
        if self._server is None:
            port = self.launch.port or 0
            try:
                self._server = TCPStore("127.0.0.1", port, None, True, STORE_TIMEOUT, wait_for_workers=False)
            except torch.distributed.DistError as error:
                if "EADDRINUSE" in str(error):
                    said = f"port {port} of this machine is in use: set MASTER_PORT to a free one"
                else:
                    said = f"rank 0 can't listen at port {port}: {first_line(error)}"
                raise RendezvousError(said) from None
        return self._server

    @staticmethod
    def detect() -> bool:
        return False  # nothing is guessed

    def world_size(self) -> int:
        return self.launch.world

    def set_world_size(self, size: int) -> None:
        assert size == self.launch.world

    def global_rank(self) -> int:
        return self.launch.rank

    def set_global_rank(self, rank: int) -> None:
        pass  # Lightning's rank is right only if the ranks of a node are neighbours

    def local_rank(self) -> int:
        return self.launch.local_rank

    def node_rank(self) -> int:
        return self.launch.node


class RankStrategy(DDPStrategy):
    """Lightning's DDP with another way to make the process group.

    Lightning makes the group in PyTorch's C++ code. No signal ends that code, and it does not say for which ranks it
    waits. Here a thread makes the group, and the main thread watches it.
    """

    def setup_distributed(self) -> None:
        if not torch.distributed.is_initialized():
            try:
                self._meet()
            except BaseException:
                self.launcher.kill(signal.SIGKILL)  # type: ignore[union-attr]  # ranks that would wait for this one
                raise
        super().setup_distributed()

    def _meet(self) -> None:
        cluster = self.cluster_environment
        assert isinstance(cluster, Cluster)
        meeting = RendezvousThread(cluster, self._make_group)
        meeting.start()
        began, told = time.monotonic(), False
        try:
            while not meeting.ended(POLL_S):
                self._look_after(cluster.launch)
                waited = time.monotonic() - began
                if waited > RENDEZVOUS_LIMIT_S:
                    raise RendezvousError(
                        f"{meeting.lacking()}, for {RENDEZVOUS_LIMIT_S / 60:.0f} minutes: start all ranks again"
                    )
                if waited > NOTICE_AFTER_S and not told:
                    told = True
                    if meeting.speaks():
                        console.print(f"{meeting.lacking()}; Ctrl-C ends this rank", markup=False)
        except KeyboardInterrupt:  # Lightning would make exit code 1 of it
            raise SystemExit(128 + signal.SIGINT) from None
        finally:
            meeting.leave()
        if meeting.error is not None:
            if isinstance(meeting.error, RendezvousError):
                raise meeting.error
            at = f"{cluster.main_address}:{cluster.main_port}"
            raise RendezvousError(f"the ranks can't meet at {at}: {first_line(meeting.error)}") from meeting.error

    def _make_group(self, store: Store) -> None:
        device = self.root_device if self.root_device.type == "cuda" else None
        if device is not None:
            torch.cuda.set_device(device)  # each thread has its own current device
        torch.distributed.init_process_group(
            self._get_process_group_backend(), store=store, rank=self.global_rank, world_size=self.world_size,
            timeout=self._timeout, device_id=device,
        )  # fmt: skip

    def _look_after(self, launch: Launch) -> None:
        """Stops waiting for ranks of this machine that have ended."""
        for rank, process in enumerate(getattr(self.launcher, "procs", ()), start=1):
            if (code := process.poll()) is not None:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise RendezvousError(f"rank {rank} ended ({how}) before the ranks met: what it printed says why")
        if launch.by == "lra" and launch.rank and str(os.getppid()) != os.environ.get(STARTER_VARIABLE):
            raise SystemExit(0)  # rank 0, which started this rank, has ended and said why


class RendezvousThread(threading.Thread):
    """Waits for all ranks at rank 0's store, then makes their process group.

    Args:
        cluster: the ranks.
        make: makes the process group once all ranks are there.
    """

    def __init__(self, cluster: Cluster, make: Callable[[Store], Any]):
        super().__init__(daemon=True, name="meeting")
        self.cluster, self.make = cluster, make
        self.missing = set(range(cluster.launch.world)) - {cluster.launch.rank}
        self.error: BaseException | None = None
        self._left = threading.Event()

    def run(self) -> None:
        try:
            store = self._store()
            if store is not None and self._all_there(store):
                self.make(store)
        except BaseException as error:
            self.error = error

    def ended(self, seconds: float) -> bool:
        self.join(seconds)
        return not self.is_alive()

    def leave(self) -> None:
        """Stops waiting. A thread that runs while Python ends may crash it."""
        self._left.set()
        self.join(5 * POLL_S)

    def speaks(self) -> bool:
        """Whether this rank reports missing ranks. Rank 0 reports for all ranks that found it."""
        return self.cluster.launch.rank == 0 or 0 in self.missing

    def lacking(self) -> str:
        launch, missing = self.cluster.launch, sorted(self.missing)
        at = f"{self.cluster.main_address}:{self.cluster.main_port}"
        own = f"rank {launch.rank} of {launch.world}, started by {launch.by}"
        if not missing:
            return f"{own}, waits for the connections of all ranks, which met at {at}"
        if launch.rank and 0 in missing:
            return f"{own}, waits for rank 0 at {at}"
        names = ", ".join(str(rank) for rank in missing[:8]) + (", …" if len(missing) > 8 else "")
        here = f"{launch.world - len(missing)} of {launch.world} are there"
        return f"{own}, waits at {at} for rank{'s' * (len(missing) > 1)} {names}: {here}"

    def _store(self) -> Store | None:
        """Returns rank 0's store as soon as it answers; None if this rank left before."""
        cluster, launch = self.cluster, self.cluster.launch
        agent = launch.by == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        if launch.rank == 0 and not agent:
            return PrefixStore(launch.name, cluster.server)
        port = cluster.main_port
        while not self._left.wait(POLL_S):
            with_port = (launch.address, port)
            try:
                socket.create_connection(with_port, timeout=5).close()
            except OSError as error:
                if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
                    mend = "set MASTER_ADDR to the host of rank 0"
                    raise RendezvousError(f"no host is called {launch.address}: {mend}") from None
                continue  # nobody listens yet
            return PrefixStore(launch.name, TCPStore(*with_port, None, False, STORE_TIMEOUT, wait_for_workers=False))
        return None

    def _all_there(self, store: Store) -> bool:
        """Waits until each rank has come; False if this rank left before."""
        store.set(f"rank/{self.cluster.launch.rank}", "there")
        while self.missing:
            self.missing = {rank for rank in self.missing if not store.check([f"rank/{rank}"])}
            if self.missing and self._left.wait(POLL_S):
                return False
        return True
