"""`xtok convert`."""

from dataclasses import replace
from pathlib import Path

import typer

import xtok
from xtok._lib.fields import option
from xtok.cli import options
from xtok.cli.command import command, full_path


@command
def convert(
    *,
    map_path: Path = options.MAP,
    target: str | None = option(
        None,
        "Output file: .safetensors, or .pt for NeMo-RL (a spelling map becomes NAME.pt and "
        "NAME.reverse.pt).",
        argument="OUTPUT",
        parser=full_path,
    ),
    output: Path | None = option(None, "Alternative to OUTPUT.", short="-o"),
    normalize: bool = option(False, "Divide each row of learned weights by its sum.", flag=True),
    json: bool = options.JSON,
    models: options.OptionalModels,
    map_options: options.MapOptions,
) -> None:
    """Convert a map between .safetensors and NeMo-RL's .pt, in either direction.

    Example: xtok convert map.safetensors map.pt
    """
    from xtok.maps.file import SUFFIXES, check_map_output
    from xtok.maps.opening import is_on_hub

    if output is not None and target is not None and not target.endswith(SUFFIXES):
        models, target = replace(models, student=target, teacher=models.student), None
    if target is None and output is None:
        local = Path(map_path.name) if is_on_hub(map_path) else map_path
        default_target = local.with_suffix(".safetensors" if map_path.suffix == ".pt" else ".pt")
        raise typer.BadParameter(f"name the output: xtok convert {map_path} {default_target}")
    if None not in (target, output):
        raise typer.BadParameter("name the output only once (OUTPUT or --output)")
    path = check_map_output(target or output or "")
    any_map, _ = models.with_map(map_options.load_any(map_path, normalize=normalize))
    xtok.convert(any_map, path)
    options.print_map(any_map, path, json=json)
