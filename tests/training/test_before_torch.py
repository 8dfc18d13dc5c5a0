"""What a command says before it imports PyTorch: refusals of fields, results that are there, and a run's first line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lra
from tests.command_line import ROOT, RUN, Done
from tests.training.conftest import arguments

WITHOUT_TORCH = """
import sys

class Torch:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.exit("PyTorch is imported")

sys.meta_path.insert(0, Torch())
from lra.cli import main
main()
"""
IMPORTED = "PyTorch is imported\n"


def without_torch(*arguments: str, **variables: str) -> Done:
    """`lra …` in a process that ends with the code 1 where it would import PyTorch."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("fit attn=flash", "task= missing: task= is one of image, listops, path256, path64, pathfinder, pathx, "
         "retrieval, text"),
        ("fit task=listop attn=flash", "unknown task 'listop': did you mean 'listops'?"),
        ("fit task=listops attn=flsh", "unknown attention 'flsh': did you mean 'flash'?"),
        ("fit task=listops attn=flash recipe=dem", "unknown recipe 'dem': did you mean 'demo'?"),
        ("fit task=listops attn=flash modl.x=3",
         "command line: unknown field 'modl.x': did you mean 'model.axes'?"),
        ("fit task=listops attn=flash model.layers=two", "command line: model.layers=two: write an integer"),
        ("fit task=listops attn=flash model.heads=3", "model.d_model=64 is not a multiple of model.heads=3"),
        ("fit task=text attn=flash max_length=0", "task.max_length=0 must be at least 1"),
        ("fit task=image attn=local attn.window=0", "attn.window=0 must be at least 1 and at most 65536"),
        ("fit task=pathx attn=bigbird block=0",
         "command line: unknown field 'block': did you mean 'attn.block'?"),
        ("fit task=listops attn=mega attn.inner=flsh",
         "attn.inner=flsh: unknown attention 'flsh': did you mean 'flash'?"),
        ("fit task=listops attn=flash trainer.epochs=2 trainer.steps=3",
         "command line: trainer.steps= and trainer.epochs= both say how long: leave one of them out"),
        ("config show task=listops attn=flsh", "unknown attention 'flsh': did you mean 'flash'?"),
        ("data prepare task=listop", "unknown task 'listop': did you mean 'listops'?"),
        ("data show task=listops trainn=5", "unknown field of task=listops 'trainn': did you mean 'train'?"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_fields_is_said_before(command, said):
    assert without_torch(*command.split()) == Done(2, "", f"lra: {said}\n")


def test_a_configuration_is_shown_without():
    done = without_torch("config", "show", *RUN)
    assert done.code == 0 and not done.err and "model.d_model" in done.out


def test_the_first_line_is_printed_before(here):
    done = without_torch("fit", *RUN, "name=new")
    assert done == Done(1, "checkpoints/runs/listops/flash/new-s0: 4 steps, then the test\n", IMPORTED)
    assert not list(here.iterdir())


def test_steps_are_a_limit_where_training_may_end_early(here):
    done = without_torch("fit", *RUN, "name=new", "trainer.patience=1", "optim.schedule=constant")
    assert done.out == "checkpoints/runs/listops/flash/new-s0: at most 4 steps, then the test\n"


def test_only_the_first_rank_prints_it(here):
    ranks = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    for rank, lines in (("0", 1), ("1", 0)):
        done = without_torch("fit", *RUN, "trainer.devices=2", **ranks, RANK=rank, LOCAL_RANK=rank)
        assert (done.code, done.out.count("\n"), done.err) == (1, lines, IMPORTED)


def test_a_run_that_starts_from_another_says_so(here):
    done = without_torch("fit", "task=listops", "attn=flash", "recipe=curriculum", "name=last")
    assert done.out == "checkpoints/runs/listops/flash/last-s0: the run that it starts from is trained first\n"


def test_a_finished_run_needs_none_to_print_its_result(finished, monkeypatch):
    monkeypatch.chdir(finished.parents[4])
    done = without_torch("fit", *arguments("name=done"))
    assert done.code == 0 and not done.err and "test accuracy" in done.out


def test_a_directory_of_another_run_is_refused_before(here):
    folder = Path("checkpoints/runs/listops/flash/mine-s0")
    folder.mkdir(parents=True)
    saved = lra.configure([*RUN, "name=mine", "seed=0", "model.d_ff=64"]).config.to_saved_dict()
    (folder / "config.yaml").write_text(yaml.safe_dump(saved))
    done = without_torch("fit", *RUN, "name=mine")
    assert done.code == 2 and "another configuration (model.d_ff: 64 -> 128)" in done.err and not done.out


def test_a_users_own_attention_is_imported(here):
    """Its module is run as a whole, whatever it imports."""
    (here / "mine.py").write_text(
        "from lra.models.attention import ATTENTIONS\nfrom lra.models.attention.base import Attention\n"
        '@ATTENTIONS.register("mine", exact=False, paper="")\nclass Mine(Attention):\n    """Mine."""\n'
    )
    assert without_torch("fit", "task=listops", "attn=mine.py") == Done(1, "", IMPORTED)
