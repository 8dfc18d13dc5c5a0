"""The wheel installs the package `lra` and nothing else, and light commands stay light."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

from tests.command_line import DATA, RUN

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source_files() -> set[str]:
    """Files of the package in the checkout, relative to it."""
    return {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.yaml", "*.json", "py.typed")
        for path in (ROOT / "lra").rglob(pattern)
    }


def copied(copy: Path) -> Path:
    """A copy of the checkout: building leaves files beside the sources."""
    for name in ("lra", "tests", "tasks", "models", "kernels", "configs"):
        if (ROOT / name).exists():  # a checkout may lack the links
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the checkout."""
    copy, dist = copied(tmp_path_factory.mktemp("checkout")), tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", dist, copy)
    (file,) = dist.iterdir()
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An empty virtual environment with the wheel, and its site-packages. No network: `needs` adds the dependencies."""
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile", wheel)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    return home, Path(site)


@pytest.fixture(scope="module")
def needs(installed):
    """Lends the environment this one's dependencies. A .pth file only appends folders: the checkout is none of them."""
    folders = [path for path in sys.path if Path(path).is_dir() and Path(path).resolve() != ROOT]
    (installed[1] / "borrowed.pth").write_text("\n".join(folders) + "\n")


@pytest.fixture
def elsewhere(tmp_path):
    """A folder that is not the checkout, and an environment that does not mention it."""
    return {"cwd": tmp_path, "env": {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}}


def test_only_lra_is_installed(installed):
    home, site = installed
    assert {path.name for path in site.iterdir()} - {"borrowed.pth"} == {"lra", "lra-0.1.0.dist-info"}
    assert (home / "bin" / "lra").exists()
    assert (site / "lra-0.1.0.dist-info" / "licenses" / "LICENSE").exists()


