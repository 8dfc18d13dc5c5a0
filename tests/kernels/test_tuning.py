"""Which tile a kernel has, and how `lra tune` finds the tiles."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from lra.bench import tune as tuner
from lra.cli import app
from lra.errors import UsageError
from lra.kernels import device
from lra.kernels.device import Ptxas
from lra.kernels.flash import tuning
from lra.kernels.flash.tuning import Tile, TileKey, TileTable
from lra.kernels.testing import BudgetedError, Case, check_case

KEY = TileKey("forward", "bfloat16", 64, False)
FORWARD = ["kernels=forward", "dtypes=bfloat16", "head_dims=64", "dropout=false"]
GOOD, OLD = Ptxas("/new/ptxas", (13, 4), "TRITON_PTXAS_PATH"), Ptxas("/old/ptxas", (12, 8), "TRITON_PTXAS_PATH")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """As on a Hopper GPU called "NVIDIA Test" with a good ptxas, with no tables; attributes may be changed."""
    pytest.importorskip("triton")
    fake = SimpleNamespace(capability=(9, 0), ptxas=GOOD, shipped=tmp_path / "tuned" / "sm_90.json")
    fake.user = tmp_path / "lra" / "tiles" / "NVIDIA-Test.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "FLASH_FOLDER", tmp_path)
    monkeypatch.setattr(device, "compute_capability", lambda device=None: fake.capability)
    monkeypatch.setattr(device, "find_ptxas", lambda capability: fake.ptxas)
    monkeypatch.setattr(device, "count_multiprocessors", lambda device: 132)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    for name, value in dict(is_available=True, is_initialized=True, current_device=0).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("init", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    monkeypatch.setattr(tuner, "use_compile_caches", lambda device: None)  # it asks PyTorch for the GPU
    tuning.forget_tables()
    yield fake
    tuning.forget_tables()


def table(path, tiles, **changes):
    import triton

    measured = {"gpu": "NVIDIA Test", "date": "2026-01-02T03:04:05Z", "command": "lra tune", "ptxas": "13.4"}
    measured |= {"versions": {"triton": triton.__version__}}
    changes = {"measured": measured, "sources": tuning.hash_kernels()} | changes
    rows = tiles, dict.fromkeys(tiles, 12.5), {key: {} for key in tiles}
    tuning.write_table(TileTable(path, changes["measured"], changes["sources"], *rows))
    tuning.forget_tables()


def forward_tile(dtype=torch.bfloat16, block_d=64, dropout=False):
    return tuning.find_tile("forward", dtype, block_d, dropout)


def test_measured_here_comes_before_shipped_before_default(gpu):
    default = tuning.default_tile("forward", torch.bfloat16, 64, False)
    assert forward_tile() == default
    table(gpu.shipped, {KEY: Tile(16, 32, 4, 1), KEY._replace(dropout=True): Tile(16, 64, 4, 1)})
    assert forward_tile() == (16, 32, 4, 1)
    table(gpu.user, {KEY: Tile(32, 32, 4, 1)})
    assert forward_tile() == forward_tile(torch.float16) == (32, 32, 4, 1)
    assert forward_tile(dropout=True) == (16, 64, 4, 1)  # the user's table has no such row
    assert forward_tile(block_d=32) == tuning.default_tile("forward", torch.bfloat16, 32, False)
    assert forward_tile(torch.float32) == tuning.default_tile("forward", torch.float32, 64, False)


def test_tables_are_read_once(gpu, monkeypatch):
    table(gpu.shipped, {KEY: Tile(16, 32, 4, 1)})
    forward_tile()
    monkeypatch.setattr(tuning, "read_table", lambda path: pytest.fail("a table is read at every launch"))
    assert forward_tile() == (16, 32, 4, 1)
    assert forward_tile(block_d=32) == tuning.default_tile("forward", torch.bfloat16, 32, False)


def test_other_gpus_do_not_take_a_shipped_table(gpu):
    table(gpu.shipped, {KEY: Tile(16, 32, 4, 1)})
    gpu.capability = (8, 0)
    assert forward_tile() == tuning.default_tile("forward", torch.bfloat16, 64, False)


@pytest.mark.parametrize("what", ["version", "sources"])
def test_an_outdated_table_is_named_and_not_used(gpu, what):
    versions = {"gpu": "NVIDIA Test", "date": "2020", "command": "", "ptxas": "", "versions": {"triton": "2.0"}}
    table(gpu.user, {KEY: Tile(16, 32, 4, 1)}, **({"measured": versions} if what == "version" else {"sources": "0"}))
    reason = {"version": "with Triton 2.0, and this is", "sources": "kernels have changed"}[what]
    with pytest.warns(UserWarning, match=rf"NVIDIA-Test.json is not used: .*{reason}.*lra tune") as caught:
        assert forward_tile() == tuning.default_tile("forward", torch.bfloat16, 64, False)
        forward_tile(dropout=True)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "indices must be"),
        ('{"measured": {}, "sources": "", "tiles": []}', "versions"),
        (dict(kernel="sideways"), "no kernel has the row"),
        (dict(dtype="float8"), "no kernel has the row"),
        (dict(rows=0), "no kernel has the row"),
        (dict(rows="many"), "not supported"),
    ],
)
def test_a_broken_table_is_an_error(gpu, content, why):
    table(gpu.user, {KEY: Tile(16, 32, 4, 1)})
    if isinstance(content, dict):
        whole = json.loads(gpu.user.read_text())
        whole["tiles"][0] |= content
        content = json.dumps(whole)
    gpu.user.write_text(content)
    with pytest.raises(UsageError, match=f"NVIDIA-Test.json is broken .*{why}.*lra tune"):
        forward_tile()


def test_an_unwritable_table_is_an_error(gpu):
    gpu.user.parent.parent.mkdir()
    gpu.user.parent.write_text("a file where a folder should be")
    with pytest.raises(UsageError, match=r"cannot write .*out="):
        table(gpu.user, {})


def test_the_shipped_tables_are_sound():
    for path in (tuning.FLASH_FOLDER / "tuned").glob("*.json"):
        shipped = tuning.read_table(path)
        assert shipped.tiles and shipped.measured["command"].startswith("lra tune")


def test_every_kernel_has_a_default():
    for kernel, dropout in itertools.product(tuning.KERNELS, (False, True)):
        for block_d in (16, 32, 64, 128):
            assert tuning.default_tile(kernel, torch.bfloat16, block_d, dropout).columns % 16 == 0
    assert [tuning.block_dim(d) for d in (1, 16, 17, 40, 64, 128)] == [16, 16, 32, 64, 64, 128]


def test_the_command_prints_every_trial(bench):
    result = CliRunner().invoke(app, ["tune", "kernels=dq", "dtypes=bfloat16", "head_dims=64", "dropout=true"])
    assert result.exit_code == 0, result.output
    *trials, written = result.output.splitlines()
    assert len(trials) >= 7 and all("dq" in trial and "dropout=True" in trial for trial in trials)
    assert any(trial.endswith(" us") for trial in trials) and str(bench.user) in written


def test_the_ptxas_is_the_one_that_triton_calls(monkeypatch):
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    for capability, arch in (((8, 0), 80), ((9, 0), 90), ((10, 0), 100)):
        used = device.find_ptxas(capability)
        assert used.path == compiler.get_ptxas(arch).path and used.version >= (12, 0)
    ours = device.find_ptxas((8, 0))
    monkeypatch.setenv(ours.variable, device.find_ptxas((10, 0)).path)
    assert device.find_ptxas((8, 0)).version == device.find_ptxas((10, 0)).version


def test_a_forced_tile_is_launched(device):
    with tuning.force_tile("forward", Tile(32, 16, 4, 1)) as launched:
        assert not launched
        errors = check_case(Case((40,), heads=1, head_dim=16), device, "triton")
        assert launched == {"forward"} and all(error.ok for error in errors.values())
    assert tuning.find_tile("forward", torch.float32, 16, False) != (32, 16, 4, 1)


@pytest.fixture
def bench(gpu, monkeypatch):
    """A tuner for which 8 warps are faster, 64 rows are wrong, 3 stages fail and 128 columns are wrong if causal."""

    def errors(case, device, impl):
        (kernel, tile), *_ = tuning.forced_tiles.items()
        tuning.find_tile(kernel, torch.bfloat16, 64, False)
        assert case.deterministic == (kernel in ("dkdv", "dq"))
        if tile.stages == 3:
            raise RuntimeError("out of resource: shared memory\nand more")
        error = 9.0 if tile.rows == 64 or (case.causal and tile.columns == 128) else 0.0
        return {"out": BudgetedError(0.0, 1.0), "dq": BudgetedError(error, 1.0)}

    monkeypatch.setattr(tuner, "check_case", errors)
    monkeypatch.setattr(tuner, "time_tile", lambda key, head_dim, tile: 1000.0 / tile.warps / tile.columns)
    return gpu


def test_the_fastest_right_tile_is_kept(bench):
    trials: list[tuner.Trial] = []
    assert tuner.tune_tiles(FORWARD, trials.append) == bench.user
    tried = [trial.tile for trial in trials if not trial.fault.startswith("causal")]
    assert tried == tuner.candidate_tiles(KEY) and tried[0] == tuning.default_tile("forward", torch.bfloat16, 64, False)
    for trial in trials:
        if trial.tile.stages == 3:
            assert trial.fault == "RuntimeError: out of resource: shared memory"
        elif trial.tile.rows == 64:
            assert trial.fault == "dq is wrong by 9 > 1"
    (causal,) = [trial for trial in trials if trial.fault.startswith("causal: dq is wrong")]
    assert causal.tile.columns == 128  # the fastest, were it right
    written = tuning.read_table(bench.user)
    assert written.tiles == {KEY: (128, 64, 8, 2)} and written.measured["gpu"] == "NVIDIA Test"
    assert forward_tile() == (128, 64, 8, 2)  # at once


def test_a_row_that_is_measured_later_states_its_own_date_command_and_commit(bench):
    tuner.tune_tiles(FORWARD)
    begun = tuning.read_table(bench.user)
    assert begun.made == {KEY: {}}
    begun.measured["date"] = "2026-01-01"
    tuning.write_table(begun)
    tuner.tune_tiles(["kernels=dq", *FORWARD[1:]])
    found = tuning.read_table(bench.user)
    (later,) = found.tiles.keys() - {KEY}
    assert found.measured == begun.measured and found.made[KEY] == {}
    assert found.made[later]["made"].keys() == {"date", "command", "commit"}
    assert found.made[later]["made"]["date"] > "2026-01-01"


def test_the_fastest_of_the_right_tiles_is_chosen(monkeypatch):
    monkeypatch.setattr(tuner, "find_fault", lambda *_, **__: "")
    tiles = [Tile(rows, 64, 4, 2) for rows in (64, 16, 32, 128)]
    trials = [tuner.Trial(KEY, tile, us) for tile, us in zip(tiles, (3.0, 1.0, 2.0, None), strict=True)]
    assert tuner._fastest(KEY, 64, trials, lambda trial: None) == (tiles[1], 1.0)


def test_measuring_in_parts_keeps_the_other_rows(bench):
    for dropout in ("false", "true"):
        tuner.tune_tiles([*FORWARD[:3], f"dropout={dropout}"])
    assert set(tuning.read_table(bench.user).tiles) == {KEY, KEY._replace(dropout=True)}
    table(bench.user, {KEY._replace(block_d=16): Tile(16, 32, 4, 1)}, sources="of other kernels")
    tuner.tune_tiles(["kernels=dq", "dtypes=bfloat16", "head_dims=128", "dropout=false"])
    assert all(key.kernel == "dq" for key in tuning.read_table(bench.user).tiles)


def test_without_a_right_candidate_there_is_no_row(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(tuner, "candidate_tiles", lambda key: [Tile(64, 64, 4, 2)])
    out = tmp_path / "out.json"
    with pytest.raises(UsageError, match="no tile was right"):
        tuner.tune_tiles([*FORWARD[:3], f"out={out}"])
    assert not out.exists()


def test_hopper_kernels_are_left_out_or_refused(bench, monkeypatch):
    bench.ptxas = OLD
    monkeypatch.setattr(tuner, "candidate_tiles", lambda key: [Tile(32, 32, 8, 2)])
    trials: list[tuner.Trial] = []
    tuner.tune_tiles(["head_dims=64", "dropout=true"], trials.append)
    assert {trial.key.kernel for trial in trials} == {"forward", "dkdv", "dq", "dkdv_dq"}
    with pytest.raises(UsageError, match=r"can't be measured: ptxas 12\.8"):
        tuner.tune_tiles(["kernels=hopper_forward"])


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("head_dim=64", "unknown field 'head_dim': did you mean 'head_dims'"),
        ("forward", "'forward' is not of the form field=value"),
        ("out=", "'out=' is not of the form field=value"),
        ("kernels=forwards", "kernels=forwards: choose from forward, dkdv"),
        ("dtypes=fp16", "dtypes=fp16: choose from bfloat16, float32"),
        ("head_dims=32,256", "head_dims=256: the kernels take 1 to 128"),
        ("head_dims=32,32", "head_dims=32,32 names one twice"),
        ("head_dims=24,64,32", "head_dims=24,32 have one row in the table, of 32: name one"),
        ("dropout=0.1", "dropout=0.1: write \\[true\\|false,…\\]"),
    ],
)
def test_bad_arguments_are_named(arg, message):
    with pytest.raises(UsageError, match=message):
        tuner.tune_tiles([arg])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_measured():
    with pytest.raises(UsageError, match="PyTorch sees none here"):
        tuner.tune_tiles([])


@pytest.mark.gpu
def test_tuning_writes_a_table_that_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trials: list[tuner.Trial] = []
    written = tuning.read_table(tuner.tune_tiles(FORWARD, trials.append))
    assert any(trial.microseconds for trial in trials)
    assert written.path == tuning.user_table_path(torch.cuda.get_device_name())
    assert forward_tile() == written.tiles[KEY]
    tuning.forget_tables()
