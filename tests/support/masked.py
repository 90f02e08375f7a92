"""JSON of which some places are not the same each time."""

from fnmatch import fnmatchcase


def masked(value, places, place="", *, zeros=True):
    """A JSON value, with the name of its type for every number and text at one of these places.

    places: patterns of paths such as /time/total_s; * is any number of characters. Null stays, and
    so does 0 (or "") unless zeros is False: that a figure stops or begins to apply, is noticed.
    """
    if isinstance(value, dict):
        return {k: masked(v, places, f"{place}/{k}", zeros=zeros) for k, v in value.items()}
    if isinstance(value, list):
        return [masked(v, places, f"{place}/{i}", zeros=zeros) for i, v in enumerate(value)]
    if value is None or (zeros and not value) or not any(fnmatchcase(place, p) for p in places):
        return value
    return f"<{type(value).__name__}>"
