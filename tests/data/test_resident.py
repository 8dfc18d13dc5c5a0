"""Batches of splits on a device, against those of the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import lra
from lra.batch import Batch
from lra.data import resident
from lra.data.resident import upload_splits
from lra.data.split import Examples, Pairs, Split
from lra.tasks.base import TaskData
from lra.tasks.batches import Rank
from lra.training import checkpoints
from lra.training.assembly import build_modules
from lra.training.engine import CapturedFunction
from lra.training.fit import configure
from tests.data.test_gather import make

CPU = torch.device("cpu")
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
LISTOPS = ("task=listops", "recipe=demo", "task.train=100", "task.val=20", "task.test=20", "task.fresh=20",
           "task.max_length=32")  # fmt: skip
FEW_STEPS = ("attn=flash", "model.d_model=32", "model.layers=1", "model.d_ff=64", "batch.size=8", "optim.warmup=0",
             "trainer.steps=4", "trainer.eval_every=2", "trainer.log_every=2", "trainer.accelerator=cpu")  # fmt: skip
LIT = ("task=pathfinder", "recipe=demo", "task.train=12", "task.val=4", "task.test=4", "tokens=lit")


def same(one: Batch, other: Batch) -> bool:
    """Whether two batches are bitwise the same, wherever they are."""
    for field in dataclasses.fields(Batch):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if not isinstance(a, torch.Tensor):
            if a != b:
                return False
        elif a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride() or not torch.equal(a.cpu(), b.cpu()):
            return False
    return True


def on(device: str, split: Examples, **options: Any) -> Examples:
    (there,) = upload_splits({"split": split}, torch.device(device), 1e9, **{"max_length": 1, **options}).values()
    return there


def cases(number: int) -> tuple[Split, np.ndarray, dict[str, Any]]:
    """A split, rows of it and the options of `gather`, all drawn."""
    rng = np.random.default_rng(number)
    kinds: list[tuple[Any, int]] = [(np.uint8, 256), (np.uint16, 65_536)]
    dtype, high = kinds[number % 2]
    split = make(dtype, high, count=int(rng.integers(1, 50)), longest=int(rng.choice([0, 1, 30, 300])))
    if rng.random() < 0.3:
        split = split.subset(rng.integers(0, len(split), int(rng.integers(1, 60))))
    rows = rng.integers(0, len(split), int(rng.integers(0, 20)))
    options = {
        "max_length": int(rng.choice([1, 7, 30, 200, 400])),
        "layout": str(rng.choice(["packed", "padded"])),
        "prefix": [None, 3, 70_000][rng.integers(3)],
        "threshold": [None, 0, high // 2, high][rng.integers(4)],
        "share": [0.0, 0.3][rng.integers(2)],
        "index": rng.integers(0, 1000, 2 * len(rows))[::2] if rng.random() < 0.5 else None,
        "multiple": int(rng.choice([1, 2, 64, 1000])),
    }
    return split, rows, options


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_resident_split_gathers_what_the_host_does(device):
    for number in range(400):
        split, rows, options = cases(number)
        fixed = {name: options[name] for name in ("max_length", "prefix", "threshold", "share")}
        there = on(device, split, **fixed)
        batch = there.collate(rows, **options).to(device)
        assert same(batch, split.collate(rows, **options).to("cpu")), (number, options)
        fields = (batch.tokens, batch.start, batch.length, batch.label, batch.index)
        assert all(field.device.type == device and (field.data_ptr() % 16 == 0) for field in fields)
        part = rows[::2]
        options["index"] = None
        again = there.subset(part).collate(np.arange(len(part)), **options).to(device)  # type: ignore[union-attr]
        assert same(again, split.collate(part, **options).to("cpu")), (number, options)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_what_unpacks_a_batch_unpacks_all_of_its_shape(device):
    """A graph that begins with it is replayed for other batches; on a GPU this is one."""
    pool = torch.cuda.graph_pool_handle() if device == "cuda" else None
    for number in range(100 if device == "cpu" else 24):
        split, rows, options = cases(number)
        fixed = {name: options[name] for name in ("max_length", "prefix", "threshold", "share")}
        expected = split.collate(rows[::-1], **options).to("cpu")
        for part in (split, on(device, split, **fixed)):
            one, other = part.collate(rows, **options), part.collate(rows[::-1], **options)
            assert one.shape == other.shape and one.nbytes == other.nbytes
            there, found = one.pack().to(device), []
            graph = CapturedFunction(lambda one=one, there=there, found=found: found.append(one.unpack(there)), pool)
            for _ in range(2):  # as it is, and captured
                graph()
            there.copy_(other.pack())
            graph()
            assert same(found[-1], expected), (number, options)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("threshold", [None, 100])
def test_resident_pairs_gather_what_the_host_does(threshold, device):
    rng = np.random.default_rng(0)
    pairs = Pairs(make(), rng.integers(0, 40, (30, 2)), rng.integers(0, 2, 30))
    fixed: dict[str, Any] = {"max_length": 9, "prefix": 300, "threshold": threshold}
    there = on(device, pairs, **fixed)
    assert len(there) == 30
    more: list[dict[str, Any]] = [{}, {"layout": "padded"}, {"multiple": 64}, {"index": [7, 4, 9]}]
    for options in more:
        expected = pairs.collate([2, 0, 29], **fixed, **options).to("cpu")
        assert same(there.collate([2, 0, 29], **fixed, **options).to(device), expected)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("prefix", [None, 5])
def test_the_ends_of_the_store_and_of_a_long_sequence(layout, prefix):
    split = Split.from_offsets(np.arange(1, 11, dtype=np.uint8), np.array([0, 0, 3, 9, 10, 10]))
    there = on("cpu", split)
    for rows in ([4], [3, 4], [4, 3], [0], [0, 4, 0], [2], [3], [1, 2, 3, 4, 0]):
        options: dict[str, Any] = {"max_length": 4, "layout": layout, "prefix": prefix}
        assert same(there.collate(rows, **options).to("cpu"), split.collate(rows, **options).to("cpu"))


def test_what_follows_a_gather_in_inference_mode_is_an_ordinary_tensor():
    there = on("cpu", make())
    with torch.inference_mode():
        there.collate([1, 2], max_length=1000).to("cpu")
    assert not there.collate([1, 2], max_length=1000).to("cpu").tokens.is_inference()


def test_more_than_one_chunk_is_uploaded_whole(monkeypatch):
    monkeypatch.setattr(resident, "CHUNK", 7)
    split = make()
    there = on("cpu", split)
    assert same(there.collate(range(40), max_length=30).to("cpu"), split.collate(range(40), max_length=30).to("cpu"))


def tokens_of(split: Examples) -> torch.Tensor:
    held = split.documents if isinstance(split, Pairs) else split
    assert isinstance(held, resident.ResidentSplit)
    return held.tokens


def test_what_splits_share_is_uploaded_once(tmp_path):
    split, labels = make(), np.zeros(2, np.int64)
    parts = {"train": split.subset([3, 1]), "val": split.subset([2]), "other": make()}
    there = {name: tokens_of(part).data_ptr() for name, part in upload_splits(parts, CPU, 1e9, max_length=9).items()}
    assert there["train"] == there["val"] != there["other"]

    np.save(tmp_path / "documents.npy", split.tokens)
    maps = [np.asarray(np.load(tmp_path / "documents.npy", mmap_mode="r")) for _ in range(2)]
    documents = [dataclasses.replace(split, tokens=tokens) for tokens in maps]
    pairs = {str(i): Pairs(some, np.array([[i, 1], [2, i]]), labels) for i, some in enumerate(documents)}
    there = upload_splits(pairs, CPU, split.tokens.nbytes + 1, max_length=9)
    assert tokens_of(there["0"]).data_ptr() == tokens_of(there["1"]).data_ptr()

    halves = {str(i): Split.from_offsets(maps[0][i : i + 5], np.array([0, 5])) for i in (0, 5)}
    there = upload_splits(halves, CPU, 1e9, max_length=9)
    for name, half in halves.items():
        assert tokens_of(there[name]).tolist() == [*half.tokens.tolist(), 0]


def test_all_splits_fit_or_none_is_uploaded():
    parts: dict[str, Examples] = {"train": make(), "val": make(count=11)}
    need = sum(tokens_of(on("cpu", part)).nbytes for part in parts.values())
    assert upload_splits(parts, CPU, need, max_length=9).keys() == parts.keys()
    assert upload_splits(parts, CPU, need - 1, max_length=9) == {}
    lit = {"train": make(high=200)}
    assert upload_splits(lit, CPU, 10, max_length=9, threshold=200) and not upload_splits(
        lit, CPU, 10, max_length=9, threshold=199
    )


def test_other_options_than_those_of_the_upload_are_errors():
    plain, lit = on("cpu", make()), on("cpu", make(), max_length=20, threshold=100)
    assert lit.collate([1], max_length=20, threshold=100).to("cpu").positions is not None
    for wrong in ({"threshold": None}, {"threshold": 101}, {"share": 0.1}, {"max_length": 19}, {"prefix": 3}):
        with pytest.raises(ValueError, match="uploaded with"):
            lit.collate([1], **{"max_length": 20, "threshold": 100, **wrong}).to("cpu")
    with pytest.raises(ValueError, match="uploaded with"):
        plain.collate([1], max_length=20, threshold=100).to("cpu")
    with pytest.raises(ValueError, match="on cpu, the batch is asked for on meta"):
        plain.collate([1], max_length=20).to("meta")
    with pytest.raises(IndexError):
        plain.collate([40], max_length=4).to("cpu")


# --- where a task's data are


def data_of(*args: str, stage: str = "fit") -> Any:
    """A prepared data module, as a trainer on the CPU sets it up."""
    run = configure([*args, "attn=flash"]).config
    data = build_modules(run, Rank(0, 1, CPU))[0]
    data.prepare_data()
    data.setup(stage)
    return data


def batches(data: Any) -> list[Batch]:
    train = (batch.to(CPU) for batch in data.train_dataloader().step(0))
    return [batch for loader in (train, data.val_dataloader(), *data.test_dataloader()) for batch in loader]


@pytest.mark.parametrize("fields", [LISTOPS, LIT, (*LIT, "model.pooling=cls", "batch.layout=padded")])
def test_a_task_s_batches_are_the_same_from_a_memory_that_is_large_enough(fields, monkeypatch):
    host = data_of(*fields)
    assert host.place == "data on the host" and host.resident == {}
    monkeypatch.setattr(resident, "device_memory", lambda _: 1 << 30)
    there = data_of(*fields)
    assert there.place == "data on the GPU" and there.resident.keys() == {"train", "val", *there.test_sets}
    assert all(same(a, b) for a, b in zip(batches(host), batches(there), strict=True))
    held = there.resident
    there.setup("test")
    assert there.resident is held and there.baselines("test") == host.baselines("test")


def test_a_quarter_of_the_memory_is_for_the_data(monkeypatch):
    parts = data_of(*LISTOPS).parts
    need = sum(part.tokens.nbytes + 1 for part in parts.values())
    for size, place in ((4 * need, "data on the GPU"), (4 * need - 1, "data on the host")):
        monkeypatch.setattr(resident, "device_memory", lambda _, size=size: size)
        assert data_of(*LISTOPS).place == place
    assert data_of(*LISTOPS, stage="test").resident.keys() == {"test", "fresh"}


def test_a_run_from_uploaded_data_is_the_run_from_the_host(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places, setup = [], TaskData.setup
    monkeypatch.setattr(TaskData, "setup", lambda data, stage=None: (setup(data, stage), places.append(data.place)))
    results = {}
    for name, size in (("host", 0), ("there", 1 << 30)):
        monkeypatch.setattr(resident, "device_memory", lambda _, size=size: size)
        results[name] = lra.fit(*LISTOPS, *FEW_STEPS, f"name={name}")
    assert places == ["data on the host"] * 2 + ["data on the GPU"] * 2  # of fit and of test
    one, other = (checkpoints.read_checkpoint(result["directory"])[0] for result in results.values())
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert results["host"]["test"] == results["there"]["test"]


@pytest.mark.gpu
@pytest.mark.parametrize("threshold", [None, 100])
@pytest.mark.parametrize("prefix", [None, 300])
@pytest.mark.parametrize("shape", [{}, {"multiple": 64}, {"layout": "padded"}])
def test_no_gather_waits_for_the_gpu(shape, prefix, threshold):
    split, fixed = make(), {"max_length": 20, "prefix": prefix, "threshold": threshold}
    there = on("cuda", split, **fixed)
    there.collate([1, 2, 3], **fixed, **shape).to("cuda")  # makes what is kept
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = there.collate([3, 7, 3], **fixed, **shape).to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(batch, split.collate([3, 7, 3], **fixed, **shape).to("cpu"))


@pytest.mark.gpu
def test_a_gpu_s_memory_is_known():
    assert resident.device_memory(torch.device("cuda", 0)) > 1 << 30 and resident.device_memory(CPU) == 0
