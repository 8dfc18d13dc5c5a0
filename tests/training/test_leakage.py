"""What weights were trained on is known over chains of runs, and is not scored; what is not known is said."""

from pathlib import Path

import pytest
import torch

import lra
from lra.errors import UsageError
from lra.training import assembly, checkpoints, fit, leakage, transfer

MODEL = ("recipe=demo", "model.d_model=32", "model.d_ff=32", "model.positions=rotary", "trainer.accelerator=cpu")
FEW = ("task.train=10", "task.val=4")


def build(task: str, *args: str):
    given = {arg.partition("=")[0]: arg for arg in (f"task={task}", "attn=flash", *MODEL, *args)}
    return assembly.build_modules(fit.configure(list(given.values())).config)[1]


@pytest.fixture
def chain(tmp_path):
    """`chain(run, run, …)`: the weights of the last of untrained runs, each from the one before; a run is a tuple."""

    def make(*runs: tuple[str, ...], start: Path | None = None) -> Path:
        path = start
        for task, *args in runs:
            module = build(task, *args, *([] if path is None else [f"init={path}"]))
            if path is not None:
                transfer.transfer_weights(module, *checkpoints.read_checkpoint(path), path)
            path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
            checkpoints.save_weights(module, path)
        assert path is not None
        return path

    return make


def asked(path: Path, task: str, *args: str, score: bool = False) -> transfer.Transfer:
    """What is said of weights for a run, or with `score` for a test."""
    module = build(task, *args, *([] if score else [f"init={path}"]))
    return transfer.transfer_weights(module, *checkpoints.read_checkpoint(path), path, score=score)


def refused(message: str, *args, **options) -> None:
    with pytest.raises(UsageError, match=message) as error:
        asked(*args, **options)
    assert "\n" not in str(error.value)


def forget(path: Path, **changes) -> Path:
    """The weights as an older lra wrote them: without a word of what they have seen, or with other words."""
    weights, identity = checkpoints.read_checkpoint(path)
    del identity["seen"]
    old = path.with_suffix(".ckpt")
    torch.save({"state_dict": {f"model.{k}": v for k, v in weights.items()}, "lra": identity | changes}, old)
    return old


OLD = ("task.level=easy", "task.version=1")
OTHERS = [
    ("pathfinder", "task.level=hard"),
    ("path64", "task.level=easy"),
    ("pathfinder", "task.level=intermediate", "task.tokens=lit"),
]


@pytest.mark.parametrize("other", OTHERS)
def test_pathfinder_1_shares_its_labels_between_levels_and_resolutions_and_2_does_not(chain, other):
    path = chain(("pathfinder", *OLD, "task.train=400"))
    task, *args = other
    refused(r"^validation would be .*task.train=10 is not its 400", path, task, *args, *FEW, "task.version=1")
    refused(r"^test would be .*task.train=10 is not its 400", path, task, *args, *FEW, "task.version=1", score=True)
    for fine in (("task.train=400",), (*FEW, "task.data_seed=1"), (*FEW, "task.version=2")):
        assert not asked(path, task, *args, "task.version=1", *fine).notes
    new = chain(("pathfinder", "task.level=easy", "task.train=400"))
    for version in (1, 2):
        assert not asked(new, task, *args, *FEW, f"task.version={version}", score=True).notes


def test_a_stream_is_remembered_over_runs_on_other_data(chain):
    first = ("pathfinder", *OLD, "task.train=400")
    for between in [("path64", *FEW), ("image",), ("pathx", *OLD, "task.train=500")]:
        path = chain(first, between)
        refused("task.train=10 is not its [45]00", path, "pathfinder", "task.level=hard", "task.version=1", *FEW)
        asked(path, "pathfinder", "task.level=hard", *FEW)


def test_a_pretraining_counts(chain):
    path = chain(("listops", "task.train=300", "pretrain=masked"), ("listops", "task.train=300"))
    refused("task.train=20 is not its 300", path, "listops", "task.train=20", "task.val=5", score=True)
    path = chain(("listops", "task.train=300", "pretrain=masked", "task.max_length=40", "task.min_length=8"))
    refused("task.train=20 is not its 300", path, "listops", "task.train=20", "task.val=5")
    path = chain(("text", "pretrain=masked", "task.data_seed=1"))
    refused("validation would be .* give task.data_seed=1, as it had$", path, "text")


