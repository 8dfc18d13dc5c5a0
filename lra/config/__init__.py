"""The configuration of a run: frozen dataclasses, YAML files and `field=value` arguments, put together by name.

`schema.py` has the fields, `registry.py` finds tasks and attentions, `sources.py` a user's own in modules and files.
`declaration.py` makes the configuration of a task or an attention of lra without importing it. `recipes.py` reads YAML,
and `override.py` splits an argument once and makes its text, or a value of YAML, the value of a field. Only
`override.py` knows OmegaConf: its nodes say what is a number and what is true. `compose.py` puts all of it together.

A recipe may start a run from another run, its stage. A rule under `start` holds for the runs that match its `when`. The
stage has the run's own arguments with those of `from` on top. The fields under `with` are set for the run itself, below
the command line. A stage is a run like any other and has its own directory: `compose` sets `init` to it, `lra fit`
trains a stage that is not finished, and a grid has stages as cells that come first. Arguments of the command line are
handed on to a stage, except those that say where a run writes or what becomes of another run's weights. `start.field=`
sets a field of the stage alone. A stage that several runs start from is trained once.
"""
