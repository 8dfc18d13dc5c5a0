"""Two phases, one precedence, and an error for everything that would be ignored."""

import re
from dataclasses import FrozenInstanceError

import pytest
import yaml

from lra.config import compose as module
from lra.config import recipes
from lra.config.compose import compose, list_differences, restore, to_dict
from lra.config.override import Override
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS
from lra.training.fit import configure
from tests.composing import composed

REGISTRIES = {"task": TASKS, "attn": ATTENTIONS}
BASE = ("task=listops", "attn=flash")


def make(*args: str):
    return compose(RunConfig, REGISTRIES, args)


@pytest.fixture
def layers(tmp_path, monkeypatch):
    """Configs of which every layer sets model.d_ff and each sets one field of its own."""
    recipe = {
        "about": "a test",
        "defaults": {"model": {"d_ff": 2, "layers": 2}},
        "tasks": {"listops": {"model": {"d_ff": 3}, "batch": {"size": 3}}, "text": None},
        "attns": {"flash": {"all": {"model": {"d_ff": 4}, "batch": {"eval": 4}}, "listops": {"model": {"d_ff": 5}}}},
    }
    for name, content in (
        ("task/listops", {"recipe": "r", "model": {"d_ff": 1, "heads": 1}}),
        ("task/text", {"recipe": "r"}),
        ("recipe/r", recipe),
    ):
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(yaml.safe_dump(content))
    monkeypatch.setattr(recipes, "CONFIGS_FOLDER", tmp_path)
    return tmp_path


def test_later_layers_win_and_origins_say_which(layers):
    composed = make(*BASE)
    config, origin = composed.config, composed.origin
    assert (config.model.d_ff, origin["model.d_ff"]) == (5, "recipe/r.yaml flash.listops")
    assert (config.model.heads, origin["model.heads"]) == (1, "task/listops.yaml")
    assert (config.model.layers, origin["model.layers"]) == (2, "recipe/r.yaml")
    assert (config.batch.size, origin["batch.size"]) == (3, "recipe/r.yaml listops")
    assert (config.batch.eval, origin["batch.eval"]) == (4, "recipe/r.yaml flash.all")
    assert (config.model.dropout, origin["model.dropout"]) == (0.1, "default")
    assert make("task=listops", "attn=standard").config.model.d_ff == 3
    assert make(*BASE, "model.d_ff=9").config.model.d_ff == 9


def test_a_selector_may_stand_beside_a_field_of_its_component():
    config = make("task.max_length=1000", "task=text", "attn=flash").config
    assert (config.task.name, config.task.max_length) == ("text", 1000)


@pytest.mark.parametrize(("given", "steps"), [
    (["trainer.steps=100"], (100, 100, 50)),
    (["trainer.steps=30"], (30, 30, 30)),
    (["trainer.steps=300"], (300, 150, 50)),
    (["trainer.steps=75"], (75, 75, 25)),
    (["trainer.steps=1"], (1, 1, 1)),
    (["trainer.steps=3000"], (3000, 250, 50)),
    (["trainer.eval_every=20"], (1500, 20, 20)),
    (["trainer.steps=40", "trainer.eval_every=20"], (40, 20, 20)),
    (["trainer.steps=40", "trainer.log_every=5"], (40, 40, 5)),
])  # fmt: skip
def test_what_divides_the_steps_follows_them_where_it_is_not_given(given, steps):
    composed = make(*BASE, "recipe=demo", *given)
    trainer = composed.config.trainer
    assert (trainer.steps, trainer.eval_every, trainer.log_every) == steps
    assert composed.overrides == tuple(Override(*field.split("=")) for field in sorted(given))
    for whole, part, own in (("steps", "eval_every", 250), ("eval_every", "log_every", 50)):
        origin, note = composed.origin[f"trainer.{part}"], f"recipe/demo.yaml listops, made to divide trainer.{whole}"
        assert (origin == note) == (getattr(trainer, part) != own and origin != module.FROM_COMMAND_LINE)


def test_what_is_given_does_not_follow():
    for given in (["trainer.eval_every=250"], ["trainer.log_every=50"]):
        with pytest.raises(UsageError, match=given[0]):
            make(*BASE, "recipe=demo", "trainer.steps=30", *given)
    with pytest.raises(UsageError, match="must divide trainer.steps=1009"):
        make(*BASE, "recipe=demo", "trainer.steps=1009")  # a prime: after each step, or once


def test_a_saved_configuration_stays_as_it_is():
    saved = to_dict(make(*BASE, "recipe=demo").config)
    with pytest.raises(UsageError, match="eval_every=250 is larger than trainer.steps=100"):
        restore(RunConfig, REGISTRIES, saved, ["trainer.steps=100"])


