"""Where the ranks of a run meet: they make a process group, and a rank that waits says for whom and hears signals.

The ranks meet at a store of rank 0. A thread waits there, so the main thread hears the first signal. After 30 s a rank
says for whom it waits, and after 30 minutes it ends. The wait also ends when a rank that lra started is gone. srun does
not end the other tasks when one fails: start it with `--kill-on-bad-exit=1`.
"""

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
from lra.ranks import STARTER, Launch
from lra.training.output import console

PATIENCE_S = 30.0  # before a rank says for whom it waits
LIMIT_S = 1800.0  # as long as PyTorch waits for a rank in training
TICK_S = 0.2
ANSWER = timedelta(seconds=60)  # for what rank 0's store is asked


class RendezvousError(UsageError):
    """The ranks of a run did not meet, so nothing of the run has happened."""


class Cluster(ClusterEnvironment):
    """What Lightning is told of the ranks, in place of what it would guess from the environment's variables."""

    def __init__(self, launch: Launch):
        super().__init__()
        self.launch = launch
        self._server: TCPStore | None = None

    @property
    def creates_processes_externally(self) -> bool:
        """Whether all ranks are started already."""
        return self.launch.by != "lra" or self.launch.rank > 0 or torch.distributed.is_initialized()

    @property
    def main_address(self) -> str:
        return self.launch.address

    @property
    def main_port(self) -> int:
        return self.server.port if self.launch.port is None else self.launch.port

    @property
    def server(self) -> TCPStore:
        """Rank 0's store. Where the port is free to choose, it listens before other ranks hear of the port."""
        if self._server is None:
            port = self.launch.port or 0
            try:
                self._server = TCPStore("127.0.0.1", port, None, True, ANSWER, wait_for_workers=False)
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
        pass  # Lightning computes one that holds where the ranks of a node are neighbours

    def local_rank(self) -> int:
        return self.launch.local_rank

    def node_rank(self) -> int:
        return self.launch.node


class RankStrategy(DDPStrategy):
    """Lightning's DDP, but for how the process group is made.

    Lightning makes it in PyTorch's C++, which no signal ends and which does not say for whom it waits. Here a thread
    does that, and the main thread watches it.
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
        meeting = Meeting(cluster, self._make_group)
        meeting.start()
        began, told = time.monotonic(), False
        try:
            while not meeting.ended(TICK_S):
                self._look_after(cluster.launch)
                waited = time.monotonic() - began
                if waited > LIMIT_S:
                    raise RendezvousError(f"{meeting.lacking()}, for {LIMIT_S / 60:.0f} minutes: start all ranks again")
                if waited > PATIENCE_S and not told:
                    told = True
                    if meeting.speaks():
                        console.print(f"{meeting.lacking()}; Ctrl-C ends this rank", markup=False)
        except KeyboardInterrupt:  # of which Lightning makes exit code 1
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
            torch.cuda.set_device(device)  # which each thread has of its own
        torch.distributed.init_process_group(
            self._get_process_group_backend(), store=store, rank=self.global_rank, world_size=self.world_size,
            timeout=self._timeout, device_id=device,
        )  # fmt: skip

    def _look_after(self, launch: Launch) -> None:
        """Ends a wait for ranks of the same machine that are gone."""
        for rank, process in enumerate(getattr(self.launcher, "procs", ()), start=1):
            if (code := process.poll()) is not None:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise RendezvousError(f"rank {rank} ended ({how}) before the ranks met: what it printed says why")
        if launch.by == "lra" and launch.rank and str(os.getppid()) != os.environ.get(STARTER):
            raise SystemExit(0)  # rank 0, which started this one, is gone; its end says why


class Meeting(threading.Thread):
    """Waits for all ranks at rank 0's store, then makes their process group.

    Args:
        cluster: the ranks.
        make: makes the process group when all ranks are there.
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
        self.join(5 * TICK_S)

    def speaks(self) -> bool:
        """Whether this rank says what is missing: rank 0 does for all that found it."""
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
        """Rank 0's store, as soon as it answers; None if this rank left before."""
        cluster, launch = self.cluster, self.cluster.launch
        agent = launch.by == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        if launch.rank == 0 and not agent:
            return PrefixStore(launch.name, cluster.server)
        port = cluster.main_port
        while not self._left.wait(TICK_S):
            with_port = (launch.address, port)
            try:
                socket.create_connection(with_port, timeout=5).close()
            except OSError as error:
                if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
                    mend = "set MASTER_ADDR to the host of rank 0"
                    raise RendezvousError(f"no host is called {launch.address}: {mend}") from None
                continue  # nobody listens yet
            return PrefixStore(launch.name, TCPStore(*with_port, None, False, ANSWER, wait_for_workers=False))
        return None

    def _all_there(self, store: Store) -> bool:
        """Waits until each rank has come; False if this rank left before."""
        store.set(f"rank/{self.cluster.launch.rank}", "there")
        while self.missing:
            self.missing = {rank for rank in self.missing if not store.check([f"rank/{rank}"])}
            if self.missing and self._left.wait(TICK_S):
                return False
        return True
