import pytest

import lra

# a few seconds on two cores, dropout on, so that randomness is part of what is tested
SMALL = (
    "task=listops", "attn=flash", "recipe=demo", "trainer.steps=12", "trainer.eval_every=4", "trainer.log_every=2",
    "trainer.accelerator=cpu", "batch.size=8", "model.d_model=32", "model.dropout=0.1", "model.attn_dropout=0.1",
    "task.train=100", "task.val=20", "task.test=20", "task.fresh=20", "task.max_length=32",
)  # fmt: skip


def arguments(*args: str) -> list[str]:
    """The small run's, of which later ones replace earlier ones."""
    return list({arg.partition("=")[0]: arg for arg in (*SMALL, *args)}.values())


@pytest.fixture
def small(tmp_path, monkeypatch):
    """`small("field=value", …)` fits the small run in a folder of its own and returns its result."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: lra.fit(*arguments(*args))


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a finished small run, not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder / lra.fit(*arguments("name=done"))["directory"]
