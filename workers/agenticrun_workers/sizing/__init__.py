"""Memory and time of a run before anything starts: `agenticrun plan`.

`memory` and `step_time` are arithmetic on a model's shape (`models/shape.py`) and a run; `plan`
compares the results with a GPU and with the run's pods, and looks for the nearest change that fits.
"""
