"""The solver: from settings to loaded models, and from problems to solutions.

`solver` has `Solver`, the public API. `machinery` loads the models within the memory limit
(`--memory`), which `memory` divides. `auto_settings` replaces `auto` settings by values. `request`
checks the user's input, `scheduler` runs requests, and `handle` waits for them. `solution_maker`
makes a `Solution` from a tree and its counters.
"""
