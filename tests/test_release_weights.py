"""Released weights are what their cards say, score what they state and start other runs; their pictures show them."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import lra
from benchmarks import pictures, release
from benchmarks.pages import cards, measured
from benchmarks.pages.pictures import FOLDER, curve
from benchmarks.studies.rescoring import study as rescoring
from lra.bench.output import write_measurement
from lra.data.pathfinder.generate import draw_image
from lra.data.pathfinder.law import image_law
from lra.errors import UsageError
from lra.experiments import accuracy
from lra.experiments.results import archive
from lra.experiments.results.card import format_accuracy
from lra.models.attention.base import Attention
from lra.tasks import TASKS
from lra.training import assembly, checkpoints, fit, transfer
from tests.composing import composed
from tests.drawings import lines, words

RELEASED = cards.released()
GENERATED = [name for name, result in RELEASED.items() if "train" in result["config"]["task"]]
PICTURED = [name for name, it in RELEASED.items() if (task := TASKS.get(cards.task_name(it))).grid(task.Config)]
CPU = ("trainer.accelerator=cpu", "trainer.precision=fp32")


def folder(name: str) -> Path:
    return cards.RELEASES / name


def linear(name: str) -> list[str]:
    """What spares a card's reader the N x N scores that weights were trained with."""
    return ["attn=flash"] if RELEASED[name]["attn"] == "standard" else []


def shown(text: str, block: int) -> list[list[str]]:
    """The commands of a card's shell block of this number, without their comments."""
    lines = text.split("```sh\n")[1 + block].partition("```")[0].splitlines()
    return [shlex.split(line, comments=True) for line in lines]


# weights of before augment.levels: renewed ones must leave this list
ON_EXACT_LEVELS = {"path256-all", "path256-all-butterfly"}


@pytest.mark.parametrize("name", PICTURED)
def test_a_card_states_what_a_grey_level_costs(name):
    levels = cards.grey_levels().get(cards.digest(folder(name)))
    text = (folder(name) / "README.md").read_text(encoding="utf-8")
    if levels is None:
        assert name in ON_EXACT_LEVELS, "python -m benchmarks.studies.levels.study measures renewed weights"
        return
    assert (100 * cards.lost(levels) > cards.MOST_LOST) == (name in ON_EXACT_LEVELS)
    assert all(f"| {100 * share:.2f} |" in text for share in levels["accuracy"].values())
    assert ("rely on how grey levels were rounded" in text) == (name in ON_EXACT_LEVELS)


def test_grey_levels_are_of_these_weights(tmp_path):
    result = {"sha256": "12", "n": 400, "accuracy": {"rounded": 0.9, "truncated": 0.895, "moved": 0.905}}
    write_measurement(tmp_path / "studies" / "levels" / "cpu" / "pathfinder.json", result)
    found = cards.grey_levels(tmp_path)
    assert found == {"12": result} and cards.lost(result) == pytest.approx(0.005)
    card = cards.card("pathfinder", RELEASED["pathfinder"], cards.known(), found["12"])
    assert "A grey level matters little: they lose 0.50 points at most on these 400 images" in card
    assert "Grey levels" not in cards.card("pathfinder", RELEASED["pathfinder"], cards.known())


@pytest.mark.parametrize("name", RELEASED)
def test_the_card_agrees_with_the_result(name):
    card, result = (folder(name) / "README.md").read_text(encoding="utf-8"), RELEASED[name]
    test, config = result["test"], result["config"]
    stated = [f"{100 * test['accuracy']:.2f} ± {100 * test['plus_minus']:.2f} of {test['n']:,}"]
    stated += [f" {100 * value:.2f} |" for value in test["baselines"].values()]
    stated += [f"| {rule}, % " for rule in test["baselines"]]
    stated += [f"{result['parameters']:,} parameters", f"seed {result['seed']}", f"`{result['task']}`"]
    stated += [f"`{result['attn']}`", f"`{result['recipe']}`"]
    stated += [f"`{key}={config['task'][key]}`" for key in config["task"] if key not in ("name", "source")]
    stated += [result["environment"][key] for key in ("gpu", "commit")] + [result["environment"]["date"][:10]]
    stated += [f"{package} {version}" for package, version in result["environment"]["versions"].items() if version]
    assert not [text for text in stated if text not in card]
    chain = cards.stages(result, cards.known())
    assert chain[0]["config"]["init"] is None and chain[-1] == result
    for command, stage in zip(shown(card, 1), chain, strict=True):
        saved = composed(tuple(command[2:])).config.to_saved_dict()
        assert command[:2] == ["lra", "fit"] and saved == stage["config"]  # what it trains now is what was trained


