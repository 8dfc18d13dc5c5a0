"""`init=` across resolutions, attentions and classifiers: what moves, what is refused, and that it lasts."""

from pathlib import Path

import pytest
import torch

import lra
from lra.errors import UsageError
from lra.models.positions import resize_table
from lra.training import assembly, checkpoints, fit, transfer

MODEL = ("recipe=demo", "model.d_model=32", "model.d_ff=32", "trainer.accelerator=cpu")
FEW = ("task.train=16", "task.val=4", "task.test=4", "batch.size=4", "batch.eval=4")
STEPS = ("trainer.steps=4", "trainer.eval_every=2", "trainer.log_every=1")


def build(task: str, *args: str):
    """An untrained module; later arguments replace earlier ones."""
    shared = (f"task={task}", "attn=flash", *MODEL)
    given = {arg.partition("=")[0]: arg for arg in (*shared, *args)}
    return assembly.build_modules(fit.configure(list(given.values())).config)[1]


@pytest.fixture
def saved(tmp_path):
    """`saved("pathfinder", …)` is the file of an untrained model whose weights are those of seed 1."""

    def save(task: str, *args: str) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        checkpoints.save_weights(build(task, "seed=1", *args), path)
        return path

    return save


def moved(task: str, path: Path, *args: str):
    """A module that started from `path`, and what was moved."""
    module = build(task, f"init={path}", *args)
    return module, transfer.transfer_weights(module, *checkpoints.read_checkpoint(path), path)


