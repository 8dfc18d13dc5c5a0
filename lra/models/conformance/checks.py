"""The properties of the contract, each with the check that asks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lra.batch import Batch
from lra.kernels.flash.reference import reference_attention
from lra.kernels.testing import RESULT_NAMES, measure_error
from lra.models.conformance.expectations import (
    NotAsked,
    expect,
    expect_equal,
    expect_finite,
    expect_near,
    gradients_of,
    leaves_of,
    make_weights,
    max_difference,
    zero_padding,
)
from lra.models.conformance.subject import LAYOUTS, LENGTHS, LONG, ROUNDING, Subject, in_layout, rows_of

LARGE = 1e4  # what lies past a length; data may have anything finite there
STEP = 1e-3  # of finite differences in fp32
DROPOUT = 0.5
DIFFERENCES = "gradients are those of finite differences"
COMPILED = "torch.compile makes one graph"

CHECKS: dict[str, Callable[[Subject], None]] = {}  # by property, in the order in which they are asked


def _asks(name: str) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    def add(check: Callable[[Subject], None]) -> Callable[[Subject], None]:
        CHECKS[name] = check
        return check

    return add


def _modes(subject: Subject, **changes: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields evaluation and training: words for a message, and what returns a module for a call in this mode.

    In training each call has a new module, as a step may change its state. All have the same weights and draw the same.
    """
    module = subject.build(**changes).eval()
    yield "", lambda: module
    yield "in training ", lambda: subject.build(**changes).train()


@_asks("the result has the shape and dtype of the input")
def _shape(subject: Subject) -> None:
    module = subject.build().eval()
    for lengths in (LENGTHS, LONG):
        for layout in LAYOUTS:
            batch, rows = in_layout(subject.batch(lengths), layout, *subject.inputs(lengths))
            out, wanted = subject.call(module, batch, *rows), rows[-1]
            expect(out.shape == wanted.shape, f"{[*out.shape]} for {[*wanted.shape]} in a {layout} batch")
            expect(out.dtype == wanted.dtype, f"{out.dtype} for {wanted.dtype} in a {layout} batch")
            expect_finite(out, f"the result of a {layout} batch")


@_asks("packed equals padded, in result and gradients")
def _layouts(subject: Subject) -> None:
    module, allowed = subject.build().eval(), ROUNDING[subject.dtype]
    for lengths in (LENGTHS, LONG):
        batch, leaves = subject.batch(lengths), leaves_of(subject.inputs(lengths))
        packed = subject.call(module, batch, *leaves)
        form = batch.to_padded()
        padded = batch.unpad(form.pad(subject.call(module, form, *(batch.pad(x).flatten(0, 1) for x in leaves))))
        expect_near(packed, padded, "the result", allowed)
        grads, others = (gradients_of(module, out, make_weights(out), leaves) for out in (packed, padded))
        for name, grad in grads.items():
            expect_near(grad, others[name], f"the gradient of {name}", allowed)


@_asks("sequences of length 0 and 1")
def _short(subject: Subject) -> None:
    module = subject.build().eval()
    for lengths in ((1,), (1, 0, 1), (0, 3, 0)):
        for layout in LAYOUTS:
            batch, rows = in_layout(subject.batch(lengths), layout, *subject.inputs(lengths))
            leaves = leaves_of(rows)
            out, where = subject.call(module, batch, *leaves), f"of lengths {lengths}, {layout},"
            expect_finite(out, f"the result {where}")
            for name, grad in gradients_of(module, out, zero_padding(batch, make_weights(out)), leaves).items():
                expect_finite(grad, f"the gradient {where} of {name}")


@_asks("what is past a length influences nothing")
def _padding(subject: Subject) -> None:
    for mode, make in _modes(subject):
        found = []
        for fill in (0.0, LARGE):
            batch, rows = in_layout(subject.batch(), "padded", *subject.inputs(), fill=fill)
            module, leaves = make(), leaves_of(rows)
            out = subject.call(module, batch, *leaves)
            grads = gradients_of(module, out, zero_padding(batch, make_weights(out)), leaves)
            found.append((zero_padding(batch, out), grads))
        (out, grads), (other, other_grads) = found
        expect_equal(other, out, f"{mode}with {LARGE:g} past the lengths the result")
        for name, grad in grads.items():
            expect_equal(other_grads[name], grad, f"{mode}with {LARGE:g} past the lengths the gradient of {name}")
        for name, grad in list(grads.items())[: len(leaves)]:
            what = f"{mode}past the lengths the gradient of {name}, which should be 0,"
            expect_equal(grad, zero_padding(batch, grad), what)


