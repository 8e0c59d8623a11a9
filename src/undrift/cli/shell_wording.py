"""Translate advice for Python callers into advice for the command line."""

ON_THE_SHELL = {
    "`help(undrift.Options)`": "`--help-all`",
    "`help(undrift_bench.train.TrainOptions)`": "`--help-all`",
    "export(model, path, images=…)": "`undrift export … --images FOLDER`",
    "`skipped` names them all.": "With --json they are all named, as `skipped`.",
    "samples=0 asks": "--samples 0 asks",
    "samples=1 or more": "--samples 1 or more",
    ", and write it again.": ", and run the same command again.",
    "With checkpoint=…": "With --checkpoint FILE",
    "Call adapt again with checkpoint=": "Give the same command again, with --checkpoint ",
    'format="torch.export"': "--format torch.export",
    'norm_statistics="moving"': "--norm-statistics moving",
    'norm_statistics="train"': "--norm-statistics train",
    "stream(…, gather=64)": "--gather 64",
    "Give episodic=False, or leave gather out.": "Give --no-episodic, or leave --gather out.",
    "balanced=True was given without gather;": "--balanced was given without --gather;",
    "Give gather=128 as well.": "Give --gather 128 as well.",
    "resume=False": "--no-resume",
    "Name it: trunk='resnet50.safetensors'": "Name it: --trunk FILE",
    "Lower batch_size to": "Lower --batch-size to",
    "Lower lr (it was": "Lower --lr (it was",
    "Use device='cpu'": "Use --device cpu",
    "Use device='auto'": "Use --device auto",
    "Set `resize`, or leave `crop` out.": "Set --resize, or --crop none.",
}
"""Parts of the library's messages and their replacements; a test checks that the library still says them."""


def in_shell(text: str) -> str:
    """Return a message of the library with advice for the command line.

    Examples:
        >>> in_shell("beta=2 is above 1. `help(undrift.Options)` lists every option.")
        'beta=2 is above 1. `--help-all` lists every option.'
    """
    for python, shell in ON_THE_SHELL.items():
        text = text.replace(python, shell)
    return text