def test_every_number_comes_from_the_result():
    name, result = "pathx", RELEASED["pathx"]
    other = json.loads(json.dumps(result).replace("20000", "30000"))
    other |= {"parameters": 1234567, "seed": 8, "steps": 4321, "train_seconds": 77.0, "resumed": False}
    other["test"] |= {"accuracy": 0.5, "plus_minus": 0.0123, "baselines": {"majority": 0.25, "another rule": 0.375}}
    card = cards.card(name, other, cards.known())
    for text in ("50.00 ± 1.23 of 30,000", "another rule, %", "37.50", "1,234,567", "seed 8", "4,321", "77 s"):
        assert text in card
    assert f"{100 * result['test']['accuracy']:.2f}" not in card and "marker distance" not in card


@pytest.mark.parametrize(("wall", "known"), [(None, False), (80.0, True)])
def test_the_time_of_a_resumed_run_is_said_where_all_of_it_was_counted(wall, known):
    name, result = next(iter(RELEASED.items()))
    resumed = result | {"train_seconds": 12345.0, "resumed": True, "wall_seconds": wall}
    assert ("12,345 s" in cards.card(name, resumed, cards.known())) == known


def test_a_card_says_which_run_was_validated_on_the_test_images():
    texts = {name: cards.card(name, result, cards.known()) for name, result in RELEASED.items()}
    chosen = {name for name, text in texts.items() if "was validated on" in text}
    assert chosen == {"path256-all", "path256-all-butterfly"}


def test_the_card_of_a_pretrained_model_of_imported_data():
    result = json.loads((measured.RUNS / "text/flash/amos2024-s0/result.json").read_text(encoding="utf-8"))
    text = cards.card("text", result, cards.known())
    assert "| league | strict |" in text and "| 89.98 ± 0.37 of 25,000 |" in text
    assert "of 4,764,413 hidden tokens |" in text, "of run 1, whose accuracy is of tokens"
    assert "in one stream of examples" not in text, "which is how generated data are made"


@pytest.mark.parametrize("name", RELEASED)
def test_a_release_is_of_one_run_and_whole(name):
    weights, identity = checkpoints.read_checkpoint(folder(name))
    module, result = lra.load(folder(name)), RELEASED[name]
    assert identity["config"] == result["config"] and not module.training
    assert sum(p.numel() for p in module.parameters()) == result["parameters"]
    assert all(torch.equal(value, weights[key]) for key, value in module.model.state_dict().items())
    assert all(value.isfinite().all() for value in weights.values())
    assert {file.name for file in folder(name).iterdir()} == {*release.FILES, "README.md"}


def case(name: str) -> Any:
    """Where: 16,384 tokens a sequence take a CPU an hour."""
    all_tokens = RELEASED[name]["config"]["task"].get("tokens") == "all"
    return pytest.param(name, (), marks=pytest.mark.gpu) if all_tokens else pytest.param(name, CPU)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where"), [case(name) for name in GENERATED])
def test_weights_reach_the_stated_accuracy_on_fresh_examples(name, where, tmp_path, monkeypatch):
    """`config.yaml` names a run that is not there; examples are of a seed that no run has seen."""
    monkeypatch.chdir(tmp_path)
    count, stated, task = 300, RELEASED[name]["test"]["accuracy"], RELEASED[name]["config"]["task"]
    data = (f"task.data_seed={task['data_seed'] + 1000}", "task.train=8", "task.val=1", f"task.test={count}")
    data += ("batch.eval=16", *(["task.fresh=1"] if "fresh" in task else []))
    scored = lra.test(f"init={folder(name)}", *linear(name), *data, *where)
    deviation = math.sqrt(stated * (1 - stated) / count) + RELEASED[name]["test"]["plus_minus"]
    assert scored["test"]["n"] == count and abs(scored["test"]["accuracy"] - stated) < 3 * deviation
    assert not scored["transfer"]["fresh"] and not scored["transfer"]["left"]
    assert not list(tmp_path.iterdir())


