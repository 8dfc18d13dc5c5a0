"""An attention of the user's own, in a file, a module or a script, is a full citizen without a package."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import yaml

import lra
from lra.config import sources
from lra.errors import UsageError
from lra.experiments.grid.grid import read_grid
from lra.experiments.sweep import parse_sweep
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS
from lra.training.fit import configure
from lra.training.run_directory import RunDirectory
from lra.training.run_files import stated_code
from tests.command_line import DATA, ROOT, SHORT, refused
from tests.command_line import lra as command
from tests.models.test_entry_point import MODULE

RUN = (*DATA, *SHORT, "task.max_length=32")
TABLE = {"recipe": "demo", "attns": ["standard", "parts/second.py"], "columns": {"listops": {"fields": RUN[:1]}}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with `first.py` and `parts/second.py`, which register attentions of these names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sources, "_own_code", {})
    before = {*sys.modules}
    (tmp_path / "parts").mkdir()
    write("first.py")
    write("parts/second.py")
    yield tmp_path
    for registry in (ATTENTIONS, TASKS):
        for name in [name for name, cls in registry._classes.items() if cls.Config.imported_from]:
            del registry._classes[name]
    for name in {*sys.modules} - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(file: str, old: str = "", new: str = "") -> None:
    """Writes a module whose attention has the name of the file, with one text replaced."""
    text = MODULE.replace('"mine"', f'"{Path(file).stem}"')
    assert old in text
    Path(file).write_text(text.replace(old, new) if old else text)


@pytest.mark.parametrize(
    ("reference", "name", "source"),
    [
        ("first.py", "first", "first"),
        ("./first.py", "first", "first"),
        ("first:first", "first", "first"),
        ("first:Mine", "first", "first"),
        ("parts/second.py:Mine", "second", "parts/second.py"),
        ("parts/second.py:second", "second", "parts/second.py"),
        ("parts/../parts/second.py", "second", "parts/second.py"),
    ],
)
def test_a_reference_registers_and_selects(reference, name, source):
    composed = configure([*RUN, f"attn={reference}", "attn.factor=2"])
    assert composed.config.attn.factor == 2 and composed.config.model.attn_dropout == 0
    assert composed.config.to_saved_dict()["attn"] == {"name": name, "from": source, "factor": 2.0}
    assert RunDirectory(composed).path.parts[3] == name
    assert ATTENTIONS.find(name).reference == f"{source}:{name}"


def test_what_is_named_by_its_name_alone_says_nothing_of_a_source():
    assert "from" not in configure([*RUN, "attn=flash"]).config.to_saved_dict()["attn"]


def test_another_source_is_another_configuration():
    composed = configure([*RUN, "attn=parts/second.py"])
    directory = RunDirectory(composed)
    directory.path.mkdir(parents=True)
    saved = directory.config | {"attn": directory.config["attn"] | {"from": "elsewhere.py"}}
    (directory.path / "config.yaml").write_text(yaml.safe_dump(saved))
    refused(command("fit", *RUN, "attn=parts/second.py"), "attn.from: elsewhere.py -> parts/second.py")


def test_it_is_trained_tested_loaded_and_continued(folder):
    assert command("fit", *RUN, "attn=parts/second.py", "attn.factor=0.5").code == 0
    (file,) = folder.glob("checkpoints/runs/listops/second/*/result.json")
    result = json.loads(file.read_text())
    assert result["config"]["attn"] == {"name": "second", "from": "parts/second.py", "factor": 0.5}
    module = lra.load(file.parent)
    assert module.run.attn.factor == 0.5
    assert command("test", f"init={file.parent}", "trainer.accelerator=cpu").code == 0
    further = ("attn=parts/second.py", "attn.factor=0.5", f"resume={file.parent}/last.ckpt", "name=further")
    longer = [text.replace("trainer.steps=4", "trainer.steps=6") for text in RUN]
    assert command("fit", *longer, *further).code == 0
    assert command("fit", *RUN, "attn=flash", f"init={file.parent}").code == 0
    (folder / "parts").rename(folder / "moved")
    moved = "parts/second.py is not there: .* \\(attn= says where it is now\\)"
    refused(command("test", f"init={file.parent}", "trainer.accelerator=cpu"), moved)


def test_a_result_states_the_code_as_it_was_imported(folder):
    first, second = (sha256(Path(file).read_bytes()).hexdigest()[:12] for file in ("first.py", "parts/second.py"))
    configure([*RUN, "attn=parts/second.py"])
    write("parts/second.py", "self.config.factor *", "2 *")
    began = lra.fit(*RUN, "attn=parts/second.py")
    on = lra.fit(*RUN, "attn=first.py", f"init={began['directory']}")
    assert began["provenance"]["own_code"] == {"second.py": second} and on["provenance"]["own_code"] == {
        "first.py": first
    }
    assert [each["own_code"] for each in on["provenance"]["ancestors"]] == [{"second.py": second}]
    assert stated_code(on) == [("second.py", second), ("first.py", first)]
    assert "own_code" not in lra.fit(*RUN, "attn=flash")["provenance"]


@pytest.mark.parametrize("package", [True, False])
def test_the_digest_of_a_package_is_of_all_its_files(folder, monkeypatch, package):
    """A folder without __init__.py is no package: the file counts alone."""

    def digest():
        monkeypatch.setattr(sources, "_own_code", {})
        return sources.own_code("parts.second")

    if package:
        (folder / "parts" / "__init__.py").touch()
    sys.path.append(str(folder))
    named, before = "parts" if package else "second.py", digest()
    (folder / "parts" / ".#second.py").symlink_to("nowhere")  # an editor's
    (folder / "parts" / "notes.txt").touch()
    assert list(before) == [named] and digest() == before
    write("parts/helper.py")
    assert (digest() != before) == package
    write("parts/second.py", "1.0", "2.0")
    assert digest() != before and list(digest()) == [named]


def test_its_configuration_is_pickled_with_its_source(monkeypatch):
    """As is one whose `Config` is inherited. A copy needs no file."""
    inherits = "    @dataclass(frozen=True)\n    class Config:\n        factor: float = 1.0\n"
    write("parts/third.py", inherits, "")
    configs = [configure([*RUN, f"attn=parts/{name}.py"]).config for name in ("second", "third")]
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir("/")
        assert copy.deepcopy(configs) == configs
    kept = pickle.dumps(configs)
    for name in ("second", "third"):  # as in another process
        del ATTENTIONS._classes[name], sys.modules[name]
    assert [each.to_saved_dict() for each in pickle.loads(kept)] == [each.to_saved_dict() for each in configs]
    write("fourth.py", inherits, "")
    here = configure([*RUN, "attn=fourth.py"]).config
    assert pickle.loads(pickle.dumps(here)) == here


def test_tables_take_it(folder):
    (folder / "board.yaml").write_text(yaml.safe_dump(TABLE))
    cells = read_grid("board.yaml").cells(attns=["flash", "first.py", "parts/second.py"])
    assert [cell.attn for cell in cells] == ["flash", "first", "second"]
    assert [cell.composed.config.attn.name for cell in cells] == ["flash", "first", "second"]
    planned = command("reproduce", "board.yaml", "--dry-run", *RUN[2:])
    assert planned.code == 0 and "runs/listops/second/" in planned.out
    assert "lra reproduce board.yaml " in planned.out  # speed=true
    (folder / "checkpoints" / "runs").mkdir(parents=True)
    for verb in ("reproduce", "report"):
        done = command(
            verb, "table3", *["--dry-run"][: verb == "reproduce"], "tasks=listops", "attns=flash,first:first"
        )
        assert done.code == 0 and "│ first " in done.out
    speeds = command("reproduce", "board.yaml", "--dry-run", "speed=true", "attns=first.py", "trainer.accelerator=cpu")
    assert speeds.code == 0 and "│ first " in speeds.out and "2 of 2 remain" in speeds.out
    refused(command("reproduce", "board.yaml", "attns=third.py"), "third.py is not there")
    (folder / "board.yaml").write_text(yaml.safe_dump(TABLE | {"attns": ["first:third"]}))
    refused(command("report", "board.yaml"), "board.yaml: first registers first: give first:first")


def test_recipes_have_a_section_for_it(folder):
    """Also a rule for it, and both whether it is chosen or not."""
    recipe = {"tasks": {"listops": {}}, "attns": {"first.py": {"all": {"attn": {"factor": 7}}}}}
    recipe["start"] = [{"when": {"attn": "first.py", "pretrain": "none"}, "from": ["pretrain=masked"]}]
    (folder / "own.yaml").write_text(yaml.safe_dump(recipe))
    own, other = (configure(["task=listops", "recipe=own.yaml", f"attn={attn}"]) for attn in ("first:first", "flash"))
    assert own.config.attn.factor == 7 and own.start is not None and "attn=first:first" in map(str, own.start)
    assert other.start is None
    (folder / "own.yaml").write_text(yaml.safe_dump(recipe | {"attns": {"third.py": {}}}))
    refused(command("config", "show", "task=listops", "recipe=own.yaml", "attn=flash"), "third.py is not there")


def test_a_task_may_be_a_file_too(folder):
    shutil.copy(ROOT / "examples/plugin/lra_example/recall.py", folder)
    recipe = {"tasks": {"recall.py": {"batch": {"size": 3}}, "listops": {}}, "attns": {"first.py": {"recall.py": {}}}}
    (folder / "own.yaml").write_text(yaml.safe_dump(recipe))
    assert "recall" not in TASKS.catalogue() and configure(["task=listops", "recipe=own.yaml", "attn=flash"])
    config = configure(["task=recall.py", "recipe=own.yaml", "attn=first.py"]).config
    assert config.batch.size == 3 and config.to_saved_dict()["task"].items() >= {"from": "recall"}.items()
    table = {"recipe": "own.yaml", "attns": ["flash"], "columns": {"own": {"fields": ["task=recall.py"]}}}
    (folder / "board.yaml").write_text(yaml.safe_dump(table))
    (folder / "checkpoints" / "runs").mkdir(parents=True)
    for verb in (["reproduce", "board.yaml", "--dry-run"], ["report", "board.yaml"]):
        assert command(*verb).code == 0
    (folder / "board.yaml").write_text(yaml.safe_dump(table | {"columns": {"own": {"fields": ["task=gone.py"]}}}))
    refused(command("report", "board.yaml"), "board.yaml: column own: gone.py is not there")


def test_a_process_of_a_grid_finds_it(folder):
    """It is `python -m lra fit` in the same folder, as a rank is."""
    (cell, *_) = read_grid("table3").cells(["listops"], ["parts/second.py"], 1, "demo", ["trainer.steps=0"])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = (sys.executable, "-m", "lra", "fit", *map(str, cell.args))
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("lra: trainer.steps=0")


@pytest.mark.parametrize("reference", ["parts/second.py", "first:Mine"])
def test_it_is_checked(reference):
    done = command("check", f"attn={reference}", "attn.factor=2", "device=cpu")
    assert done.code == 0 and done.out.splitlines()[-1] == "12 passed, 4 not asked", done.out


def test_a_sweep_goes_by_its_name():
    asked = parse_sweep([*RUN, "attn=flash,parts/second.py,first:Mine", "optim.lr=1e-3,1e-4"])
    assert {cell.attn for cell in asked.cells} == {"flash", "second", "first"}
    assert asked.name.startswith("listops+flash,second,first+batch.size=4")


def test_benchmarks_take_it():
    sizes = ("lengths=32", "head_dims=16", "tokens=64", "heads=2", "dtypes=fp32")
    done = command("bench", "attention", "attns=flash,parts/second.py:second:factor=2,first.py", *sizes)
    assert done.code == 0 and "second:factor=2" in done.out and "unsupported" not in done.out + done.err
    refused(command("bench", "attention", "attns=first.py:fator=2", *sizes), "attns=first: unknown field 'fator'")


def test_a_class_of_a_cell_is_replaced_when_the_cell_runs_again():
    cell = MODULE.replace("mine", "celled")
    scope = {"__name__": "__main__"}
    exec(cell, scope)
    assert command("config", "show", *RUN, "attn=celled").code == 0
    exec(cell.replace("factor: float = 1.0", "factor: float = 3.0"), scope)
    config = configure([*RUN, "attn=celled"]).config
    assert config.attn.factor == 3 and config.to_saved_dict()["attn"]["from"] == "__main__"
    assert lra.fit(*RUN, "attn=celled")["config"]["attn"]["name"] == "celled"
    with pytest.raises(UsageError, match=r"registered twice, by __main__\.Mine and json\.Mine: rename one"):
        exec(cell, {"__name__": "json"})
    del ATTENTIONS._classes["celled"]
    (path,) = Path("checkpoints/runs/listops/celled").iterdir()
    refused(command("test", f"init={path}"), "'celled' was registered in a script or notebook: register it before, or")


BAD = {
    "import": ("\n\n@", "\nimport no_such_module\n\n@", "own.py:9: ModuleNotFoundError: No module named"),
    "syntax": ("\n\n@", "\ndef (\n\n@", "own.py:9: SyntaxError: invalid syntax"),
    "init": (
        "    def forward",
        "    def __init__(self, config, spec):\n        super().__init__(config, spec)\n        config.none()\n\n"
        "    def forward",
        "own.py:20: AttributeError: 'Config' object has no attribute 'none'",
    ),
    "forward": (
        "        real =",
        "        q @ k\n        real =",
        "own.py:19: RuntimeError: Expected size",
    ),
    "fact": ("exact=", "exat=", "own has no declaration that can be read .*'exat'"),
    "text": ("dropout=False", 'dropout="no"', "own has no declaration that can be read \\(dropout='no': write True or"),
    "dims": ("dropout=False", "head_dims=64", "\\(head_dims=64: write whole numbers in a tuple, as in \\(1, 64\\)\\)"),
    "range": ("dropout=False", "head_dims=(64,)", "\\(head_dims=\\(64,\\): write the smallest and the largest, as in "),
    "needs": ("dropout=False", 'requires="torch"', "\\(requires='torch': write texts in a tuple, one with a comma"),
    "dtypes": ("dropout=False", 'dtypes=("fp32")', "\\(dtypes='fp32': write texts in a tuple, one with a comma"),
    "name": ('"own"', '"flash"', "attention 'flash' of own has the name of another attention: rename it"),
    "folder": ('"own"', '"my/own"', "attention 'my/own' of own: a name has letters, digits and _ alone, rename it"),
    "base": ("(Attention)", "", "own.py:10: Mine is no attention: subclass Attention or Mixer of lra.models.attention"),
    "plain": ("    @dataclass(frozen=True)\n", "", "own.py:10: the Config of Mine is no dataclass: write @dataclass"),
    "heir": (
        "    @dataclass(frozen=True)\n    class Config:",
        "    class Config(Attention.Config):",
        "own.py:10: the Config of Mine is no dataclass: write @dataclass",
    ),
    "default": (" = 1.0", "", "own.py:10: the Config of Mine has a field without a default, factor: give it one"),
    "option": ("factor: float", "name: float", "own.py:10: the Config of Mine has a field name, which lra sets itself"),
    "type": (
        ": float",
        ": 'Size'",
        "own.py:10: the Config of Mine has a type that can't be read .*'Size' is not defined",
    ),
    "unnamed": ('"own", ', "", "own has no declaration that can be read \\(register on line 10 is given no name\\)"),
    "none": ("@ATTENTIONS", "# @ATTENTIONS", 'own registers nothing: write @ATTENTIONS.register\\("name", …\\) above'),
}


@pytest.mark.parametrize("wrong", BAD)
def test_an_error_names_the_line_of_the_users_code(folder, wrong):
    old, new, message = BAD[wrong]
    write("own.py", old, new)
    done = command("fit", *RUN, "attn=own.py")
    assert done.code == 2 and done.err.splitlines()[-1].startswith("lra: "), done.err
    lines = done.err.splitlines()
    refused(done._replace(err=lines[-1] + "\n"), message)
    for file in folder.glob("checkpoints/runs/listops/own/*/result.json"):
        assert wrong == "forward" and 'own.py", line 19' in json.loads(file.read_text())["traceback"]
    assert wrong in ("init", "forward") or not (folder / "checkpoints").exists()


def test_check_names_the_line_too():
    old, new, message = BAD["plain"]
    write("own.py", old, new)
    refused(command("check", "attn=own.py"), message)


INIT = "    def __init__(self{}):\n        super().__init__({})\n\n    def forward"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def forward(", "def attention(", "own.py:10: Mine lacks forward(self, q, k, v, batch): add it"),
        ("v, batch):", "v):", "own.py:10: Mine has forward(self, q, k, v): write forward(self, q, k, v, batch)"),
        (
            "    def forward",
            INIT.format("", ""),
            "own.py:10: Mine has __init__(self): write __init__(self, config, spec)",
        ),
        ("return (", "(", "own.py:18: forward of Mine (attn=own) returns None for values of [{}, 2, {}]: return a"),
        (".flatten(0, 1)", ".flatten(0, 1), q", "own.py:18: forward of Mine (attn=own) returns a tuple for values of "),
        (".flatten(0, 1)", "", "own.py:18: forward of Mine (attn=own) returns ["),
        (".flatten(0, 1)", ".flatten(0, 1)[1:]", "own.py:18: forward of Mine (attn=own) returns ["),
    ],
)
def test_a_method_that_lra_can_not_use_is_one_line(old, new, message):
    """As is a result of another shape, with the mend."""
    write("own.py", old, new)
    for done in (command("check", "attn=own.py", "device=cpu"), command("fit", *RUN, "attn=own.py")):
        last = done.err.splitlines()[-1]
        refused(done._replace(err=last + "\n"), re.escape(message).replace("\\{\\}", r"\d+"))
        assert "write" in last or "add" in last or "batch.unpad" in last


def test_methods_may_take_more_and_be_static():
    write(
        "own.py", "    def forward(self, q, k, v, batch):", "    @staticmethod\n    def forward(q, *rows, more=None):"
    )
    assert ATTENTIONS.get("own.py").name == "own"


def test_an_error_that_lra_raises_is_not_taken_for_the_users():
    write("own.py", "batch.mask()", "batch.pad(None)")
    with pytest.raises(AttributeError):  # as before, with its traceback
        command("fit", *RUN, "attn=own.py")


def test_what_torch_compile_can_not_trace_names_the_line_too():
    Path("own.py").write_text("def choose(x):\n    return x if x.sum() > 0 else 2 * x\n")
    sys.path.append(str(Path.cwd()))
    sources.import_component("own")
    with pytest.raises(Exception, match="branching") as caught:
        torch.compile(sys.modules["own"].choose, fullgraph=True, backend="eager")(torch.ones(2))
    said = sources.explain_own_code(caught.value) or ""
    assert said.startswith("own.py:2: Unsupported: ") and said.endswith("(of torch.compile: engine=eager does without)")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("gone.py", "gone.py is not there: name a file of Python"),
        ("gone:first", "no module gone is here or on PYTHONPATH: name its file, as in <folder>/gone.py"),
        ("first.py:second", "first registers first: give first:first"),
        ("two.py", "two registers one, other: give two:one or two:other"),
        ("random.py", "random.py has the name of another module of Python"),
        ("my-own.py", "my-own.py can't be imported under this name: rename it"),
        ("first:", ""),
    ],
)
def test_a_wrong_reference_is_one_line(folder, reference, message):
    write("random.py")
    write("my-own.py")
    once = MODULE.replace('"mine"', '"one"')
    Path("two.py").write_text(once + once[once.index("@ATT") :].replace('"one"', '"other"'))
    done = command("config", "show", *RUN, f"attn={reference}")
    assert done.code == 0 if not message else refused(done, message)