@_asks("sequences do not see each other")
def _neighbours(subject: Subject) -> None:
    batch, rows = subject.batch(), subject.inputs()
    own = rows_of(batch, 2)
    changed = [x.clone() for x in rows]
    for x in changed:
        x[own] = 3.0
    for mode, make in _modes(subject):
        out, other = (subject.call(make(), batch, *given) for given in (rows, changed))
        for which, others in (("before", slice(own.start)), ("behind", slice(own.stop, None))):
            expect_equal(other[others], out[others], f"{mode}with another sequence the result of those {which} it")


@_asks("a sequence gives the same alone and anywhere in a batch")
def _order(subject: Subject) -> None:
    """In training, too, unless it draws something there: each row may draw its own."""
    batch, rows = subject.batch(), subject.inputs()
    places = torch.arange(len(rows[0]), device=subject.device)
    for mode, make in _modes(subject):
        out = subject.call(make(), batch, *rows)
        if mode and not torch.equal(_with_other_seeds(subject, make(), batch, rows), out):
            continue
        for order in ([3, 1, 4, 0, 2], *([sequence] for sequence, length in enumerate(LENGTHS) if length)):
            place = torch.cat([places[rows_of(batch, sequence)] for sequence in order])
            other = dataclasses.replace(
                subject.batch([LENGTHS[sequence] for sequence in order]), index=batch.index[order]
            )
            where = f"sequence {order[0]} alone" if len(order) == 1 else f"sequences in the order {order}"
            found = subject.call(make(), other, *(x[place] for x in rows))
            expect_near(found, out[place], f"{mode}the result of {where}", ROUNDING[subject.dtype])


def _with_other_seeds(subject: Subject, module: Any, batch: Batch, rows: Sequence[Tensor]) -> Tensor:
    torch.manual_seed(1)
    return subject.call(module, batch.with_seed(torch.tensor(8, device=subject.device)), *rows)


@_asks("strided rows give the same as copies")
def _strides(subject: Subject) -> None:
    module, batch = subject.build().eval(), subject.batch()
    fused = torch.stack(subject.inputs(), 1)
    views = subject.call(module, batch, *fused.unbind(1))
    copies = subject.call(module, batch, *(x.contiguous() for x in fused.unbind(1)))
    expect_equal(views, copies, "the result of strided rows")


@_asks("causal: no later token is seen")
def _causal(subject: Subject) -> None:
    if not subject.facts.causal:
        raise NotAsked("it does not register causal=True")
    for mode, make in _modes(subject, causal=True):
        for lengths in (LENGTHS,) if mode else (LENGTHS, LONG):
            for layout in LAYOUTS:
                _change_later_tokens(subject, mode, make, lengths, layout)


