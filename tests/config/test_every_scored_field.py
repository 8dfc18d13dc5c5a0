"""Every field of a run does something in `lra test`, too: other values change what is scored, or are refused."""

from __future__ import annotations

import pytest

import lra
from lra.training.fit import configure
from tests.config.baseline import RUN, SAME
from tests.config.effects import alternatives, idle, leaves, merged, scored, text

UNTRIED = {"init", "trainer.devices", "attn.impl"}  # the checkpoint; 2 would be started; one is interpreted for seconds
LEARNED = {"labels": (), "denoised": ("denoise=1",), "masked": ("pretrain=masked",), "causal": ("pretrain=causal",)}
SAME_SCORES = {name: SAME[name] for name in ("engine", "trainer.accelerator")}


@pytest.mark.usefixtures("here", "one_thread")
@pytest.mark.parametrize("learned", LEARNED.values(), ids=LEARNED)
def test_a_field_changes_what_is_scored_or_is_refused(learned):
    args = merged(*RUN, *learned)
    init = f"init={lra.fit(*args)['directory']}"
    base, wrong = scored(init), {}
    for field, hint, value in leaves(configure(args).config):
        if field not in UNTRIED:
            act = lambda other, field=field: scored(init, f"{field}={text(other)}")  # noqa: E731
            wrong[field] = idle(base, act, alternatives(hint, value), SAME_SCORES.get(field, ()))
    assert not {field: what for field, what in wrong.items() if what}