def test_scores_on_another_seed_stand_beside_the_stated_ones(tmp_path, capsys):
    place = tmp_path / "studies" / "rescoring"
    assert rescoring.main(["pathfinder", "--count", "20", "--out", str(place), "--fields", *CPU]) == 0
    (file,) = place.rglob("*.json")
    result = json.loads(file.read_text(encoding="utf-8"))
    assert file.name == "pathfinder.json" and result["checkpoint"] == "checkpoints/pathfinder"
    assert file.parent.name == measured.place(result["environment"]["gpu"])
    assert result["test"]["n"] == 20 and result["environment"]["command"]
    shown = format_accuracy(result["test"])
    assert shown in capsys.readouterr().out
    assert cards.rescored(tmp_path) == {cards.digest(folder("pathfinder")): shown}
    assert rescoring.main(["pathfinders"]) == 2 and "none of the released weights" in capsys.readouterr().err


@pytest.mark.parametrize("name", RELEASED)
def test_the_commands_for_its_use_are_valid(name):
    (_, _, *scored), (_, _, *fields) = shown((folder(name) / "README.md").read_text(encoding="utf-8"), 0)
    assert scored == [f"init=checkpoints/{name}", *linear(name)]
    run = fit.configure(fields).config
    assert run.init == f"checkpoints/{name}"
    _, module = assembly.build_modules(run)
    path = folder(name)
    assert not transfer.transfer_weights(module, *checkpoints.read_checkpoint(path), path).fresh


def test_another_run_starts_from_a_release(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ("task.train=4", "task.val=2", "task.test=2", "batch.size=2", "batch.eval=2", "optim.warmup=0")
    steps = ("trainer.steps=1", "trainer.eval_every=1", "trainer.log_every=1")
    start = ("task=path64", "attn=flash", "recipe=paths", "task.tokens=lit", f"init={folder('pathfinder')}")
    result = lra.fit(*start, *few, *steps, *CPU)
    assert result["status"] == "finished" and result["steps"] == 1
    assert result["transfer"]["task"] == "pathfinder@2" and not result["transfer"]["fresh"]
    assert result["transfer"]["same"] == len(checkpoints.read_checkpoint(folder("pathfinder"))[0])


def test_merged_releases_are_stages_of_a_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, result in RELEASED.items():
        place = result["directory"].removeprefix("checkpoints/runs/")
        assert archive.merge_runs(folder(name))[0] == f"{place}: added"
        for file in release.FILES:
            assert (Path(result["directory"]) / file).read_bytes() == (folder(name) / file).read_bytes()
        assert archive.merge_runs(folder(name))[0] == f"{place}: kept, it is finished here"
    fields = ["tasks=path64,pathx,pathx-lit,path256-lit", "recipe=paths", "attns=flash", "seeds=1"]
    assert accuracy.reproduce("table6", fields, dry_run=True).lines[0] == "cells: 4, 4 done"
    fields = ["tasks=path256", "attns=flash", "seeds=1"]
    assert accuracy.reproduce("table6", [*fields, "task.version=1"], dry_run=True).lines[0] == "cells: 1, 1 done"
    with pytest.raises(UsageError, match="a run of path256@1, and the task is now path256@2: give task.version=1 "):
        accuracy.reproduce("table6", fields, dry_run=True)


@pytest.fixture
def run(tmp_path):
    """A finished run's directory, and an empty folder for releases."""
    directory = tmp_path / "pathfinder" / "flash" / "some-s0"
    directory.mkdir(parents=True)
    for file in release.FILES:
        shutil.copy(folder("pathfinder") / file, directory)
    (tmp_path / "releases").mkdir()
    return directory, tmp_path / "releases"


def test_a_run_is_released_with_its_card(run):
    directory, releases = run
    target = release.release(directory, "pathfinder", releases)
    assert target == releases / "pathfinder" and list(releases.iterdir()) == [target]
    for file in (*release.FILES, "README.md"):
        assert (target / file).read_bytes() == (folder("pathfinder") / file).read_bytes()
    assert cards.make(releases)[target / "README.md"] == (target / "README.md").read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="pathfinder is there already: remove it first"):
        release.release(directory, "pathfinder", releases)


@pytest.mark.parametrize("name", ["runs", "../away", "Large", ".hidden", ""])
def test_a_release_needs_a_plain_name(run, name):
    with pytest.raises(UsageError, match="can't be the name of a release"):
        release.release(run[0], name, run[1])


