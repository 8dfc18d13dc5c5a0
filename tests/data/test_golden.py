"""Content hashes of prepared data, committed: results are compared across machines and years.

What changes one of them changes what a published number means. If that is wanted, the task gets a new version, so that
stores and results of the old one are told apart, and only then the new hash is written here. A hash that changes
without any change here (another NumPy, another Pillow) is a defect. The generators' own output is in test_listops.py
and test_pathfinder.py, the order of batches in test_order.py; here it is what lies in the store, and the splits.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from lra.data import store
from lra.data.split import Pairs
from lra.tasks import TASKS
from lra.training.data_verbs import task_data
from tests.fixtures import pngs, write_aan_pairs, write_cifar10, write_imdb

GENERATED = {
    "listops": ("task.train=300", "task.val=20", "task.test=30", "task.fresh=40", "task.min_length=8",
                "task.max_length=64"),
    "pathfinder": ("task.train=12", "task.val=4", "task.test=4"),
    "pathfinder@1": ("task.train=12", "task.val=4", "task.test=4", "task.version=1"),
    "path64": ("task.train=6", "task.val=2", "task.test=2", "task.level=easy", "task.data_seed=1"),
    "path64@1": ("task.train=6", "task.val=2", "task.test=2", "task.level=easy", "task.data_seed=1", "task.version=1"),
}  # fmt: skip


def contents(task: str, *args: str) -> dict[str, str]:
    """Of every split the hash of its examples and labels, in their order."""
    data = task_data((f"task={task}", *args))
    data.prepare_data()
    data.setup()
    hashes = {}
    for name, part in data.parts.items():
        digest = hashlib.sha256()
        for row, label in enumerate(part.labels):
            for sequence in part[row] if isinstance(part, Pairs) else (part[row],):
                digest.update(len(sequence).to_bytes(8) + sequence.tobytes())
            digest.update(int(label).to_bytes(8))
        hashes[name] = digest.hexdigest()[:16]
    return hashes


@pytest.mark.parametrize("name", GENERATED)
def test_golden_stores(name):
    assert contents(name.partition("@")[0], *GENERATED[name]) == GOLDEN[name]


def test_golden_text(tmp_path):
    def reviews(split: str, count: int) -> dict[str, Any]:
        texts = [f"{split} {row} naïve — " + "so " * (row % 5) for row in range(count)]
        return {"text": texts, "label": [row % 2 for row in range(count)]}

    source = write_imdb(tmp_path / "imdb", train=reviews("train", 40), test=reviews("test", 10))
    assert contents("text", f"source={source}") == GOLDEN["text"]


def test_golden_image(tmp_path):
    def images(first: int, count: int) -> dict[str, Any]:
        pixels = np.arange(first, first + count * 3072) * 37 % 251
        return {"img": pngs(pixels.astype(np.uint8).reshape(count, 32, 32, 3)), "label": [i % 10 for i in range(count)]}

    source = write_cifar10(tmp_path / "cifar10", train=images(0, 40), test=images(7, 10))
    assert contents("image", f"source={source}") == GOLDEN["image"]


def test_golden_retrieval(tmp_path):
    texts = {f"p{i}": f"paper {i}: " + "of attention " * (i % 4) for i in range(12)}
    pairs = [(i % 2, f"p{i % 12}", f"p{(5 * i + 1) % 12}") for i in range(30)]
    source = write_aan_pairs(tmp_path / "aan", texts, train=pairs[:20], val=pairs[20:25], test=pairs[25:])
    assert contents("retrieval", f"source={source}") == GOLDEN["retrieval"]


@pytest.mark.parametrize("task", sorted(TASKS.builtins()))
def test_golden_vocabularies(task):
    """Weights trained with one vocabulary are refused where another is."""
    assert store.vocabulary_hash(TASKS.get(task).Data.vocabulary)[:16] == VOCABULARIES[task]


GOLDEN = {
    "listops": {
        "train": "8c9f912d6cf7f0a4",
        "val": "8c6dc7c6ecd0b365",
        "test": "4a419b3fe9902140",
        "fresh": "32d306c4880f3cac",
    },
    "pathfinder": {"train": "b4b70dd0a649710a", "val": "e2f6a2e962653f49", "test": "da340859a0f7eb63"},
    "pathfinder@1": {"train": "ceafeab6118428ae", "val": "ed169e633c13a9a0", "test": "9206e869c0c7c7eb"},
    "path64": {"train": "6c939952cf34b92c", "val": "0decbc52bd284583", "test": "85b5073dd2871146"},
    "path64@1": {"train": "703a1fb223d1ec88", "val": "dcbb28b43c0ab2af", "test": "b6b9a38908236839"},
    "text": {"train": "3df92cce303ce5a6", "val": "ce8d8b6fe5906386", "test": "f294a312cfec4bc5"},
    "image": {"train": "71fcbc9929329f81", "val": "82e986f6ceebfd0b", "test": "c32d8a13d121e15a"},
    "retrieval": {"train": "b5a4f662c199dc38", "val": "2c4a76c68f78830b", "test": "f2852c616837ed4b"},
}

VOCABULARIES = {
    "image": "a507d85f43b24ccb",
    "listops": "f6862bcf2688ee03",
    "path256": "a507d85f43b24ccb",
    "path64": "a507d85f43b24ccb",
    "pathfinder": "a507d85f43b24ccb",
    "pathx": "a507d85f43b24ccb",
    "retrieval": "2096619eed2ac28e",
    "text": "2096619eed2ac28e",
}