@pytest.mark.parametrize("between", [(), ("retrieval",)])
def test_a_part_that_is_held_out_is_remembered_over_runs(chain, between):
    def runs(*last: str) -> Path:
        return chain(("text", *last), *([between] if between else []))

    refused("give task.data_seed=1, as it had$", runs("task.data_seed=1"), "text")
    refused("give task.protocol=lra, as it had$", runs("task.protocol=lra"), "text")
    for fine in ("task.data_seed=1", "task.protocol=lra"):
        asked(runs("task.data_seed=1"), "text", fine)
    asked(chain(("text", "task.data_seed=1")), "text", score=True)  # of a test set there is one
    both = chain(("text", "task.data_seed=1"), ("text", "task.protocol=lra"))
    for seed in (0, 1):
        refused("give task.protocol=lra, as it had$", both, "text", f"task.data_seed={seed}")
    images = chain(("image", "task.data_seed=3"), ("pathfinder", *FEW))
    refused("give task.data_seed=3, as it had$", images, "image")


def test_what_is_not_known_is_said(chain, tmp_path):
    first = ("text", "task.data_seed=1")
    stated, older = chain(first, ("text", "task.data_seed=1")), forget(chain(first, ("text", "task.data_seed=1")))
    assert not asked(stated, "text", "task.data_seed=1").notes
    assert not asked(forget(chain(first)), "text", score=True).notes, "it began from nothing"
    [note] = asked(older, "text", "task.data_seed=1").notes
    assert "does not say on what that was trained" in note and "0.safetensors" not in note.partition(" comes from ")[0]
    on = chain(("image",), ("image",), start=None)
    on = chain(("image",), start=forget(on))
    assert len(asked(on, "image").notes) == 1, "it is not forgotten in a later run"

    listops = ("listops", "recipe=xiong2021")
    here = (*listops, f"task.source={tmp_path / 'one'}")
    imported = chain(here)
    assert not asked(imported, *here).notes
    for other in ((*listops, "task.source=/there/two"), listops):
        [note] = asked(imported, *other).notes
        assert "was trained on listops@1, source=one: whether that has examples of listops@1, " in note
        assert str(tmp_path) not in note.partition("was trained")[2]
    short = chain(("listops", "recipe=xiong2021", "task.min_length=4", "task.max_length=16"))
    for lengths, noted in ((("4", "16"), False), (("4", "64"), True), (("16", "64"), False)):
        limits = [f"task.{name}={value}" for name, value in zip(("min_length", "max_length"), lengths, strict=True)]
        notes = asked(short, *listops, *limits).notes
        assert ["of 4 to 16 tokens: with other lengths" in note for note in notes] == [True] * noted
    [note] = asked(chain(("retrieval",)), "retrieval", "task.dataset=scisumm").notes
    assert "retrieval@1, dataset=lra: whether that has examples of retrieval@1, dataset=scisumm is not known" in note
    assert not asked(chain(("retrieval",)), "text").notes


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("pathx, source=generate, level=hard, data_seed=4", "pathfinder@1, data_seed=4"),
        ("listops, source=generate, data_seed=2", "listops@1, data_seed=2"),
        ("gone, source=generate, data_seed=2", "gone, source=generate, data_seed=2"),
        ("listops, source=generate, data_seed=x", "listops, source=generate, data_seed=x"),
        ("odd", "odd"),
    ],
)
def test_the_words_of_an_older_checkpoint_are_read(chain, name, now):
    path = forget(chain(("pathfinder", *FEW)), seen={name: 300})
    assert leakage.sets_before_run(checkpoints.read_checkpoint(path)[1]) == {now: 300}
    asked(path, "path64", *FEW)


def test_released_weights_say_what_they_do_not_know():
    """They are older than the list of what they have seen, and begin with runs on Pathfinder's easier levels."""
    folder = Path(__file__).parents[2] / "checkpoints" / "path256-all"
    module = lra.load(folder)
    assert module.run.task.version == 1 and module.identity()["task"] == "path256@1"
    known = leakage.sets_of_checkpoint(checkpoints.read_checkpoint(folder)[1])
    assert known["pathfinder@1, data_seed=0"] == 160000
    assert str(known[leakage.UNSTATED_SET]).endswith("curriculum+task.background=0.3,task.tokens=lit-s0")
