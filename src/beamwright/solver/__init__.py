"""The solver room: from settings to models, from problems to solutions. `Solver` is the public API.

`solver` has the API; `machinery` loads the models and spends the memory number (`memory`), and
`settled` says what settings leave open; `request` takes in what users give, `scheduler` runs it,
`handle` waits for it; `describe` makes a `Solution` of a tree and what was counted.
"""
