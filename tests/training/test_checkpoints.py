"""Checkpoints: what is not as it was written is noticed before it is used, and weights go where they fit."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lra.errors import UsageError
from lra.training import assembly, checkpoints, fit
from lra.training.checkpoints import find_damage, read_checkpoint, verify_checkpoint
from lra.training.lightning import WholeCheckpointIO
from lra.training.provenance import weights_digest

TINY = ("task=listops", "attn=flash", "recipe=demo", "model.d_model=32", "model.d_ff=32", "task.max_length=32")
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.int64)}


@pytest.fixture(scope="module")
def module():
    return assembly.build_modules(fit.configure(list(TINY)).config)[1]


@pytest.fixture
def files(module, tmp_path) -> dict[str, Path]:
    """A checkpoint and a file of weights, both whole."""
    state = {f"model.{name}": value for name, value in module.model.state_dict().items()}
    torch.save({"state_dict": state, "lra": module.identity()}, tmp_path / "last.ckpt")
    checkpoints.save_weights(module, tmp_path / "model.safetensors")
    return {path.suffix: path for path in tmp_path.iterdir()}


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_whole_files_have_no_fault(files, suffix, module):
    assert find_damage(files[suffix]) is None
    weights, identity = read_checkpoint(files[suffix])
    assert all(torch.equal(value, weights[name]) for name, value in module.model.state_dict().items())
    assert identity == module.identity()


def places(path: Path) -> list[int]:
    """Some bytes of the largest tensor."""
    if path.suffix == ".safetensors":
        return [path.stat().st_size - each for each in (1, 1000)]
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda each: each.file_size)
        begin = largest.header_offset + 30 + len(largest.filename) + 64  # past the header and its padding
        return [begin, begin + largest.file_size // 2]


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_flipped_bit_of_a_weight_is_noticed(files, suffix, which):
    """Its bytes are as good a number as before."""
    path = files[suffix]
    flip(path, places(path)[which])
    assert find_damage(path) in ("checksum", "UsageError")
    with pytest.raises(UsageError, match=rf"{path.name} can't be read as a checkpoint of lra \(checksum\)"):
        read_checkpoint(path)


def test_a_flipped_bit_is_noticed_before_a_run_goes_on(files):
    path = files[".ckpt"].rename(files[".ckpt"].with_name("best.ckpt"))
    whole = WholeCheckpointIO(path.parent)
    verify_checkpoint(path)
    whole.load_checkpoint(path, weights_only=True)
    flip(path, places(path)[0])
    for use in (verify_checkpoint, whole.load_checkpoint):
        with pytest.raises(UsageError, match=r"\(checksum\).*; \S*model.safetensors is whole: init="):
            use(path)


def test_another_identity_is_noticed(files, module):
    path = files[".safetensors"]
    with safe_open(path, "pt") as file:
        said = json.loads(file.metadata()["lra"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    for change in ({"task": "text@1"}, {"seen": {"listops": 5}}):
        save_file(weights, path, metadata={"lra": json.dumps(said | change)})
        assert find_damage(path) is not None
    del said["sha256"]  # of an earlier lra
    save_file(weights, path, metadata={"lra": json.dumps(said)})
    assert find_damage(path) is None


A, B = WEIGHTS["a"], WEIGHTS["b"]
OTHERS = {
    "value": {"a": A + 1, "b": B}, "name": {"a2": A, "b": B}, "shape": {"a": A.view(3, 2), "b": B},
    "dtype": {"a": A.view(torch.int32), "b": B}, "one more": {"a": A, "b": B, "c": B}, "one less": {"a": A},
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_a_digest_is_of_names_types_shapes_values_and_what_is_said(what):
    for said in ("", "listops@1"):
        whole = weights_digest(WEIGHTS, said)
        assert len(whole) == 64 and whole == weights_digest(dict(reversed(WEIGHTS.items())), said), "in any order"
        assert weights_digest(OTHERS[what], said) != whole
        assert weights_digest(WEIGHTS, "listops@2") != whole


def rewritten(path: Path, **options: Any) -> None:
    """The same archive, as another program would write it."""
    with zipfile.ZipFile(path) as archive:
        members = {each: archive.read(each) for each in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in members.items():
            archive.writestr(each.filename, content, **options)


def test_what_the_checksums_of_an_archive_would_pass_over_is_a_fault(files):
    path = files[".ckpt"]
    rewritten(path, compress_type=zipfile.ZIP_DEFLATED)
    assert find_damage(path) == "checksum"
    path.write_bytes(b"")
    assert find_damage(path) == "BadZipFile"
    assert find_damage(path.with_name("none.ckpt")) == "FileNotFoundError"


def saved(path: Path, module: Any, state: dict[str, torch.Tensor] | None = None, **identity: Any) -> Path:
    """A `.ckpt` of a module, with other weights or another identity."""
    weights = module.model.state_dict() if state is None else state
    torch.save({"state_dict": {f"model.{key}": value for key, value in weights.items()} | {"other.x": torch.ones(1)},
                "lra": module.identity() | identity}, path)  # fmt: skip
    return path


@pytest.mark.parametrize(("name", "stands_in", "said"), [
    ("last.ckpt", "best.ckpt", "resume={0} goes on there, init={0} takes its weights"),
    ("best.ckpt", "model.safetensors", "init={0} takes its weights"),
    ("best.ckpt", "last.ckpt", "init={0} takes its weights"),
    ("model.safetensors", "best.ckpt", "init={0} takes its weights"),
    ("last.ckpt", None, "without it, resume=auto begins anew"),
    ("best.ckpt", None, "choose another checkpoint"),
])  # fmt: skip
def test_what_stands_in_for_a_damaged_file_is_named(module, tmp_path, name, stands_in, said):
    (tmp_path / name).write_bytes(b"damaged")
    if stands_in and stands_in.endswith(".ckpt"):
        saved(tmp_path / stands_in, module)
    elif stands_in:
        checkpoints.save_weights(module, tmp_path / stands_in)
    with pytest.raises(UsageError) as error:
        read_checkpoint(tmp_path / name)
    whole = tmp_path / (stands_in or "none")
    assert str(error.value).endswith((f"{whole} is whole: " if stands_in else "") + said.format(whole))


def test_a_damaged_file_does_not_stand_in(module, tmp_path):
    for name in ("last.ckpt", "best.ckpt"):
        (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(UsageError, match="resume=auto begins anew"):
        read_checkpoint(tmp_path / "last.ckpt")


def test_weights_that_are_not_finite_are_only_of_a_fault(module, tmp_path):
    state = module.model.state_dict() | {"encoder.norm.weight": torch.full((32,), torch.nan)}
    state["encoder.blocks.1.up.bias"] = torch.full((32,), torch.inf)
    with pytest.raises(UsageError, match=r"NaN or infinite \(blocks\.\*\.up\.bias, norm\.weight\): choose another"):
        read_checkpoint(saved(tmp_path / "a.ckpt", module, state))
    assert read_checkpoint(saved(tmp_path / "fault.pt", module, state))[0].keys() == state.keys()


@pytest.mark.parametrize("change", [
    {"task": None}, {"config": {}}, {"seen": {"listops": None}}, {"vocabulary": None},
    {"more": {"init": "${oc.env:HOME}"}}, {"more": {"init": "???"}}, {"more": {"attn": {}}},
    {"more": {"model": {"d_model": 32}}}, {"weight": torch.ones(2, dtype=torch.complex64)},
    {"weight": torch.ones(2).to_sparse()},
], ids=str)  # fmt: skip
def test_what_lra_does_not_write_is_refused(module, tmp_path, change):
    identity = module.identity()
    changed = {"config": identity["config"] | change.get("more", {})} | change
    state = {"x": change.get("weight", torch.ones(1))}
    with pytest.raises(UsageError, match=r"can't be read as a checkpoint of lra \((KeyError|TypeError)\)"):
        read_checkpoint(saved(tmp_path / "a.ckpt", module, state, **changed))


def test_what_may_not_be_read_is_not_called_damaged(files, monkeypatch):
    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(zipfile, "ZipFile", denied)
    monkeypatch.setattr(Path, "open", denied)
    for path in files.values():
        for use in (find_damage, read_checkpoint):
            with pytest.raises(PermissionError):
                use(path)


@pytest.mark.parametrize("status", ["failed", "oom"])
def test_of_a_run_that_failed_the_error_is_named_in_one_line(tmp_path, status):
    named = {"task": {"name": "listops"}, "attn": {"name": "flash"}}
    result = {"status": status, "error": "it broke\n" + "here " * 99, "config": named, "task": "listops@1"}
    (tmp_path / "result.json").write_text(json.dumps(result | {"environment": {"date": "2026-01-02T03:04:05Z"}}))
    with pytest.raises(UsageError) as error:
        read_checkpoint(tmp_path)
    said = str(error.value)
    assert said.startswith(f"{tmp_path} has no weights, its run failed (it broke here here ") and "\n" not in said
    assert said.endswith(" …): mend that and train again, or choose another checkpoint")


def test_where_there_is_no_checkpoint_the_one_to_give_is_named(module, tmp_path):
    with pytest.raises(UsageError, match="no checkpoint at .*: give a finished run's directory, a .ckpt or"):
        read_checkpoint(tmp_path / "none")
    (tmp_path / "result.json").touch()
    with pytest.raises(UsageError, match="has a result and no weights: merge an archive packed with checkpoints=weig"):
        read_checkpoint(tmp_path)
    saved(tmp_path / "last.ckpt", module)
    with pytest.raises(UsageError, match="has no model.safetensors, which a run writes at its end: give .*/last.ckpt"):
        read_checkpoint(tmp_path)
    checkpoints.save_weights(module, tmp_path / "model.safetensors")
    assert read_checkpoint(tmp_path)[1] == module.identity()


def other(*args: str) -> Any:
    """A module with other fields; later ones replace earlier ones."""
    given = {arg.partition("=")[0]: arg for arg in (*TINY, *args)}
    return assembly.build_modules(fit.configure(list(given.values())).config)[1]


def test_weights_are_put_into_a_model_that_they_fit(module, files):
    weights, identity = read_checkpoint(files[".ckpt"])
    into = other("seed=1")
    assert not torch.equal(into.model.state_dict()["encoder.embedding.weight"], weights["encoder.embedding.weight"])
    checkpoints.load_into(into, weights, identity | {"seen": {"a stream": 5}}, "there")
    assert all(torch.equal(value, weights[name]) for name, value in into.model.state_dict().items())
    assert into.seen == {"a stream": 5}


@pytest.mark.parametrize(("field", "message"), [
    ("model.d_model=64", "model.d_model 32 here 64"), ("model.layers=1", "model.layers 2 here 1"),
    ("model.heads=4", "model.heads 2 here 4"), ("model.d_ff=64", "model.d_ff 32 here 64"),
    ("model.positions=rotary", "model.positions learned here rotary"), ("model.pooling=cls", "pooling mean here cls"),
])  # fmt: skip
def test_a_field_by_which_weights_mean_something_else_is_named(files, field, message):
    """Heads, too, although no shape shows them."""
    with pytest.raises(UsageError, match=f"there does not fit this model: .*{message}.*; use the model fields of its"):
        checkpoints.load_into(other(field), *read_checkpoint(files[".ckpt"]), "there")


def test_between_mean_and_maximum_weights_fit(files):
    checkpoints.load_into(other("model.pooling=max"), *read_checkpoint(files[".ckpt"]), "there")


def test_where_a_pretraining_begins_or_ends_the_pooling_may_be_another(module):
    identity = module.identity()
    checkpoints.check_model(other("model.pooling=cls", "pretrain=masked"), identity, "there")
    masked = other("pretrain=masked")
    assert checkpoints.pretraining_of(identity) == "none" and checkpoints.pretraining_of(masked.identity()) == "masked"
    with pytest.raises(UsageError, match="model.pooling mean here cls"):
        checkpoints.check_model(other("model.pooling=cls", "pretrain=masked"), masked.identity(), "there")


def test_another_vocabulary_is_refused(module):
    identity = module.identity() | {"vocabulary": "0" * 64, "task": "text@1"}
    with pytest.raises(UsageError, match=r"there was trained on the vocabulary of text@1, not of listops@1: choose"):
        checkpoints.check_model(module, identity, "there")


def test_every_tensor_that_does_not_fit_is_named_once_for_all_layers():
    own = {
        "encoder.blocks.0.up.weight": A,
        "encoder.blocks.12.up.weight": A,
        "head.bias": B,
        checkpoints.POSITION_SCALE: B,
    }
    checkpoints.check_shapes(own, {key: own[key] for key in own if key != checkpoints.POSITION_SCALE}, "there")
    given = {"encoder.blocks.0.up.weight": A.flatten(), "encoder.blocks.12.up.weight": A.flatten(), "tail": B}
    said = (
        "there does not fit this model: blocks.*.up.weight [6] here [2, 3], head.bias missing, tail unknown here; "
        "use the fields of its config.yaml"
    )
    with pytest.raises(UsageError) as error:
        checkpoints.check_shapes(own, given, "there")
    assert str(error.value) == said
    attention = {"encoder.blocks.0.attention.projection": A}
    with pytest.raises(UsageError, match="or another attn=, whose parameters are then fresh"):
        checkpoints.check_shapes(attention, {}, "there")


def test_what_a_checkpoint_has_behind_it(tmp_path):
    state = {"best_model_score": torch.tensor(0.5), "best_model_path": "/elsewhere/best.ckpt"}
    none = {"best_model_score": None, "best_model_path": "/elsewhere/last.ckpt"}
    for callbacks, best in (({"a": none, "b": state}, tmp_path / "best.ckpt"), ({"a": none, "c": {}}, None)):
        torch.save({"global_step": 7, "callbacks": callbacks}, tmp_path / "last.ckpt")
        assert checkpoints.read_progress(tmp_path / "last.ckpt") == (7, best, [], 0)


def test_the_best_checkpoint_is_looked_for_where_the_run_lies_now(tmp_path):
    score = torch.tensor(0.5)
    state = {"dirpath": "/old/run", "best_model_path": "/old/run/best.ckpt", "best_model_score": score,
             "best_k_models": {"/old/run/best.ckpt": score}, "mode": "max"}  # fmt: skip
    torch.save({"callbacks": {"a": state, "b": {"x": 1}}}, tmp_path / "last.ckpt")
    loaded = WholeCheckpointIO(tmp_path).load_checkpoint(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    here = str(tmp_path.resolve())
    assert loaded["a"]["dirpath"] == here and loaded["a"]["best_model_path"] == f"{here}/best.ckpt"
    assert loaded["a"]["best_k_models"] == {f"{here}/best.ckpt": score} and loaded["b"] == {"x": 1}


def test_a_checkpoint_is_written_whole(tmp_path):
    path = tmp_path / "last.ckpt"
    WholeCheckpointIO(tmp_path).save_checkpoint({"a": 1}, path)
    with pytest.raises(Exception, match="pickle"):
        WholeCheckpointIO(tmp_path).save_checkpoint({"a": lambda: None}, path)
    assert torch.load(path) == {"a": 1} and [*tmp_path.iterdir()] == [path]