def test_a_field_of_the_task_needs_no_prefix():
    composed = make("task=text", "attn=flash", "protocol=lra")
    assert composed.config.task.protocol == "lra" and composed.overrides == (Override("task.protocol", "lra"),)


def test_text_fields_are_not_read_as_yaml():
    assert make(*BASE, "name=on").config.name == "on"
    assert make(*BASE, "name=1e5").config.name == "1e5"
    assert make(*BASE, "name=null").config.name is None
    assert make(*BASE, "name=a #b").config.name == "a #b"


def test_values_are_typed():
    config = make(*BASE, "optim.lr=1e-4", "optim.betas=[0.5,0.6]", "optim.clip=1", "batch.micro=null").config
    assert (config.optim.lr, config.optim.betas, config.optim.clip, config.batch.micro) == (1e-4, (0.5, 0.6), 1.0, None)
    assert make(*BASE, "model.axes=2", "model.pooling=max").config.model.axes == 2  # a choice of numbers, and of words


def test_the_result_is_frozen():
    with pytest.raises(FrozenInstanceError):
        make(*BASE).config.model.d_ff = 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("task=listop", "attn=flash"), "unknown task 'listop': did you mean 'listops'"),
        (("task=listops", "attn=flsh"), "unknown attention 'flsh': did you mean 'flash'"),
        ((*BASE, "recipe=xiong"), "unknown recipe 'xiong': did you mean 'xiong2021'"),
        (("task=text", "attn=flash", "recipe=rotary"), "recipe 'rotary' has no section for task 'text'"),
        (("task=listops",), "attn= missing: attn= is one of"),
        (("task=listops", "atn=flash"), "attn= missing, atn= is given: attn= is one of"),
        ((), "task= and attn= missing"),
        ((*BASE, "model.dmodel=3"), "unknown field 'model.dmodel': did you mean 'model.d_model'"),
        ((*BASE, "d_model=3"), "unknown field 'd_model': did you mean 'model.d_model'"),
        ((*BASE, "protocol=lra"), "unknown field 'protocol'"),
        ((*BASE, "model=3"), "unknown field 'model'"),
        ((*BASE, "OPTIM.LR=1"), "did you mean 'optim.lr'"),
        ((*BASE, "optim.lr=${seed}"), "write the value itself"),
        ((*BASE, "name=${oc.env:HOME}"), "write the value itself"),
        ((*BASE, "name=???"), "write the value itself"),
        ((*BASE, "trainer.steps=1:30"), "trainer.steps=1:30: write an integer"),
        (
            ("task=text", "attn=flash", "task.protocol=lra", "task.data_seed=1"),
            "nothing is held out with",
        ),
        ((*BASE, "seed=1 # one"), "seed=1 # one: write an integer"),
        ((*BASE, "optim.lr=nan"), "optim.lr=nan: write a finite number"),
        ((*BASE, "batch.micro=0"), "must be at least 1"),
        ((*BASE, "model.d_model=100000"), "model.d_model=100000 is too large: use at most 16384"),
        ((*BASE, "task.train=100000000"), "task.train=100000000 is too large: use at most 10000000"),
        ((*BASE, "flash"), "'flash' is not of the form field=value"),
        ((*BASE, "attn="), "'attn=' is not of the form"),
        ((*BASE, "seed=1", "seed=2"), "seed= is given twice"),
        ((*BASE, "attn=standard"), "attn= is given twice"),
        ((*BASE, "train=5", "task.train=6"), "task.train= is given twice"),
        ((*BASE, "seed=-1"), "seed=-1 is negative"),
        ((*BASE, "name=" + "x" * 201), "too long for a folder"),
        ((*BASE, "model.attn_dropout=0.999"), "use at most 0.998"),
        ((*BASE, "model.attn_dropout=0.0019"), "is 0 in steps of 1/256: use 0, or at least 0.002"),
        ((*BASE, "model.dropout=0.000001"), "is 0 in steps of 1/256: use 0, or at least 0.002"),
        ((*BASE, "model.dropout=0.999999"), "is 1 in steps of 1/256: use at most 0.998"),
        ((*BASE, "model.d_model=65"), "model.d_model=65 is not a multiple of model.heads=2"),
        ((*BASE, "model.rotary_base=500", "model.positions=learned"), "model.positions=learned does not rotate"),
        ((*BASE, "model.rotary_base=1", "model.positions=rotary"), "model.rotary_base=1.0 must be finite and above 1"),
        ((*BASE, "model.rotary_share=0.5", "model.positions=sinusoidal"), "model.positions=sinusoidal does not rotate"),
        ((*BASE, "model.rotary_bands=heads", "model.positions=learned"), "model.positions=learned does not rotate"),
        ((*BASE, "model.rotary_share=1.5", "model.positions=rotary"), "rotary_share=1.5 must be above 0 and at most 1"),
        ((*BASE, "model.rotary_share=0", "model.positions=rotary"), "model.rotary_share=0.0 must be above 0"),
        ((*BASE, "model.rotary_share=0.01", "model.positions=rotary"), "turns none of the 16 .*: use at least 0.0625"),
        ((*BASE, "model.rotary_share=0.99", "model.positions=rotary"), "turns all of the 16 pairs of a head .*: use 1"),
        ((*BASE, "model.rotary_bands=heads", "model.positions=rotary", "model.heads=1"), "nothing with model.heads=1"),
        ((*BASE, "model.layer_drop=1"), "model.layer_drop=1.0 must be at least 0 and below 1"),
        ((*BASE, "model.layer_drop=0.001"), "model.layer_drop=0.001 is 0 in steps of 1/256: use 0, or at least 0.002"),
        ((*BASE, "model.dropout=1"), "model.dropout=1.0 must be at least 0 and below 1"),
        ((*BASE, "trainer.log_every=7"), "trainer.log_every=7 must divide"),
        ((*BASE, "task.min_length=5000"), "task.min_length=5000 must be"),
    ],
)
def test_bad_input_is_one_line_that_names_the_mend(args, message):
    with pytest.raises(UsageError, match=message) as caught:
        make(*args)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("recipe", recipes.recipe_names())
