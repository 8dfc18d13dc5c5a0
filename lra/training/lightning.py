"""All workarounds for PyTorch Lightning 2.6, the only version allowed, each with its reason.

Regular extensions of Lightning are elsewhere: a strategy and a cluster (`rendezvous`), a logger (`curves`), callbacks,
manual optimisation (`step`), and a loader that states its position (`lra.tasks.batches`).
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any, NoReturn

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

from lra.training.checkpoints import verify_checkpoint, write_checkpoint


def silence_signals(trainer: pl.Trainer) -> None:
    """Keeps a trainer from handling signals, because `preemption` does that.

    Lightning 2.6 installs handlers that talk to the other ranks and make an exception of SIGTERM, and asks all ranks
    before each batch whether these were called, which waits for the GPU.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


class ResetLastBatch(pl.Callback):
    """Lets a finished run resume with more steps.

    The checkpoint of a finished run marks its last batch as the last of all, and Lightning 2.6 would stop there.
    """

    def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = False


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints in one step and refuses damaged ones.

    Lightning 2.6 writes a checkpoint in /tmp and copies it if that is another file system, so a killed run can leave
    half a file. It also forgets the best checkpoint if the folder of a run was moved; this class finds it in `home`.
    """

    def __init__(self, home: Path):
        super().__init__()
        self.home = os.path.realpath(home)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        write_checkpoint(checkpoint, Path(path))

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        verify_checkpoint(Path(path))
        checkpoint = super().load_checkpoint(path, *args, **kwargs)
        for state in checkpoint.get("callbacks", {}).values():
            if there := state.get("dirpath"):
                state |= {key: text.replace(there, self.home) for key, text in state.items() if isinstance(text, str)}
                best = state["best_k_models"].items()
                state["best_k_models"] = {file.replace(there, self.home): score for file, score in best}
        return checkpoint


def silence_lightning() -> None:
    """Switches off the greetings of Lightning 2.6 and warnings about deliberate choices."""
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*`srun` command is available")  # on a login node there is no job
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")  # it has config.yaml
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning's own use of PyTorch
    warnings.filterwarnings("ignore", ".*LeafSpec", DeprecationWarning)
    warnings.filterwarnings("ignore", r"\s*Online softmax is disabled")  # a choice of Inductor for compiled attentions


def exit_rank(trainer: pl.Trainer, code: int) -> NoReturn:
    """Ends this rank with SystemExit.

    If lra started the ranks, only rank 0 ends with `code`. If another rank ended with a code, the launcher of Lightning
    2.6 would kill rank 0.
    """
    launched = trainer.global_rank and trainer.strategy.cluster_environment.launch.by == "lra"  # type: ignore[attr-defined]
    raise SystemExit(0 if launched else code)


def leave_process_group() -> None:
    """Ends the threads of gloo, which Lightning leaves running and which may abort the process at exit."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
