"""The solver room: from settings to models, from problems to solutions. `Solver` is the public API.

`solver` has the API; `assembly` loads the models and spends the memory number (`memory`, `tiers`);
`own` takes in what users give as objects; `describe` makes a `Solution` of a tree and its `facts`.
"""