def test_every_recipe_composes_for_every_task_it_covers(recipe):
    content = recipes.read_recipe(recipe)
    here = {entry.name for entry in ATTENTIONS.catalogue().values() if not entry.missing}
    # of the others it says nothing, so that one task shows what all do
    rules = [rule["when"] for rule in content.get("start") or ()]
    named = {"flash", *(content.get("attns") or ()), *(when["attn"] for when in rules if "attn" in when)}
    assert named <= set(ATTENTIONS.catalogue()) and {when["task"] for when in rules if "task" in when} <= set(
        content["tasks"]
    )
    for number, task in enumerate(content["tasks"]):
        for attn in here & named if number else here:
            assert composed((f"task={task}", f"attn={attn}", f"recipe={recipe}")).config.recipe == recipe


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"tasks": {"listopps": {}}}, "unknown task 'listopps': did you mean 'listops'?"),
        ({"attns": {"linaer": {}}}, "unknown attention 'linaer': did you mean 'linear'?"),
        ({"attns": {"linear": {"imgae": {}}}}, "unknown section of linear 'imgae': did you mean 'image'?"),
        ({"attns": {True: None}}, "unknown attention 'True': choose from "),
        ({"start": [{"when": {"task": "imgae"}, "from": []}]}, "unknown task 'imgae': did you mean 'image'?"),
        ({"start": [{"when": {"attn": "flahs"}, "from": []}]}, "unknown attention 'flahs': did you mean 'flash'?"),
        (
            {"start": [{"when": {}, "from": [], "wiht": {}}]},
            "unknown key of a rule of start 'wiht': did you mean 'with'?",
        ),
        ({"start": [{"form": []}]}, "a rule of start has no when: add it"),
        (
            {"start": [{"when": {"task": "listops", "task.max_lenght": 9}, "from": []}]},
            "a rule of start for task=listops attn=flash: unknown field 'task.max_lenght': did you mean "
            "'task.max_length'?",
        ),
        (
            {"start": [{"when": {"taks": "text"}, "from": []}]},
            "a rule of start for task=listops attn=flash: unknown field 'taks'",
        ),
    ],
)
def test_a_name_in_a_recipe_that_nothing_has_is_refused(layers, content, message):
    """It would have no effect."""
    tasks = {"listops": None} | content.pop("tasks", {})
    (layers / "recipe/r.yaml").write_text(yaml.safe_dump({"tasks": tasks} | content))
    with pytest.raises(UsageError, match=f"^recipe/r.yaml: {re.escape(message)}"):
        make(*BASE)


