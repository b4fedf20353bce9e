"""`octavo pull MODEL`: fetch a model without running it."""

from __future__ import annotations

import click

from octavo.config import LOAD_FORMATS, read_environment


@click.command()
@click.argument("model")
@click.option("--load-format", type=click.Choice(LOAD_FORMATS), default="auto", show_default=True)
def pull(model: str, load_format: str) -> None:
    """Download MODEL into the cache and print where it lies.

    The default model's cache is OCTAVO_CACHE (else ~/.cache/octavo); repositories go where huggingface_hub keeps
    them (HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are honoured).
    """
    from octavo.progress import StageProgress, by_fraction
    from octavo.weights.hub import resolve_model

    read_environment()
    with StageProgress() as progress:
        files = resolve_model(model, load_format=load_format, progress=by_fraction(progress))
    click.echo(str(files.path))
