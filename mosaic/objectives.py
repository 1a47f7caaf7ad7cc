"""The objectives by the names a configuration uses."""

from __future__ import annotations

from typing import Any

from mosaic_kernels import Cispo, Clip, Reinforce, Sao

OBJECTIVES = {"clip": Clip, "cispo": Cispo, "sao": Sao, "reinforce": Reinforce}


def objective_from(name: str, options: dict[str, Any]) -> Clip | Cispo | Sao | Reinforce:
    """The objective of that name with `options`; ValueError names an unknown name, option or value."""
    if name not in OBJECTIVES:
        raise ValueError(f"algorithm.objective: {name!r} is not one of {', '.join(OBJECTIVES)}")
    known = OBJECTIVES[name].__dataclass_fields__
    for key in options:
        if key not in known:
            raise ValueError(
                f"algorithm.objective_options: {name} has no option {key!r}; it has {', '.join(known) or 'none'}"
            )
    try:
        return OBJECTIVES[name](**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"algorithm.objective_options: {error}") from None