def test_a_rule_may_ask_for_a_field_that_another_task_has(layers):
    rules = [{"when": {"task": "pathfinder", "task.level": "hard", "attn": "flash"}, "from": []}]
    (layers / "recipe/r.yaml").write_text(yaml.safe_dump({"tasks": {"listops": None}, "start": rules}))
    assert make(*BASE).start is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks:\n\tlistops:", "can't be read: found character"),
        ("tasks: {listops: {}, listops: {}}", "can't be read: it has a key twice in the mapping on line 1"),
        ("- tasks", "has no fields: it is a mapping of names to values"),
        ("tasks: [listops]", "tasks is ['listops'], and must be a mapping"),
        ("tasks: {listops: fast}", "tasks.listops is 'fast', and must be a mapping"),
        ("attns: {flash: [all]}", "attns.flash is ['all'], and must be a mapping"),
        ("start: [{when: listops, from: []}]", "when of a rule of start is 'listops', and must be a mapping"),
        ("start: [{when: {}, from: task=text}]", "from of a rule of start is 'task=text', and must be a list"),
    ],
)
def test_a_recipe_of_another_form_is_refused(layers, text, message):
    (layers / "recipe/r.yaml").write_text(text)
    with pytest.raises(UsageError, match=f"^recipe/r.yaml:? {re.escape(message)}"):
        make(*BASE, "recipe=r")


def test_what_a_start_asks_for_in_vain_is_told_from_what_was_given():
    args = ("task=pathx", "recipe=curriculum", "model.positions=learned")
    with pytest.raises(UsageError) as error:
        configure([*args, "attn=flash"])
    assert str(error.value).count(module.START_MEND) == 1
    assert configure([*args, "attn=flash", "init=null"]).start is None
    with pytest.raises(UsageError) as error:
        configure([*args, "attn=flash", "model.heads=3"])
    assert module.START_MEND not in str(error.value)


@pytest.mark.parametrize("task", ["pathx", "path256"])
@pytest.mark.parametrize("model", [("attn=s4d",), ("attn=flash", "model.positions=rotary")])
def test_dao2022_resizes_learned_positions_only(task, model):
    run = configure([f"task={task}", "recipe=dao2022", *model])
    assert run.start is not None and run.config.positions.resize is None
    assert configure([f"task={task}", "recipe=dao2022", "attn=flash"]).start is not None


def test_every_task_has_a_default_recipe():
    for task in TASKS.catalogue():
        composed = make(f"task={task}", "attn=flash")
        assert composed.origin["recipe"] == f"task/{task}.yaml"
        assert (
            make(f"task={task}", "attn=flash", f"recipe={composed.config.recipe}").origin["recipe"]
            == module.FROM_COMMAND_LINE
        )


def test_a_saved_configuration_comes_back():
    config = make(*BASE, "model.d_ff=9", "optim.betas=[0.5,0.6]").config
    assert restore(RunConfig, REGISTRIES, to_dict(config)) == config


def test_a_saved_configuration_takes_another_attention_and_fields():
    saved = to_dict(make(*BASE, "attn.impl=sdpa", "model.d_ff=9").config)
    config = restore(RunConfig, REGISTRIES, saved, ["attn=standard", "batch.eval=3"])
    assert (config.attn.name, config.model.d_ff, config.batch.eval) == ("standard", 9, 3)


def test_differences_name_the_fields():
    old, new = (to_dict(make(*BASE, f"model.d_ff={n}").config) for n in (8, 9))
    assert list_differences(old, new) == ["model.d_ff: 8 -> 9"]


def test_a_number_may_begin_with_zeros():
    assert configure((*BASE, "seed=010", "model.dropout=00.1")).config.seed == 10


@pytest.mark.parametrize(
    ("field", "wrong", "form"),
    [
        ("model.layers", "a 1.5 1e3 true null ~ [1] {} - !!int", "an integer"),
        ("optim.lr", "a 0.1.2 1,5 true null [1] {} - *a &a @ !!int", "a number"),
        ("attn.deterministic", "a 1.5 null [true] {}", "true or false"),
        ("model.positions", "foo null [learned]", "learned, sinusoidal, rotary or none"),
        ("model.axes", "3 a 1.0 null [1] true {}", "1 or 2"),
        ("head", "foo None", "kept, fresh or null"),
        ("batch.micro", "a 1.5 none [1] {}", "an integer or null"),
        ("optim.clip", "a none true [1] {}", "a number or null"),
        ("optim.betas", "[a,b] [0.9] [1 [1,1,1] 0.9 (0,0) {a:1} [[1],2] [{},1] [null,1] 'a", "[number,number] or null"),
    ],
)
def test_a_value_of_another_form_is_answered_by_the_fields_form(field, wrong, form):
    for text in wrong.split():
        with pytest.raises(UsageError, match=f"^command line: {re.escape(f'{field}={text}: write {form}')}$"):
            make(*BASE, f"{field}={text}")


def test_a_layer_of_a_wrong_form_is_named(layers):
    (layers / "task/listops.yaml").write_text("recipe: r\noptim: {betas: [a, b]}\n")
    with pytest.raises(UsageError, match=r"^task/listops.yaml: optim.betas=.*: write \[number,number\] or null$"):
        make(*BASE)