def test_the_package_page_has_the_readme_and_no_link_that_leads_nowhere(installed):
    [file] = installed[1].glob("lra-*.dist-info/METADATA")
    metadata = message_from_string(file.read_text(encoding="utf-8"))
    page = str(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown" and "make demo" in page
    links = re.findall(r"\]\(([^)]*)\)", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    assert links and all(link.startswith("https://") for link in links)
    assert "- docs/usage.md: " in page and "(`lra/tasks/text.py`)" not in page


def test_every_module_and_yaml_is_inside(installed):
    _, site = installed
    there = {str(path.relative_to(site)) for path in (site / "lra").rglob("*") if path.is_file()}
    assert there == source_files()
    assert {"lra/configs/task/listops.yaml", "lra/py.typed"} <= there


@pytest.mark.slow
def test_the_command_works_from_another_folder(installed, needs, elsewhere):
    home, site = installed
    where = run(home / "bin" / "python", "-c", "import lra; print(lra.__file__)", **elsewhere)
    assert where.strip() == str(site / "lra" / "__init__.py")
    assert "listops" in run(home / "bin" / "lra", "ls", "tasks", **elsewhere)
    assert "learned" in run(home / "bin" / "lra", "config", "show", "task=listops", "attn=standard", **elsewhere)


def test_an_editable_install_wins_over_a_clone_that_the_current_folder_holds(tmp_path):
    """Where the clone is called lra, Python takes it for a namespace package, unless a path holds the package."""
    clone, dist, site = tmp_path / "lra", tmp_path / "dist", tmp_path / "site"
    clone.mkdir()
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    run(sys.executable, "-c", build, dist, cwd=copied(clone))
    (file,) = dist.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(site)
    program = "import site, sys; site.addsitedir(sys.argv[1]); import lra; print(lra.__file__)"
    where = run(sys.executable, "-IS", "-c", f"import sys; sys.path.insert(0, ''); {program}", site, cwd=tmp_path)
    assert where.strip() == str(clone / "lra" / "__init__.py")


MY_TABLE = """
recipe: demo
seeds: 2
attns: [flash, my_attention.py]
columns:
  listops: {fields: [task=listops, task.train=200, task.val=50, task.test=50, task.fresh=50]}
  pathfinder: {fields: [task=pathfinder, task.train=200, task.val=50, task.test=50]}
"""


@pytest.mark.slow
def test_a_file_gets_into_a_latex_table_from_an_empty_folder(installed, needs, elsewhere):
    """A user's attention and table, with nothing but the wheel: four commands."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "@ATTENTIONS.register" in block)
    folder = elsewhere["cwd"]
    (folder / "my_attention.py").write_text(code)
    (folder / "my_table.yaml").write_text(MY_TABLE)
    elsewhere["env"] |= {"LRA_DATA": str(folder / "data"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    short = ("trainer.steps=20", "trainer.eval_every=10", "trainer.log_every=10", "batch.eval=50")
    lra = installed[0] / "bin" / "lra"
    assert "failed" not in run(lra, "check", "attn=my_attention.py", **elsewhere)
    assert "8 remain to be run" in run(lra, "reproduce", "my_table.yaml", "--dry-run", *short, **elsewhere)
    run(lra, "reproduce", "my_table.yaml", *short, **elsewhere)
    run(lra, "report", "my_table.yaml", "out=paper", *short, **elsewhere)
    latex = (folder / "paper" / "my_table.tex").read_text()
    assert "booktabs" in latex and "cosine" in latex and "pathfinder" in latex


@pytest.mark.parametrize(
    ("target", "tools"),
    [("demo", False), ("site", False), ("docs", True), ("test", True), ("lint", True), ("aot", True)],
)
def test_only_what_needs_the_development_tools_installs_them(target, tools, tmp_path):
    steps = run("make", "--dry-run", target, f"VENV={tmp_path / 'new'}", "RECIPE=demo", cwd=ROOT)
    assert "--no-build-isolation -e .\n" in steps and ("-e '.[dev]'" in steps) == tools


def test_the_citation_names_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["title"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]
    assert all(each["title"] and each["authors"] and each["year"] for each in citation["references"])


def test_no_advice_names_a_package_index_that_has_no_lra():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("lra/**/*.py")]
    assert files and not [file for file in files if "pip install lra" in file.read_text()]


HEAVY = {
    "torch", "pytorch_lightning", "triton", "datasets", "numba", "numpy", "matplotlib", "pyarrow", "scipy", "sympy",
    "torchmetrics", "PIL", "huggingface_hub",
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [(["ls", "tasks"], "listops"), (["ls", "attns"], "flash"), (["ls", "recipes"], "xiong2021"),
     (["--version"], "torch"), (["fit", "--help"], "xiong2021"), (["--help"], "Train Transformers")],
    ids=str,
)  # fmt: skip
def test_listing_imports_neither_pytorch_nor_lightning(arguments, printed):
    program = f"""
import sys
from lra.cli import main
sys.argv = ["lra", *{arguments}]
try:
    main()
finally:
    print("imported:", *sorted({HEAVY} & sys.modules.keys()))
"""
    output = run(sys.executable, "-c", program, cwd=ROOT)
    assert output.splitlines()[-1].strip() == "imported:"
    assert printed in output


AFTER_THE_BEGINNING = (
    "datasets", "pyarrow", "huggingface_hub", "numba", "scipy", "pandas", "sklearn", "torchvision", "transformers",
    "tensorboard", "tensorboardX", "google.protobuf", "torch.utils.tensorboard", "torch._inductor.compile_fx",
    "lra.bench", "lra.experiments", "lra.kernels.flash.launch_attention", "lra.kernels.flash.forward",
    "lra.kernels.layers.launch_layers", "lra.kernels.moving_average.average_kernels",
    "lra.kernels.softmax.softmax_kernels",
)  # fmt: skip


def test_a_run_begins_without_what_it_needs_later_or_not_at_all(tmp_path, monkeypatch):
    """Lightning itself imports torch._dynamo, and with it Triton and SymPy; and torchmetrics imports Matplotlib."""
    program = f"""
import gc, io, os, sys
from lra.cli import main
class Beginning(io.StringIO):
    def write(self, text):
        if not text.startswith("attention "):  # the line before says what begins
            return
        collector = f"collector: {{gc.isenabled()}} {{gc.get_freeze_count() > 100_000}}"
        imported = "imported:", *sorted({set(AFTER_THE_BEGINNING)} & sys.modules.keys())
        print(text.strip(), collector, " ".join(imported), sep="\\n", file=sys.__stdout__, flush=True)
        os._exit(0)
sys.argv = ["lra", "fit", *{RUN}]
sys.stdout = Beginning()
main()
"""
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run(sys.executable, "-m", "lra", "data", "prepare", *DATA, cwd=tmp_path)
    first, collector, imported = run(sys.executable, "-c", program, cwd=tmp_path).splitlines()
    assert first.startswith("attention flash by sdpa")
    assert imported == "imported:"
    assert collector == "collector: True True", "it collects again, but not what the imports made"


@pytest.mark.parametrize(
    ("own", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_threads_that_wait_sleep_soon_unless_the_user_says_how_they_wait(own, spins):
    program = "import os, lra; print(os.environ.get('GOMP_SPINCOUNT'))"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    assert run(sys.executable, "-c", program, cwd=ROOT, env=environment | own).strip() == str(spins)
