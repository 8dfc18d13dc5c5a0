"""What every attention and mixer must keep, as checks that `lra check` and the tests run.

`checks.py` has the checks by the property that each asks for, and `subject.py` the one adapter through which they
build and call a component. A check returns if the property is kept, and raises `Violation` or `NotAsked` otherwise.
They ask for what the contract says (docs/architecture.md), and for nothing else.
"""
