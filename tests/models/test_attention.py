"""Every registered attention, those of installed packages too, keeps the contract of `Attention` on every device."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lra.batch import Batch
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS, Capabilities
from lra.models.attention.base import Attention, AttentionSpec

LENGTHS = (5, 0, 17, 1, 16)
LONG = (130, 0, 64, 33)  # more than one tile or block
CATALOGUE = ATTENTIONS.catalogue()
FACTS = {name: facts for name, entry in CATALOGUE.items() if not (facts := ATTENTIONS.facts_of(entry)).mixes}


@dataclass(frozen=True)
class Subject:
    """An attention on a device."""

    name: str
    device: str

    @property
    def facts(self) -> Capabilities:
        return FACTS[self.name]

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """fp32, or bf16 where it has no fp32 on this device."""
        try:
            self.build().resolve(torch.device(self.device), "fp32")
        except UsageError:
            return torch.bfloat16
        return torch.float32

    def build(self, **changes) -> Attention:
        cls = ATTENTIONS.get(self.name)
        spec = AttentionSpec(**{"heads": 2, "head_dim": 16, "max_length": 20, **changes})
        return cls(cls.Config(), spec).to(self.device)

    def batch(self, lengths: Sequence[int] = LENGTHS) -> Batch:
        """A packed one, of a training step."""
        length = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        start, total = (length.cumsum(0) - length).int(), sum(lengths)
        index = torch.arange(len(lengths), dtype=torch.int32, device=self.device)
        tokens, label = length.new_zeros(total), length.new_zeros(len(lengths)).long()
        return Batch(tokens, start, length, max(lengths), label, index, seed=torch.tensor(7, device=self.device))

    def inputs(self, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
        """q, k and v of the batch."""
        generator = torch.Generator().manual_seed(0)
        shape = (sum(lengths), 2, 16)
        return [torch.randn(shape, generator=generator).to(self.device, self.dtype) for _ in range(3)]

    def assert_near(self, actual: Tensor, expected: Tensor) -> None:
        """Within rounding."""
        allowed = 1e-5 if self.dtype == torch.float32 else 0.03
        torch.testing.assert_close(actual, expected, atol=allowed, rtol=allowed)


def subjects(able: Callable[[Capabilities], bool] = lambda facts: True, slow: Sequence[str] = ()):
    """For each test the attentions with these facts, on the CPU and on a GPU, with what each needs to run.

    Those named `slow` are left to make test-all.
    """
    params = []
    for name, facts in FACTS.items():
        missing = CATALOGUE[name].missing
        marks = [pytest.mark.skip(reason=f"{name} needs {', '.join(missing)}")] if missing else []
        marks += [pytest.mark.slow] * (name in slow)
        for device in ("cuda",) if facts.needs_gpu else ("cpu", "cuda"):
            gpu = [pytest.mark.gpu] if device == "cuda" else []
            params.append(pytest.param(Subject(name, device), marks=marks + gpu, id=f"{name}-{device}"))
    return pytest.mark.parametrize("subject", [param for param in params if able(param.values[0].facts)])


def attend(attention: Attention, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention.attend(q, k, v, batch)


def rows(batch: Batch, sequence: int) -> slice:
    first = int(batch.start[sequence])
    return slice(first, first + int(batch.length[sequence]))


@pytest.mark.parametrize("lengths", [LENGTHS, LONG], ids=["short", "long"])
@subjects(lambda facts: facts.exact)
def test_exact_attention_is_softmax_attention_of_each_sequence(subject, lengths):
    q, k, v = subject.inputs(lengths)
    batch = subject.batch(lengths)
    out = attend(subject.build(max_length=130).eval(), batch, q, k, v)
    for sequence in range(batch.size):
        own = rows(batch, sequence)
        scores = torch.einsum("ihd,jhd->hij", q[own].double(), k[own].double()) / 4
        expected = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[own].double())
        subject.assert_near(out[own].double(), expected)


@subjects()
def test_what_is_past_a_length_influences_nothing(subject):
    attention, batch = subject.build().eval(), subject.batch()
    padded = batch.to_padded()
    real = padded.mask().flatten()[:, None, None]
    q, k, v = (batch.pad(x).flatten(0, 1).requires_grad_() for x in subject.inputs())
    other = [x.detach().where(real, 7.0).requires_grad_() for x in (q, k, v)]
    out, out_other = attention(q, k, v, padded), attention(*other, padded)
    assert torch.equal(out, out_other)
    weights = torch.randn_like(out).where(real, 0)
    grads = torch.autograd.grad((out * weights).sum(), (q, k, v), materialize_grads=True)
    grads_other = torch.autograd.grad((out_other * weights).sum(), other, materialize_grads=True)
    for grad, grad_other in zip(grads, grads_other, strict=True):
        assert torch.equal(grad, grad_other)
        assert grad.isfinite().all() and not grad.where(~real, 0).any()


@pytest.mark.parametrize("lengths", [LENGTHS, LONG], ids=["short", "long"])
@subjects()
def test_packed_and_padded_agree_in_result_and_gradients(subject, lengths):
    attention, batch = subject.build(max_length=130).eval(), subject.batch(lengths)
    leaves = [x.requires_grad_() for x in subject.inputs(lengths)]
    packed = attend(attention, batch, *leaves)
    form = batch.to_padded()
    padded = batch.unpad(form.pad(attend(attention, form, *(batch.pad(x).flatten(0, 1) for x in leaves))))
    weights = torch.randn_like(packed)
    subject.assert_near(packed, padded)
    leaves += attention.parameters()
    grads, grads_padded = (
        torch.autograd.grad((out * weights).sum(), leaves, materialize_grads=True) for out in (packed, padded)
    )
    for grad, grad_padded in zip(grads, grads_padded, strict=True):
        subject.assert_near(grad, grad_padded)


@subjects()
def test_sequences_do_not_see_each_other(subject):
    attention, batch = subject.build().eval(), subject.batch()
    q, k, v = subject.inputs()
    out = attend(attention, batch, q, k, v)
    first = batch.start[2]
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[first:] = 3.0
    assert torch.equal(attend(attention, batch, *changed)[:first], out[:first])


@subjects()
def test_a_sequence_gives_the_same_alone_and_anywhere_in_a_batch(subject):
    """Whatever the longest sequence of the batch; `index` goes with it."""
    attention, batch, qkv = subject.build().eval(), subject.batch(), subject.inputs()
    out = attend(attention, batch, *qkv)
    for order in ([3, 1, 4, 0, 2], *([sequence] for sequence, length in enumerate(LENGTHS) if length)):
        place = torch.cat([torch.arange(len(out), device=subject.device)[rows(batch, sequence)] for sequence in order])
        other = dataclasses.replace(subject.batch([LENGTHS[sequence] for sequence in order]), index=batch.index[order])
        subject.assert_near(attend(attention, other, *(x[place] for x in qkv)), out[place])


@subjects()
def test_strided_views_give_the_same_as_copies(subject):
    attention, batch = subject.build().eval(), subject.batch()
    fused = torch.stack(subject.inputs(), 1)
    views = attend(attention, batch, *fused.unbind(1))
    assert torch.equal(views, attend(attention, batch, *(x.contiguous() for x in fused.unbind(1))))


@subjects(lambda facts: facts.dropout)
def test_dropout_acts_in_training_alone(subject):
    attention, batch, qkv = subject.build(dropout=0.5), subject.batch(), subject.inputs()
    evaluated = attend(attention.eval(), batch, *qkv)
    assert not torch.allclose(attend(attention.train(), batch, *qkv), evaluated)


@subjects()
def test_training_follows_the_seeds_and_evaluation_needs_none(subject):
    attention, batch, qkv = subject.build(dropout=0.5 * subject.facts.dropout), subject.batch(), subject.inputs()

    def run(seed: int, batch: Batch, training: bool) -> Tensor:
        torch.manual_seed(seed)
        return attend(copy.deepcopy(attention).train(training), batch, *qkv)

    assert torch.equal(run(0, batch, True), run(0, batch, True))
    assert torch.equal(run(0, batch, False), run(1, dataclasses.replace(batch, seed=None), False))


@subjects()
def test_a_checkpoint_holds_all_that_evaluation_and_the_next_step_need(subject):
    batch, qkv = subject.batch(), subject.inputs()

    def build(seed: int) -> Attention:
        torch.manual_seed(seed)
        return subject.build(dropout=0.5 * subject.facts.dropout)

    def evaluate(attention: Attention) -> Tensor:
        return attend(attention.eval(), batch, *qkv)

    def step(attention: Attention, number: int) -> Tensor:
        torch.manual_seed(number)
        out = attend(attention.train(), batch.with_seed(torch.tensor(number, device=subject.device)), *qkv)
        if parameters := list(attention.parameters()):
            grads = torch.autograd.grad(out.square().sum(), parameters)
            with torch.no_grad():
                for parameter, grad in zip(parameters, grads, strict=True):
                    parameter -= 0.01 * grad
        return out

    trained = build(0)
    for number in (1, 2):  # the first checkpoint is of a fresh module
        restored = build(number)
        restored.load_state_dict(trained.state_dict())
        assert torch.equal(evaluate(restored), evaluate(trained))
        assert torch.equal(step(restored, number), step(trained, number))
        assert torch.equal(evaluate(restored), evaluate(trained))


@subjects(lambda facts: facts.dropout)
@torch.no_grad()
def test_dropout_keeps_the_mean(subject):
    """Of one direction, that of the result without dropout; 1 - rate if what is kept were not scaled."""
    attention, batch, qkv = subject.build(dropout=0.3), subject.batch(), subject.inputs()
    exact = attend(attention.eval(), batch, *qkv).float()
    attention.train()
    assert attention.dropout_rate == 77 / 256
    torch.manual_seed(0)
    steps = (batch.with_seed(torch.tensor(step, device=subject.device)) for step in range(100))
    mean = torch.stack([attend(attention, step, *qkv).float() for step in steps]).mean(0)
    assert float((mean * exact).sum() / exact.square().sum()) == pytest.approx(1, abs=0.1)


@subjects(slow=("local", "longformer", "openai_sparse"))  # their code is butterfly's and bigbird's, but for the layout
def test_torch_compile_makes_one_graph_with_the_same_result_and_gradients(subject):
    if subject.name in (apart := {"flex": "calls torch.compile itself", "flash_attn": "is left out of graphs"}):
        pytest.skip(f"{subject.name} {apart[subject.name]}")
    attention, batch = subject.build().train(), subject.batch()
    leaves = [x.requires_grad_() for x in subject.inputs()]

    def run(attend: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        again = dataclasses.replace(batch)  # what a batch keeps is computed inside
        out = attend(attention, again, *leaves)
        return [out, *torch.autograd.grad(out.square().sum(), [*leaves, *attention.parameters()], allow_unused=True)]

    torch.compiler.reset()
    try:
        compiled = run(torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=False))
    finally:
        torch.compiler.reset()
    for actual, expected in zip(compiled, run(attend), strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            subject.assert_near(actual, expected)


@subjects()
def test_half_precision_runs_forward_and_backward(subject):
    attention, batch = subject.build().eval(), subject.batch()
    q, k, v = (x.bfloat16().requires_grad_() for x in subject.inputs())
    out = attend(attention, batch, q, k, v)
    assert out.dtype == torch.bfloat16
    out.float().pow(2).sum().backward()
    read = (q, v) if attention.facts.shared_qk else (q, k, v)
    assert all(x.grad is not None and x.grad.isfinite().all() for x in read)
    exact = attend(attention, batch, *subject.inputs())
    torch.testing.assert_close(out.float(), exact.float(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("flash", {"head_dim": 192, "dropout": 0.1}, "attn=flash supports head dimensions 1 to 128, not 192"),
        ("linear", {"dropout": 0.1}, "attn=linear supports no dropout on its probabilities: set model.attn_dropout=0"),
        ("cudnn", {"head_dim": 20}, "attn=cudnn supports head dimensions that are multiples of 8, not 20"),
    ],
)
def test_what_is_named_in_place_of_an_attention_can_do_what_it_was_asked_for(name, asked, message):
    with pytest.raises(UsageError, match=f"^{message}, or use attn=") as error:
        Subject(name, "cpu").build(**asked)
    others = str(error.value).rpartition("attn=")[2].split("|")
    assert "standard" in others and not any(CATALOGUE[other].missing for other in others)
    for other in others:
        Subject(other, "cpu").build(**asked)


def test_an_attention_that_needs_a_gpu_says_so_before_training():
    attention: Any = Subject("standard", "cpu").build()
    attention.facts = dataclasses.replace(attention.facts, needs_gpu=True)
    assert attention.resolve(torch.device("cuda"), "bf16") == "standard"
    with pytest.raises(UsageError, match=r"attn=standard supports GPUs only, or use attn=.*flash"):
        attention.resolve(torch.device("cpu"), "bf16")


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("shape", [(1, 16), (2, 1), (2, 16, 1), (2,)])
def test_an_attention_that_returns_another_shape_is_refused(shape, ragged):
    """Most of these the residual would broadcast, and training would go on."""
    subject = Subject("linear", "cpu")
    attention: Any = subject.build()
    attention.facts = dataclasses.replace(attention.facts, ragged=ragged, rotates=False)
    attention.forward = lambda q, k, v, batch: v.new_zeros(len(v), *shape)
    with pytest.raises(UsageError, match=r"attn=linear returns \[T, .* for values of \[T, 2, 16\]"):
        attention.attend(*subject.inputs()[:3], subject.batch())
