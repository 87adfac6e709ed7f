"""`onegraph config`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onegraph.cli.arguments import TrainOptions, base_config, expand, parse, with_env_kwargs
from onegraph.config import load_json, to_dict
from onegraph.dreamer.config import SIZES
from onegraph.train.config import PRESETS, TrainConfig


@dataclass(frozen=True, kw_only=True)
class ConfigArgs:
    """Print the resolved configuration as JSON. Takes every option of `onegraph train dreamer`.

    Attributes:
        config: Options on top of the preset.
        preset: Where the defaults come from.
        size: Model size on top of the preset.
        env_kwargs: Keyword arguments of the environment as a JSON object.
        list: Print the presets and sizes instead.
        run: Print the configuration that this run directory was started with instead.
    """

    config: TrainOptions
    preset: str = "default"
    size: str = ""
    env_kwargs: str = ""
    list: bool = False
    run: Path | None = None


def show_config(argv: Sequence[str]) -> int:
    """Prints a config, or the lists of presets and sizes."""
    argv = expand(argv)
    args = parse(ConfigArgs, argv, "onegraph config", ConfigArgs(config=base_config(argv)))
    if args.list:
        for name, make in PRESETS.items():
            print(f"{name:12s} {(make.__doc__ or '').strip()}")
        print(f"\nsizes: {', '.join(SIZES)}")
        return 0
    config = (
        load_json(TrainConfig, args.run / "config.json") if args.run else with_env_kwargs(args.config, args.env_kwargs)
    )
    print(json.dumps(to_dict(config), indent=2))
    return 0
