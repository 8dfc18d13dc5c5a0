"""Optimisers by name, and their parameter groups.

`optim.name=` chooses one of `OPTIMIZERS`. They are PyTorch's own, and each works behind the captured step: its learning
rate may be a tensor on the GPU, and an update may be left out there without asking the host. PyTorch's others are left
out. Adagrad and ASGD read a number on the host in each step. Muon does too, and trains matrices alone. Adadelta needs
another epsilon than `optim.eps` has by default, and Rprop needs the gradient of all examples in each step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lra.config.optim import OptimConfig, OptimizerName
from lra.errors import UsageError
from lra.models.pixels import PixelEmbedding
from lra.models.positions import LearnedPositions

PIECE_SIZE, MOST_PIECES = 1 << 13, 1 << 9  # elements that a block updates at a time; pieces of a large model
MARK_FIELDS = ("lr", "weight_decay")  # what a parameter's `_optim` may say
INITIAL_STATE = {"mu_product": 1.0}  # first values of states that do not start at 0


class Optimizer(torch.optim.Optimizer):
    """Base class of all optimisers here. A subclass also inherits from one of PyTorch's.

    A group of parameters may have a `scale`. Its learning rate is that of the schedule times `scale`.
    """

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate. A rate that is a tensor is changed in place."""
        for group in self.param_groups:
            scaled = rate * group.get("scale", 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(scaled)
            else:
                group["lr"] = scaled

    def make_capturable(self, device: torch.device) -> None:
        """Makes the learning rates tensors, which a captured update reads."""
        for group in self.param_groups:
            group["lr"] = torch.zeros((), device=device)
            if "capturable" in group:
                group["capturable"] = device.type == "cuda"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the moments of a checkpoint. The options stay those of this run and device.

        Raises:
            UsageError: the checkpoint has other groups of parameters.
        """
        there = [group["params"] for group in state_dict["param_groups"]]
        sizes, own = [len(each) for each in there], [len(group["params"]) for group in self.param_groups]
        if sizes != own:
            raise UsageError(
                f"the checkpoint's optimiser has groups of {sizes} parameters, and here they are of {own}: "
                "the marks `_optim` in the code have changed; begin another run, name=, with its weights, init="
            )
        groups = [own | {"params": params} for own, params in zip(self.param_groups, there, strict=True)]
        super().load_state_dict(state_dict | {"param_groups": groups})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters. A `closure` of Lightning does the update itself."""
        if closure is None:
            self.update()
        else:
            closure()

    def update(self, left_out: Tensor | None = None) -> None:
        """Updates the parameters, unless `left_out`, a number on their device, is 1."""
        if left_out is None:
            super().step()
        elif left_out.is_cuda:
            self._update_unless(left_out)
        elif not left_out:
            super().step()

    @torch.no_grad()
    def _update_unless(self, left_out: Tensor) -> None:
        """Updates and reverts the update if `left_out` is 1. The host does not wait for this number."""
        before = {key: tensor.clone() for key, tensor in self._tensors()}
        super().step()
        out = left_out.bool()
        for key, tensor in self._tensors():
            old = before[key] if key in before else torch.full_like(tensor, INITIAL_STATE.get(key[1], 0.0))
            tensor.copy_(torch.where(out, old, tensor))

    def _tensors(self) -> Iterator[tuple[tuple[Tensor, str], Tensor]]:
        """Yields all tensors that an update changes: parameters with a gradient, and their states."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield (parameter, ""), parameter
                    for name, value in self.state[parameter].items():
                        if isinstance(value, Tensor):
                            yield (parameter, name), value


class PiecewiseUpdate(Optimizer):
    """Adam or AdamW. It gives tensors to the fused kernel in pieces.

    The kernel has a block for each 65,536 elements of a tensor. Most models here are smaller, so one block would update
    most of the model, and that takes longer than some attentions. So tensors are cut into pieces. A large model has
    larger pieces, because each piece costs the host some views, and one launch takes only some dozens of pieces.
    """

    def update(self, left_out: Tensor | None = None) -> None:
        if not self.defaults["fused"]:
            super().update(left_out)
            return
        if left_out is not None and not left_out.is_cuda:  # on the CPU nothing has to wait
            if left_out:
                return
            left_out = None
        for group in self.param_groups:
            self._update_group(group, left_out)

    @torch.no_grad()
    def _update_group(self, group: dict[str, Any], found_inf: Tensor | None) -> None:
        tensors: list[list[Tensor]] = [[] for _ in range(6)]
        self._init_group(group, *tensors)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        *updated, _, steps = tensors  # parameters, gradients and both moments
        if not steps:
            return
        torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
        size = max(PIECE_SIZE, sum(weight.numel() for weight in updated[0]) // MOST_PIECES)
        cut = [[tensor.view(-1).split(size) for tensor in each] for each in updated]
        pieces = [list(itertools.chain.from_iterable(each)) for each in cut]
        of_pieces = [step for parts, step in zip(cut[0], steps, strict=True) for _ in parts]
        beta1, beta2 = group["betas"]
        decoupled = isinstance(self, torch.optim.AdamW)
        kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_  # pyright: ignore
        kernel(
            *pieces, [], of_pieces, lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=False, maximize=False, found_inf=found_inf,
        )  # fmt: skip
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))  # pyright: ignore[reportPrivateImportUsage]


class AdamW(PiecewiseUpdate, torch.optim.AdamW): ...


class Adam(PiecewiseUpdate, torch.optim.Adam): ...


class Adamax(Optimizer, torch.optim.Adamax): ...


class NAdam(Optimizer, torch.optim.NAdam): ...


class RAdam(Optimizer, torch.optim.RAdam): ...


class RMSprop(Optimizer, torch.optim.RMSprop): ...


class SGD(Optimizer, torch.optim.SGD): ...


OPTIMIZERS: dict[str, Any] = {cls.__name__.lower(): cls for cls in (AdamW, Adam, Adamax, NAdam, RAdam, RMSprop, SGD)}
assert (*OPTIMIZERS,) == get_args(OptimizerName)


def make_optimizer(config: OptimConfig, module: nn.Module) -> Optimizer:
    """Returns the optimiser of a module's trained parameters, for their device."""
    cls, on_gpu = OPTIMIZERS[config.name], trained_parameters(module)[0].is_cuda
    how = ("fused",) if issubclass(cls, PiecewiseUpdate | SGD) else ("foreach", "capturable")
    return cls(parameter_groups(config, module), **config.options(), **dict.fromkeys(how, on_gpu))


def parameter_groups(config: OptimConfig, module: nn.Module) -> list[dict[str, Any]]:
    """Groups the trained parameters by learning rate and weight decay, in order. Usually there is one group.

    Code may mark a parameter with its own values, as state-space models do: `parameter._optim = {"lr": 1e-3,
    "weight_decay": 0.0}`. The mark overrides `optim.lr` and `optim.weight_decay`. The schedule scales its `lr` in
    proportion.

    Raises:
        UsageError: a mark has another key, or a value that is no finite number of at least 0.
    """
    kinds = nn.Embedding | PixelEmbedding | LearnedPositions | nn.LayerNorm | nn.RMSNorm  # norms of heads, of 2 axes
    others = {parameter for part in module.modules() if isinstance(part, kinds) for parameter in part.parameters()}
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim > 1 and parameter not in others
            own = {"lr": config.lr, "weight_decay": config.weight_decay if config.decay == "all" or matrix else 0.0}
            own |= _mark(name, parameter)
            found.setdefault((own["lr"], own["weight_decay"]), []).append(parameter)
    return [
        {"params": parameters}
        | ({} if decay == config.weight_decay else {"weight_decay": decay})
        | ({} if lr == config.lr else {"scale": lr / config.lr})
        for (lr, decay), parameters in found.items()
    ]


def _mark(name: str, parameter: nn.Parameter) -> dict[str, float]:
    """Returns the mark of a parameter. UsageError if it is not valid."""
    mark = getattr(parameter, "_optim", None) or {}
    for key, value in mark.items():
        if key not in MARK_FIELDS:
            raise UsageError(
                f"{name} is marked with _optim['{key}']: a mark has {' and '.join(MARK_FIELDS)}, leave it out"
            )
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise UsageError(f"{name} is marked with _optim['{key}']={value}: write a finite number, at least 0")
    return mark


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