def test_what_is_not_one_finished_run_is_not_released(run, tmp_path):
    directory, releases = run
    result = json.loads((directory / "result.json").read_text())

    def refused(message: str, **changed) -> None:
        (directory / "result.json").write_text(json.dumps(result | changed))
        with pytest.raises(UsageError, match=message) as error:
            release.release(directory, "new", releases)
        assert "\n" not in str(error.value) and not list(releases.iterdir())

    refused("holds no finished run", status="failed")
    refused("config.yaml and result.json .* different runs: seed: 0 -> 1", config=result["config"] | {"seed": 1})
    config = (directory / "config.yaml").read_text()
    (directory / "config.yaml").write_text(config.replace("\nseed: 0", "\nseed: 1"))
    refused("model.safetensors and result.json .*: seed: 0 -> 1", config=result["config"] | {"seed": 1})
    (directory / "config.yaml").write_text(config)
    (directory / "result.json").write_text(json.dumps(result))
    with pytest.raises(UsageError, match="starts from .*task.tokens=lit.*: release that run first, or copy"):
        release.release(directory, "new", releases, tmp_path / "none")
    (directory / "model.safetensors").unlink()
    refused("has a result and no weights")


def test_two_results_of_one_stage_are_not_chosen_between(run, tmp_path):
    directory, releases = run
    shutil.copytree(measured.RUNS, results := tmp_path / "runs")
    before = RELEASED["pathfinder"]["config"]["init"]
    ((file, result),) = cards.known(releases, results)[before]
    (copy := results / "copy" / "result.json").parent.mkdir()
    copy.write_text(json.dumps(result))  # the same twice is one
    release.release(directory, "first", releases, results)
    copy.write_text(json.dumps(result | {"steps": 1}))
    with pytest.raises(UsageError, match=rf"{file.name}.* are different results of .*keep the one of the weights"):
        release.release(directory, "second", releases, results)