def refused(message: str, task: str, path: Path, *args: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        moved(task, path, *args)
    assert "\n" not in str(error.value)


def tables(module) -> list[torch.Tensor]:
    return list(module.model.encoder.positions.tables)


HOW = ("gridwise", "bilinear", "bicubic")


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("how", HOW)
def test_a_table_of_pixels_is_resized_as_an_image(saved, how, pooling):
    path = saved("pathfinder", f"model.pooling={pooling}")
    module, said = moved("path64", path, f"model.pooling={pooling}", f"positions.resize={how}")
    weights, first = checkpoints.read_checkpoint(path)[0], int(pooling == "cls")
    before, (after,) = weights["encoder.positions.tables.0"], tables(module)
    assert torch.equal(after[:first], before[:first])
    assert torch.equal(after[first:], resize_table(before[first:], (32, 32), (64, 64), how))
    rest = module.model.state_dict()
    assert all(torch.equal(rest[key], value) for key, value in weights.items() if "tables" not in key)
    assert said.same == len(weights) - 1 and said.resized == f"{how}, 32x32 pixels to 64x64 pixels"
    assert said.describe("there") == f"init: {said.same} tensors of there; positions resized, {said.resized}"


def test_bilinear_is_the_default_of_images(saved):
    path = saved("pathfinder")
    (by_default,), (asked,) = (tables(moved("path64", path, *args)[0]) for args in ((), ("positions.resize=bilinear",)))
    assert torch.equal(by_default, asked)


def test_two_axes_are_resized_each(saved):
    path = saved("pathfinder", "model.axes=2")
    module, _ = moved("path64", path, "model.axes=2", "positions.resize=gridwise")
    for axis, table in enumerate(tables(module)):
        before = checkpoints.read_checkpoint(path)[0][f"encoder.positions.tables.{axis}"]
        assert torch.equal(table, before.repeat_interleave(2, 0))


def test_there_and_back_is_the_same_model(saved, tmp_path):
    path, large = saved("pathfinder"), tmp_path / "large.safetensors"
    checkpoints.save_weights(moved("path64", path, "positions.resize=gridwise")[0], large)
    module, said = moved("pathfinder", large, "positions.resize=gridwise")
    weights = checkpoints.read_checkpoint(path)[0]
    assert all(torch.equal(value, weights[key]) for key, value in module.model.state_dict().items())
    assert said.task == "path64@2" and said.resized == "gridwise, 64x64 pixels to 32x32 pixels"


def test_a_sequence_is_stretched_only_where_asked(saved):
    path = saved("listops", "task.max_length=32")
    refused("learned positions of 32 tokens for 64 tokens: positions.resize=bilinear", "listops", path)
    module, said = moved("listops", path, "positions.resize=gridwise")
    before = checkpoints.read_checkpoint(path)[0]["encoder.positions.tables.0"]
    assert torch.equal(tables(module)[0], before.repeat_interleave(2, 0))
    assert said.resized == "gridwise, 32 tokens to 64 tokens"


def test_options_without_effect_are_refused(saved):
    learned, rotary = saved("pathfinder"), saved("pathfinder", "model.positions=rotary")
    refused("positions.resize=bicubic: nothing is resized, both have 32x32", "pathfinder", learned,
            "positions.resize=bicubic")  # fmt: skip
    refused("positions.scale is for sinusoidal and rotary", "path64", learned, "positions.scale=pixel")
    refused("rotary positions are computed anew", "path64", rotary, "model.positions=rotary",
            "positions.resize=bilinear")  # fmt: skip
    refused("positions.scale=image changes nothing, both have 32x32", "pathfinder", rotary,
            "model.positions=rotary", "positions.scale=image")  # fmt: skip
    text = saved("listops", "model.positions=rotary")
    refused("positions.scale=image is for images", "listops", text, "model.positions=rotary",
            "task.max_length=32", "positions.scale=image")  # fmt: skip
    for field in ("positions.scale=pixel", "positions.resize=gridwise", "head=fresh"):
        with pytest.raises(UsageError, match=rf"{field} says what is done .* it needs init="):
            build("path64", field)


def test_all_that_does_not_fit_is_in_one_line(saved):
    path = saved("pathfinder")
    fields = ("model.d_model=48", "model.heads=3", "model.layers=1", "model.d_ff=64", "model.axes=2")
    refused(
        "does not fit this model: model.d_model 32 here 48, model.layers 2 here 1, model.heads 2 here 3, "
        "model.d_ff 32 here 64, model.axes 1 here 2; use the model fields of its config.yaml",
        "path64", path, *fields,
    )  # fmt: skip
    refused("model.positions learned here rotary", "path64", path, "model.positions=rotary")
    refused("model.pooling mean here cls", "path64", path, "model.pooling=cls")
    refused(r"vocabulary of pathfinder@2, not of listops@1: choose .*", "listops", path, "model.heads=1")


def test_heads_count_although_no_shape_shows_them(saved):
    refused("model.heads 2 here 4", "pathfinder", saved("pathfinder"), "model.heads=4", "attn=standard")


def test_gridwise_refuses_what_is_no_multiple(saved):
    path = saved("listops", "task.max_length=40")
    refused("gridwise needs integer ratios, not 40 to 64", "listops", path, "positions.resize=gridwise")


def test_another_attention_is_said_and_its_own_parameters_are_fresh(saved):
    path = saved("pathfinder")
    module, said = moved("path64", path, "attn=butterfly")
    assert said.changed == {"attn": ["flash", "butterfly"]} and not said.fresh and not said.left
    assert "trained with attn=flash, here butterfly" in said.describe(path)
    module, said = moved("path64", path, "attn=linformer", "attn.k=8")
    assert said.fresh == ["blocks.*.attention.projections.0", "blocks.*.attention.projections.1"]
    fresh, weights = (
        build("path64", "attn=linformer", "attn.k=8").model.state_dict(),
        checkpoints.read_checkpoint(path)[0],
    )
    for key, value in module.model.state_dict().items():
        if "tables" not in key:  # the fresh ones are those of the seed, so of every rank
            assert torch.equal(value, fresh[key] if ".attention." in key else weights[key])


def test_parameters_that_only_the_other_attention_had_are_left_behind(saved):
    path = saved("pathfinder", "attn=linformer", "attn.k=8")
    _, said = moved("path64", path)
    assert said.left == ["blocks.*.attention.projections.0", "blocks.*.attention.projections.1"] and not said.fresh
    # of the same name, and something else
    module, said = moved("path64", saved("pathfinder", "attn=lsformer", "model.attn_dropout=0"), "attn=performer")
    own = build("path64", "attn=performer").model.state_dict()
    key = "encoder.blocks.0.attention.projection"
    assert torch.equal(module.model.state_dict()[key], own[key]) and "blocks.*.attention.projection" in said.fresh


def test_the_same_attention_with_other_options_is_refused(saved):
    path = saved("pathfinder", "attn=linformer", "attn.k=8")
    refused(
        r"does not fit this model: blocks\.\*\.attention\.projections\.0 \[1024, 8\] here \[1024, 16\], "
        r"blocks\.\*\.attention\.projections\.1 .* or another attn=, whose parameters are then fresh",
        "pathfinder", path, "attn=linformer", "attn.k=16",
    )  # fmt: skip
    refused(r"blocks\.\*\.qkv\.weight \[96, 32\] here \[64, 32\]", "path64", saved("pathfinder"), "attn=reformer")


@pytest.mark.parametrize(("attn", "part"), [("linformer", "projections.0"), ("reformer", "rotations")])
def test_what_has_the_size_of_the_longest_sequence_is_fresh_for_another(saved, attn, part):
    path = saved("pathfinder", f"attn={attn}")
    module, said = moved("path64", path, f"attn={attn}")
    assert f"blocks.*.attention.{part}" in said.fresh and not said.left
    assert f"fresh: blocks.*.attention.{part}" in said.describe(path)
    own, weights = build("path64", f"attn={attn}").model.state_dict(), checkpoints.read_checkpoint(path)[0]
    for key, value in module.model.state_dict().items():
        if "tables" not in key:
            assert torch.equal(value, own[key] if part.partition(".")[0] in key else weights[key])
    assert not moved("pathfinder", path, f"attn={attn}")[1].fresh


def test_a_test_set_that_was_trained_on_is_refused(saved):
    """Splits of one seed follow one another: with fewer for training, test begins where training was."""
    path = saved("pathfinder", "task.train=100")
    message = r"was trained on, as task.train=10 is not its 100: .* add task.data_seed=1$"
    refused(message, "pathfinder", path, "task.train=10", "task.val=10", "task.test=50")
    refused(
        "validation would be .* as task.train=50 is not its 100", "pathfinder", path, "task.train=50", "task.val=90"
    )
    for fine in (("task.train=200",), ("task.train=10", "task.data_seed=1"), ("task.train=10", "task.level=hard")):
        moved("pathfinder", path, "task.val=10", *fine)
    moved("path64", path, "task.train=10", "task.val=10")
    lit = saved("pathfinder", "task.train=100", "task.tokens=lit", "task.background=0.1")
    refused(message, "pathfinder", lit, "task.train=10", "task.val=10", "task.tokens=lit", "task.background=0.2")
    refused(
        "as task.train=20 is not its 300", "listops", saved("listops", "task.train=300"), "task.train=20", "task.val=5"
    )
    shorter = ("task.train=20", "task.val=5", "task.max_length=1500")  # of most numbers the same expression
    refused("as task.train=20 is not its 300", "listops", saved("listops", "task.train=300"), *shorter)


def test_of_what_is_only_scored_the_test_set_alone_must_not_be_seen(saved):
    """It follows validation, which is then not scored."""
    path = saved("listops", "task.train=100")
    weights, identity = checkpoints.read_checkpoint(path)
    for val, fine in ((50, True), (49, False)):
        into = build("listops", "task.train=50", f"task.val={val}")
        if fine:
            transfer.transfer_weights(into, weights, identity, path, score=True)
        else:
            with pytest.raises(UsageError, match="test would be of the examples that .* was trained on"):
                transfer.transfer_weights(into, weights, identity, path, score=True)


def test_a_validation_set_that_was_trained_on_is_refused(saved):
    """Image and Text hold out a part of train, which depends on fields."""
    message = r"validation would be of examples that .* was trained on: give task\.{} as it had$"
    refused(message.format("data_seed=0,"), "image", saved("image"), "task.data_seed=1")
    refused(message.format("protocol=lra,"), "text", saved("text", "task.protocol=lra"))
    refused(message.format("data_seed=2,"), "text", saved("text", "task.data_seed=2"))
    moved("text", saved("text"), "task.protocol=lra")
    moved("text", saved("text", "task.data_seed=2"), "task.data_seed=2")
    path = saved("text", "task.data_seed=2")  # of a test set there is one
    transfer.transfer_weights(build("text"), *checkpoints.read_checkpoint(path), path, score=True)


def test_what_an_earlier_run_was_trained_on_is_remembered(saved, tmp_path):
    """Over a run on other images, and over one that goes on from its own checkpoint."""
    first, few = saved("pathfinder", "task.train=100"), ("task.train=10", "task.val=10")
    module, _ = moved("path64", first, *few)
    checkpoints.save_weights(module, tmp_path / "64.safetensors")
    again = build("path64", *few)
    checkpoints.load_into(again, *checkpoints.read_checkpoint(tmp_path / "64.safetensors"), tmp_path)
    checkpoints.save_weights(again, tmp_path / "on.safetensors")
    for path in (tmp_path / "64.safetensors", tmp_path / "on.safetensors"):
        refused("as task.train=10 is not its 100", "pathfinder", path, *few)
        moved("pathfinder", path, "task.train=100", "task.val=20")
        moved("path64", path, *few)


def test_the_head_is_kept_or_fresh(saved):
    path = saved("pathfinder")
    weights, own = checkpoints.read_checkpoint(path)[0], build("path64").model.state_dict()
    for choice, source, names in (("kept", weights, []), ("fresh", own, ["head"])):
        module, said = moved("path64", path, f"head={choice}")
        state = module.model.state_dict()
        assert all(torch.equal(state[key], source[key]) for key in own if key.startswith("head."))
        assert said.fresh == names and said.same == len(weights) - 1 - 4 * len(names)


def test_a_head_of_other_classes_is_fresh_and_can_not_be_kept(saved):
    path = saved("image")
    _, said = moved("pathfinder", path)
    assert said.fresh == ["head"] and said.describe(path).endswith("; fresh: head") and said.resized is None
    refused("has another head than this task: leave out head=kept", "pathfinder", path, "head=kept")


@pytest.mark.parametrize(("axes", "once", "twice"), [(1, [1 / 4], [1 / 16]), (2, [1 / 2] * 2, [1 / 4] * 2)])
@pytest.mark.parametrize("positions", ["rotary", "sinusoidal"])
def test_factors_multiply_over_transfers(saved, tmp_path, positions, axes, once, twice):
    model = (f"model.positions={positions}", f"model.axes={axes}")
    paths = [saved("pathfinder", *model), tmp_path / "64.safetensors", tmp_path / "128.safetensors"]
    module, said = moved("path64", paths[0], *model, "positions.scale=image")
    assert said.scale == once and "coordinates times" in said.describe("there")
    checkpoints.save_weights(module, paths[1])
    assert moved("pathx", paths[1], *model)[1].scale == once  # a pixel keeps its distance
    assert moved("pathx", paths[1], *model, "positions.scale=pixel")[1].scale == once
    module, said = moved("pathx", paths[1], *model, "positions.scale=image")
    assert said.scale == twice
    checkpoints.save_weights(module, paths[2])
    assert lra.load(paths[2]).model.encoder.positions.state_dict()["scale"].tolist() == twice
    assert moved("pathfinder", paths[2], *model, "positions.scale=image")[1].scale == [1.0] * axes


def test_pixel_changes_nothing(saved):
    path = saved("pathfinder", "model.positions=rotary")
    module, said = moved("path64", path, "model.positions=rotary")
    assert said.scale == [1.0] and said.describe("there") == f"init: {said.same} tensors of there, all of this model's"
    weights = checkpoints.read_checkpoint(path)[0]
    assert all(torch.equal(value, weights[key]) for key, value in module.model.state_dict().items())


def test_an_older_checkpoint_has_no_factor(saved, monkeypatch, tmp_path):
    path, model = saved("pathfinder", "model.positions=rotary"), ("model.positions=rotary", "positions.scale=image")
    weights, identity = checkpoints.read_checkpoint(path)
    del weights["encoder.positions.scale"]
    for field in ("head", "positions"):
        del identity["config"][field]
    old = tmp_path / "old.ckpt"
    torch.save({"state_dict": {f"model.{k}": v for k, v in weights.items()}, "lra": identity}, old)
    assert moved("path64", old, *model)[1].scale == [1 / 4]
    assert lra.load(old).model.encoder.positions.state_dict()["scale"].tolist() == [1.0]


EMBEDDING, TABLE, SIZE = "encoder.embedding.weight", "encoder.positions.tables.0", 256  # ids of a pixel


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize(("before", "after"), [("mean", "mean"), ("mean", "cls"), ("cls", "mean"), ("cls", "cls")])
def test_from_a_pretraining(saved, before, after, positions):
    args = f"model.positions={positions}", f"model.pooling={after}"
    path = saved("pathfinder", args[0], f"model.pooling={before}", "pretrain=masked")
    weights, own = checkpoints.read_checkpoint(path)[0], build("pathfinder", *args).model.state_dict()
    own = {key: value.clone() for key, value in own.items()}
    module, said = moved("pathfinder", path, *args)
    state = module.model.state_dict()
    one, other = int(before == "cls"), int(after == "cls")
    fresh, left = ["CLS"] * (other > one), ["CLS"] * (one > other)
    assert said.fresh == ["head", *fresh] and said.left == ["decoder", *left, "MASK"]
    assert said.changed["pretrain"] == ["masked", "none"] and ("model.pooling" in said.changed) == (before != after)
    assert f"trained with pretrain=masked, here none; fresh: {', '.join(said.fresh)}; left" in said.describe(path)

    assert len(weights[EMBEDDING]) == SIZE + one + 1 and len(state[EMBEDDING]) == SIZE + other
    assert torch.equal(state[EMBEDDING][:SIZE], weights[EMBEDDING][:SIZE])
    source = weights if one else own
    assert torch.equal(state[EMBEDDING][SIZE:], source[EMBEDDING][SIZE : SIZE + other])
    changed = {EMBEDDING}
    if positions == "learned":
        assert torch.equal(state[TABLE][other:], weights[TABLE][one:])
        assert torch.equal(state[TABLE][:other], source[TABLE][:other])
        changed |= {TABLE} if one != other else set()
    for key, value in state.items():
        if key not in changed:
            assert torch.equal(value, own[key] if key.startswith("head.") else weights[key])
    kept = {key for key in weights if not key.startswith("decoder.")}
    assert said.same == len(kept - changed)


def test_a_pretraining_of_another_resolution(saved):
    path = saved("pathfinder", "model.pooling=mean", "pretrain=masked", "mask=0.3")
    weights = checkpoints.read_checkpoint(path)[0]
    module, said = moved("path64", path, "model.pooling=cls", "positions.resize=gridwise")
    (table,) = tables(module)
    assert torch.equal(table[1:], resize_table(weights[TABLE], (32, 32), (64, 64), "gridwise"))
    assert torch.equal(table[:1], tables(build("path64", "model.pooling=cls"))[0][:1])
    assert said.resized and said.fresh == ["head", "CLS"]
    module, said = moved("path64", path, "pretrain=masked", "positions.resize=gridwise")  # it goes on
    assert not said.changed and not said.fresh and not said.left and said.same == len(weights) - 1
    assert torch.equal(module.model.state_dict()[EMBEDDING], weights[EMBEDDING])


def test_a_pretraining_from_a_run(saved):
    path = saved("pathfinder", "model.pooling=cls")
    weights = checkpoints.read_checkpoint(path)[0]
    module, said = moved("path64", path, "pretrain=masked", "model.pooling=cls")
    assert said.changed == {"pretrain": ["none", "masked"]} and said.resized
    assert said.fresh == ["decoder", "MASK"] and said.left == ["head"]
    own = build("path64", "pretrain=masked", "model.pooling=cls").model.state_dict()[EMBEDDING]
    assert torch.equal(module.model.state_dict()[EMBEDDING], torch.cat((weights[EMBEDDING], own[-1:])))


def test_what_a_pretraining_does_not_have_is_refused(saved):
    path = saved("pathfinder", "pretrain=masked")
    refused("has no head to keep, because a pretraining made it: leave out head=kept", "pathfinder", path, "head=kept")
    refused("model.pooling mean here cls", "pathfinder", path, "pretrain=masked", "model.pooling=cls")
    refused("model.heads 2 here 1", "pathfinder", path, "model.heads=1")
    linformer = saved("pathfinder", "attn=linformer", "attn.k=8", "pretrain=masked")
    _, said = moved("pathfinder", linformer, "attn=linformer", "attn.k=8", "model.pooling=cls")  # a place longer
    assert said.fresh == ["blocks.*.attention.projections.0", "blocks.*.attention.projections.1", "head", "CLS"]
    with pytest.raises(UsageError, match="has no decoder and MASK for this model"):
        lra.test(f"init={saved('pathfinder')}", "pretrain=masked")
    assert lra.load(path).run.pretrain == "masked"


def test_another_difference_of_pairs_is_said(saved):
    older = saved("retrieval")
    assert "difference" not in checkpoints.read_checkpoint(older)[1]["config"]["task"]
    assert moved("retrieval", older, "task.difference=absolute")[1].changed == {
        "task.difference": ["signed", "absolute"]
    }
    path = saved("retrieval", "task.difference=absolute")
    _, said = moved("retrieval", path, "task.difference=signed")
    assert said.changed == {"task.difference": ["absolute", "signed"]}
    assert "trained with task.difference=absolute, here signed" in said.describe("there")
    assert not moved("retrieval", path, "task.difference=absolute")[1].changed


def test_another_base_of_rotary_positions_and_another_classifier_are_said(saved):
    path = saved("pathfinder", "model.positions=rotary")
    module, said = moved(
        "pathfinder", path, "model.positions=rotary", "model.rotary_base=500", "model.classifier=linear"
    )
    assert said.changed == {"model.rotary_base": [10000.0, 500.0]} and said.fresh == ["head"]
    assert module.model.encoder.positions.base == 500