def _change_later_tokens(
    subject: Subject, mode: str, make: Callable[[], Any], lengths: Sequence[int], layout: str
) -> None:
    batch, rows = in_layout(subject.batch(lengths), layout, *subject.inputs(lengths))
    out = subject.call(make(), batch, *rows)
    for sequence in (number for number, length in enumerate(lengths) if length > 1):
        own = rows_of(batch, sequence)
        for place in {own.stop - 1, (own.start + own.stop) // 2}:
            changed = [x.clone() for x in rows]
            for x in changed:
                x[place : own.stop] = 3.0
            earlier = slice(own.start, place)
            what = f"{mode}with other tokens from {place - own.start} on, of {lengths[sequence]}, an earlier row"
            found = subject.call(make(), batch, *changed)
            # a Fourier transform sees them as rounding of the whole sequence, of at most 3e-7 of its size in fp32
            size = max(1.0, float(found[own].detach().abs().max()))
            seen, allowed = max_difference(found[earlier], out[earlier]), ROUNDING[subject.dtype] / 10 * size
            expect(seen <= allowed, f"{what} changes by up to {seen:.2g}, rounding explains {allowed:.2g}")


@_asks(DIFFERENCES)
def _differences(subject: Subject) -> None:
    if subject.dtype != torch.float32:
        raise NotAsked("it has no fp32 on this device")
    module, batch, rows = subject.build().eval(), subject.batch(), subject.inputs()
    leaves = leaves_of(rows)
    out = subject.call(module, batch, *leaves)
    weights = make_weights(out)
    grads = gradients_of(module, out, weights, leaves)
    for name, grad in grads.items():
        expect_finite(grad, f"the gradient of {name}")
    points = [*leaves, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    begins = [x.detach().clone() for x in points]
    size = max(sum(float(grad.double().square().sum()) for grad in grads.values()) ** 0.5, 1.0)

    @torch.no_grad()
    def loss(step: float, directions: Sequence[Tensor]) -> float:
        for x, begin, direction in zip(points, begins, directions, strict=True):
            x.copy_(begin + step * direction)
        return float((subject.call(module, batch, *leaves).double() * weights).sum())

    compared = 0
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        directions = [torch.randn(x.shape, generator=generator).to(x) for x in begins]
        near, far = ((loss(h, directions) - loss(-h, directions)) / (2 * h) for h in (STEP, 2 * STEP))
        if abs(near - far) > 0.005 * size:
            continue  # it jumps here, as hashes do, or bends
        slope = sum(float((grad * d).double().sum()) for grad, d in zip(grads.values(), directions, strict=True))
        expect(
            abs(near - slope) <= 0.02 * size,
            f"along a random direction the gradient says {slope:.4g}, and finite differences say {near:.4g}",
        )
        compared += 1
        if compared == 3:
            return
    if not compared:
        raise NotAsked("its result jumps along each of 12 directions, so differences say nothing")


@_asks("dropout acts in training alone, and keeps the mean")
@torch.no_grad()
def _dropout(subject: Subject) -> None:
    if not subject.facts.dropout:
        raise NotAsked("it registers dropout=False")
    batch, rows = subject.batch(), subject.inputs()
    evaluated, without = (
        subject.call(subject.build(dropout=rate).eval(), batch, *rows).float() for rate in (DROPOUT, 0.0)
    )
    expect_equal(evaluated, without, "with dropout the result of evaluation")
    module = subject.build(dropout=DROPOUT).train()
    torch.manual_seed(0)
    steps = (batch.with_seed(torch.tensor(step, device=subject.device)) for step in range(100))
    results = torch.stack([subject.call(module, step, *rows).float() for step in steps])
    expect(not torch.allclose(results[0], evaluated), "in training nothing is dropped")
    ratio = float((results.mean(0) * evaluated).sum() / evaluated.square().sum())
    expect(abs(ratio - 1) <= 0.15, f"with dropout the mean of 100 results is {ratio:.2f} of that without")


@_asks("training repeats with its seeds")
def _seeds(subject: Subject) -> None:
    dropout = DROPOUT if subject.facts.dropout else 0.0
    batch, rows = subject.batch(), subject.inputs()

    def run(seed: int) -> Tensor:
        module = subject.build(dropout=dropout).train()
        torch.manual_seed(seed)
        return subject.call(module, batch.with_seed(torch.tensor(seed, device=subject.device)), *rows)

    first = run(0)
    expect_equal(run(0), first, "with the same seeds the result")
    expect(not dropout or not torch.equal(run(1), first), "other seeds drop the same")


@_asks("evaluation is deterministic and needs no seed")
def _evaluation(subject: Subject) -> None:
    module = subject.build(dropout=DROPOUT if subject.facts.dropout else 0.0).eval()
    batch, rows = dataclasses.replace(subject.batch(), seed=None), subject.inputs()

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return subject.call(module, batch, *rows)

    expect_equal(run(1), run(0), "with another seed of PyTorch the result")


@_asks("a checkpoint holds what evaluation and the next step need")
def _checkpoint(subject: Subject) -> None:
    batch, rows = subject.batch(), subject.inputs()
    dropout = DROPOUT if subject.facts.dropout else 0.0

    def step(module: Any, number: int) -> Tensor:
        torch.manual_seed(number)
        out = subject.call(module.train(), batch.with_seed(torch.tensor(number, device=subject.device)), *rows)
        if parameters := [parameter for parameter in module.parameters() if parameter.requires_grad]:
            grads = torch.autograd.grad(out.square().sum(), parameters, materialize_grads=True)
            with torch.no_grad():
                for parameter, grad in zip(parameters, grads, strict=True):
                    parameter -= 0.01 * grad
        return out

    trained = subject.build(0, dropout=dropout)
    for number in (1, 2):  # the first checkpoint is of a fresh module
        restored = subject.build(number, dropout=dropout)
        restored.load_state_dict(trained.state_dict())
        where = "of a fresh module" if number == 1 else "after a step"
        for what, run in (
            (f"from a checkpoint {where} the evaluation", lambda each: subject.call(each.eval(), batch, *rows)),
            (f"from a checkpoint {where} the next step", lambda each, number=number: step(each, number)),
            (
                f"from a checkpoint {where} the evaluation behind a step",
                lambda each: subject.call(each.eval(), batch, *rows),
            ),
        ):
            expect_equal(run(restored), run(trained), what)


@_asks("bf16 under autocast, in result and gradients")
def _autocast(subject: Subject) -> None:
    if "bf16" not in subject.facts.dtypes:
        raise NotAsked("it registers no bf16")
    module, batch, rows = subject.build().eval(), subject.batch(), subject.inputs()
    leaves = leaves_of(subject.autocast_rows(rows))
    with torch.autocast(subject.device, torch.bfloat16, cache_enabled=False):
        out = subject.call(module, batch, *leaves)
        grads = gradients_of(module, out, make_weights(out), leaves)
    for name, grad in grads.items():
        expect_finite(grad, f"the gradient of {name}")
    expect_near(out, subject.call(module, batch, *rows), "the result, beside that without autocast,", 0.05)


@_asks("it equals the reference in float64 within the budget")
def _exact(subject: Subject) -> None:
    """The budget is that of `measure_error`. A layout shows what it shows, and of that no later token if causal.

    bf16 comes under autocast. In fp32 on a GPU, rounding is allowed instead of the budget, which leaves no room for the
    order in which PyTorch sums there.
    """
    if not (subject.facts.exact or getattr(subject.build(), "layout", None) is not None):
        raise NotAsked("it registers exact=False, and has no layout of blocks")
    dtypes = {subject.dtype} | ({torch.bfloat16} if "bf16" in subject.facts.dtypes else set())
    for causal in (False, True)[: 1 + subject.facts.causal]:
        module = subject.build(causal=causal).eval()
        for lengths in (LENGTHS, LONG):
            for layout in LAYOUTS:
                batch, rows = in_layout(subject.batch(lengths), layout, *subject.inputs(lengths))
                for dtype in dtypes:
                    _compare_with_reference(subject, module, batch, [x.to(dtype) for x in rows])


def _compare_with_reference(subject: Subject, module: Any, batch: Batch, rows: Sequence[Tensor]) -> None:
    weights, given = zero_padding(batch, make_weights(rows[-1])), rows[-1].dtype
    seen = {"layout": module.layout, "causal": module.spec.causal and module.layout is None}

    def results(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in rows]
        out = function(*leaves)
        total = out.where(weights != 0, 0).mul(weights.to(dtype)).sum()
        return [zero_padding(batch, out.detach()), *torch.autograd.grad(total, leaves, materialize_grads=True)]

    def reference(*given: Tensor) -> Tensor:
        return reference_attention(*given, start=batch.start, length=batch.length, **seen)

    with torch.autocast(subject.device, torch.bfloat16, given == torch.bfloat16, cache_enabled=False):
        found = results(lambda *given: subject.call(module, batch, *given), given)
    exact, plain = (results(reference, dtype) for dtype in (torch.float64, given))
    for name, a, e, p in zip(RESULT_NAMES, found, exact, plain, strict=True):
        what = f"{name} ({'causal, ' if module.spec.causal else ''}{'padded' if batch.padded else 'packed'}, {given})"
        if subject.device == "cuda" and given == torch.float32:
            expect_near(a, e, what, ROUNDING[given])
            continue
        error = measure_error(a, e, p)
        expect(error.ok, f"{what} is off by {error.error:.2g}, its budget is {error.budget:.2g}")


@_asks(COMPILED)
def _compiled(subject: Subject) -> None:
    """For any number of rows, as training compiles it."""
    module = subject.build().train()

    def call(batch: Batch, *rows: Tensor) -> Tensor:
        return subject.call(module, batch, *rows)

    def run(function: Callable[..., Tensor], lengths: Sequence[int], mark: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        batch, leaves = subject.batch(lengths), leaves_of(subject.inputs(lengths))
        for tensor in (batch.tokens, *leaves) if mark else ():
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        out = function(batch, *leaves)
        return {"result": out, **gradients_of(module, out, make_weights(out), leaves)}

    torch.compiler.reset()
    try:
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        for lengths in (LENGTHS, (3, 9, 2, 1, 17)):
            found, expected = run(compiled, lengths, True), run(call, lengths, False)
            for name, tensor in expected.items():
                expect_near(found[name], tensor, f"compiled, the {name}", ROUNDING[subject.dtype])
    finally:
        torch.compiler.reset()