def test_the_command_line_says_what_is_wrong(capsys):
    assert release.main(["one", "two", "three"]) == 2 and release.main(["none", "pathx"]) == 2
    assert pictures.main(["init=checkpoints/none"]) == 2 and pictures.main(["init=checkpoints/pathfinder", "x=1"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4 and errors[2].startswith("pictures: init=checkpoints/none is not a released folder")


# pictures

DRAWN = [path.stem for path in sorted(FOLDER.glob("*.json"))]


@pytest.mark.parametrize("name", DRAWN)
def test_a_sheet_shows_what_the_test_set_has(name):
    record, task = json.loads((FOLDER / f"{name}.json").read_text()), RELEASED[name]["config"]["task"]
    module = lra.load(folder(name))
    chosen = image_law(module.run.task.resolution, task["level"])
    first = task["train"] + task["val"]
    for kind, images in record["sheet"].items():
        verdict, label = kind.split(", ")
        for image in images[:1]:
            which = {"index": first + image["image"], "version": task.get("version", 1)}
            drawing = draw_image(chosen, seed=task["data_seed"], **which)
            share = float(pictures.connected(module, drawing.pixels.reshape(1, -1))[0])
            assert image["label"] == label == ("apart", "connected")[drawing.label]
            assert abs(share - image["connected"]) < 1e-3
            assert ((share > 0.5) == (label == "connected")) == (verdict == "right")
    files = list(FOLDER.glob(f"{name}-*"))
    assert len(files) == 3 and all(file.stat().st_size < 300_000 for file in files)


@pytest.mark.slow
def test_the_pictures_are_those_of_the_weights(tmp_path):
    name, count = "pathfinder", 128
    made = pictures.depict(pictures.PictureOptions(f"{folder(name)}", count), tmp_path)
    kept = json.loads((FOLDER / f"{name}.json").read_text())
    look, before = made["attention"], kept["attention"]
    assert look.pop("largest") == pytest.approx(before.pop("largest"), abs=1e-3) and look == before
    for kind, images in made["sheet"].items():
        assert [image["image"] for image in images] == [each["image"] for each in kept["sheet"][kind]][: len(images)]
    for picture, (columns, rows) in {"attention": (5, 1), "samples": (pictures.EACH, 4)}.items():
        with Image.open(tmp_path / f"{name}-{picture}.png") as image:
            assert image.width == columns * (pictures.PANEL + pictures.GAP) + pictures.GAP
            assert rows * pictures.PANEL < image.height < rows * (pictures.PANEL + 80)


@pytest.mark.parametrize("tokens", ["all", "lit"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])  # the last one of a causal model
@pytest.mark.parametrize("attn", ["flash", "standard"])
def test_the_attention_drawn_is_what_the_layer_computes(attn, pooling, tokens):
    """With one head its probabilities times v are the layer's output."""
    causal = str(pooling == "last").lower()
    fields = (
        f"task.tokens={tokens}", f"model.pooling={pooling}", "model.heads=1", "model.layers=2", f"model.causal={causal}"
    )  # fmt: skip
    run = fit.configure(["task=pathfinder", f"attn={attn}", "recipe=demo", *fields]).config
    module = assembly.build_modules(run)[1].eval()
    drawing = draw_image(image_law(32, "hard"), seed=0, index=3)  # its row and column differ
    query: tuple[int, int] = tuple(drawing.markers[0].tolist())
    seen, prefix = [], int(pooling == "cls")

    def look(_, given, output):
        seen.append((given[2], output, given[3].token_positions()))

    for part in module.modules():
        if isinstance(part, Attention):
            part.register_forward_hook(look)
    layers = pictures.attentions(module, drawing.pixels.ravel(), query)
    kept = drawing.pixels.ravel() >= (8 if tokens == "lit" else 0)
    assert len(layers) == len(seen) == 2
    for share, (v, output, positions) in zip(layers, seen, strict=True):
        assert np.array_equal(np.isfinite(share), kept)
        weight = torch.zeros(len(positions))
        weight[positions >= prefix] = torch.from_numpy(share[kept])
        weight[0] += prefix * (1 - float(share[kept].sum()))  # what CLS has is not drawn
        row = positions == query[0] * 32 + query[1] + prefix
        assert torch.allclose(torch.einsum("n,nhd->hd", weight, v), output[row][0], atol=1e-5)


def test_attention_that_is_no_softmax_or_of_no_token_is_refused():
    def build(*fields):
        return assembly.build_modules(fit.configure(["task=pathfinder", "recipe=demo", *fields]).config)[1].eval()

    pixels = draw_image(image_law(32, "hard"), seed=0, index=0).pixels.ravel()
    with pytest.raises(UsageError, match="attn=linear has other weights than softmax attention"):
        pictures.attentions(build("attn=linear", "model.attn_dropout=0"), pixels, (0, 0))
    with pytest.raises(UsageError, match=r"the pixel \(0, 0\) is dark"):
        pictures.attentions(build("attn=flash", "task.tokens=lit"), pixels, (0, 0))


def test_what_is_drawn_of_attention():
    image = np.zeros((32, 32), np.uint8)
    image[4, 5:9] = 200
    layer = np.full((32, 32), np.nan, np.float32)
    layer[4, 5:9] = (0.0, 0.1, 0.2, 0.7)
    drawn = np.asarray(pictures.overlays(image, [layer], (4, 5)))
    factor, gap = pictures.PANEL // 32, pictures.GAP
    panel = drawn[gap : gap + 32 * factor, 2 * gap + 32 * factor :][:, : 32 * factor]
    middles = panel[factor // 2 :: factor, factor // 2 :: factor].astype(int)
    assert (middles[4, 8] == pictures.RAMP[-1][1]).all() and (middles[10, 10] == 0).all()
    assert len(set(middles[4, 5])) == 1 and 0 < middles[4, 5, 0] < 200  # a token without attention stays grey
    assert drawn.shape[1] == 3 * gap + 2 * 32 * factor
    rows = [("right, apart", [(image, 0.25)] * 2), ("wrong, apart", [])]
    assert isinstance(pictures.sheet(rows), Image.Image)


def test_curves_are_one_after_another():
    result = {"task": "pathfinder@1", "steps": 100, "config": {"task": {"level": "easy"}}}
    points = [(50, 0.5), (100, 0.75)]
    text = curve([(result, points), (result | {"steps": 300}, [(300, 1.0)])], 0.5)
    shown = words(text)
    assert {"0", "100", "400", "chance", "75.0", "100.0"} <= set(shown) and shown.count("pathfinder") == 2
    first, second = lines(text)["until-100"].points, lines(text)["until-400"].points
    step = first[1][0] - first[0][0]  # of 50
    assert [x for x, _ in second] == [pytest.approx(first[1][0] + 6 * step, abs=1e-3)]
    assert first[0][1] - first[1][1] == pytest.approx(first[1][1] - second[0][1], abs=1e-3) and step > 0
    assert [line.dots for line in lines(text).values()] == [1, 1]
