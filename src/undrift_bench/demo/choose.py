"""Choose the demo's learning rate without a label: `python -m undrift_bench.demo.choose`, a minute or two.

The library's rate over epochs (2e-3) is for a pretrained backbone; a small network trained from scratch may need
another. Of 1, 10 and 100 times that rate the demo takes the one with the most information,

    H(mean of p) − mean of H(p),

on the unlabelled target, summed over the rows that learn over epochs, if none of them collapses.
`undrift.adapt(keep="best")` compares epochs by the same number. All rows share one rate, so none is favoured.
"""

import warnings
from collections.abc import Mapping

import torch
from rich.console import Console
from rich.table import Table

from undrift._errors import UndriftWarning
from undrift.adapt import adapt
from undrift.judge.verdict import Verdict
from undrift.likelihood import Shot
from undrift.options import PAPER
from undrift_bench.demo.rows import CONTROL, LARGE, NO_NOISE, VMP, VMP_LARGE, generator, perturbed
from undrift_bench.demo.setting import DemoSetting, World, load_world

RATES = tuple(PAPER.adapt_lr * factor for factor in (1, 10, 100))
LEARNING: Mapping[str, Mapping[str, object]] = {
    CONTROL.name: NO_NOISE,
    VMP.name: {},
    VMP_LARGE.name: {"init_fraction": LARGE},
}


def choose(found: Mapping[float, Mapping[str, Verdict]]) -> float:
    """Return the rate whose rows have the most information together, of those where no row collapsed."""
    sound = {rate: rows for rate, rows in found.items() if not any(v.collapsed for v in rows.values())}
    return max(sound or found, key=lambda rate: sum(v.after.information for v in found[rate].values()))


def try_rate(world: World, setting: DemoSetting, lr: float) -> dict[str, Verdict]:
    """Return the label-free verdict on each row at this rate, seed 0."""
    verdicts = {}
    for name, changes in LEARNING.items():
        with perturbed(world, 0, adapt_lr=lr, **changes) as model, warnings.catch_warnings():
            warnings.simplefilter("ignore", UndriftWarning)  # a collapse is what is looked for here
            history = adapt(
                model,
                world.target.images / 255,  # no labels anywhere near
                Shot(),
                setting.epochs,
                batch_size=setting.batch_size,
                generator=generator(0),
                progress=False,
            )
        assert history.verdict is not None
        verdicts[name] = history.verdict
    return verdicts


def main() -> None:
    """Try every rate and print what the rule says."""
    torch.set_num_threads(1)
    setting, console = DemoSetting(), Console()
    world = load_world(setting)
    table = Table("learning rate", *LEARNING, "together", "collapsed", title="information on the target, nats")
    found = {}
    for rate in RATES:
        found[rate] = rows = try_rate(world, setting, rate)
        values = [v.after.information for v in rows.values()]
        collapsed = ", ".join(name for name, v in rows.items() if v.collapsed) or "none"
        table.add_row(f"{rate:g}", *(f"{v:.3f}" for v in values), f"{sum(values):.3f}", collapsed)
    console.print(table)
    console.print(f"The rule takes {choose(found):g}; the demo uses {setting.lr:g}.")


if __name__ == "__main__":
    main()
