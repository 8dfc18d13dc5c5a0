"""Runs: fitting, testing and what they leave on disk.

A step is forward and backward of each micro-batch, then one update. The loss is summed over micro-batches and divided
by the global batch. The update judges the gradient (`tally.py`), clips it and gives it to the optimiser (`optim.py`).
`step.py` has the loop and `engine.py` two engines. Lightning is handed the update as a closure and counts it. To
Lightning a batch is a stride of up to ten steps, because its loop around a batch takes as long as a small model's step.
Randomness is derived from (seed, purpose, step); for attentions that draw from PyTorch's generator also from the rank.

The captured engine lets the host launch a copy and a graph for each micro-batch, and the update, because steps of small
models wait for the host. Gradients go to one flat buffer, which ranks reduce between the graphs; Lightning's DDP only
launches processes. Kernels are launched for the task's longest sequence; with lit tokens alone for the power of two
that a batch needs. Compiled, PyTorch adds an embedding's gradients in any order, so tables of tokens and positions get
theirs by products and sums instead. With `attn.deterministic=true` no kernel is picked by timing, and each shape is
compiled by itself, so that a resumed run has the same kernels. An attention whose steps the host must decide says so
(`decides_on_host`), and runs eagerly. Evaluation is not captured, and not compiled where kernels compute all blocks.

The tally judges a step's whole gradient and loss after the ranks have reduced them, in a captured step as part of the
captured update. The host reads the counts together with the loss that is logged, so no step waits for it.

An average of the weights (`average.py`) is changed after the update, in a captured step as part of it. Validation and
test score the average, and checkpoints and `model.safetensors` hold it. A checkpoint also has the weights to train on.

Where a rate or an end of training depends on validations (`plateau.py`), the counts are a callback's state in the
checkpoint. The rate stays a function of the step and a factor, and every rank finds the same one.

`checkpoints/runs/<task>/<attn>/<recipe>[+<overrides>]-s<seed>/` is a run's directory. It holds `config.yaml`,
`env.json` (what each session ran in), `metrics.csv`, `tensorboard/`, `loggers.json` (the run's place at remote
loggers), `best.ckpt`, `last.ckpt`, `model.safetensors`, with `predictions=true` also `predictions.npz`, and
`result.json`, which is written last. Every file is written aside, synced and renamed. A directory of another
configuration is refused with the fields that differ, and an unfinished run unless `resume=` says to go on. The fields
that say what computes (devices, engine, micro-batches) neither name a directory nor make another configuration, so a
run may begin on one GPU and continue on four. PyTorch does not look at the checksums in its files; `checkpoints.py`
does, before weights are trained on or scored, and names a file of the run that may stand in.
"""
