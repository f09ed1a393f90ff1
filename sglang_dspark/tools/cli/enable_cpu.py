"""``sglang-dspark enable-cpu``."""

import click


@click.command(short_help="Let SGLang serve on this machine's CPU if there is no GPU.")
@click.option("--undo", is_flag=True, help="Take it back.")
def enable_cpu(*, undo: bool) -> None:
    """Let SGLang serve on this machine's CPU if there is no GPU.

    SGLang's kernel package is built for CUDA alone. This puts a file into the environment by which, whenever no NVIDIA
    driver is found, a small module stands in for that package and SGLang serves on the CPU. With that driver nothing
    changes.
    """
    from sglang_dspark import on_cpu
    from sglang_dspark.tools import cpu_environment

    if undo:
        cpu_environment.disable()
        click.echo(f"removed {cpu_environment.path_file()}")
        return
    cpu_environment.enable()
    click.echo(f"wrote {cpu_environment.path_file()}")
    if on_cpu.has_driver():
        click.echo("This machine has an NVIDIA driver: SGLang serves with its own kernels, as before.")
    else:
        click.echo("No NVIDIA driver was found: SGLang serves on the CPU from now on.")
