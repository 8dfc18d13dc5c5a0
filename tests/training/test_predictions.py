"""A run keeps what it predicts for each test example, once and in order, whatever computes it."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import lra
from lra.data.store import Store
from lra.errors import UsageError
from lra.tasks.batches import Collation, Rank
from lra.training import assembly, fit
from lra.training.predictions import Predictions, gather_predictions, read_predictions, write_predictions
from tests.fixtures import write_aan_papers
from tests.training.test_ranks import alone

CPU = torch.device("cpu")


def test_a_run_keeps_what_it_predicts_of_each_test_set(small):
    result = small("predictions=true", "batch.eval=7", "name=kept")
    found = read_predictions(folder_of(result) / "predictions.npz")
    assert found.keys() == {"test", "fresh"}
    for split, predictions in found.items():
        assert predictions.predicted.dtype == predictions.label.dtype == np.uint8 and len(predictions.label) == 20
        assert predictions.right.mean() == pytest.approx(result[split]["accuracy"])
    assert "predictions" not in result["config"] and not any("predictions" in each for each in result["overrides"])
    assert small("predictions=true", "batch.eval=7", "name=kept") == result, "a finished run is not done again"


def folder_of(result: dict[str, Any]) -> Path:
    return Path(result["directory"])


def test_a_run_without_predictions_is_the_same_run_and_gets_them_later(small):
    result = small()
    path = folder_of(result)
    assert not (path / "predictions.npz").exists()
    with pytest.raises(UsageError, match=r"is finished and has no predictions.npz: lra test init=\S+ predictions=true"):
        small("predictions=true")
    before = (path / "result.json").read_bytes()
    scored = lra.test(f"init={path}", "predictions=true", "batch.eval=3")
    right = {split: each.right.mean() for split, each in read_predictions(path / "predictions.npz").items()}
    assert right == {split: pytest.approx(scored[split]["accuracy"]) for split in ("test", "fresh")}
    assert (path / "result.json").read_bytes() == before


def test_the_loaded_module_predicts_the_same_of_the_same_tokens(small):
    """Also with a CLS token, which the tokens of a store lack."""
    result = small("predictions=true", "model.pooling=cls", "trainer.steps=4")
    module = lra.load(result["directory"])
    test = Store.open(Path(os.environ["LRA_DATA"]) / result["data"]["store"], "").split("test")
    tokens = [test[row] for row in range(len(test))]
    with torch.no_grad():
        scores = module(module.make_batch(tokens))
        one = module(module.make_batch([tokens[3].tolist()]))
    kept = read_predictions(folder_of(result) / "predictions.npz")["test"].predicted
    assert np.array_equal(scores.argmax(1), kept) and torch.allclose(one, scores[3:4], atol=1e-5)
    for wrong in (["12"], [[0, 15]], [[-1]], [[0.5]], [[[1, 2], [3, 4]]]):
        with pytest.raises(UsageError, match="^sequence 0 must be integers from 0 to 14 in one dimension$"):
            module.make_batch(wrong)
    with pytest.raises(UsageError, match="no sequence"):
        module.make_batch([])


def test_a_batch_of_lit_pixels_has_these_alone_with_their_places():
    run = fit.configure(["task=pathfinder", "attn=flash", "recipe=paths", "tokens=lit"]).config
    image = np.zeros(1024, np.uint8)
    image[[5, 700]] = 9
    batch = assembly.build_modules(run)[1].make_batch([image])
    assert batch.length.tolist() == [2] and batch.token_positions().tolist() == [5, 700]


def test_only_what_a_finished_run_itself_predicts_is_kept(finished, tmp_path):
    with pytest.raises(UsageError, match="leave out task.data_seed"):
        lra.test(f"init={finished}", "predictions=true", "task.data_seed=5")
    with pytest.raises(UsageError, match="needs init=<the directory of a finished run>: .*best.ckpt is none"):
        lra.test(f"init={finished}/best.ckpt", "predictions=true")
    assert not (finished / "predictions.npz").exists()


def test_a_pretraining_run_has_no_classes(small):
    with pytest.raises(UsageError, match="predictions=true: pretrain=masked predicts no class of an example"):
        small("predictions=true", "pretrain=masked")


def test_an_earlier_session_leaves_no_predictions(small):
    result = small("predictions=true")
    path = folder_of(result)
    (path / "result.json").write_text(json.dumps(result | {"status": "failed"}))
    small("resume=auto")
    assert (path / "result.json").exists() and not (path / "predictions.npz").exists()


@pytest.fixture
def papers(tmp_path):
    texts = {f"P{i}": "word " * (i % 5 + 1) for i in range(12)}
    pairs = [(i % 2, f"P{i % 12}", f"P{(5 * i + 1) % 12}") for i in range(11)]
    folder = write_aan_papers(tmp_path / "aan", texts, train=pairs * 3, val=pairs[:4], test=pairs)
    return ("task=retrieval", f"source={folder}", "dataset=scisumm", "max_length=32")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("filled", [False, True])
def test_all_ranks_together_have_each_example_once(world, filled, papers, monkeypatch, tmp_path):
    """Of a batch that is filled up, too, and of pairs: here a model predicts the row that it sees."""
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "data"))
    lists = ("task=listops", "train=30", "val=4", "test=11", "fresh=9", "max_length=32")
    for task in (lists, papers):
        run = fit.configure([*task, "attn=flash", "recipe=demo", "batch.eval=4", "predictions=true"]).config
        kept = defaultdict(list)  # of all ranks
        data, module = assembly.build_modules(run)
        classes = module.facts.classes
        monkeypatch.setattr(module, "evaluate", lambda batch, classes=classes: predict_row(batch, classes))
        for rank in range(world):
            data = type(data)(run, Collation(Rank(rank, world, CPU), None, filled))
            data.prepare_data()
            data.setup("test")
            for number, loader in enumerate(data.test_dataloader()):
                for batch in loader:
                    module.test_step(batch, 0, number)
            for split in data.test_sets:
                kept[split] += module.predicted.pop(split)
        module.predicted = dict(kept)
        strategy = SimpleNamespace(root_device=CPU, reduce=lambda sums, reduce_op: sums)
        trainer: Any = SimpleNamespace(strategy=strategy)
        gathered = gather_predictions(module, data, trainer)
        assert gathered.keys() == set(data.test_sets)
        for split, (predicted, label) in gathered.items():
            assert predicted.tolist() == [row % classes for row in range(len(data.parts[split]))]
            assert label.tolist() == list(data.parts[split].labels)
        module.predicted = {split: parts[:-1] for split, parts in kept.items()}
        with pytest.raises(RuntimeError, match="examples were not scored exactly once"):
            gather_predictions(module, data, trainer)


def predict_row(batch: Any, classes: int) -> torch.Tensor:
    each = batch.size // len(batch.label)
    return torch.nn.functional.one_hot(batch.index[::each].long() // each % classes, classes).float()


@pytest.mark.slow
def test_two_processes_keep_what_one_keeps(small, tmp_path):
    path = folder_of(small("model.attn_dropout=0", "name=one", "predictions=true", "task.test=21"))
    one = read_predictions(path / "predictions.npz")
    command = [sys.executable, "-m", "lra", "test", f"init={path}", "predictions=true", "trainer.devices=2"]
    (path / "predictions.npz").unlink()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=alone())
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    two = read_predictions(path / "predictions.npz")
    assert one.keys() == two.keys()
    for split in one:
        assert np.array_equal(one[split].predicted, two[split].predicted)
        assert np.array_equal(one[split].label, two[split].label)


def test_a_damaged_file_is_refused_and_none_is_unpickled(tmp_path):
    path = tmp_path / "predictions.npz"
    assert read_predictions(path) == {}
    good = Predictions(np.zeros(3, np.uint8), np.ones(3, np.uint8))
    write_predictions(path, {"test": good})
    whole = path.read_bytes()
    place = whole.index(good.label.tobytes())
    for text in (b"", whole[:200], whole[:place] + b"\7" + whole[place + 1 :]):
        path.write_bytes(text)
        with pytest.raises(UsageError, match="can't be read as predictions .*lra test init=.* predictions=true"):
            read_predictions(path)
    for arrays in (
        {"test": good.label}, {"test": good.label, "test_label": good.label[:2]}, {},
        {"test": np.array([{}] * 3), "test_label": good.label}, {"test": good.label * 1.0, "test_label": good.label},
    ):  # fmt: skip
        np.savez(path, **arrays)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="can't be read as predictions"):
            read_predictions(path)
    np.savez_compressed(path, test=good.label, test_label=good.label)
    with pytest.raises(UsageError, match="it is compressed"):
        read_predictions(path)
